// A minimal HTTP client for the built-in scaffold: POST of a JSON body to the agent plane.
#pragma once

#include <string>

#include "common/status.h"

namespace temper::agents {

// Not thread-safe; keeps its connection.
class ChatClient {
 public:
  ChatClient(std::string base_url, std::string api_key);
  ~ChatClient();
  ChatClient(const ChatClient&) = delete;
  ChatClient& operator=(const ChatClient&) = delete;

  struct Answer {
    long status = 0;
    std::string body;
  };
  // kDeadlineExceeded after timeout_s, kUnavailable when the service cannot be reached.
  Result<Answer> Post(const std::string& path, const std::string& body, double timeout_s);

 private:
  std::string base_url_, api_key_;
  void* curl_;
};

}  // namespace temper::agents
