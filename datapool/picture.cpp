#include "datapool/picture.h"

#include <algorithm>
#include <cstdint>

namespace temper::datapool {
namespace {

constexpr int kRowHeight = 120;  // of one half row
constexpr int kMargin = 8;
constexpr int kMinWidth = 640, kMaxWidth = 4000;

struct Colour {
  uint8_t r, g, b;
};
constexpr Colour kWhite{255, 255, 255}, kGrey{160, 160, 160}, kRed{200, 60, 50}, kBlue{60, 100, 190};

class Canvas {
 public:
  Canvas(int width, int height) : width_(width), height_(height), pixels_(static_cast<size_t>(width) * static_cast<size_t>(height), kWhite) {}
  void Fill(int x0, int y0, int x1, int y1, Colour c) {
    for (int y = std::max(0, y0); y < std::min(height_, y1); ++y) {
      for (int x = std::max(0, x0); x < std::min(width_, x1); ++x) pixels_[static_cast<size_t>(y) * static_cast<size_t>(width_) + static_cast<size_t>(x)] = c;
    }
  }
  std::string Png() const;

 private:
  int width_, height_;
  std::vector<Colour> pixels_;
};

void PutU32(std::string& out, uint32_t v) {
  for (int shift = 24; shift >= 0; shift -= 8) out.push_back(static_cast<char>(v >> shift));
}

uint32_t Crc(const std::string& bytes) {
  uint32_t crc = ~0u;
  for (unsigned char b : bytes) {
    crc ^= b;
    for (int i = 0; i < 8; ++i) crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1)));
  }
  return ~crc;
}

void Chunk(std::string& out, const std::string& type, const std::string& body) {
  PutU32(out, static_cast<uint32_t>(body.size()));
  out += type + body;
  PutU32(out, Crc(type + body));
}

// A zlib stream of stored blocks: no compression, no library.
std::string Stored(const std::string& raw) {
  std::string out = "\x78\x01";
  uint32_t a = 1, b = 0;
  for (unsigned char c : raw) {
    a = (a + c) % 65521;
    b = (b + a) % 65521;
  }
  for (size_t at = 0; at < raw.size() || at == 0;) {
    size_t n = std::min<size_t>(65535, raw.size() - at);
    out.push_back(at + n == raw.size() ? 1 : 0);
    for (size_t v : {n, ~n}) {
      out.push_back(static_cast<char>(v & 255));
      out.push_back(static_cast<char>((v >> 8) & 255));
    }
    out.append(raw, at, n);
    at += n;
    if (n == 0) break;
  }
  PutU32(out, (b << 16) | a);
  return out;
}

std::string Canvas::Png() const {
  std::string raw;
  raw.reserve(pixels_.size() * 3 + static_cast<size_t>(height_));
  for (int y = 0; y < height_; ++y) {
    raw.push_back(0);  // no filter
    for (int x = 0; x < width_; ++x) {
      const Colour& c = pixels_[static_cast<size_t>(y) * static_cast<size_t>(width_) + static_cast<size_t>(x)];
      raw.push_back(static_cast<char>(c.r));
      raw.push_back(static_cast<char>(c.g));
      raw.push_back(static_cast<char>(c.b));
    }
  }
  std::string header;
  PutU32(header, static_cast<uint32_t>(width_));
  PutU32(header, static_cast<uint32_t>(height_));
  header += std::string("\x08\x02\x00\x00\x00", 5);  // 8 bits, RGB
  std::string out = "\x89PNG\r\n\x1a\n";
  Chunk(out, "IHDR", header);
  Chunk(out, "IDAT", Stored(raw));
  Chunk(out, "IEND", "");
  return out;
}

}  // namespace

std::string DrawReports(const std::vector<WorldReport>& reports) {
  size_t batches = 1;
  double most_stale = 1, most_idle = 1e-9;
  for (const WorldReport& r : reports) {
    batches = std::max(batches, r.staleness_by_batch.size());
    for (int64_t s : r.staleness_by_batch) most_stale = std::max(most_stale, static_cast<double>(s));
    if (r.plan.bound) most_stale = std::max(most_stale, static_cast<double>(*r.plan.bound));
    for (double s : r.idle_by_batch) most_idle = std::max(most_idle, s);
  }
  const int width = std::clamp<int>(static_cast<int>(std::min<size_t>(batches, kMaxWidth)) * 4, kMinWidth, kMaxWidth);
  Canvas canvas(width + 2 * kMargin, static_cast<int>(reports.size()) * 2 * (kRowHeight + kMargin) + kMargin);
  const double step = static_cast<double>(width) / static_cast<double>(batches);
  int base = 0;
  for (const WorldReport& r : reports) {
    auto bars = [&](auto& values, double most, Colour colour) {
      base += kRowHeight + kMargin;
      for (size_t i = 0; i < values.size(); ++i) {
        int height = static_cast<int>(static_cast<double>(values[i]) / most * kRowHeight);
        int x = kMargin + static_cast<int>(static_cast<double>(i) * step);
        canvas.Fill(x, base - height, std::max(x + 1, kMargin + static_cast<int>(static_cast<double>(i + 1) * step)), base, colour);
      }
      canvas.Fill(kMargin, base, kMargin + width, base + 1, kGrey);
    };
    bars(r.staleness_by_batch, most_stale, kRed);
    if (r.plan.bound) {
      int y = base - static_cast<int>(static_cast<double>(*r.plan.bound) / most_stale * kRowHeight);
      canvas.Fill(kMargin, y, kMargin + width, y + 1, kGrey);
    }
    bars(r.idle_by_batch, most_idle, kBlue);
  }
  return canvas.Png();
}

}  // namespace temper::datapool
