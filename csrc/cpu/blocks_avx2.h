// Blocks of 32 values in four AVX2 vectors. Same bits as blocks_scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "core/format.h"
#include "core/minmax.h"
#include "core/noise.h"
#include "core/rows.h"

#define SYLVIE_ISA avx2
// Attributes rather than compiler flags: shared inline functions must not be compiled for one processor.
#define SYLVIE_TARGET __attribute__((target("avx2,fma,f16c")))
#define SYLVIE_INLINE SYLVIE_TARGET __attribute__((always_inline)) inline

namespace sylvie {
namespace avx2 {

constexpr int kLanes = 8;
constexpr int kVectors = kBlock / kLanes;
using Vector = __m256;

struct Block {
  Vector part[kVectors];
};

SYLVIE_INLINE Vector load_vector(const float* source) { return _mm256_loadu_ps(source); }
SYLVIE_INLINE Vector load_vector(const Half* source) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
}
SYLVIE_INLINE Vector load_vector(const BFloat16* source) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

SYLVIE_INLINE void store_vector(Vector values, float* target) { _mm256_storeu_ps(target, values); }
SYLVIE_INLINE void store_vector(Vector values, Half* target) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}
SYLVIE_INLINE void store_vector(Vector values, BFloat16* target) {  // see narrow() in core/rows.h
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  const __m256i rounded = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), is_nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(packed));
}

template <typename Value>
SYLVIE_INLINE Block load_block(const Value* source) {
  return {{load_vector(source), load_vector(source + 8), load_vector(source + 16), load_vector(source + 24)}};
}

template <typename Value>
SYLVIE_INLINE void store_block(const Block& block, Value* target) {
  for (int i = 0; i < kVectors; ++i) {
    store_vector(block.part[i], target + i * kLanes);
  }
}

SYLVIE_INLINE Block fill(float value) {
  const Vector values = _mm256_set1_ps(value);
  return {{values, values, values, values}};
}

SYLVIE_INLINE Block add(const Block& a, const Block& b) {
  Block sum;
  for (int i = 0; i < kVectors; ++i) {
    sum.part[i] = _mm256_add_ps(a.part[i], b.part[i]);
  }
  return sum;
}

SYLVIE_INLINE float horizontal_min(Vector values) {
  __m128 half = _mm_min_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  half = _mm_min_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_min_ss(half, _mm_movehdup_ps(half)));
}

// Smallest and largest value so far, and whether one was not finite.
class Extremes {
 public:
  SYLVIE_INLINE Extremes()
      : low_(fill(bit_cast<float>(0x7f800000u))),
        high_(fill(bit_cast<float>(0xff800000u))),
        nan_(_mm256_setzero_ps()) {}
  SYLVIE_INLINE void add(const Block& block) {
    for (int i = 0; i < kVectors; ++i) {
      low_.part[i] = _mm256_min_ps(low_.part[i], block.part[i]);
      high_.part[i] = _mm256_max_ps(high_.part[i], block.part[i]);
    }
    for (int i = 0; i < kVectors; i += 2) {  // minimum and maximum drop NaN, and keep infinity
      nan_ = _mm256_or_ps(nan_, _mm256_cmp_ps(block.part[i], block.part[i + 1], _CMP_UNORD_Q));
    }
  }
  SYLVIE_INLINE float low() const {
    const Vector low = _mm256_min_ps(_mm256_min_ps(low_.part[0], low_.part[1]),  //
                                     _mm256_min_ps(low_.part[2], low_.part[3]));
    return horizontal_min(low);
  }
  SYLVIE_INLINE float high() const {
    const Vector high =
        _mm256_max_ps(_mm256_max_ps(high_.part[0], high_.part[1]), _mm256_max_ps(high_.part[2], high_.part[3]));
    return -horizontal_min(_mm256_xor_ps(high, _mm256_set1_ps(-0.0f)));
  }
  SYLVIE_INLINE bool is_finite() const {
    return _mm256_movemask_ps(nan_) == 0 && sylvie::is_finite(low()) && sylvie::is_finite(high());
  }

 private:
  Block low_;
  Block high_;
  Vector nan_;
};

// See random_bits in core/noise.h, for eight counters.
SYLVIE_INLINE __m256i random_vector(RowKey key, __m256i counter) {
  __m256i bits = _mm256_xor_si256(_mm256_set1_epi32(static_cast<int>(key.first)), counter);
  bits = _mm256_xor_si256(bits, _mm256_srli_epi32(bits, 16));
  bits = _mm256_mullo_epi32(bits, _mm256_set1_epi32(static_cast<int>(kHashFirst)));
  bits = _mm256_xor_si256(bits, _mm256_srli_epi32(bits, 15));
  bits = _mm256_add_epi32(bits, _mm256_set1_epi32(static_cast<int>(key.second)));
  bits = _mm256_mullo_epi32(bits, _mm256_set1_epi32(static_cast<int>(kHashSecond)));
  return _mm256_xor_si256(bits, _mm256_srli_epi32(bits, 16));
}

SYLVIE_INLINE Vector dither_vector(__m256i shifted) {
  const __m256i bits = _mm256_and_si256(shifted, _mm256_set1_epi32(static_cast<int>(kDitherMask)));
  return _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(static_cast<int>(kDitherBits))));
}

// The dithers of columns 32 * number and on.
SYLVIE_INLINE Block dithers(RowKey key, int64_t number) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i counter = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(16 * number)), lanes);
  const __m256i first = random_vector(key, counter);
  const __m256i second = random_vector(key, _mm256_add_epi32(counter, _mm256_set1_epi32(8)));
  return {{dither_vector(_mm256_slli_epi32(first, 7)), dither_vector(_mm256_slli_epi32(second, 7)),
           dither_vector(_mm256_srli_epi32(first, 9)), dither_vector(_mm256_srli_epi32(second, 9))}};
}

// 32 codes of a byte each to kBits each, in element order; the codes come as packus leaves them, see pack.
template <int kBits>
SYLVIE_INLINE void store_codes(__m256i codes, uint8_t* target) {
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  codes = _mm256_permutevar8x32_epi32(codes, in_order);
  if constexpr (kBits == 8) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), codes);
  } else if constexpr (kBits == 4) {
    const __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x1001));  // first + 16 * second
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(bytes));
  } else {
    const __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x0401));
    const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00100001));
    const __m256i words = _mm256_packus_epi32(fours, fours);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words, words), in_order);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(bytes));
  }
}

// Codes of the 32 values that start at column 32 * number: kBits each, in element order. See code_of.
template <int kBits>
SYLVIE_INLINE void pack(const Block& block, const Grid& grid, RowKey key, int64_t number, uint8_t* codes) {
  Block sum = dithers(key, number);
  for (int i = 0; i < kVectors; ++i) {
    const Vector offset = _mm256_sub_ps(block.part[i], _mm256_set1_ps(grid.zero));
    sum.part[i] = _mm256_add_ps(_mm256_mul_ps(offset, _mm256_set1_ps(grid.inverse)), sum.part[i]);
  }
  if constexpr (kBits == 1) {
    uint32_t word = 0;
    for (int i = 0; i < kVectors; ++i) {  // the code is 1 from 2 on
      const Vector is_one = _mm256_cmp_ps(sum.part[i], _mm256_set1_ps(2.0f), _CMP_GE_OQ);
      word |= static_cast<uint32_t>(_mm256_movemask_ps(is_one)) << i * kLanes;
    }
    std::memcpy(codes, &word, sizeof(word));
  } else {
    const __m256i low = _mm256_packus_epi32(_mm256_cvttps_epi32(sum.part[0]), _mm256_cvttps_epi32(sum.part[1]));
    const __m256i high = _mm256_packus_epi32(_mm256_cvttps_epi32(sum.part[2]), _mm256_cvttps_epi32(sum.part[3]));
    const __m256i one = _mm256_set1_epi16(1);
    const __m256i bytes = _mm256_packus_epi16(_mm256_sub_epi16(low, one), _mm256_sub_epi16(high, one));
    store_codes<kBits>(_mm256_min_epu8(bytes, _mm256_set1_epi8(static_cast<char>((1 << kBits) - 1))), codes);
  }
}

SYLVIE_INLINE Vector levels_of(__m256i codes, const Grid& grid) {  // see value_of
  const Vector product = _mm256_mul_ps(_mm256_cvtepi32_ps(codes), _mm256_set1_ps(grid.scale));
  return _mm256_add_ps(product, _mm256_set1_ps(grid.zero));
}

template <int kBits>
SYLVIE_INLINE Block unpack(const uint8_t* codes, const Grid& grid) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  Block block;
  for (int i = 0; i < kVectors; ++i) {
    if constexpr (kBits == 1) {  // the blend looks at sign bits
      const __m256i shift = _mm256_sub_epi32(_mm256_set1_epi32(31 - kLanes * i), lanes);
      const __m256i signs = _mm256_sllv_epi32(_mm256_set1_epi32(load<int32_t>(codes)), shift);
      block.part[i] = _mm256_blendv_ps(_mm256_set1_ps(value_of(0, grid)), _mm256_set1_ps(value_of(1, grid)),
                                       _mm256_castsi256_ps(signs));
    } else if constexpr (kBits == 8) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + kLanes * i));
      block.part[i] = levels_of(_mm256_cvtepu8_epi32(bytes), grid);
    } else {
      const __m256i word = _mm256_set1_epi32(kBits == 4 ? load<int32_t>(codes + 4 * i) : load<uint16_t>(codes + 2 * i));
      const __m256i shifted = _mm256_srlv_epi32(word, _mm256_mullo_epi32(lanes, _mm256_set1_epi32(kBits)));
      block.part[i] = levels_of(_mm256_and_si256(shifted, _mm256_set1_epi32((1 << kBits) - 1)), grid);
    }
  }
  return block;
}

SYLVIE_INLINE Vector add_vector(Vector a, Vector b) { return _mm256_add_ps(a, b); }
SYLVIE_INLINE Vector subtract_vector(Vector a, Vector b) { return _mm256_sub_ps(a, b); }

SYLVIE_INLINE Block subtract(const Block& a, float b) {
  Block difference;
  for (int i = 0; i < kVectors; ++i) {
    difference.part[i] = _mm256_sub_ps(a.part[i], _mm256_set1_ps(b));
  }
  return difference;
}

SYLVIE_INLINE Block multiply(const Block& a, const Block& b) {
  Block product;
  for (int i = 0; i < kVectors; ++i) {
    product.part[i] = _mm256_mul_ps(a.part[i], b.part[i]);
  }
  return product;
}

SYLVIE_INLINE Block absolute(const Block& a) {
  Block sizes;
  for (int i = 0; i < kVectors; ++i) {
    sizes.part[i] = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.part[i]);
  }
  return sizes;
}

// The values times a factor, with the sign turned where a bit is set; lane is the bit of the first value.
SYLVIE_INLINE Vector signed_vector(Vector a, uint32_t word, int lane, float factor) {
  const __m256i lanes = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
  const __m256i shifted =
      _mm256_sllv_epi32(_mm256_set1_epi32(static_cast<int>(word)), _mm256_sub_epi32(lanes, _mm256_set1_epi32(lane)));
  const Vector signs = _mm256_and_ps(_mm256_castsi256_ps(shifted), _mm256_set1_ps(-0.0f));
  return factor == 1.0f ? _mm256_xor_ps(a, signs) : _mm256_mul_ps(a, _mm256_xor_ps(_mm256_set1_ps(factor), signs));
}
SYLVIE_INLINE Block signed_block(const Block& a, uint32_t word, float factor) {
  Block block;
  for (int i = 0; i < kVectors; ++i) {
    block.part[i] = signed_vector(a.part[i], word, kLanes * i, factor);
  }
  return block;
}

constexpr int kWordsAtOnce = 8;
SYLVIE_INLINE void random_words(RowKey key, uint32_t counter, uint32_t* words) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i counters = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(counter)), lanes);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), random_vector(key, counters));
}

SYLVIE_INLINE uint32_t sign_bits(const Block& block) {
  uint32_t word = 0;
  for (int i = 0; i < kVectors; ++i) {
    word |= static_cast<uint32_t>(_mm256_movemask_ps(block.part[i])) << i * kLanes;
  }
  return word;
}

// The levels of the transform inside a vector: a partner's value is added to a value or its negative. The product
// with 1 or -1 is exact, so this fused operation rounds as an addition does.
SYLVIE_INLINE Vector hadamard_vector(Vector v) {
  const Vector signs4 = _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1);
  const Vector signs2 = _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1);
  const Vector signs1 = _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1);
  v = _mm256_fmadd_ps(v, signs4, _mm256_permute2f128_ps(v, v, 0x01));
  v = _mm256_fmadd_ps(v, signs2, _mm256_permute_ps(v, 0x4e));
  return _mm256_fmadd_ps(v, signs1, _mm256_permute_ps(v, 0xb1));
}

// Unnormalized Hadamard transform of the block, the widest level first.
SYLVIE_INLINE Block hadamard_block(const Block& block) {
  const Vector a = _mm256_add_ps(block.part[0], block.part[2]), b = _mm256_add_ps(block.part[1], block.part[3]);
  const Vector c = _mm256_sub_ps(block.part[0], block.part[2]), d = _mm256_sub_ps(block.part[1], block.part[3]);
  return {{hadamard_vector(_mm256_add_ps(a, b)), hadamard_vector(_mm256_sub_ps(a, b)),
           hadamard_vector(_mm256_add_ps(c, d)), hadamard_vector(_mm256_sub_ps(c, d))}};
}

// The bits of the largest absolute value so far, as integers: NaN and infinity are largest.
class Largest {
 public:
  SYLVIE_INLINE Largest() : bits_(_mm256_setzero_si256()) {}
  SYLVIE_INLINE void add(const Block& block) {
    for (int i = 0; i < kVectors; ++i) {
      const __m256i bits = _mm256_castps_si256(block.part[i]);
      bits_ = _mm256_max_epi32(bits_, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    }
  }
  SYLVIE_INLINE uint32_t bits() const {
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(bits_), _mm256_extracti128_si256(bits_, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1))));
  }

 private:
  __m256i bits_;
};

// A sum in an order that all kernels share: 32 lanes, which are then added in halves.
class LaneSum {
 public:
  SYLVIE_INLINE LaneSum() : lanes_(fill(0.0f)) {}
  SYLVIE_INLINE void add(const Block& block) { lanes_ = avx2::add(lanes_, block); }
  SYLVIE_INLINE float total() const {
    const Vector sum =
        _mm256_add_ps(_mm256_add_ps(lanes_.part[0], lanes_.part[2]), _mm256_add_ps(lanes_.part[1], lanes_.part[3]));
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }

 private:
  Block lanes_;
};

}  // namespace avx2
}  // namespace sylvie
