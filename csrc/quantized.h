// Checks of the quantize ops, as checks.h. They keep memory safe whoever calls the ops.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "checks.h"
#include "core/format.h"

namespace sylvie {

// The layout of one call: `record_bytes` is what one row takes in the message.
inline Layout check_record_layout(const Tensor& message, int64_t offset, const Tensor& rows, int64_t num_entries,
                                  int64_t record_bytes) {
  SYLVIE_CHECK(rows.dim() == 2 && rows.is_contiguous(), "rows: expected contiguous (n, width)");
  SYLVIE_CHECK(message.dim() == 2 && message.is_contiguous(), "message: expected contiguous (k, stride)");
  SYLVIE_CHECK(message.scalar_type() == ScalarType::Byte, "message: expected uint8");
  SYLVIE_CHECK(rows.device() == message.device(), "rows and message: expected one device");
  SYLVIE_CHECK(message.size(0) == num_entries, "message: expected ", num_entries, " rows, got ", message.size(0));
  SYLVIE_CHECK(offset >= 0 && offset + record_bytes <= message.size(1), "offset: expected 0..",
               message.size(1) - record_bytes, ", got ", offset);
  Layout layout;
  layout.num_rows = rows.size(0);
  layout.num_entries = num_entries;
  layout.width = rows.size(1);
  layout.row_bytes = rows.size(1) * static_cast<int64_t>(rows.element_size());
  layout.stride = message.size(1);
  layout.offset = offset;
  return layout;
}

inline void check_bits(int64_t bits) {
  SYLVIE_CHECK(bits == 1 || bits == 2 || bits == 4 || bits == 8, "bits: expected 1, 2, 4 or 8, got ", bits);
}

// int64 (num_entries,), beside the rows.
inline const int64_t* check_entries(const Tensor& entries, const char* name, int64_t num_entries, const Tensor& rows) {
  SYLVIE_CHECK(entries.dim() == 1 && entries.is_contiguous() && entries.scalar_type() == ScalarType::Long, name,
               ": expected contiguous int64 (k,)");
  SYLVIE_CHECK(entries.size(0) == num_entries, name, ": expected ", num_entries, " entries, got ", entries.size(0));
  SYLVIE_CHECK(entries.device() == rows.device(), "rows and ", name, ": expected one device");
  return entries.const_data_ptr<int64_t>();
}

// Null without an index: rows in order, one per message row.
inline const int64_t* check_index(const std::optional<Tensor>& index, const Tensor& rows, int64_t num_entries) {
  if (index.has_value()) {
    return check_entries(*index, "index", num_entries, rows);
  }
  SYLVIE_CHECK(rows.size(0) == num_entries, "rows: expected ", num_entries, " rows, got ", rows.size(0));
  return nullptr;
}

// Calls body with a value of the C++ type that stores `type`.
template <typename Body>
void with_quantized_type(ScalarType type, const Body& body) {
  switch (type) {
    case ScalarType::Float:
      return body(float{});
    case ScalarType::BFloat16:
      return body(BFloat16{});
    case ScalarType::Half:
      return body(Half{});
    default:
      SYLVIE_CHECK(false, "rows: expected float32, bfloat16 or float16");
  }
}

}  // namespace sylvie
