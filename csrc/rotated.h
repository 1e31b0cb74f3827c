// What the rotated quantizer's ops begin with, on every device.
#pragma once

#include <cstdint>

#include "core/rotate.h"
#include "quantized.h"

namespace sylvie {

// The layout of one call, as `check_record_layout`.
inline Layout check_rotated(const Tensor& message, int64_t offset, double bits, const Tensor& rows,
                            int64_t num_entries) {
  SYLVIE_CHECK(bits == 0.5 || bits == 1.0 || bits == 2.0, "bits: expected 0.5, 1 or 2, got ", bits);
  const int64_t width = rows.size(1);
  return check_record_layout(message, offset, rows, num_entries, rotated_bytes(width, rotated_rate(width, bits)));
}

inline Rotation rotation_of(const Layout& layout, double bits) {
  return make_rotation(layout.width, rotated_rate(layout.width, bits));
}

}  // namespace sylvie
