// How a quantized row lies in a message: the one definition of the format. docs/message_format.md describes it byte
// by byte. Neither torch nor CUDA headers: any compiler can read this file.
#pragma once

#include <cstdint>

#include "core/rows.h"

namespace sylvie {

// Goes up with every change of a byte's place or meaning, noise and rotation included.
constexpr int kFormatVersion = 2;

// Kernels work on blocks of this many values; it is also the width of a warp.
constexpr int kBlock = 32;

// Rows of fewer values carry smaller side information: four bytes would weigh as much as their codes.
constexpr int64_t kNarrowWidth = 32;

// Wider rows are rotated in pieces: the work grows with the logarithm, the gain hardly grows at all.
constexpr int64_t kMaxRotation = 256;

SYLVIE_HOST_DEVICE int64_t code_bytes(int64_t width, int bits) { return (width * bits + 7) / 8; }

SYLVIE_HOST_DEVICE bool is_narrow(int64_t width) { return width < kNarrowWidth; }

// [codes][scale][zero]: two bf16, or in a narrow row two bytes.
SYLVIE_HOST_DEVICE int64_t minmax_bytes(int64_t width, int bits) {
  return width == 0 ? 0 : code_bytes(width, bits) + (is_narrow(width) ? 2 : 4);
}

// Values that one Hadamard transform mixes: the largest power of two that fits.
SYLVIE_HOST_DEVICE int64_t rotation_size(int64_t width) {
  int64_t size = 1;
  while (size * 2 <= width && size < kMaxRotation) {
    size *= 2;
  }
  return size;
}

// Values that share a scale.
SYLVIE_HOST_DEVICE int64_t num_scales(int64_t width) {
  const int64_t size = rotation_size(width);
  return (width + size - 1) / size;
}

// How many half bits a value of a rotated row takes: 1 (of each block the first half of the values has a sign), 2 (all
// have a sign) or 4 (and a bit for the size). A narrow row has too few values to leave some out.
SYLVIE_HOST_DEVICE int rotated_rate(int64_t width, double bits) {
  return bits < 1.0 && !is_narrow(width) ? 1 : bits < 2.0 ? 2 : 4;
}

// Columns before this one that have a code.
SYLVIE_HOST_DEVICE int64_t num_sent(int64_t column, int rate) {
  const int64_t rest = column % kBlock;
  return rate != 1 ? column : column / kBlock * (kBlock / 2) + (rest < kBlock / 2 ? rest : kBlock / 2);
}

// Bytes of the codes of the first columns of a row; those of a whole block fill theirs.
SYLVIE_HOST_DEVICE int64_t rotated_code_bytes(int64_t column, int rate) {
  return code_bytes(num_sent(column, rate), rate == 4 ? 2 : 1);
}

// [codes][scales][mean]: bf16 each; a narrow row has no mean.
SYLVIE_HOST_DEVICE int64_t rotated_bytes(int64_t width, int rate) {
  return width == 0 ? 0 : rotated_code_bytes(width, rate) + 2 * num_scales(width) + (is_narrow(width) ? 0 : 2);
}

SYLVIE_HOST_DEVICE uint16_t load16(const uint8_t* bytes) { return load<uint16_t>(bytes); }
SYLVIE_HOST_DEVICE void store16(uint8_t* bytes, uint16_t value) { memcpy(bytes, &value, sizeof(value)); }

}  // namespace sylvie
