// Rows into a message and back, on CUDA.
//
// All kernels run on torch's current stream, which also frees the tensors: nothing outlives its memory.
#include "core/rows.h"

#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "checks.h"
#include "cuda/launch.h"

namespace sylvie {
namespace {

constexpr int64_t kThreads = 256;
constexpr int64_t kMaxBlocks = 1 << 20;  // a grid-stride loop does the rest

// Stops the program with a message: an index that leaves its tensor must not read or write there.
__device__ void check_row(int64_t row, int64_t num_rows) {
  if (row < 0 || row >= num_rows) {
    printf("lightning_sylvie: index: expected 0..%lld, got %lld\n", static_cast<long long>(num_rows - 1),
           static_cast<long long>(row));
    __trap();
  }
}

// Threads lie along a row (x) and over entries (y): neighbours touch neighbouring words, and narrow rows share a block.
struct Shape {
  dim3 grid;
  dim3 block;

  Shape(int64_t num_entries, int64_t num_words) {
    int64_t x = 1;
    while (x < num_words && x < kThreads) {
      x *= 2;
    }
    const int64_t y = kThreads / x;
    block = dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
    grid = dim3(static_cast<unsigned>(std::min((num_entries + y - 1) / y, kMaxBlocks)));
  }
};

template <typename Word>
__global__ void select_kernel(const uint8_t* __restrict__ source, const int64_t* __restrict__ entries,
                              uint8_t* __restrict__ target, Layout layout) {
  const int64_t num_words = layout.row_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; k < layout.num_entries; k += step) {
    check_row(entries[k], layout.num_rows);
    const auto* const from = reinterpret_cast<const Word*>(source + entries[k] * layout.row_bytes);
    auto* const to = reinterpret_cast<Word*>(target + k * layout.stride);
    for (int64_t word = threadIdx.x; word < num_words; word += blockDim.x) {
      to[word] = from[word];
    }
  }
}

// The largest word that divides every address and size of the call.
int64_t word_bytes(const void* source, const void* target, const Layout& layout) {
  const auto bits = reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(target) |
                    static_cast<uintptr_t>(layout.row_bytes) | static_cast<uintptr_t>(layout.stride) | 16u;
  return static_cast<int64_t>(bits & (~bits + 1));
}

template <typename Word>
void launch_select(const uint8_t* source, const int64_t* entries, uint8_t* target, const Layout& layout,
                   cudaStream_t stream) {
  const Shape shape(layout.num_entries, layout.row_bytes / static_cast<int64_t>(sizeof(Word)));
  select_kernel<Word><<<shape.grid, shape.block, 0, stream>>>(source, entries, target, layout);
  SYLVIE_CUDA_CHECK(cudaGetLastError());
}

void select_rows(const Tensor& rows, const Tensor& index, const Tensor& message, int64_t offset) {
  const Layout layout = check_layout(rows, index, message, offset);
  if (layout.is_empty()) {
    return;
  }
  const DeviceScope device(rows);
  const auto* const source = static_cast<const uint8_t*>(rows.const_data_ptr());
  const auto* const entries = index.const_data_ptr<int64_t>();
  auto* const target = static_cast<uint8_t*>(message.mutable_data_ptr()) + layout.offset;
  switch (word_bytes(source, target, layout)) {
    case 16:
      return launch_select<uint4>(source, entries, target, layout, device.stream());
    case 8:
      return launch_select<uint64_t>(source, entries, target, layout, device.stream());
    case 4:
      return launch_select<uint32_t>(source, entries, target, layout, device.stream());
    case 2:
      return launch_select<uint16_t>(source, entries, target, layout, device.stream());
    default:
      return launch_select<uint8_t>(source, entries, target, layout, device.stream());
  }
}

// Adds the entries of one peer. Their rows differ, so every value has one writer and needs no atomic.
template <typename Value, bool kAligned>
__global__ void add_kernel(const uint8_t* __restrict__ source, const int64_t* __restrict__ entries,
                           Value* __restrict__ rows, Layout layout) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; k < layout.num_entries; k += step) {
    check_row(entries[k], layout.num_rows);
    const uint8_t* const from = source + k * layout.stride;
    Value* const to = rows + entries[k] * layout.width;
    for (int64_t j = threadIdx.x; j < layout.width; j += blockDim.x) {
      const Value value = kAligned ? reinterpret_cast<const Value*>(from)[j]
                                   : load<Value>(from + j * static_cast<int64_t>(sizeof(Value)));
      to[j] = add(to[j], value);
    }
  }
}

template <typename Value>
void launch_add(const uint8_t* source, const int64_t* entries, Value* rows, const Layout& group, cudaStream_t stream) {
  const Shape shape(group.num_entries, group.width);
  const bool is_aligned =
      (reinterpret_cast<uintptr_t>(source) | static_cast<uintptr_t>(group.stride)) % sizeof(Value) == 0;
  if (is_aligned) {
    add_kernel<Value, true><<<shape.grid, shape.block, 0, stream>>>(source, entries, rows, group);
  } else {
    add_kernel<Value, false><<<shape.grid, shape.block, 0, stream>>>(source, entries, rows, group);
  }
  SYLVIE_CUDA_CHECK(cudaGetLastError());
}

void scatter_add_rows(const Tensor& message, int64_t offset, const Tensor& index, const std::vector<int64_t>& counts,
                      const Tensor& rows) {
  const Layout layout = check_layout(rows, index, message, offset);
  check_counts(counts, layout);
  if (layout.is_empty()) {
    return;
  }
  const DeviceScope device(rows);
  const auto* source = static_cast<const uint8_t*>(message.const_data_ptr()) + layout.offset;
  const auto* entries = index.const_data_ptr<int64_t>();
  with_float_type(rows.scalar_type(), [&](auto zero) {
    using Value = decltype(zero);
    auto* const target = static_cast<Value*>(rows.mutable_data_ptr());
    for (const int64_t count : counts) {  // one kernel a peer, in peer order: the same sum every time
      if (count > 0) {
        Layout group = layout;
        group.num_entries = count;
        launch_add(source, entries, target, group, device.stream());
      }
      source += count * layout.stride;
      entries += count;
    }
  });
}

}  // namespace
}  // namespace sylvie

STABLE_TORCH_LIBRARY_IMPL(lightning_sylvie, CUDA, m) {
  m.impl("select_rows", TORCH_BOX(&sylvie::select_rows));
  m.impl("scatter_add_rows", TORCH_BOX(&sylvie::scatter_add_rows));
}
