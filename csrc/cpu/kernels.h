// The row kernels of each instruction set, and the choice among them. All give the same bytes.
#pragma once

#include <cstdint>

#include "core/format.h"
#include "core/noise.h"
#include "core/rotate.h"
#include "core/rows.h"

namespace sylvie {

// One row at a time, of float, BFloat16 or Half. `next` is a row that is needed soon: kernels ask for its memory
// piece by piece while they work.
template <typename Value>
struct MinmaxKernels {
  // Returns false, and writes a row of NaN, if a value is not finite or the values lie too far apart for float.
  bool (*quantize)(const Value* row, int64_t width, RowKey key, uint8_t* record, const Value* next);
  void (*dequantize)(const uint8_t* record, int64_t width, Value* row, const Value* next);
  void (*dequantize_add)(const uint8_t* record, int64_t width, Value* row, const Value* next);
};

// As above; `space` holds rotation_space(width) floats.
template <typename Value>
struct RotateKernels {
  bool (*quantize)(const Rotation& rotation, const Value* row, RowKey key, bool unbiased, uint8_t* record, float* space,
                   const Value* next);
  void (*dequantize)(const Rotation& rotation, const uint8_t* record, RowKey key, Value* row, float* space,
                     const Value* next);
  void (*dequantize_add)(const Rotation& rotation, const uint8_t* record, RowKey key, Value* row, float* space,
                         const Value* next);
};

// Values of the row, then the words of random signs; see rotate_rows.h.
constexpr int64_t kWordBlock = 16;  // words are made a vector at a time
inline int64_t padded_width(int64_t width) { return (width + kBlock - 1) / kBlock * kBlock; }
inline int64_t num_sign_words(int64_t width) { return (width / kBlock / kWordBlock + 1) * kWordBlock; }
inline int64_t rotation_space(int64_t width) { return padded_width(width) + 2 * (num_sign_words(width) + kWordBlock); }

namespace scalar {
template <typename Value>
MinmaxKernels<Value> minmax_kernels(int bits);
template <typename Value>
RotateKernels<Value> rotate_kernels(int rate);
}  // namespace scalar

#if defined(__x86_64__)
namespace avx2 {
template <typename Value>
MinmaxKernels<Value> minmax_kernels(int bits);
template <typename Value>
RotateKernels<Value> rotate_kernels(int rate);
}  // namespace avx2

namespace avx512 {
template <typename Value>
MinmaxKernels<Value> minmax_kernels(int bits);
template <typename Value>
RotateKernels<Value> rotate_kernels(int rate);
}  // namespace avx512
#endif

enum class Isa { kScalar, kAvx2, kAvx512 };

// The best instruction set of this processor, or the one that SYLVIE_ISA names (scalar, avx2, avx512): tests run
// them all.
Isa chosen_isa();

template <typename Value>
MinmaxKernels<Value> minmax_kernels(int bits) {
#if defined(__x86_64__)
  switch (chosen_isa()) {
    case Isa::kAvx512:
      return avx512::minmax_kernels<Value>(bits);
    case Isa::kAvx2:
      return avx2::minmax_kernels<Value>(bits);
    case Isa::kScalar:
      break;
  }
#endif
  return scalar::minmax_kernels<Value>(bits);
}

template <typename Value>
RotateKernels<Value> rotate_kernels(int rate) {
#if defined(__x86_64__)
  switch (chosen_isa()) {
    case Isa::kAvx512:
      return avx512::rotate_kernels<Value>(rate);
    case Isa::kAvx2:
      return avx2::rotate_kernels<Value>(rate);
    case Isa::kScalar:
      break;
  }
#endif
  return scalar::rotate_kernels<Value>(rate);
}

}  // namespace sylvie
