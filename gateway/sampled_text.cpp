#include "gateway/sampled_text.h"

#include <algorithm>

#include "common/check.h"

namespace temper::gateway {
namespace {

constexpr const char* kReplacement = "\xef\xbf\xbd";

// The length of the code point that begins at s[0]: > 0 whole, 0 = more bytes are needed, < 0: that many bytes are bad (one
// maximal ill-formed part, as Unicode counts them).
int CodePoint(std::string_view s) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(s[i]); };
  const unsigned char b = byte(0);
  if (b < 0x80) return 1;
  int length = 0;
  unsigned char low = 0x80, high = 0xbf;  // of the second byte
  if (b >= 0xc2 && b <= 0xdf) {
    length = 2;
  } else if (b >= 0xe0 && b <= 0xef) {
    length = 3;
    if (b == 0xe0) low = 0xa0;
    if (b == 0xed) high = 0x9f;
  } else if (b >= 0xf0 && b <= 0xf4) {
    length = 4;
    if (b == 0xf0) low = 0x90;
    if (b == 0xf4) high = 0x8f;
  } else {
    return -1;
  }
  for (int i = 1; i < length; ++i) {
    if (i >= static_cast<int>(s.size())) return 0;
    const unsigned char c = byte(i);
    if (c < (i == 1 ? low : 0x80) || c > (i == 1 ? high : 0xbf)) return -i;
  }
  return length;
}

}  // namespace

void SampledText::AppendBytes(std::string_view bytes) {
  held_ += bytes;
  size_t at = 0;
  while (at < held_.size()) {
    const int n = CodePoint(std::string_view(held_).substr(at));
    if (n == 0) break;
    if (n > 0) {
      all_.append(held_, at, n);
      at += n;
    } else {
      all_ += kReplacement;
      at += -n;
    }
  }
  held_.erase(0, at);
}

bool SampledText::Append(int32_t id) {
  TEMPER_CHECK(!stopped_) << "a token after the stop string";
  if (text_.IsSpecial(id)) return true;
  const size_t before = all_.size();
  AppendBytes(text_.TokenBytes(id));
  size_t cut = std::string::npos;
  for (const std::string& stop : stop_) {
    const size_t from = before >= stop.size() ? before - stop.size() + 1 : 0;
    cut = std::min(cut, all_.find(stop, from));
  }
  if (cut == std::string::npos) return true;
  all_.resize(cut);
  held_.clear();
  stopped_ = true;
  return false;
}

std::string SampledText::TakeVisible() {
  size_t certain = all_.size();
  if (!stopped_) {
    // A suffix that begins a stop string may still be taken back.
    for (const std::string& stop : stop_) {
      for (size_t n = std::min(stop.size() - 1, all_.size()); n > 0; --n) {
        if (all_.compare(all_.size() - n, n, stop, 0, n) == 0) {
          certain = std::min(certain, all_.size() - n);
          break;
        }
      }
    }
  }
  if (!tools_.is_none()) certain = std::min(certain, text_.CertainContent(std::string_view(all_).substr(0, certain), tools_));
  if (certain <= shown_) return "";
  std::string visible = all_.substr(shown_, certain - shown_);
  shown_ = certain;
  return visible;
}

SampledText::Said SampledText::Finish(bool complete) {
  if (!held_.empty()) all_ += kReplacement;
  held_.clear();
  Said said;
  if (tools_.is_none()) {
    said.content = all_;
    return said;
  }
  text::ParsedAnswer parsed = text_.Parse(all_, tools_, complete);
  said.content = std::move(parsed.content);
  said.ill_formed = parsed.ill_formed;
  for (text::ToolCall& call : parsed.calls) said.tool_calls.push_back({"", std::move(call.name), std::move(call.arguments)});
  return said;
}

}  // namespace temper::gateway
