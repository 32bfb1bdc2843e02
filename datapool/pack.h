// A flat list of numbers and strings as bytes: the store form of the pool's state. Both ends walk the fields in the same order;
// the reader never reads past the end, and says so instead.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace temper::datapool {

class Packer {
 public:
  void Int(int64_t v) {
    for (int i = 0; i < 8; ++i) out_.push_back(static_cast<char>(static_cast<uint64_t>(v) >> (8 * i)));
  }
  void Real(double v) {
    int64_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    Int(bits);
  }
  void Text(const std::string& s) {
    Int(static_cast<int64_t>(s.size()));
    out_ += s;
  }
  template <typename Range>
  void Ints(const Range& range) {
    Int(static_cast<int64_t>(range.size()));
    for (int64_t v : range) Int(v);
  }
  std::string Take() { return std::move(out_); }

 private:
  std::string out_;
};

class Unpacker {
 public:
  // `in` must outlive it.
  explicit Unpacker(const std::string& in) : in_(in) {}
  bool ok() const { return ok_; }
  bool AtEnd() const { return ok_ && at_ == in_.size(); }
  int64_t Int() {
    if (!ok_ || in_.size() - at_ < 8) return Fail();
    uint64_t v = 0;
    for (int i = 0; i < 8; ++i) v |= static_cast<uint64_t>(static_cast<unsigned char>(in_[at_ + static_cast<size_t>(i)])) << (8 * i);
    at_ += 8;
    return static_cast<int64_t>(v);
  }
  double Real() {
    int64_t bits = Int();
    double v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
  }
  // A count of items of at least `bytes` each: never more than what is left can hold.
  size_t Count(size_t bytes) {
    int64_t n = Int();
    if (!ok_ || n < 0 || static_cast<uint64_t>(n) > (in_.size() - at_) / bytes) {
      Fail();
      return 0;
    }
    return static_cast<size_t>(n);
  }
  std::string Text() {
    size_t n = Count(1);
    std::string s = in_.substr(at_, n);
    at_ += n;
    return s;
  }
  std::vector<int64_t> Ints() {
    std::vector<int64_t> out(Count(8));
    for (int64_t& v : out) v = Int();
    return out;
  }
  // An enumerator of a type with `count` of them.
  template <typename E>
  E Choice(int count) {
    int64_t v = Int();
    if (v < 0 || v >= count) v = Fail();
    return static_cast<E>(v);
  }

 private:
  int64_t Fail() {
    ok_ = false;
    return 0;
  }
  const std::string& in_;
  size_t at_ = 0;
  bool ok_ = true;
};

}  // namespace temper::datapool
