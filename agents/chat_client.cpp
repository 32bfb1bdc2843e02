#include "agents/chat_client.h"

#include <curl/curl.h>

#include <utility>

namespace temper::agents {
namespace {

constexpr size_t kBodyBytesMax = size_t{64} << 20;

size_t Append(char* data, size_t size, size_t count, void* out) {
  auto* body = static_cast<std::string*>(out);
  if (body->size() + size * count > kBodyBytesMax) return 0;
  body->append(data, size * count);
  return size * count;
}

}  // namespace

ChatClient::ChatClient(std::string base_url, std::string api_key)
    : base_url_(std::move(base_url)), api_key_(std::move(api_key)), curl_(curl_easy_init()) {
  TEMPER_CHECK(curl_ != nullptr);
}

ChatClient::~ChatClient() { curl_easy_cleanup(curl_); }

Result<ChatClient::Answer> ChatClient::Post(const std::string& path, const std::string& body, double timeout_s) {
  Answer answer;
  CURL* curl = curl_;
  curl_slist* headers = curl_slist_append(nullptr, "Content-Type: application/json");
  headers = curl_slist_append(headers, ("Authorization: Bearer " + api_key_).c_str());
  curl_easy_setopt(curl, CURLOPT_URL, (base_url_ + path).c_str());
  curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
  curl_easy_setopt(curl, CURLOPT_POSTFIELDSIZE, static_cast<long>(body.size()));
  curl_easy_setopt(curl, CURLOPT_POSTFIELDS, body.data());
  curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, Append);
  curl_easy_setopt(curl, CURLOPT_WRITEDATA, &answer.body);
  curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(curl, CURLOPT_NOPROXY, "*");
  curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, static_cast<long>(timeout_s * 1000) + 1);
  const CURLcode code = curl_easy_perform(curl);
  curl_slist_free_all(headers);
  if (code == CURLE_OPERATION_TIMEDOUT) return DeadlineExceeded(base_url_ + path);
  if (code != CURLE_OK) return Unavailable(base_url_ + path + ": " + curl_easy_strerror(code));
  curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &answer.status);
  return answer;
}

}  // namespace temper::agents
