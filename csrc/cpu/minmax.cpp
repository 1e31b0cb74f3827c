// The min/max quantizer's ops, on the CPU.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "cpu/groups.h"
#include "cpu/kernels.h"
#include "cpu/quantize.h"
#include "quantized.h"

namespace sylvie {
namespace {

Layout check_minmax(const Tensor& message, int64_t offset, int64_t bits, const Tensor& rows, int64_t num_entries) {
  check_bits(bits);
  const int64_t record_bytes = minmax_bytes(rows.size(1), static_cast<int>(bits));
  return check_record_layout(message, offset, rows, num_entries, record_bytes);
}

void quantize_rows(const Tensor& rows, const std::optional<Tensor>& index, const Tensor& id, int64_t key, int64_t bits,
                   const Tensor& message, int64_t offset, const Tensor& bad) {
  const Layout layout = check_minmax(message, offset, bits, rows, id.size(0));
  const int64_t* const ids = check_entries(id, "id", layout.num_entries, rows);
  const int64_t* const entries = check_index(index, rows, layout.num_entries);
  if (layout.is_empty()) {
    return;
  }
  auto* const records = static_cast<uint8_t*>(message.mutable_data_ptr()) + offset;
  with_quantized_type(rows.scalar_type(), [&](auto zero) {
    using Value = decltype(zero);
    const auto quantize = minmax_kernels<Value>(static_cast<int>(bits)).quantize;
    const auto* const source = static_cast<const Value*>(rows.const_data_ptr());
    quantize_each(layout, entries, bad, [&] {
      return [&](int64_t k, int64_t row, int64_t next) {
        return quantize(source + row * layout.width, layout.width, row_key(key, ids[k]), records + k * layout.stride,
                        source + next * layout.width);
      };
    });
  });
}

void dequantize_rows(const Tensor& message, int64_t offset, int64_t bits, const Tensor& rows) {
  const Layout layout = check_minmax(message, offset, bits, rows, rows.size(0));
  if (layout.is_empty()) {
    return;
  }
  const auto* const records = static_cast<const uint8_t*>(message.const_data_ptr()) + offset;
  with_quantized_type(rows.scalar_type(), [&](auto zero) {
    using Value = decltype(zero);
    const auto dequantize = minmax_kernels<Value>(static_cast<int>(bits)).dequantize;
    auto* const target = static_cast<Value*>(rows.mutable_data_ptr());
    dequantize_each(layout, [&] {
      return [&](int64_t k, int64_t row, int64_t next) {
        dequantize(records + k * layout.stride, layout.width, target + row * layout.width,
                   target + next * layout.width);
      };
    });
  });
}

void dequantize_add_rows(const Tensor& message, int64_t offset, int64_t bits, const Tensor& index,
                         const std::vector<int64_t>& counts, const Tensor& rows) {
  const Layout layout = check_minmax(message, offset, bits, rows, index.size(0));
  const int64_t* const entries = check_entries(index, "index", layout.num_entries, rows);
  check_counts(counts, layout);
  if (layout.is_empty()) {
    return;
  }
  const auto* const records = static_cast<const uint8_t*>(message.const_data_ptr()) + offset;
  with_quantized_type(rows.scalar_type(), [&](auto zero) {
    using Value = decltype(zero);
    const auto add = minmax_kernels<Value>(static_cast<int>(bits)).dequantize_add;
    auto* const target = static_cast<Value*>(rows.mutable_data_ptr());
    visit_groups(counts, entries, layout.num_rows, layout.row_bytes, [&] {
      return [&](int64_t k, int64_t row, int64_t next) {
        add(records + k * layout.stride, layout.width, target + row * layout.width, target + next * layout.width);
      };
    });
  });
}

}  // namespace
}  // namespace sylvie

STABLE_TORCH_LIBRARY_IMPL(lightning_sylvie, CPU, m) {
  m.impl("quantize_rows", TORCH_BOX(&sylvie::quantize_rows));
  m.impl("dequantize_rows", TORCH_BOX(&sylvie::dequantize_rows));
  m.impl("dequantize_add_rows", TORCH_BOX(&sylvie::dequantize_add_rows));
}
