// The rotated quantizer's ops, on CUDA.
//
// All kernels run on torch's current stream, which also frees the tensors: nothing outlives its memory. A team keeps
// its row in shared memory; sums run in the order of 32 lanes that all kernels share, so a warp makes each.
#include "core/rotate.h"

#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "checks.h"
#include "cuda/launch.h"
#include "cuda/team.h"
#include "rotated.h"

namespace sylvie {
namespace {

// Levels of the transform inside blocks of 32 values, one per lane, in registers.
template <typename AnyTeam>
__device__ void transform_blocks(const AnyTeam& team, float* values, int64_t count) {
  for (int64_t begin = team.warp * kBlock; begin < count; begin += AnyTeam::kSize) {
    float value = values[begin + team.lane];
    for (int half = kBlock / 2; half > 0; half /= 2) {
      const float other = __shfl_xor_sync(kAllLanes, value, half);
      value = (team.lane & half) != 0 ? other - value : value + other;
    }
    values[begin + team.lane] = value;
  }
}

// Unnormalized Hadamard transforms of all pieces of `size` values, a power of two, in place, the widest level first.
template <typename AnyTeam>
__device__ void hadamard(const AnyTeam& team, float* values, int64_t count, int64_t size) {
  for (int64_t half = size / 2; half >= (size < kBlock ? 1 : kBlock); half /= 2) {
    for (int64_t pair = team.thread(); pair < count / 2; pair += AnyTeam::kSize) {
      const int64_t i = pair / half * 2 * half + pair % half;
      const float a = values[i];
      const float b = values[i + half];
      values[i] = a + b;
      values[i + half] = a - b;
    }
    team.sync();
  }
  if (size >= kBlock) {
    transform_blocks(team, values, count);
    team.sync();
  }
}

template <typename AnyTeam>
__device__ void multiply_signs(const AnyTeam& team, float* values, int64_t count, RowKey key, uint32_t counter,
                               float factor) {
  for (int64_t j = team.thread(); j < count; j += AnyTeam::kSize) {
    const uint32_t word = random_bits(key, counter + static_cast<uint32_t>(j / kBlock));
    values[j] *= (word >> j % kBlock & 1u) != 0u ? -factor : factor;
  }
  team.sync();
}

// One round: random signs and transforms of its pieces. The whole pieces are one stretch of memory, and so are the
// counters of their signs.
template <typename AnyTeam>
__device__ void rotate(const AnyTeam& team, const Rotation& rotation, int round, RowKey key, float* values) {
  const int64_t size = rotation.size[round];
  const float factor = rotation.factor[round];
  const uint32_t counter = static_cast<uint32_t>(round) * kRoundSigns;
  multiply_signs(team, values, rotation.whole[round], key, counter, factor);
  hadamard(team, values, rotation.whole[round], size);
  if (rotation.whole[round] < rotation.width) {
    float* const last = values + rotation.width - size;
    multiply_signs(team, last, size, key, counter + kLastPieceSigns, factor);
    hadamard(team, last, size, size);
  }
}

template <typename AnyTeam>
__device__ void rotate_back(const AnyTeam& team, const Rotation& rotation, int round, RowKey key, float* values) {
  const int64_t size = rotation.size[round];
  const float factor = rotation.factor[round];
  const uint32_t counter = static_cast<uint32_t>(round) * kRoundSigns;
  if (rotation.whole[round] < rotation.width) {
    float* const last = values + rotation.width - size;
    hadamard(team, last, size, size);
    multiply_signs(team, last, size, key, counter + kLastPieceSigns, factor);
  }
  hadamard(team, values, rotation.whole[round], size);
  multiply_signs(team, values, rotation.whole[round], key, counter, factor);
}

// The sum of all lanes of a warp, in the shared order.
__device__ float lane_sum(float lane_value) {
  for (int half = kBlock / 2; half > 0; half /= 2) {
    lane_value += __shfl_xor_sync(kAllLanes, lane_value, half);
  }
  return lane_value;
}

// What a team knows of its row.
struct Row {
  bool is_constant;
  bool is_finite;
  float mean;
  float normal;
};

// The row less its mean, normalized, in `values`.
template <typename AnyTeam, typename Value>
__device__ Row normalize(const AnyTeam& team, const Rotation& rotation, const Value* row, float* values) {
  const int64_t width = rotation.width;
  __shared__ uint32_t largest_space[kWarpsPerBlock];
  __shared__ int same_space[kWarpsPerBlock];
  __shared__ float sum_space[kWarpsPerBlock];
  uint32_t largest = 0;
  int is_same = 1;
  const float first = widen(row[0]);
  for (int64_t j = team.thread(); j < width; j += AnyTeam::kSize) {
    values[j] = widen(row[j]);
    largest = max(largest, bit_cast<uint32_t>(values[j]) & 0x7fffffffu);
    is_same &= values[j] == first ? 1 : 0;
  }
  largest = team.all(largest, largest_space, [](uint32_t a, uint32_t b) { return max(a, b); });
  is_same = team.all(is_same, same_space, [](int a, int b) { return a & b; });
  team.sync();
  if (team.warp == 0) {
    float sum = 0.0f;
    for (int64_t j = team.lane; j < width; j += kBlock) {
      sum += values[j];
    }
    sum = lane_sum(sum);
    if (team.lane == 0) {
      sum_space[team.number] = sum;
    }
  }
  team.sync();
  const Row result{is_same != 0 && rotation.has_mean, largest < 0x7f800000u,
                   sent_mean(sum_space[team.number], rotation), normalizer(largest)};
  for (int64_t j = team.thread(); j < width; j += AnyTeam::kSize) {
    values[j] = (values[j] - result.mean) * result.normal;
  }
  team.sync();
  return result;
}

// The size of a code at 2 bits.
__device__ float size_at(bool is_small) { return kSizeMiddle + (is_small ? -kSizeHalf : kSizeHalf); }

// See Sums, by a warp. At 2 bits the values leave with the limit between the sizes at 1.
__device__ Sums sum_piece(const Piece& piece, int rate, int lane, float* values) {
  float squares = 0.0f;
  float products = 0.0f;
  for (int64_t j = piece.begin + lane; j < piece.begin + piece.size; j += kBlock) {
    squares += values[j] * values[j];
    products += fabsf(values[j]) * (rate == 1 && j % kBlock >= kBlock / 2 ? 0.0f : 1.0f);
  }
  squares = lane_sum(squares);
  if (rate != 4) {
    const int64_t num_codes = num_sent(piece.begin + piece.size, rate) - num_sent(piece.begin, rate);
    return {squares, lane_sum(products), static_cast<float>(num_codes)};
  }
  const float factor = size_normalizer(squares, piece.size);
  float codes = 0.0f;
  products = 0.0f;
  for (int64_t j = piece.begin + lane; j < piece.begin + piece.size; j += kBlock) {
    const float normal = values[j] * factor;
    const float size = size_at(fabsf(normal) < 1.0f);
    products += fabsf(values[j]) * size;
    codes += size * size;
    values[j] = normal;
  }
  return {squares, lane_sum(products), lane_sum(codes)};
}

// Writes the scale of every piece, a warp each. False if one is not finite.
template <typename AnyTeam>
__device__ bool write_scales(const AnyTeam& team, const Rotation& rotation, float* values, RowKey key, bool unbiased,
                             float normal, uint8_t* scales) {
  __shared__ int space[kWarpsPerBlock];
  int is_good = 1;
  for (int64_t number = team.warp; number < rotation.num_scales; number += AnyTeam::kSize / kBlock) {
    const Sums sums = sum_piece(piece_of(rotation, number), rotation.rate, team.lane, values);
    const uint32_t noise = random_bits(key, kScaleNoise + static_cast<uint32_t>(number));
    const float scale = sent_scale(sums, unbiased, normal, rotation, noise);
    is_good &= is_finite(scale) ? 1 : 0;
    if (team.lane == 0) {
      store16(scales + 2 * number, static_cast<uint16_t>(bit_cast<uint32_t>(scale) >> 16));
    }
  }
  team.sync();
  return team.all(is_good, space, [](int a, int b) { return a & b; }) != 0;
}

// The codes of a block in a word: its signs, then at 2 bits which values are large.
template <typename AnyTeam>
__device__ void write_codes(const AnyTeam& team, const float* values, int64_t width, int rate, uint8_t* codes) {
  for (int64_t begin = team.warp * kBlock; begin < width; begin += AnyTeam::kSize) {
    const int64_t j = begin + team.lane;
    const int64_t count = min(width - begin, static_cast<int64_t>(kBlock));
    const bool is_sent = j < width && (rate != 1 || team.lane < kBlock / 2);
    uint64_t word = __ballot_sync(kAllLanes, is_sent && bit_cast<uint32_t>(values[j]) >> 31 != 0u);
    const unsigned is_large = __ballot_sync(kAllLanes, rate == 4 && j < width && fabsf(values[j]) >= 1.0f);
    word |= static_cast<uint64_t>(is_large) << count;
    if (team.lane < rotated_code_bytes(count, rate)) {
      codes[rotated_code_bytes(begin, rate) + team.lane] = static_cast<uint8_t>(word >> 8 * team.lane);
    }
  }
}

// The value of the code of a column, for a scale.
__device__ float read_code(const uint8_t* codes, const Rotation& rotation, int64_t column, float scale) {
  const int lane = static_cast<int>(column % kBlock);
  const auto bit = [&](int number) { return codes[number / 8] >> number % 8 & 1; };
  codes += rotated_code_bytes(column - lane, rotation.rate);
  if (rotation.rate == 1 && lane >= kBlock / 2) {
    return 0.0f;
  }
  if (rotation.rate == 4) {
    const auto count = static_cast<int>(min(rotation.width - (column - lane), static_cast<int64_t>(kBlock)));
    scale *= size_at(bit(count + lane) == 0);
  }
  return bit(lane) != 0 ? -scale : scale;
}

// Codes of 0, then the same bf16 in place of scales and mean.
template <typename AnyTeam>
__device__ void fill_record(const AnyTeam& team, const Rotation& rotation, uint8_t* record, uint16_t side) {
  for (int64_t j = team.thread(); j < rotation.num_codes; j += AnyTeam::kSize) {
    record[j] = 0;
  }
  for (int64_t j = rotation.num_codes + 2 * team.thread(); j < rotation.record_bytes; j += 2 * AnyTeam::kSize) {
    store16(record + j, side);
  }
  team.sync();
}

template <typename AnyTeam, typename Value>
__global__ void quantize_kernel(const Value* __restrict__ rows, const int64_t* __restrict__ entries,
                                const int64_t* __restrict__ ids, int64_t key, bool unbiased,
                                uint8_t* __restrict__ records, int64_t* __restrict__ bad, Layout layout,
                                Rotation rotation) {
  extern __shared__ float space[];
  const AnyTeam team;
  const int64_t width = layout.width;
  float* const values = space + team.number * width;
  for (int64_t k = team.first_row(); k < layout.num_entries; k += team.row_step()) {
    const int64_t entry = entries == nullptr ? k : entries[k];
    check_row(entry, layout.num_rows);
    uint8_t* const record = records + k * layout.stride;
    uint8_t* const scales = record + rotation.num_codes;
    uint8_t* const mean = record + rotation.record_bytes - 2;
    const RowKey row_noise = row_key(key, ids[k]);
    const Row row = normalize(team, rotation, rows + entry * width, values);
    if (row.is_finite && row.is_constant) {
      fill_record(team, rotation, record, 0);
      if (team.is_first()) {
        const uint32_t bits = bit_cast<uint32_t>(widen(rows[entry * width]));
        store16(record, static_cast<uint16_t>(bits));
        store16(scales, kConstantMark);
        store16(mean, static_cast<uint16_t>(bits >> 16));
      }
      continue;
    }
    rotate(team, rotation, 0, row_noise, values);
    rotate(team, rotation, 1, row_noise, values);
    const bool has_scales = write_scales(team, rotation, values, row_noise, unbiased, row.normal, scales);
    if (!row.is_finite || !has_scales) {
      fill_record(team, rotation, record, 0x7fc0u);
      if (team.is_first()) {
        report_bad(bad, k);
      }
      continue;
    }
    write_codes(team, values, width, rotation.rate, record);
    if (team.is_first() && rotation.has_mean) {
      store16(mean, static_cast<uint16_t>(bit_cast<uint32_t>(row.mean) >> 16));
    }
  }
}

template <typename AnyTeam, typename Value, bool kAdd>
__global__ void dequantize_kernel(const uint8_t* __restrict__ records, const int64_t* __restrict__ entries,
                                  const int64_t* __restrict__ ids, int64_t key, Value* __restrict__ rows, Layout layout,
                                  Rotation rotation) {
  extern __shared__ float space[];
  const AnyTeam team;
  const int64_t width = layout.width;
  float* const values = space + team.number * width;
  for (int64_t k = team.first_row(); k < layout.num_entries; k += team.row_step()) {
    const int64_t entry = entries == nullptr ? k : entries[k];
    check_row(entry, layout.num_rows);
    const uint8_t* const record = records + k * layout.stride;
    const uint8_t* const scales = record + rotation.num_codes;
    const RowKey row_noise = row_key(key, ids[k]);
    const uint32_t upper = rotation.has_mean ? load16(record + rotation.record_bytes - 2) : 0u;
    const bool is_constant = load16(scales) == kConstantMark;
    const float constant = bit_cast<float>(upper << 16 | (is_constant ? load16(record) : 0u));
    if (!is_constant) {
      for (int64_t number = 0; number < rotation.num_scales; ++number) {
        const Piece piece = piece_of(rotation, number);
        const float scale = size_of(load16(scales + 2 * number), rotation);
        for (int64_t j = piece.begin + team.thread(); j < piece.begin + piece.size; j += AnyTeam::kSize) {
          values[j] = read_code(record, rotation, j, scale);
        }
      }
      team.sync();
      rotate_back(team, rotation, 1, row_noise, values);
      rotate_back(team, rotation, 0, row_noise, values);
    }
    Value* const row = rows + entry * width;
    for (int64_t j = team.thread(); j < width; j += AnyTeam::kSize) {
      put<kAdd>(is_constant ? constant : values[j] + constant, row + j);
    }
    team.sync();  // before the next row enters the space
  }
}

// Lets a kernel have as much shared memory as its rows take. Returns the bytes.
template <typename AnyTeam, typename Kernel>
size_t shared_bytes(Kernel* kernel, int64_t width) {
  const size_t bytes = static_cast<size_t>(width) * sizeof(float) * AnyTeam::kPerBlock;
  SYLVIE_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  return bytes;
}

void rotate_quantize_rows(const Tensor& rows, const std::optional<Tensor>& index, const Tensor& id, int64_t key,
                          double bits, bool unbiased, const Tensor& message, int64_t offset, const Tensor& bad) {
  const Layout layout = check_rotated(message, offset, bits, rows, id.size(0));
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
    with_team(layout.width, [&](auto team) {
      using AnyTeam = typename decltype(team)::Type;
      const auto kernel = quantize_kernel<AnyTeam, Value>;
      kernel<<<num_blocks<AnyTeam>(layout.num_entries), kThreadsPerBlock, shared_bytes<AnyTeam>(kernel, layout.width),
               device.stream()>>>(source, entries, ids, key, unbiased, records, first_bad, layout,
                                  rotation_of(layout, bits));
    });
  });
  SYLVIE_CUDA_CHECK(cudaGetLastError());
}

template <bool kAdd>
void launch_dequantize(const uint8_t* records, const int64_t* entries, const int64_t* ids, int64_t key, double bits,
                       const Tensor& rows, const Layout& layout, cudaStream_t stream) {
  with_quantized_type(rows.scalar_type(), [&](auto zero) {
    using Value = decltype(zero);
    auto* const target = static_cast<Value*>(rows.mutable_data_ptr());
    with_team(layout.width, [&](auto team) {
      using AnyTeam = typename decltype(team)::Type;
      const auto kernel = dequantize_kernel<AnyTeam, Value, kAdd>;
      kernel<<<num_blocks<AnyTeam>(layout.num_entries), kThreadsPerBlock, shared_bytes<AnyTeam>(kernel, layout.width),
               stream>>>(records, entries, ids, key, target, layout, rotation_of(layout, bits));
    });
  });
  SYLVIE_CUDA_CHECK(cudaGetLastError());
}

void rotate_dequantize_rows(const Tensor& message, int64_t offset, const Tensor& id, int64_t key, double bits,
                            const Tensor& rows) {
  const Layout layout = check_rotated(message, offset, bits, rows, rows.size(0));
  const int64_t* const ids = check_entries(id, "id", layout.num_entries, rows);
  if (layout.is_empty()) {
    return;
  }
  const DeviceScope device(rows);
  const auto* const records = static_cast<const uint8_t*>(message.const_data_ptr()) + offset;
  launch_dequantize<false>(records, nullptr, ids, key, bits, rows, layout, device.stream());
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
  const DeviceScope device(rows);
  const auto* const records = static_cast<const uint8_t*>(message.const_data_ptr()) + offset;
  for_each_group(counts, [&](int64_t begin, int64_t count) {
    Layout group = layout;
    group.num_entries = count;
    launch_dequantize<true>(records + begin * layout.stride, entries + begin, ids + begin, key, bits, rows, group,
                            device.stream());
  });
}

}  // namespace
}  // namespace sylvie

STABLE_TORCH_LIBRARY_IMPL(lightning_sylvie, CUDA, m) {
  m.impl("rotate_quantize_rows", TORCH_BOX(&sylvie::rotate_quantize_rows));
  m.impl("rotate_dequantize_rows", TORCH_BOX(&sylvie::rotate_dequantize_rows));
  m.impl("rotate_dequantize_add_rows", TORCH_BOX(&sylvie::rotate_dequantize_add_rows));
}
