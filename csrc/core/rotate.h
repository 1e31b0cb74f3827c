// The arithmetic of the rotated codes (DRIVE and EDEN, Vargaftik et al. 2021 and 2022), shared by all kernels so that
// all give the same bits: no operation may be fused, and none reassociated. Neither torch nor CUDA headers.
//
// A row is rotated in two rounds, inside pieces of first_rotation_size(width), then of rotation_size(width) values. In
// a round each piece gets random signs of the row's own and a Hadamard transform: first all whole pieces from the left,
// then, if values remain, the last piece's worth of values of the row, some of which are rotated again. All steps are
// orthonormal for any width, so nothing is padded. The first round spreads single large values: with one round alone
// the mean decoded row is off by 4 % (5 % of 256 values not zero) or 1 % (rectified rows of 64), with two by less than
// 0.4 %.
#pragma once

#include <cmath>
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

SYLVIE_HOST_DEVICE int log2_of(int64_t power) {
  int exponent = 0;
  for (; power > 1; power /= 2) {
    ++exponent;
  }
  return exponent;
}

SYLVIE_HOST_DEVICE float power_of_two(int exponent) {
  return bit_cast<float>(static_cast<uint32_t>(127 + exponent) << 23);
}

// How rows of one width are rotated and written: worked out once for all of them.
struct Rotation {
  int64_t width;
  int rate;              // half bits per value, see rotated_rate
  int64_t num_codes;     // bytes
  int64_t num_scales;    // as many as pieces of the second round
  int64_t record_bytes;  // codes, scales, and the mean unless the row is narrow
  bool has_mean;
  int64_t size[2];     // values in a piece of each round
  int64_t whole[2];    // values in its whole pieces; if they do not cover the row there is a last piece
  float factor[2];     // what multiplies its values, beside the signs
  float scale_factor;  // what multiplies a scale that is written
  float code_factor;   // what multiplies a scale that is read
};

// The factor 1 / sqrt(size) makes a round orthonormal. Where whole pieces cover the row all values grow alike, and the
// scale takes the factors of the round and of its inverse: half where it is written and half where it is read, which
// keeps it within the values' own range.
SYLVIE_HOST_DEVICE Rotation make_rotation(int64_t width, int rate) {
  Rotation rotation{};
  rotation.width = width;
  rotation.rate = rate;
  rotation.num_codes = rotated_code_bytes(width, rate);
  rotation.num_scales = num_scales(width);
  rotation.record_bytes = rotated_bytes(width, rate);
  rotation.has_mean = !is_narrow(width);
  const int64_t size = rotation_size(width);
  int left_to_scale = 0;
  for (int round = 0; round < 2; ++round) {
    rotation.size[round] = round == 0 && size > kBlock ? kBlock : size;
    rotation.whole[round] = width / rotation.size[round] * rotation.size[round];
    rotation.factor[round] = 1.0f;
    const int exponent = log2_of(rotation.size[round]);
    if (rotation.whole[round] == width) {
      left_to_scale += exponent;
    } else {
      rotation.factor[round] = power_of_two(-(exponent / 2)) * (exponent % 2 == 0 ? 1.0f : 0.70710678f);
    }
  }
  rotation.scale_factor = power_of_two(-((left_to_scale + 1) / 2));
  rotation.code_factor = power_of_two(-(left_to_scale / 2));
  return rotation;
}

// The values begin..begin+size that share a scale. The last piece takes its share first.
struct Piece {
  int64_t begin;
  int64_t size;
};

SYLVIE_HOST_DEVICE Piece piece_of(const Rotation& rotation, int64_t number) {
  const int64_t size = rotation.size[1];
  const int64_t last = rotation.width - size;
  if (number == rotation.num_scales - 1) {
    return {last, size};
  }
  const int64_t begin = number * size;
  return {begin, begin + size < last ? size : last - begin};
}

// A power of two that brings the largest absolute value, given by its bits, to 1..4: squares stay within float.
SYLVIE_HOST_DEVICE float normalizer(uint32_t largest) {
  const uint32_t exponent = largest >> 23;
  return bit_cast<float>((254u - (exponent < 1u ? 1u : exponent > 253u ? 253u : exponent)) << 23);
}

// What is subtracted from the row: its mean in bf16, or 0 if the sum left float.
SYLVIE_HOST_DEVICE float sent_mean(float sum, const Rotation& rotation) {
  if (!rotation.has_mean || !is_finite(sum)) {
    return 0.0f;
  }
  BFloat16 mean;
  narrow(sum / static_cast<float>(rotation.width), mean);
  return widen(mean);
}

// The two sizes that a value has at 2 bits, middle - half and middle + half, and where one ends and the other begins,
// for normal values of variance 1 (Max 1960).
constexpr float kSizeMiddle = 0.9814f;
constexpr float kSizeHalf = 0.5286f;
constexpr float kSizeLimit = 0.9816f;

// What brings the limit between the sizes to 1 in a piece with this sum of squares.
SYLVIE_HOST_DEVICE float size_normalizer(float sum_of_squares, int64_t size) {
  return sum_of_squares > 0.0f ? 1.0f / (kSizeLimit * sqrtf(sum_of_squares / static_cast<float>(size))) : 0.0f;
}

// Sums over a piece of rotated, normalized values z, whose codes stand for values c of the same sign.
struct Sums {
  float squares;   // z * z
  float products;  // z * c of values with a code
  float codes;     // c * c
};

// The scale of a piece. Unbiased: the decoded piece has the original's projection on it. Least error: the closest. To
// bf16 by stochastic rounding, which keeps it unbiased.
SYLVIE_HOST_DEVICE float sent_scale(const Sums& sums, bool unbiased, float normal, const Rotation& rotation,
                                    uint32_t noise) {
  if (!(sums.products > 0.0f)) {
    return sums.products;  // 0 or NaN
  }
  const float scale = unbiased ? sums.squares / sums.products : sums.products / sums.codes;
  const float sent = scale * rotation.scale_factor / normal;
  return is_finite(sent) ? bit_cast<float>((bit_cast<uint32_t>(sent) + (noise >> 16)) & 0xffff0000u) : sent;
}

// The size of a piece's codes.
SYLVIE_HOST_DEVICE float size_of(uint16_t scale, const Rotation& rotation) {
  return widen(BFloat16{scale}) * rotation.code_factor;
}

}  // namespace sylvie
