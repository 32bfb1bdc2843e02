// A client socket that says exactly the bytes it is told, and a simple exchange on top of it.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <map>
#include <string>

namespace temper::gateway {

class RawClient {
 public:
  explicit RawClient(int port) {
    fd_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in in{};
    in.sin_family = AF_INET;
    in.sin_port = htons(static_cast<uint16_t>(port));
    in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(fd_, reinterpret_cast<sockaddr*>(&in), sizeof in), 0);
  }
  RawClient(const sockaddr_un& un, socklen_t length) {
    fd_ = ::socket(AF_UNIX, SOCK_STREAM, 0);
    EXPECT_EQ(::connect(fd_, reinterpret_cast<const sockaddr*>(&un), length), 0);
  }
  ~RawClient() { Close(); }
  void Close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  void Say(const std::string& bytes) {
    size_t sent = 0;
    while (sent < bytes.size()) {
      ssize_t n = ::send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (n <= 0) return;
      sent += n;
    }
  }
  // Everything until `end` was seen, the server closed, or nothing came for `silence_ms`.
  std::string Hear(const std::string& end, int silence_ms = 10'000) {
    std::string all;
    while (end.empty() || all.find(end) == std::string::npos) {
      pollfd p{fd_, POLLIN, 0};
      if (::poll(&p, 1, silence_ms) <= 0) return all + "<silence>";
      char buffer[4096];
      ssize_t n = ::recv(fd_, buffer, sizeof buffer, 0);
      if (n <= 0) return all + "<closed>";
      all.append(buffer, n);
    }
    return all;
  }

 private:
  int fd_ = -1;
};

struct HttpAnswer {
  int status = 0;
  std::string head;
  std::string body;  // chunks joined
};

inline std::string HttpRequest(const std::string& method, const std::string& path, const std::string& key, const std::string& body,
                               const std::string& extra = "") {
  std::string bytes = method + " " + path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + extra;
  if (!key.empty()) bytes += "Authorization: Bearer " + key + "\r\n";
  return bytes + "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

inline HttpAnswer ParseAnswer(std::string all) {
  HttpAnswer answer;
  if (all.ends_with("<closed>")) all.resize(all.size() - 8);
  const size_t split = all.find("\r\n\r\n");
  if (split == std::string::npos) return answer;
  answer.head = all.substr(0, split);
  answer.status = std::atoi(answer.head.c_str() + 9);
  std::string rest = all.substr(split + 4);
  if (answer.head.find("transfer-encoding: chunked") == std::string::npos) {
    answer.body = rest;
    return answer;
  }
  while (!rest.empty()) {
    const size_t line = rest.find("\r\n");
    if (line == std::string::npos) break;
    const size_t size = std::stoul(rest.substr(0, line), nullptr, 16);
    answer.body += rest.substr(line + 2, size);
    if (size == 0) break;
    rest = rest.size() > line + 4 + size ? rest.substr(line + 4 + size) : "";
  }
  return answer;
}

// One exchange on a connection of its own.
inline HttpAnswer Exchange(int port, const std::string& method, const std::string& path, const std::string& key,
                           const std::string& body = "", const std::string& extra = "") {
  RawClient client(port);
  client.Say(HttpRequest(method, path, key, body, extra));
  return ParseAnswer(client.Hear(""));
}

}  // namespace temper::gateway
