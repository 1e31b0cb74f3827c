// Checks that keep memory safe whoever calls the ops. The friendly messages are in ops.py.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "core/rows.h"

#define SYLVIE_CHECK(condition, ...) STD_TORCH_CHECK(condition, __VA_ARGS__)

namespace sylvie {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// How rows and message lie in memory, in bytes unless said otherwise.
struct Layout {
  int64_t num_rows;     // rows of the tensor
  int64_t num_entries;  // rows of the message
  int64_t width;        // values in a row
  int64_t row_bytes;
  int64_t stride;  // from one message row to the next
  int64_t offset;  // of the row inside its message row

  bool is_empty() const { return num_entries == 0 || row_bytes == 0; }
};

// The layout of one call, or an error that says which argument does not fit.
inline Layout check_layout(const Tensor& rows, const Tensor& index, const Tensor& message, int64_t offset) {
  SYLVIE_CHECK(rows.dim() == 2 && rows.is_contiguous(), "rows: expected contiguous (n, width)");
  SYLVIE_CHECK(index.dim() == 1 && index.is_contiguous(), "index: expected contiguous (k,)");
  SYLVIE_CHECK(index.scalar_type() == ScalarType::Long, "index: expected int64");
  SYLVIE_CHECK(message.dim() == 2 && message.is_contiguous(), "message: expected contiguous (k, stride)");
  SYLVIE_CHECK(message.scalar_type() == ScalarType::Byte, "message: expected uint8");
  SYLVIE_CHECK(rows.device() == index.device() && rows.device() == message.device(),
               "rows, index and message: expected one device");
  Layout layout;
  layout.num_rows = rows.size(0);
  layout.num_entries = index.size(0);
  layout.width = rows.size(1);
  layout.row_bytes = rows.size(1) * static_cast<int64_t>(rows.element_size());
  layout.stride = message.size(1);
  layout.offset = offset;
  SYLVIE_CHECK(message.size(0) == layout.num_entries, "message: expected ", layout.num_entries, " rows, got ",
               message.size(0));
  SYLVIE_CHECK(offset >= 0 && offset + layout.row_bytes <= layout.stride, "offset: expected 0..",
               layout.stride - layout.row_bytes, ", got ", offset);
  return layout;
}

inline void check_counts(const std::vector<int64_t>& counts, const Layout& layout) {
  int64_t total = 0;
  for (const int64_t count : counts) {
    SYLVIE_CHECK(count >= 0, "counts: expected none below 0, got ", count);
    total += count;
  }
  SYLVIE_CHECK(total == layout.num_entries, "counts: expected a sum of ", layout.num_entries, ", got ", total);
}

// Calls body with a value of the C++ type that stores `type`.
template <typename Body>
void with_float_type(ScalarType type, const Body& body) {
  switch (type) {
    case ScalarType::Float:
      return body(float{});
    case ScalarType::Double:
      return body(double{});
    case ScalarType::BFloat16:
      return body(BFloat16{});
    case ScalarType::Half:
      return body(Half{});
    default:
      SYLVIE_CHECK(false, "rows: expected float32, float64, bfloat16 or float16");
  }
}

}  // namespace sylvie
