// The min/max quantizer's ops, on CUDA.
//
// All kernels run on torch's current stream, which also frees the tensors: nothing outlives its memory. A warp takes
// 32 neighbouring columns at a time, one per lane, as core/noise.h numbers them.
#include "core/minmax.h"

#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "checks.h"
#include "cuda/launch.h"
#include "cuda/team.h"
#include "quantized.h"

namespace sylvie {
namespace {

// Codes of 32 lanes to bytes in element order. Every lane of the warp calls it; count lanes hold a value, the others 0.
template <int kBits>
__device__ void write_codes(uint32_t code, int lane, int64_t count, uint8_t* target) {
  const int num_bytes = static_cast<int>(code_bytes(count, kBits));
  if constexpr (kBits == 1) {
    const uint32_t word = __ballot_sync(kAllLanes, code != 0u);
    if (lane < num_bytes) {
      target[lane] = static_cast<uint8_t>(word >> 8 * lane);
    }
  } else {
    constexpr int kPerByte = 8 / kBits;
    for (int step = 1; step < kPerByte; step *= 2) {
      code |= __shfl_down_sync(kAllLanes, code, step) << step * kBits;
    }
    if (lane % kPerByte == 0 && lane / kPerByte < num_bytes) {
      target[lane / kPerByte] = static_cast<uint8_t>(code);
    }
  }
}

template <typename AnyTeam, typename Value>
__device__ Grid grid_of(const AnyTeam& team, const Value* row, int64_t width, int bits) {
  __shared__ float space[3][kWarpsPerBlock];
  float low = bit_cast<float>(0x7f800000u);
  float high = bit_cast<float>(0xff800000u);
  float finite = 1.0f;
  for (int64_t j = team.thread(); j < width; j += AnyTeam::kSize) {
    const float value = widen(row[j]);
    low = fminf(low, value);
    high = fmaxf(high, value);
    finite = is_finite(value) ? finite : 0.0f;
  }
  const auto smaller = [](float a, float b) { return fminf(a, b); };
  low = team.all(low, space[0], smaller);
  high = team.all(high, space[1], [](float a, float b) { return fmaxf(a, b); });
  if (team.all(finite, space[2], smaller) == 0.0f) {
    return {bit_cast<float>(0x7fc00000u), 0.0f, 0.0f};
  }
  return make_grid(low, high, bits, width);
}

template <typename AnyTeam, typename Value, int kBits>
__global__ void quantize_kernel(const Value* __restrict__ rows, const int64_t* __restrict__ entries,
                                const int64_t* __restrict__ ids, int64_t key, uint8_t* __restrict__ records,
                                int64_t* __restrict__ bad, Layout layout) {
  const AnyTeam team;
  const int64_t width = layout.width;
  const int64_t num_codes = code_bytes(width, kBits);
  for (int64_t k = team.first_row(); k < layout.num_entries; k += team.row_step()) {
    const int64_t entry = entries == nullptr ? k : entries[k];
    check_row(entry, layout.num_rows);
    const Value* const row = rows + entry * width;
    uint8_t* const record = records + k * layout.stride;
    const RowKey row_noise = row_key(key, ids[k]);
    const Grid grid = grid_of(team, row, width, kBits);
    const bool has_levels = grid.scale > 0.0f;
    for (int64_t begin = team.warp * kBlock; begin < width; begin += AnyTeam::kSize) {
      const int64_t column = begin + team.lane;
      uint32_t code = 0;
      if (has_levels && column < width) {
        code = code_of(widen(row[column]), grid, dither(row_noise, column), (1u << kBits) - 1u);
      }
      write_codes<kBits>(code, team.lane, min(width - begin, static_cast<int64_t>(kBlock)), record + begin / 8 * kBits);
    }
    team.sync();  // store_constant writes over the codes
    if (!team.is_first()) {
      continue;
    }
    if (has_levels) {
      store_grid(grid, record + num_codes, width, kBits);
    } else if (grid.scale == 0.0f) {
      store_constant(widen(row[0]), row_noise, record, width, kBits);
    } else {
      store_constant(grid.scale, row_noise, record, width, kBits);
      report_bad(bad, k);
    }
  }
}

template <typename AnyTeam, typename Value, int kBits, bool kAdd>
__global__ void dequantize_kernel(const uint8_t* __restrict__ records, const int64_t* __restrict__ entries,
                                  Value* __restrict__ rows, Layout layout) {
  const AnyTeam team;
  const int64_t width = layout.width;
  for (int64_t k = team.first_row(); k < layout.num_entries; k += team.row_step()) {
    const int64_t entry = entries == nullptr ? k : entries[k];
    check_row(entry, layout.num_rows);
    const uint8_t* const record = records + k * layout.stride;
    Value* const row = rows + entry * width;
    const Grid grid = load_grid(record + code_bytes(width, kBits), width, kBits);
    const float constant = grid.scale == 0.0f ? load_constant(record, width, kBits) : 0.0f;
    for (int64_t j = team.thread(); j < width; j += AnyTeam::kSize) {
      const uint32_t code = record[j * kBits / 8] >> j * kBits % 8 & ((1u << kBits) - 1u);
      put<kAdd>(grid.scale == 0.0f ? constant : value_of(code, grid), row + j);
    }
  }
}

// Calls body with an integral constant of the bits.
template <typename Body>
void with_bits(int64_t bits, const Body& body) {
  switch (bits) {
    case 1:
      return body(std::integral_constant<int, 1>{});
    case 2:
      return body(std::integral_constant<int, 2>{});
    case 4:
      return body(std::integral_constant<int, 4>{});
    default:
      return body(std::integral_constant<int, 8>{});
  }
}

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
  auto* const first_bad = const_cast<int64_t*>(check_entries(bad, "bad", 1, rows));
  if (layout.is_empty()) {
    return;
  }
  const DeviceScope device(rows);
  auto* const records = static_cast<uint8_t*>(message.mutable_data_ptr()) + offset;
  with_quantized_type(rows.scalar_type(), [&](auto zero) {
    using Value = decltype(zero);
    const auto* const source = static_cast<const Value*>(rows.const_data_ptr());
    with_bits(bits, [&](auto constant) {
      with_team(layout.width, [&](auto team) {
        using AnyTeam = typename decltype(team)::Type;
        quantize_kernel<AnyTeam, Value, decltype(constant)::value>
            <<<num_blocks<AnyTeam>(layout.num_entries), kThreadsPerBlock, 0, device.stream()>>>(
                source, entries, ids, key, records, first_bad, layout);
      });
    });
  });
  SYLVIE_CUDA_CHECK(cudaGetLastError());
}

template <bool kAdd>
void launch_dequantize(const uint8_t* records, int64_t bits, const int64_t* entries, const Tensor& rows,
                       const Layout& layout, cudaStream_t stream) {
  with_quantized_type(rows.scalar_type(), [&](auto zero) {
    using Value = decltype(zero);
    auto* const target = static_cast<Value*>(rows.mutable_data_ptr());
    with_bits(bits, [&](auto constant) {
      with_team(layout.width, [&](auto team) {
        using AnyTeam = typename decltype(team)::Type;
        dequantize_kernel<AnyTeam, Value, decltype(constant)::value, kAdd>
            <<<num_blocks<AnyTeam>(layout.num_entries), kThreadsPerBlock, 0, stream>>>(records, entries, target,
                                                                                       layout);
      });
    });
  });
  SYLVIE_CUDA_CHECK(cudaGetLastError());
}

void dequantize_rows(const Tensor& message, int64_t offset, int64_t bits, const Tensor& rows) {
  const Layout layout = check_minmax(message, offset, bits, rows, rows.size(0));
  if (layout.is_empty()) {
    return;
  }
  const DeviceScope device(rows);
  const auto* const records = static_cast<const uint8_t*>(message.const_data_ptr()) + offset;
  launch_dequantize<false>(records, bits, nullptr, rows, layout, device.stream());
}

void dequantize_add_rows(const Tensor& message, int64_t offset, int64_t bits, const Tensor& index,
                         const std::vector<int64_t>& counts, const Tensor& rows) {
  const Layout layout = check_minmax(message, offset, bits, rows, index.size(0));
  const int64_t* const entries = check_entries(index, "index", layout.num_entries, rows);
  check_counts(counts, layout);
  if (layout.is_empty()) {
    return;
  }
  const DeviceScope device(rows);
  const auto* const records = static_cast<const uint8_t*>(message.const_data_ptr()) + offset;
  for_each_group(counts, [&](int64_t begin, int64_t count) {
    Layout group = layout;
    group.num_entries = count;
    launch_dequantize<true>(records + begin * layout.stride, bits, entries + begin, rows, group, device.stream());
  });
}

}  // namespace
}  // namespace sylvie

STABLE_TORCH_LIBRARY_IMPL(lightning_sylvie, CUDA, m) {
  m.impl("quantize_rows", TORCH_BOX(&sylvie::quantize_rows));
  m.impl("dequantize_rows", TORCH_BOX(&sylvie::dequantize_rows));
  m.impl("dequantize_add_rows", TORCH_BOX(&sylvie::dequantize_add_rows));
}
