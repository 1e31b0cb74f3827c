// Noise as a pure function of (key, node id, column): the same on every device, for any number of threads and any
// order of rows. Neither torch nor CUDA headers: any compiler can read this file.
#pragma once

#include <cstdint>

#include "core/rows.h"

namespace sylvie {

// One step of splitmix64 (Steele, Lea, Flood 2014).
SYLVIE_HOST_DEVICE uint64_t mix(uint64_t state) {
  state += 0x9e3779b97f4a7c15u;
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebu;
  return state ^ (state >> 31);
}

// What distinguishes the noise of one row.
struct RowKey {
  uint32_t first;
  uint32_t second;
};

SYLVIE_HOST_DEVICE RowKey row_key(int64_t key, int64_t id) {
  const uint64_t mixed = mix(mix(static_cast<uint64_t>(key)) + static_cast<uint64_t>(id));
  return {static_cast<uint32_t>(mixed), static_cast<uint32_t>(mixed >> 32)};
}

// The constants of a 32-bit hash with two multiplications (Wellons, "lowbias32"); the vector kernels repeat it.
constexpr uint32_t kHashFirst = 0x7feb352du;
constexpr uint32_t kHashSecond = 0x846ca68bu;

// 32 random bits for a counter. The key enters before and between the multiplications, so rows whose first halves
// are neighbours do not share a sequence.
SYLVIE_HOST_DEVICE uint32_t random_bits(RowKey key, uint32_t counter) {
  uint32_t bits = key.first ^ counter;
  bits = (bits ^ (bits >> 16)) * kHashFirst;
  bits = ((bits ^ (bits >> 15)) + key.second) * kHashSecond;
  return bits ^ (bits >> 16);
}

// 1 + u with u = (d + 1/2) / 2^16: a float in (1, 2) built without a conversion.
constexpr uint32_t kDitherBits = 0x3f800040u;  // 1 + 1/2 / 2^16
constexpr uint32_t kDitherMask = 0x007fff80u;  // where d stands

// The dither of a column. Each counter serves two columns, 16 apart, so a vector of hashes serves 32 values.
SYLVIE_HOST_DEVICE float dither(RowKey key, int64_t column) {
  const uint32_t counter = static_cast<uint32_t>(column / 32 * 16 + column % 16);
  const uint32_t bits = random_bits(key, counter);
  return bit_cast<float>(((column % 32 < 16 ? bits << 7 : bits >> 9) & kDitherMask) | kDitherBits);
}

}  // namespace sylvie
