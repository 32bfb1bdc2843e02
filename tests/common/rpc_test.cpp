#include "common/rpc.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "common/rpc_call.h"
#include "temper/v1/role.grpc.pb.h"

namespace temper {
namespace {

std::string Name(const char* test) { return "temper-test-" + std::to_string(getpid()) + "-" + test; }

Fd Duplicate(const Fd& fd) { return Fd(dup(fd.get())); }

// The whole path: listen, accept from a descriptor, check the peer, call, stop.
TEST(Rpc, SnapshotAndStop) {
  auto listening = ListenAbstract(Name("snapshot"));
  ASSERT_TRUE(listening.ok()) << listening.status().ToString();
  Metrics metrics;
  metrics["tokens"].Add(5);
  metrics.Say("hello");
  std::atomic<bool> stopped{false};
  RpcServer server(std::move(*listening));
  server.RegisterRole("rollout", &metrics, [&](const std::string& reason) { stopped = reason == "done"; });
  ASSERT_TRUE(server.Start().ok());
  auto channel = RpcChannel("unix-abstract:" + Name("snapshot"));
  auto snapshot = FetchSnapshot(*channel, 5);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status().ToString();
  EXPECT_EQ(snapshot->role, "rollout");
  EXPECT_EQ(snapshot->pid, getpid());
  EXPECT_EQ(snapshot->metrics.at("tokens"), 5);
  EXPECT_EQ(snapshot->lines, std::vector<std::string>{"hello"});
  EXPECT_TRUE(RequestStop(*channel, "done", 5).ok());
  EXPECT_TRUE(stopped);
  server.Stop();
}

// A client of a role that restarts must wait in the backlog and then be served, not fail.
TEST(Rpc, CallsOutliveARestartOfThePeer) {
  auto listening = ListenAbstract(Name("restart"));
  ASSERT_TRUE(listening.ok());
  Metrics metrics;
  auto start = [&](double epoch) {
    metrics["epoch"].Set(epoch);
    auto server = std::make_unique<RpcServer>(Duplicate(*listening));
    server->RegisterRole("trainer", &metrics, [](const std::string&) {});
    EXPECT_TRUE(server->Start().ok());
    return server;
  };
  auto server = start(1);
  auto channel = RpcChannel("unix-abstract:" + Name("restart"));
  EXPECT_EQ(FetchSnapshot(*channel, 5)->metrics["epoch"], 1);
  server.reset();
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    server = start(2);
  });
  auto snapshot = FetchSnapshot(*channel, 20);
  later.join();
  ASSERT_TRUE(snapshot.ok()) << snapshot.status().ToString();
  EXPECT_EQ(snapshot->metrics["epoch"], 2);
}

// A peer that never comes must give an error within the budget, and a cancelled call at once.
TEST(Rpc, GivesUpAndCancels) {
  auto channel = RpcChannel("unix-abstract:" + Name("nobody"));
  EXPECT_EQ(FetchSnapshot(*channel, 0.3).status().code(), StatusCode::kUnavailable);
  std::atomic<bool> cancelled{true};
  EXPECT_EQ(WaitConnected(*channel, 100, &cancelled).code(), StatusCode::kCancelled);
}

// More callers than threads must be served one after the other, not be told that the server is exhausted.
TEST(Rpc, MoreCallersThanThreads) {
  auto listening = ListenAbstract(Name("crowd"));
  ASSERT_TRUE(listening.ok());
  Metrics metrics;
  RpcServer server(std::move(*listening), {.max_threads = 4});
  server.RegisterRole("gateway", &metrics, [](const std::string&) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  ASSERT_TRUE(server.Start().ok());
  auto channel = RpcChannel("unix-abstract:" + Name("crowd"));
  std::atomic<int> good{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 40; ++i) {
    callers.emplace_back([&] { good += RequestStop(*channel, "x", 20).ok(); });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(good, 40);
}

// A second server on the same name or port would split the clients between two worlds.
TEST(Rpc, NamesAndPortsAreExclusive) {
  auto first = ListenAbstract(Name("taken"));
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(ListenAbstract(Name("taken")).status().code(), StatusCode::kFailedPrecondition);
  auto tcp = ListenTcp("127.0.0.1", 0);
  ASSERT_TRUE(tcp.ok());
  const int port = *BoundPort(tcp->get());
  EXPECT_GT(port, 0);
  auto again = ListenTcp("127.0.0.1", port);
  EXPECT_EQ(again.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(again.status().message().find(std::to_string(port)), std::string::npos);
  EXPECT_FALSE(ListenTcp("localhost", 0).ok());
  EXPECT_FALSE(ListenAbstract(std::string(200, 'x')).ok());
}

// Codes are numbers on the wire; a shift would turn "not found" into something else.
TEST(Rpc, StatusCrossesTheWire) {
  for (int code = 1; code <= 16; ++code) {
    const Status status(static_cast<StatusCode>(code), "m");
    const Status back = FromGrpc(ToGrpc(status));
    EXPECT_EQ(back.code(), status.code());
    EXPECT_EQ(back.message(), "m");
  }
  EXPECT_TRUE(FromGrpc(ToGrpc(Status::Ok())).ok());
}

}  // namespace
}  // namespace temper
