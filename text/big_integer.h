// BigInteger: Python's int beyond 64 bits, for templates that compute with ids, sizes or powers.
//
// Idea: sign and magnitude in limbs of 32 bits, school arithmetic. The caller bounds the sizes (kMaxDigits decimal digits, what
// Python itself turns into text), so nothing here needs to be clever. Values are immutable in use; thread-safe to read.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace temper::text {

class BigInteger {
 public:
  static constexpr size_t kMaxDigits = 4300;

  BigInteger() = default;            // 0
  BigInteger(int64_t v);             // NOLINT: implicit by design
  // Decimal digits after an optional '-'; nothing else is checked (a bug otherwise).
  static BigInteger FromDigits(std::string_view digits);
  // The integer part of a finite double.
  static BigInteger FromDouble(double v);

  bool negative() const { return negative_; }
  bool is_zero() const { return limbs_.empty(); }
  bool odd() const { return !limbs_.empty() && (limbs_[0] & 1); }
  size_t bits() const;               // of the magnitude; 0 of zero
  size_t ones() const;               // bits set in the magnitude
  std::optional<int64_t> ToInt64() const;
  // The nearest double, ties to even; infinite beyond the range.
  double ToDouble() const;
  // Digits in a base of 2 to 36, lower case, with '-' before them.
  std::string ToString(uint32_t base = 10) const;

  BigInteger Negated() const;
  // < 0, 0, > 0.
  static int Compare(const BigInteger& a, const BigInteger& b);
  static BigInteger Add(const BigInteger& a, const BigInteger& b);
  static BigInteger Multiply(const BigInteger& a, const BigInteger& b);
  // Python's // and %: the quotient rounds down, the remainder has the sign of b. Requires b != 0.
  static void Divide(const BigInteger& a, const BigInteger& b, BigInteger* quotient, BigInteger* remainder);
  // Python's a / b, rounded once. Requires b != 0; infinite beyond the range.
  static double TrueDivide(const BigInteger& a, const BigInteger& b);

 private:
  using Limbs = std::vector<uint32_t>;
  static void Trim(Limbs* limbs);
  static int CompareMagnitude(const Limbs& a, const Limbs& b);
  static Limbs AddMagnitude(const Limbs& a, const Limbs& b);
  static Limbs SubtractMagnitude(const Limbs& a, const Limbs& b);  // a >= b
  static void DivideMagnitude(const Limbs& a, const Limbs& b, Limbs* quotient, Limbs* remainder);
  static uint32_t DivideSmall(Limbs* limbs, uint32_t by);  // in place; the remainder
  static Limbs ShiftLeft(const Limbs& a, size_t bits);
  static double Scaled(const Limbs& magnitude, bool more_below, int exponent);
  BigInteger(bool negative, Limbs limbs);

  bool negative_ = false;
  Limbs limbs_;  // the least significant first, no zeros at the end
};

}  // namespace temper::text
