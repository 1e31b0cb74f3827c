// The rotated quantizer's ops, on the CPU.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "cpu/groups.h"
#include "cpu/kernels.h"
#include "cpu/quantize.h"
#include "rotated.h"

namespace sylvie {
namespace {

void rotate_quantize_rows(const Tensor& rows, const std::optional<Tensor>& index, const Tensor& id, int64_t key,
                          double bits, bool unbiased, const Tensor& message, int64_t offset, const Tensor& bad) {
  const Layout layout = check_rotated(message, offset, bits, rows, id.size(0));
  const int64_t* const ids = check_entries(id, "id", layout.num_entries, rows);
  const int64_t* const entries = check_index(index, rows, layout.num_entries);
  if (layout.is_empty()) {
    return;
  }
  const Rotation rotation = rotation_of(layout, bits);
  auto* const records = static_cast<uint8_t*>(message.mutable_data_ptr()) + offset;
  with_quantized_type(rows.scalar_type(), [&](auto zero) {
    using Value = decltype(zero);
    const auto quantize = rotate_kernels<Value>(rotation.rate).quantize;
    const auto* const source = static_cast<const Value*>(rows.const_data_ptr());
    quantize_each(layout, entries, bad, [&] {
      return
          [&, space = std::vector<float>(rotation_space(layout.width))](int64_t k, int64_t row, int64_t next) mutable {
            return quantize(rotation, source + row * layout.width, row_key(key, ids[k]), unbiased,
                            records + k * layout.stride, space.data(), source + next * layout.width);
          };
    });
  });
}

void rotate_dequantize_rows(const Tensor& message, int64_t offset, const Tensor& id, int64_t key, double bits,
                            const Tensor& rows) {
  const Layout layout = check_rotated(message, offset, bits, rows, rows.size(0));
  const int64_t* const ids = check_entries(id, "id", layout.num_entries, rows);
  if (layout.is_empty()) {
    return;
  }
  const Rotation rotation = rotation_of(layout, bits);
  const auto* const records = static_cast<const uint8_t*>(message.const_data_ptr()) + offset;
  with_quantized_type(rows.scalar_type(), [&](auto zero) {
    using Value = decltype(zero);
    const auto dequantize = rotate_kernels<Value>(rotation.rate).dequantize;
    auto* const target = static_cast<Value*>(rows.mutable_data_ptr());
    dequantize_each(layout, [&] {
      return
          [&, space = std::vector<float>(rotation_space(layout.width))](int64_t k, int64_t row, int64_t next) mutable {
            dequantize(rotation, records + k * layout.stride, row_key(key, ids[k]), target + row * layout.width,
                       space.data(), target + next * layout.width);
          };
    });
  });
}

void rotate_dequantize_add_rows(const Tensor& message, int64_t offset, const Tensor& id, int64_t key, double bits,
                                const Tensor& index, const std::vector<int64_t>& counts, const Tensor& rows) {
  const Layout layout = check_rotated(message, offset, bits, rows, index.size(0));
  const int64_t* const ids = check_entries(id, "id", layout.num_entries, rows);
  const int64_t* const entries = check_entries(index, "index", layout.num_entries, rows);
  check_counts(counts, layout);
  if (layout.is_empty()) {
    return;
  }
  const Rotation rotation = rotation_of(layout, bits);
  const auto* const records = static_cast<const uint8_t*>(message.const_data_ptr()) + offset;
  with_quantized_type(rows.scalar_type(), [&](auto zero) {
    using Value = decltype(zero);
    const auto add = rotate_kernels<Value>(rotation.rate).dequantize_add;
    auto* const target = static_cast<Value*>(rows.mutable_data_ptr());
    visit_groups(counts, entries, layout.num_rows, layout.row_bytes, [&] {
      return
          [&, space = std::vector<float>(rotation_space(layout.width))](int64_t k, int64_t row, int64_t next) mutable {
            add(rotation, records + k * layout.stride, row_key(key, ids[k]), target + row * layout.width, space.data(),
                target + next * layout.width);
          };
    });
  });
}

}  // namespace
}  // namespace sylvie

STABLE_TORCH_LIBRARY_IMPL(lightning_sylvie, CPU, m) {
  m.impl("rotate_quantize_rows", TORCH_BOX(&sylvie::rotate_quantize_rows));
  m.impl("rotate_dequantize_rows", TORCH_BOX(&sylvie::rotate_dequantize_rows));
  m.impl("rotate_dequantize_add_rows", TORCH_BOX(&sylvie::rotate_dequantize_add_rows));
}
