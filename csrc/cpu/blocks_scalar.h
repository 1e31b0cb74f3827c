// Blocks of 32 values in plain C++: for processors without a path of their own, and the plain form of the others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/format.h"
#include "core/minmax.h"
#include "core/noise.h"
#include "core/rows.h"

#define SYLVIE_ISA scalar
#define SYLVIE_TARGET

namespace sylvie {
namespace scalar {

constexpr int kLanes = 1;
using Vector = float;

struct Block {
  float values[kBlock];
};

template <typename Value>
Block load_block(const Value* source) {
  Block block;
  for (int i = 0; i < kBlock; ++i) {
    block.values[i] = widen(source[i]);
  }
  return block;
}

template <typename Value>
void store_block(const Block& block, Value* target) {
  for (int i = 0; i < kBlock; ++i) {
    narrow(block.values[i], target[i]);
  }
}

inline Block fill(float value) {
  Block block;
  std::fill(block.values, block.values + kBlock, value);
  return block;
}

inline Block add(const Block& a, const Block& b) {
  Block sum;
  for (int i = 0; i < kBlock; ++i) {
    sum.values[i] = a.values[i] + b.values[i];
  }
  return sum;
}

// Smallest and largest value so far, and whether one was not finite.
class Extremes {
 public:
  void add(const Block& block) {
    for (const float value : block.values) {
      low_ = std::min(low_, value);
      high_ = std::max(high_, value);
      finite_ &= sylvie::is_finite(value);
    }
  }
  float low() const { return low_; }
  float high() const { return high_; }
  bool is_finite() const { return finite_; }

 private:
  float low_ = bit_cast<float>(0x7f800000u);
  float high_ = bit_cast<float>(0xff800000u);
  bool finite_ = true;
};

// Codes of the 32 values that start at column 32 * number: kBits each, in element order.
template <int kBits>
void pack(const Block& block, const Grid& grid, RowKey key, int64_t number, uint8_t* codes) {
  std::memset(codes, 0, 4 * kBits);
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t code = code_of(block.values[i], grid, dither(key, kBlock * number + i), (1u << kBits) - 1u);
    codes[i * kBits / 8] |= static_cast<uint8_t>(code << i * kBits % 8);
  }
}

template <int kBits>
Block unpack(const uint8_t* codes, const Grid& grid) {
  Block block;
  for (int i = 0; i < kBlock; ++i) {
    block.values[i] = value_of(codes[i * kBits / 8] >> i * kBits % 8 & ((1u << kBits) - 1u), grid);
  }
  return block;
}

inline float load_vector(const float* source) { return *source; }
inline void store_vector(float value, float* target) { *target = value; }
inline float add_vector(float a, float b) { return a + b; }
inline float subtract_vector(float a, float b) { return a - b; }

inline Block subtract(const Block& a, float b) {
  Block difference;
  for (int i = 0; i < kBlock; ++i) {
    difference.values[i] = a.values[i] - b;
  }
  return difference;
}

inline Block multiply(const Block& a, const Block& b) {
  Block product;
  for (int i = 0; i < kBlock; ++i) {
    product.values[i] = a.values[i] * b.values[i];
  }
  return product;
}

inline Block absolute(const Block& a) {
  Block sizes;
  for (int i = 0; i < kBlock; ++i) {
    sizes.values[i] = a.values[i] < 0.0f ? -a.values[i] : a.values[i];
  }
  return sizes;
}

// The values times a factor, with the sign turned where a bit is set.
inline Block signed_block(const Block& a, uint32_t word, float factor) {
  Block block;
  for (int i = 0; i < kBlock; ++i) {
    block.values[i] = a.values[i] * ((word >> i & 1u) != 0u ? -factor : factor);
  }
  return block;
}
inline Vector signed_vector(Vector a, uint32_t word, int lane, float factor) {
  return a * ((word >> lane & 1u) != 0u ? -factor : factor);
}

constexpr int kWordsAtOnce = 1;
inline void random_words(RowKey key, uint32_t counter, uint32_t* words) { *words = random_bits(key, counter); }

inline uint32_t sign_bits(const Block& block) {
  uint32_t word = 0;
  for (int i = 0; i < kBlock; ++i) {
    word |= bit_cast<uint32_t>(block.values[i]) >> 31 << i;
  }
  return word;
}

// Unnormalized Hadamard transform of the block, the widest level first.
inline Block hadamard_block(Block block) {
  for (int half = kBlock / 2; half > 0; half /= 2) {
    for (int i = 0; i < kBlock; ++i) {
      if ((i & half) == 0) {
        const float a = block.values[i], b = block.values[i + half];
        block.values[i] = a + b;
        block.values[i + half] = a - b;
      }
    }
  }
  return block;
}

// The bits of the largest absolute value so far, as integers: NaN and infinity are largest.
class Largest {
 public:
  void add(const Block& block) {
    for (const float value : block.values) {
      bits_ = std::max(bits_, bit_cast<uint32_t>(value) & 0x7fffffffu);
    }
  }
  uint32_t bits() const { return bits_; }

 private:
  uint32_t bits_ = 0;
};

// A sum in an order that all kernels share: 32 lanes, which are then added in halves.
class LaneSum {
 public:
  void add(const Block& block) { lanes_ = scalar::add(lanes_, block); }
  float total() const {
    Block sum = lanes_;
    for (int half = kBlock / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) {
        sum.values[i] += sum.values[i + half];
      }
    }
    return sum.values[0];
  }

 private:
  Block lanes_ = fill(0.0f);
};

}  // namespace scalar
}  // namespace sylvie
