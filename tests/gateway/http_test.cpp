#include "gateway/http/server.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

#include "common/rpc.h"
#include "tests/gateway/http_client.h"

namespace temper::gateway::http {
namespace {

using namespace std::chrono_literals;

using Client = RawClient;

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  int count = 0;
  void Set() {
    std::lock_guard lock(mutex);
    ++count;
    changed.notify_all();
  }
  bool Wait(int n = 1) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, 5s, [&] { return count >= n; });
  }
};

class HttpTest : public ::testing::Test {
 protected:
  void Start(Handler handler, ServerOptions options = {}) {
    options.refuse = [](int status, const std::string& message) { return std::to_string(status) + " " + message; };
    server_ = std::make_unique<Server>(options, std::move(handler));
    auto fd = ListenTcp("127.0.0.1", 0);
    ASSERT_TRUE(fd.ok()) << fd.status().ToString();
    port_ = *BoundPort(fd->get());
    ASSERT_TRUE(server_->AddListener(fd->Release()).ok());
    server_->Start();
  }
  std::unique_ptr<Server> server_;
  int port_ = 0;
};

Handler Echo() {
  return [](Request r, std::shared_ptr<Responder> out) {
    out->Send(200, {{"x-path", r.path}, {"x-query", r.query}}, r.method + " " + r.body);
  };
}

std::string Post(const std::string& body, const std::string& extra = "") {
  return "POST /a/b?c=d HTTP/1.1\r\nHost: x\r\n" + extra + "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

// A connection that is not reused, or that mixes two pipelined requests, breaks every SDK.
TEST_F(HttpTest, KeepsConnectionsAndAnswersPipelinedRequestsInOrder) {
  Start(Echo());
  Client client(port_);
  client.Say(Post("one"));
  std::string answer = client.Hear("POST one");
  EXPECT_NE(answer.find("HTTP/1.1 200 OK\r\nx-path: /a/b\r\nx-query: c=d\r\ncontent-length: 8\r\n\r\nPOST one"), std::string::npos)
      << answer;
  client.Say(Post("two") + Post("three"));
  answer = client.Hear("POST three");
  EXPECT_LT(answer.find("POST two"), answer.find("POST three"));
  EXPECT_EQ(server_->connections(), 1);
  client.Say("HEAD / HTTP/1.1\r\n\r\n" + Post("last", "Connection: close\r\n"));
  answer = client.Hear("");
  EXPECT_NE(answer.find("content-length: 5\r\n\r\nHTTP/1.1 200 OK"), std::string::npos) << answer;  // HEAD: no body
  EXPECT_NE(answer.find("POST last<closed>"), std::string::npos) << answer;
}

// A chunked answer with a wrong size or a missing last chunk leaves a client waiting for ever.
TEST_F(HttpTest, StreamsChunksAndCutsWhenToldTo) {
  Start([](Request r, std::shared_ptr<Responder> out) {
    out->Begin(200, {{"content-type", "text/event-stream"}});
    out->Write("data: 1\n\n");
    out->Write("");
    out->Write(std::string(20, 'x'));
    out->End(r.body != "cut");
  });
  Client client(port_);
  client.Say(Post(""));
  std::string answer = client.Hear("0\r\n\r\n");
  EXPECT_NE(answer.find("transfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n14\r\nxxxxxxxxxxxxxxxxxxxx\r\n0\r\n\r\n"),
            std::string::npos)
      << answer;
  client.Say(Post("cut"));
  answer = client.Hear("");
  EXPECT_NE(answer.find("xxxx\r\n<closed>"), std::string::npos) << answer;
  Client old(port_);
  old.Say("POST / HTTP/1.0\r\nContent-Length: 0\r\n\r\n");
  answer = old.Hear("");
  EXPECT_NE(answer.find("\r\n\r\ndata: 1\n\nxxxxxxxxxxxxxxxxxxxx<closed>"), std::string::npos) << answer;
}

// Bytes from outside must never end the process, and each refusal must reach the client before the close.
TEST_F(HttpTest, RefusesWhatIsNoRequest) {
  ServerOptions options;
  options.body_bytes_max = 1000;
  options.header_bytes_max = 2000;
  Start(Echo(), options);
  {
    Client client(port_);
    client.Say("nonsense\r\n\r\n");
    EXPECT_NE(client.Hear("").find("HTTP/1.1 400"), std::string::npos);
  }
  {
    Client client(port_);
    client.Say(Post(std::string(5000, 'b')));
    EXPECT_NE(client.Hear("").find("HTTP/1.1 413"), std::string::npos);
  }
  {
    Client client(port_);
    client.Say("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n800\r\n" + std::string(0x800, 'b') + "\r\n0\r\n\r\n");
    EXPECT_NE(client.Hear("").find("HTTP/1.1 413"), std::string::npos);
  }
  {
    Client client(port_);
    client.Say("GET / HTTP/1.1\r\nX: " + std::string(5000, 'h') + "\r\n\r\n");
    EXPECT_NE(client.Hear("").find("HTTP/1.1 431"), std::string::npos);
  }
  {
    Client client(port_);
    client.Say("POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n");
    EXPECT_NE(client.Hear("\r\n\r\n").find("HTTP/1.1 100 Continue"), std::string::npos);
    client.Say("ok");
    EXPECT_NE(client.Hear("POST ok").find("HTTP/1.1 200"), std::string::npos);
  }
}

TEST_F(HttpTest, SurvivesMutatedRequests) {
  // What could go wrong: a crash or a hang on malformed bytes.
  ServerOptions options;
  options.header_s_max = 1;
  options.body_s_max = 1;
  options.body_bytes_max = 2000;
  options.header_bytes_max = 1000;
  Start([](Request r, std::shared_ptr<Responder> out) {
    out->OnGone([] {});
    out->OnDelivered([] {});
    if (r.path == "/none") return;
    if (r.path != "/stream") return out->Send(200, {}, r.method + " " + r.body);
    out->Begin(200, {});
    out->Write(r.body);
    out->End(r.query.empty());
  }, options);
  std::mt19937 rng(7);
  const std::string chunked = "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3;x=y\r\nyou\r\n0\r\n\r\n";
  const std::vector<std::string> seeds = {
      Post("hello body", "Connection: close\r\n"), Post("one") + Post("two", "Connection: close\r\n"), "POST /stream HTTP/1.1\r\n" + chunked,
      "POST /stream?x HTTP/1.1\r\nConnection: close\r\n" + chunked, "HEAD /stream HTTP/1.0\r\n\r\n", "GET /none HTTP/1.1\r\n\r\n",
      "PUT / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nok", Post(std::string(3000, 'b')),
      "POST / HTTP/1.1\r\n" + std::string("Transfer-Encoding: chunked\r\n\r\nfff\r\n") + std::string(0xfff, 'c'),
      Post("x", "X-Long: " + std::string(1500, 'h') + "\r\n")};
  for (int i = 0; i < 400; ++i) {
    std::string bytes = seeds[rng() % seeds.size()];
    for (int k = 0; k < 1 + static_cast<int>(rng() % 4); ++k) {
      const size_t at = rng() % bytes.size();
      switch (rng() % 3) {
        case 0: bytes[at] = static_cast<char>(rng()); break;
        case 1: bytes.erase(at, 1 + rng() % 5); break;
        default: bytes.insert(at, 1, "\r\n:0 \0\xff"[rng() % 7]);
      }
    }
    Client client(port_);
    client.Say(bytes);
    if (i % 4 == 0) client.Hear("\r\n\r\n", 50);
  }
  Client client(port_);
  client.Say(Post("alive"));
  EXPECT_NE(client.Hear("POST alive").find("POST alive"), std::string::npos);
}

// A client that leaves must be noticed while its request waits: its tokens would be drawn for nobody.
TEST_F(HttpTest, NoticesAClientThatLeavesAndOneThatTookAll) {
  Event gone, delivered, arrived;
  std::mutex mutex;
  std::shared_ptr<Responder> kept;
  Start([&](Request, std::shared_ptr<Responder> out) {
    out->OnGone([&] { gone.Set(); });
    out->OnDelivered([&] { delivered.Set(); });
    {
      std::lock_guard lock(mutex);
      kept = out;
    }
    arrived.Set();
  });
  {
    Client client(port_);
    client.Say(Post(""));
    ASSERT_TRUE(arrived.Wait(1));
  }
  EXPECT_TRUE(gone.Wait(1));
  EXPECT_EQ(delivered.count, 0);
  {
    std::lock_guard lock(mutex);
    kept->Send(200, {}, "too late");  // harmless
  }
  Client client(port_);
  client.Say(Post(""));
  ASSERT_TRUE(arrived.Wait(2));
  {
    std::lock_guard lock(mutex);
    kept->Send(200, {}, "in time");
  }
  EXPECT_NE(client.Hear("in time").find("in time"), std::string::npos);
  EXPECT_TRUE(delivered.Wait(1));
  EXPECT_EQ(gone.count, 1);
  // A request nobody will answer closes the connection instead of hanging it.
  client.Say(Post(""));
  ASSERT_TRUE(arrived.Wait(3));
  {
    std::lock_guard lock(mutex);
    kept.reset();
  }
  EXPECT_EQ(client.Hear(""), "<closed>");
  server_->Stop();  // before the events of this test go
}

// A listening socket handed over later (from a sandbox) must serve like the first one.
TEST_F(HttpTest, TakesFurtherListenersOfAnyFamily) {
  Start(Echo());
  int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un un{};
  un.sun_family = AF_UNIX;
  const std::string name = "temper-http-test-" + std::to_string(::getpid());
  std::memcpy(un.sun_path + 1, name.data(), name.size());
  const socklen_t length = offsetof(sockaddr_un, sun_path) + 1 + name.size();
  ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&un), length), 0);
  EXPECT_EQ(server_->AddListener(::dup(fd)).code(), StatusCode::kInvalidArgument);  // not listening yet
  ASSERT_EQ(::listen(fd, 8), 0);
  ASSERT_TRUE(server_->AddListener(fd).ok());
  Client client(un, length);
  client.Say(Post("unix"));
  EXPECT_NE(client.Hear("POST unix").find("POST unix"), std::string::npos);
}

// Stop must end although clients are connected and requests unanswered.
TEST_F(HttpTest, StopsWithOpenConnectionsAndLateAnswers) {
  Event arrived;
  std::shared_ptr<Responder> kept;
  Start([&](Request, std::shared_ptr<Responder> out) {
    kept = out;
    arrived.Set();
  });
  Client idle(port_), waiting(port_);
  waiting.Say(Post(""));
  ASSERT_TRUE(arrived.Wait());
  server_->Stop();
  EXPECT_EQ(waiting.Hear(""), "<closed>");
  kept->Send(200, {}, "late");
  kept.reset();
}

}  // namespace
}  // namespace temper::gateway::http
