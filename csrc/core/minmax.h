// The arithmetic of the min/max quantizer (the paper's, section 3.1), shared by all kernels so that all give the same
// bits: no operation may be fused, and none reassociated. Neither torch nor CUDA headers.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/format.h"
#include "core/noise.h"
#include "core/rows.h"

namespace sylvie {

constexpr float kSmallestScale = 1.17549435e-38f;  // smallest normal float: its inverse is finite

// The levels zero, zero + scale, ... of a row, exactly as its reader will compute them.
struct Grid {
  float scale;  // 0: the row has no levels, see store_constant
  float zero;
  float inverse;  // of scale
};

SYLVIE_HOST_DEVICE bool is_finite(float value) { return (bit_cast<uint32_t>(value) & 0x7f800000u) != 0x7f800000u; }

// To bf16 toward minus infinity, and toward plus infinity for values >= 0: no value may lie outside the levels.
SYLVIE_HOST_DEVICE float bf16_below(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  return bit_cast<float>((bits >> 31 ? bits + 0xffffu : bits) & 0xffff0000u);
}
SYLVIE_HOST_DEVICE float bf16_above(float value) {
  return bit_cast<float>((bit_cast<uint32_t>(value) + 0xffffu) & 0xffff0000u);
}

// The smallest power of two >= value, for normal values >= 0.
SYLVIE_HOST_DEVICE float power_above(float value) {
  return bit_cast<float>((bit_cast<uint32_t>(value) + 0x7fffffu) & 0x7f800000u);
}

SYLVIE_HOST_DEVICE float at_least(float value, float lowest) { return value > lowest ? value : lowest; }

// Scale and zero in bf16, rounded outward.
SYLVIE_HOST_DEVICE Grid wide_grid(float low, float high, int bits) {
  const float top = static_cast<float>((1 << bits) - 1);
  const float zero = bf16_below(low);
  float scale = at_least(bf16_above((high - zero) / top), kSmallestScale);
  if (top * scale + zero < high) {  // the quotient was rounded down
    scale = bit_cast<float>(bit_cast<uint32_t>(scale) + 0x10000u);
  }
  return {scale, zero, 1.0f / scale};
}

// The step of a narrow row's zero, in units of its scale: a sixteenth of what the codes span.
SYLVIE_HOST_DEVICE float zero_step(int bits) { return bit_cast<float>(static_cast<uint32_t>(127 + bits - 4) << 23); }

// Scale a power of two, zero a multiple -128..127 of its step: two bytes. All levels are exact. Rows further from 0
// than eight times their range get a coarser scale, which keeps them unbiased.
SYLVIE_HOST_DEVICE Grid narrow_grid(float low, float high, int bits) {
  const float top = static_cast<float>((1 << bits) - 1);
  const float step = zero_step(bits);
  const float offset = (low < 0 ? -low : low) / (128.0f * step);
  float scale = power_above(at_least(at_least((high - low) / top, offset), kSmallestScale));
  float multiple = floorf(low / scale / step);
  while (is_finite(scale) && (multiple < -128.0f || multiple > 127.0f || high / scale > multiple * step + top)) {
    scale = scale * 2.0f;
    multiple = floorf(low / scale / step);
  }
  return {scale, multiple * step * scale, 1.0f / scale};
}

// The levels of a row of values low..high, both finite. The scale is 0 if they are equal and NaN if a level would be
// infinite.
SYLVIE_HOST_DEVICE Grid make_grid(float low, float high, int bits, int64_t width) {
  low = low + 0.0f;  // -0 and 0 are one minimum, whichever came first
  if (low == high) {
    return {0.0f, low, 0.0f};
  }
  Grid grid = is_narrow(width) ? narrow_grid(low, high, bits) : wide_grid(low, high, bits);
  if (!is_finite(grid.zero) || !is_finite(static_cast<float>((1 << bits) - 1) * grid.scale + grid.zero)) {
    grid.scale = bit_cast<float>(0x7fc00000u);
  }
  return grid;
}

// Code of a value plus one and a fraction: stochastic rounding is the dither's 1 + u and truncation.
SYLVIE_HOST_DEVICE float dithered(float value, const Grid& grid, float one_plus_u) {
  return (value - grid.zero) * grid.inverse + one_plus_u;
}

SYLVIE_HOST_DEVICE uint32_t code_of(float value, const Grid& grid, float one_plus_u, uint32_t top) {
  const uint32_t code = static_cast<uint32_t>(dithered(value, grid, one_plus_u)) - 1u;
  return code < top ? code : top;  // at the maximum the product may be rounded up past top
}

SYLVIE_HOST_DEVICE float value_of(uint32_t code, const Grid& grid) {
  return static_cast<float>(code) * grid.scale + grid.zero;
}

SYLVIE_HOST_DEVICE void store_grid(const Grid& grid, uint8_t* side, int64_t width, int bits) {
  if (is_narrow(width)) {
    side[0] = static_cast<uint8_t>(bit_cast<uint32_t>(grid.scale) >> 23);
    side[1] = static_cast<uint8_t>(static_cast<int8_t>(grid.zero * grid.inverse / zero_step(bits)));
  } else {
    store16(side, static_cast<uint16_t>(bit_cast<uint32_t>(grid.scale) >> 16));
    store16(side + 2, static_cast<uint16_t>(bit_cast<uint32_t>(grid.zero) >> 16));
  }
}

// What store_grid wrote; of a row without levels the scale is 0. The inverse is the writer's alone.
SYLVIE_HOST_DEVICE Grid load_grid(const uint8_t* side, int64_t width, int bits) {
  if (is_narrow(width)) {
    const float scale = bit_cast<float>(static_cast<uint32_t>(side[0]) << 23);
    return {scale, static_cast<float>(static_cast<int8_t>(side[1])) * zero_step(bits) * scale, 0.0f};
  }
  return {widen(BFloat16{load16(side)}), widen(BFloat16{load16(side + 2)}), 0.0f};
}

// A row of one value, or of NaN: the upper bytes of the value stand in place of zero, the lower ones in the codes,
// of which store_constant expects all to be 0. Where there are too few codes (narrow rows of one or two bytes of
// codes) the value is rounded stochastically to 16 or 24 bits.
SYLVIE_HOST_DEVICE void store_constant(float value, RowKey key, uint8_t* record, int64_t width, int bits) {
  uint32_t word = bit_cast<uint32_t>(value);
  uint8_t* const side = record + code_bytes(width, bits);
  if (!is_narrow(width)) {
    store16(record, static_cast<uint16_t>(word));
    store16(side, 0);
    store16(side + 2, static_cast<uint16_t>(word >> 16));
    return;
  }
  const int kept = static_cast<int>(code_bytes(width, bits) < 3 ? code_bytes(width, bits) : 3);
  const uint32_t dropped = (1u << 8 * (3 - kept)) - 1u;
  const uint32_t rounded = word + (random_bits(key, 0) & dropped);
  word = is_finite(bit_cast<float>(rounded)) ? rounded : word;
  for (int i = 0; i < kept; ++i) {
    record[i] = static_cast<uint8_t>(word >> 8 * (3 - kept + i));
  }
  side[0] = 0;
  side[1] = static_cast<uint8_t>(word >> 24);
}

SYLVIE_HOST_DEVICE float load_constant(const uint8_t* record, int64_t width, int bits) {
  const uint8_t* const side = record + code_bytes(width, bits);
  if (!is_narrow(width)) {
    return bit_cast<float>(static_cast<uint32_t>(load16(side + 2)) << 16 | load16(record));
  }
  const int kept = static_cast<int>(code_bytes(width, bits) < 3 ? code_bytes(width, bits) : 3);
  uint32_t word = static_cast<uint32_t>(side[1]) << 24;
  for (int i = 0; i < kept; ++i) {
    word |= static_cast<uint32_t>(record[i]) << 8 * (3 - kept + i);
  }
  return bit_cast<float>(word);
}

}  // namespace sylvie
