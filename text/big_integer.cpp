#include "text/big_integer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace temper::text {

BigInteger::BigInteger(bool negative, Limbs limbs) : negative_(negative), limbs_(std::move(limbs)) {
  Trim(&limbs_);
  if (limbs_.empty()) negative_ = false;
}

BigInteger::BigInteger(int64_t v) : negative_(v < 0) {
  for (uint64_t left = v < 0 ? -static_cast<uint64_t>(v) : static_cast<uint64_t>(v); left; left >>= 32) {
    limbs_.push_back(static_cast<uint32_t>(left));
  }
}

void BigInteger::Trim(Limbs* limbs) {
  while (!limbs->empty() && limbs->back() == 0) limbs->pop_back();
}

BigInteger BigInteger::FromDigits(std::string_view digits) {
  const bool negative = !digits.empty() && digits[0] == '-';
  Limbs limbs;
  for (size_t at = negative; at < digits.size();) {  // nine digits at a time
    uint32_t chunk = 0, scale = 1;
    for (; at < digits.size() && scale < 1'000'000'000; ++at, scale *= 10)
      chunk = chunk * 10 + static_cast<uint32_t>(digits[at] - '0');
    uint64_t carry = chunk;
    for (uint32_t& limb : limbs) {
      carry += uint64_t{limb} * scale;
      limb = static_cast<uint32_t>(carry);
      carry >>= 32;
    }
    if (carry) limbs.push_back(static_cast<uint32_t>(carry));
  }
  return BigInteger(negative, std::move(limbs));
}

BigInteger BigInteger::FromDouble(double v) {
  int exponent = 0;
  const double fraction = std::frexp(std::fabs(std::trunc(v)), &exponent);
  const auto mantissa = static_cast<uint64_t>(std::ldexp(fraction, 53));
  Limbs limbs = {static_cast<uint32_t>(mantissa), static_cast<uint32_t>(mantissa >> 32)};
  if (exponent <= 53) {
    const uint64_t small = exponent <= 0 ? 0 : mantissa >> (53 - exponent);
    limbs = {static_cast<uint32_t>(small), static_cast<uint32_t>(small >> 32)};
  } else {
    limbs = ShiftLeft(limbs, static_cast<size_t>(exponent - 53));
  }
  return BigInteger(v < 0, std::move(limbs));
}

size_t BigInteger::bits() const {
  return limbs_.empty() ? 0 : limbs_.size() * 32 - static_cast<size_t>(std::countl_zero(limbs_.back()));
}

size_t BigInteger::ones() const {
  size_t out = 0;
  for (uint32_t limb : limbs_) out += static_cast<size_t>(std::popcount(limb));
  return out;
}

std::optional<int64_t> BigInteger::ToInt64() const {
  if (limbs_.size() > 2) return std::nullopt;
  uint64_t magnitude = 0;
  for (size_t i = limbs_.size(); i-- > 0;) magnitude = magnitude << 32 | limbs_[i];
  if (magnitude > (uint64_t{1} << 63) - (negative_ ? 0 : 1)) return std::nullopt;
  return static_cast<int64_t>(negative_ ? -magnitude : magnitude);
}

// magnitude * 2^exponent, where `more_below` says that the true value is a little larger; one rounding, ties to even.
double BigInteger::Scaled(const Limbs& magnitude, bool more_below, int exponent) {
  if (magnitude.empty()) return 0;
  uint64_t top = 0;  // the highest 64 bits
  const int bits = static_cast<int>(magnitude.size()) * 32 - std::countl_zero(magnitude.back());
  for (int i = 0; i < 64; ++i) {
    const int at = bits - 1 - i;
    top = top << 1 | (at >= 0 ? magnitude[static_cast<size_t>(at / 32)] >> (at % 32) & 1 : 0);
  }
  for (int at = 0; at < bits - 64 && !more_below; ++at) more_below = magnitude[static_cast<size_t>(at / 32)] >> (at % 32) & 1;
  exponent += bits - 64;  // the value is top * 2^exponent
  // How many bits a double keeps here: fewer below the normal range.
  const int keep = std::min(53, 53 + (exponent + 63 + 1022 < 0 ? exponent + 63 + 1022 : 0));
  if (keep < 0) return 0;
  const int drop = 64 - keep;
  uint64_t kept = drop == 64 ? 0 : top >> drop;
  const uint64_t half = uint64_t{1} << (drop - 1), rest = drop == 64 ? top : top & ((half << 1) - 1);
  if (rest > half || (rest == half && (more_below || (kept & 1)))) ++kept;
  return std::ldexp(static_cast<double>(kept), exponent + drop);
}

double BigInteger::ToDouble() const {
  const double v = Scaled(limbs_, false, 0);
  return negative_ ? -v : v;
}

uint32_t BigInteger::DivideSmall(Limbs* limbs, uint32_t by) {
  uint64_t rest = 0;
  for (size_t i = limbs->size(); i-- > 0;) {
    rest = rest << 32 | (*limbs)[i];
    (*limbs)[i] = static_cast<uint32_t>(rest / by);
    rest %= by;
  }
  Trim(limbs);
  return static_cast<uint32_t>(rest);
}

std::string BigInteger::ToString(uint32_t base) const {
  if (limbs_.empty()) return "0";
  uint32_t chunk = base;  // the largest power of the base in one limb
  int digits = 1;
  for (; uint64_t{chunk} * base <= std::numeric_limits<uint32_t>::max(); ++digits) chunk *= base;
  std::string out;
  Limbs left = limbs_;
  while (!left.empty()) {
    uint32_t part = DivideSmall(&left, chunk);
    for (int i = 0; i < digits && (part || !left.empty()); ++i, part /= base)
      out.push_back("0123456789abcdefghijklmnopqrstuvwxyz"[part % base]);
  }
  if (negative_) out.push_back('-');
  std::reverse(out.begin(), out.end());
  return out;
}

BigInteger BigInteger::Negated() const { return BigInteger(!negative_, limbs_); }

int BigInteger::CompareMagnitude(const Limbs& a, const Limbs& b) {
  if (a.size() != b.size()) return a.size() < b.size() ? -1 : 1;
  for (size_t i = a.size(); i-- > 0;) {
    if (a[i] != b[i]) return a[i] < b[i] ? -1 : 1;
  }
  return 0;
}

int BigInteger::Compare(const BigInteger& a, const BigInteger& b) {
  if (a.negative_ != b.negative_) return a.negative_ ? -1 : 1;
  const int order = CompareMagnitude(a.limbs_, b.limbs_);
  return a.negative_ ? -order : order;
}

BigInteger::Limbs BigInteger::AddMagnitude(const Limbs& a, const Limbs& b) {
  Limbs out;
  uint64_t carry = 0;
  for (size_t i = 0; i < std::max(a.size(), b.size()) || carry; ++i) {
    carry += uint64_t{i < a.size() ? a[i] : 0} + (i < b.size() ? b[i] : 0);
    out.push_back(static_cast<uint32_t>(carry));
    carry >>= 32;
  }
  return out;
}

BigInteger::Limbs BigInteger::SubtractMagnitude(const Limbs& a, const Limbs& b) {
  Limbs out;
  int64_t borrow = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    int64_t v = int64_t{a[i]} - (i < b.size() ? b[i] : 0) - borrow;
    borrow = v < 0;
    out.push_back(static_cast<uint32_t>(v + (borrow << 32)));
  }
  return out;
}

BigInteger BigInteger::Add(const BigInteger& a, const BigInteger& b) {
  if (a.negative_ == b.negative_) return BigInteger(a.negative_, AddMagnitude(a.limbs_, b.limbs_));
  const bool a_larger = CompareMagnitude(a.limbs_, b.limbs_) >= 0;
  const BigInteger &large = a_larger ? a : b, &small = a_larger ? b : a;
  return BigInteger(large.negative_, SubtractMagnitude(large.limbs_, small.limbs_));
}

BigInteger BigInteger::Multiply(const BigInteger& a, const BigInteger& b) {
  Limbs out(a.limbs_.size() + b.limbs_.size());
  for (size_t i = 0; i < a.limbs_.size(); ++i) {
    uint64_t carry = 0;
    for (size_t j = 0; j < b.limbs_.size() || carry; ++j) {
      carry += out[i + j] + uint64_t{a.limbs_[i]} * (j < b.limbs_.size() ? b.limbs_[j] : 0);
      out[i + j] = static_cast<uint32_t>(carry);
      carry >>= 32;
    }
  }
  return BigInteger(a.negative_ != b.negative_, std::move(out));
}

BigInteger::Limbs BigInteger::ShiftLeft(const Limbs& a, size_t bits) {
  Limbs out(bits / 32);
  const size_t by = bits % 32;
  uint32_t carry = 0;
  for (uint32_t limb : a) {
    out.push_back(limb << by | carry);
    carry = by ? limb >> (32 - by) : 0;
  }
  out.push_back(carry);
  Trim(&out);
  return out;
}

// Knuth's algorithm D.
void BigInteger::DivideMagnitude(const Limbs& a, const Limbs& b, Limbs* quotient, Limbs* remainder) {
  if (CompareMagnitude(a, b) < 0) {
    quotient->clear();
    *remainder = a;
    return;
  }
  if (b.size() == 1) {
    *quotient = a;
    const uint32_t rest = DivideSmall(quotient, b[0]);
    *remainder = rest ? Limbs{rest} : Limbs{};
    return;
  }
  const int shift = std::countl_zero(b.back());
  const Limbs v = ShiftLeft(b, static_cast<size_t>(shift));
  Limbs u = ShiftLeft(a, static_cast<size_t>(shift));
  u.resize(a.size() + 1);
  const size_t n = v.size();
  quotient->assign(a.size() - n + 1, 0);
  for (size_t j = quotient->size(); j-- > 0;) {
    const uint64_t head = uint64_t{u[j + n]} << 32 | u[j + n - 1];
    uint64_t guess = head / v[n - 1], rest = head % v[n - 1];
    while (guess >> 32 || guess * v[n - 2] > (rest << 32 | u[j + n - 2])) {
      --guess;
      rest += v[n - 1];
      if (rest >> 32) break;
    }
    int64_t borrow = 0;
    uint64_t carry = 0;
    for (size_t i = 0; i < n; ++i) {
      carry += guess * v[i];
      const int64_t t = int64_t{u[i + j]} - borrow - static_cast<int64_t>(carry & 0xFFFFFFFF);
      u[i + j] = static_cast<uint32_t>(t);
      borrow = t < 0;
      carry >>= 32;
    }
    const int64_t t = int64_t{u[j + n]} - borrow - static_cast<int64_t>(carry);
    u[j + n] = static_cast<uint32_t>(t);
    if (t < 0) {  // the guess was one too large
      --guess;
      uint64_t back = 0;
      for (size_t i = 0; i < n; ++i) {
        back += uint64_t{u[i + j]} + v[i];
        u[i + j] = static_cast<uint32_t>(back);
        back >>= 32;
      }
      u[j + n] += static_cast<uint32_t>(back);
    }
    (*quotient)[j] = static_cast<uint32_t>(guess);
  }
  remainder->clear();
  for (size_t i = 0; i < n; ++i) {
    remainder->push_back(u[i] >> shift |
                         (shift && i + 1 < u.size() ? static_cast<uint32_t>(uint64_t{u[i + 1]} << (32 - shift)) : 0));
  }
  Trim(quotient);
  Trim(remainder);
}

void BigInteger::Divide(const BigInteger& a, const BigInteger& b, BigInteger* quotient, BigInteger* remainder) {
  Limbs q, r;
  DivideMagnitude(a.limbs_, b.limbs_, &q, &r);
  const bool down = a.negative_ != b.negative_ && !r.empty();
  *quotient = BigInteger(a.negative_ != b.negative_, std::move(q));
  *remainder = BigInteger(a.negative_, std::move(r));
  if (down) {
    *quotient = Add(*quotient, BigInteger(-1));
    *remainder = Add(*remainder, b);
  }
}

double BigInteger::TrueDivide(const BigInteger& a, const BigInteger& b) {
  // A quotient of at least 66 bits, and whether something is left, decide the rounding.
  const int shift = 66 + static_cast<int>(b.bits()) - static_cast<int>(a.bits());
  const size_t up = static_cast<size_t>(std::max(0, shift)), down = static_cast<size_t>(std::max(0, -shift));
  Limbs q, r;
  DivideMagnitude(ShiftLeft(a.limbs_, up), ShiftLeft(b.limbs_, down), &q, &r);
  const double v = Scaled(q, !r.empty(), -shift);
  return a.negative_ != b.negative_ ? -v : v;
}

}  // namespace temper::text
