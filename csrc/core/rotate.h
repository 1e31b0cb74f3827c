// The arithmetic of the rotated sign code (DRIVE, Vargaftik et al. 2021), shared by all kernels so that all give the
// same bits: no operation may be fused, and none reassociated. Neither torch nor CUDA headers.
//
// A row is rotated in two rounds, inside pieces of first_rotation_size(width), then of rotation_size(width) values. In
// a round each piece gets random signs of the row's own and a Hadamard transform: first all whole pieces from the left,
// then, if values remain, the last piece's worth of values of the row, some of which are rotated again. All steps are
// orthonormal for any width, so nothing is padded. The first round spreads single large values: with one round alone
// the mean decoded row is off by 4 % (5 % of 256 values not zero) or 1 % (rectified rows of 64), with two by less than
// 0.4 %.
#pragma once

#include <cstdint>

#include "core/format.h"
#include "core/minmax.h"
#include "core/noise.h"
#include "core/rows.h"

namespace sylvie {

// Counters of a row's random bits: the signs of a round's whole pieces by block of 32 columns, then the others.
constexpr uint32_t kRoundSigns = 0x20000000u;  // times the round, 0 or 1
constexpr uint32_t kLastPieceSigns = 0x10000000u;
constexpr uint32_t kScaleNoise = 0x40000000u;

// In place of the first scale, which is never negative: a row of one value.
constexpr uint16_t kConstantMark = 0x8000u;

SYLVIE_HOST_DEVICE int64_t first_rotation_size(int64_t width) {
  const int64_t size = rotation_size(width);
  return size < kBlock ? size : kBlock;
}

// The values begin..begin+size that share a scale. The last piece takes its share first.
struct Piece {
  int64_t begin;
  int64_t size;
};

SYLVIE_HOST_DEVICE Piece piece_of(int64_t width, int64_t number) {
  const int64_t size = rotation_size(width);
  const int64_t last = width - size;
  if (number == num_scales(width) - 1) {
    return {last, size};
  }
  const int64_t begin = number * size;
  return {begin, begin + size < last ? size : last - begin};
}

// 1 / sqrt(size) for a power of two, without a root.
SYLVIE_HOST_DEVICE float rotation_factor(int64_t size) {
  float factor = 1.0f;
  for (; size >= 4; size /= 4) {
    factor *= 0.5f;
  }
  return size == 2 ? factor * 0.70710678f : factor;
}

// A power of two that brings the largest absolute value, given by its bits, to 1..4: squares stay within float.
SYLVIE_HOST_DEVICE float normalizer(uint32_t largest) {
  const uint32_t exponent = largest >> 23;
  return bit_cast<float>((254u - (exponent < 1u ? 1u : exponent > 253u ? 253u : exponent)) << 23);
}

// What is subtracted from the row: its mean in bf16, or 0 if the sum left float.
SYLVIE_HOST_DEVICE float sent_mean(float sum, int64_t width) {
  if (is_narrow(width) || !is_finite(sum)) {
    return 0.0f;
  }
  BFloat16 mean;
  narrow(sum / static_cast<float>(width), mean);
  return widen(mean);
}

// The size of all values of a piece whose rotated, normalized values have these sums. Unbiased: the decoded piece has
// the original's projection on it. Least error: the mean size. To bf16 by stochastic rounding, which keeps it unbiased.
SYLVIE_HOST_DEVICE float sent_scale(float sum_of_sizes, float sum_of_squares, int64_t size, bool unbiased, float normal,
                                    uint32_t noise) {
  if (!(sum_of_sizes > 0.0f)) {
    return sum_of_sizes;  // 0 or NaN
  }
  const float scale = unbiased ? sum_of_squares / sum_of_sizes : sum_of_sizes / static_cast<float>(size);
  const float sent = scale / normal;
  return is_finite(sent) ? bit_cast<float>((bit_cast<uint32_t>(sent) + (noise >> 16)) & 0xffff0000u) : sent;
}

}  // namespace sylvie
