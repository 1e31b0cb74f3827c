// Blocks of 32 values in two AVX-512 vectors. Same bits as blocks_scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "core/format.h"
#include "core/minmax.h"
#include "core/noise.h"
#include "core/rows.h"

#define SYLVIE_ISA avx512
// Attributes rather than compiler flags: shared inline functions must not be compiled for one processor.
#define SYLVIE_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define SYLVIE_INLINE SYLVIE_TARGET __attribute__((always_inline)) inline

namespace sylvie {
namespace avx512 {

constexpr int kLanes = 16;
using Vector = __m512;

struct Block {
  Vector part[2];
};

SYLVIE_INLINE __m512i lane_numbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
SYLVIE_INLINE __m512i spread(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }

SYLVIE_INLINE Vector load_vector(const float* source) { return _mm512_loadu_ps(source); }
SYLVIE_INLINE Vector load_vector(const Half* source) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}
SYLVIE_INLINE Vector load_vector(const BFloat16* source) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

SYLVIE_INLINE void store_vector(Vector values, float* target) { _mm512_storeu_ps(target, values); }
SYLVIE_INLINE void store_vector(Vector values, Half* target) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}
SYLVIE_INLINE void store_vector(Vector values, BFloat16* target) {  // see narrow() in core/rows.h
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), spread(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, spread(0x7fff)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), is_nan, spread(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtepi32_epi16(rounded));
}

template <typename Value>
SYLVIE_INLINE Block load_block(const Value* source) {
  return {{load_vector(source), load_vector(source + kLanes)}};
}

template <typename Value>
SYLVIE_INLINE void store_block(const Block& block, Value* target) {
  store_vector(block.part[0], target);
  store_vector(block.part[1], target + kLanes);
}

SYLVIE_INLINE Block fill(float value) { return {{_mm512_set1_ps(value), _mm512_set1_ps(value)}}; }

SYLVIE_INLINE Vector add_vector(Vector a, Vector b) { return _mm512_add_ps(a, b); }
SYLVIE_INLINE Vector subtract_vector(Vector a, Vector b) { return _mm512_sub_ps(a, b); }

SYLVIE_INLINE Block add(const Block& a, const Block& b) {
  return {{_mm512_add_ps(a.part[0], b.part[0]), _mm512_add_ps(a.part[1], b.part[1])}};
}
SYLVIE_INLINE Block subtract(const Block& a, float b) {
  return {{_mm512_sub_ps(a.part[0], _mm512_set1_ps(b)), _mm512_sub_ps(a.part[1], _mm512_set1_ps(b))}};
}
SYLVIE_INLINE Block multiply(const Block& a, const Block& b) {
  return {{_mm512_mul_ps(a.part[0], b.part[0]), _mm512_mul_ps(a.part[1], b.part[1])}};
}
SYLVIE_INLINE Block absolute(const Block& a) { return {{_mm512_abs_ps(a.part[0]), _mm512_abs_ps(a.part[1])}}; }

// Smallest and largest value so far, and whether one was not finite.
class Extremes {
 public:
  SYLVIE_INLINE Extremes() : low_(fill(bit_cast<float>(0x7f800000u))), high_(fill(bit_cast<float>(0xff800000u))) {}
  SYLVIE_INLINE void add(const Block& block) {
    for (int i = 0; i < 2; ++i) {
      low_.part[i] = _mm512_min_ps(low_.part[i], block.part[i]);
      high_.part[i] = _mm512_max_ps(high_.part[i], block.part[i]);
    }
    // Minimum and maximum drop NaN, and keep infinity.
    nan_ = static_cast<__mmask16>(nan_ | _mm512_cmp_ps_mask(block.part[0], block.part[1], _CMP_UNORD_Q));
  }
  SYLVIE_INLINE float low() const { return _mm512_reduce_min_ps(_mm512_min_ps(low_.part[0], low_.part[1])); }
  SYLVIE_INLINE float high() const { return _mm512_reduce_max_ps(_mm512_max_ps(high_.part[0], high_.part[1])); }
  SYLVIE_INLINE bool is_finite() const { return nan_ == 0 && sylvie::is_finite(low()) && sylvie::is_finite(high()); }

 private:
  Block low_;
  Block high_;
  __mmask16 nan_ = 0;
};

// See random_bits in core/noise.h, for sixteen counters.
SYLVIE_INLINE __m512i random_vector(RowKey key, __m512i counter) {
  __m512i bits = _mm512_xor_si512(spread(key.first), counter);
  bits = _mm512_xor_si512(bits, _mm512_srli_epi32(bits, 16));
  bits = _mm512_mullo_epi32(bits, spread(kHashFirst));
  bits = _mm512_xor_si512(bits, _mm512_srli_epi32(bits, 15));
  bits = _mm512_add_epi32(bits, spread(key.second));
  bits = _mm512_mullo_epi32(bits, spread(kHashSecond));
  return _mm512_xor_si512(bits, _mm512_srli_epi32(bits, 16));
}

SYLVIE_INLINE Vector dither_vector(__m512i shifted) {
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_and_si512(shifted, spread(kDitherMask)), spread(kDitherBits)));
}

// 32 codes of a byte each to kBits each, in element order.
template <int kBits>
SYLVIE_INLINE void store_codes(__m128i first, __m128i second, uint8_t* target) {
  if constexpr (kBits == 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), first);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + kLanes), second);
  } else if constexpr (kBits == 4) {
    const __m128i weights = _mm_set1_epi16(0x1001);  // first + 16 * second
    const __m128i bytes = _mm_packus_epi16(_mm_maddubs_epi16(first, weights), _mm_maddubs_epi16(second, weights));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), bytes);
  } else {
    const __m128i pairs = _mm_set1_epi16(0x0401), fours = _mm_set1_epi32(0x00100001);
    const __m128i words = _mm_packus_epi32(_mm_madd_epi16(_mm_maddubs_epi16(first, pairs), fours),
                                           _mm_madd_epi16(_mm_maddubs_epi16(second, pairs), fours));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(target), _mm_packus_epi16(words, words));
  }
}

SYLVIE_INLINE Vector dithered_vector(Vector values, const Grid& grid, Vector one_plus_u) {  // see dithered
  const Vector offset = _mm512_sub_ps(values, _mm512_set1_ps(grid.zero));
  return _mm512_add_ps(_mm512_mul_ps(offset, _mm512_set1_ps(grid.inverse)), one_plus_u);
}

SYLVIE_INLINE __m128i codes_of(Vector sum, uint32_t top) {  // see code_of
  const __m512i codes = _mm512_sub_epi32(_mm512_cvttps_epi32(sum), spread(1));
  return _mm512_cvtepi32_epi8(_mm512_min_epu32(codes, spread(top)));
}

// Codes of the 32 values that start at column 32 * number: kBits each, in element order.
template <int kBits>
SYLVIE_INLINE void pack(const Block& block, const Grid& grid, RowKey key, int64_t number, uint8_t* codes) {
  const __m512i bits = random_vector(key, _mm512_add_epi32(spread(static_cast<uint32_t>(16 * number)), lane_numbers()));
  const Vector first = dithered_vector(block.part[0], grid, dither_vector(_mm512_slli_epi32(bits, 7)));
  const Vector second = dithered_vector(block.part[1], grid, dither_vector(_mm512_srli_epi32(bits, 9)));
  if constexpr (kBits == 1) {  // the code is 1 from 2 on
    const Vector two = _mm512_set1_ps(2.0f);
    const uint32_t word = static_cast<uint32_t>(_mm512_cmp_ps_mask(first, two, _CMP_GE_OQ)) |
                          static_cast<uint32_t>(_mm512_cmp_ps_mask(second, two, _CMP_GE_OQ)) << kLanes;
    std::memcpy(codes, &word, sizeof(word));
  } else {
    constexpr uint32_t kTop = (1u << kBits) - 1u;
    store_codes<kBits>(codes_of(first, kTop), codes_of(second, kTop), codes);
  }
}

SYLVIE_INLINE Vector levels_of(__m512i codes, const Grid& grid) {  // see value_of
  const Vector product = _mm512_mul_ps(_mm512_cvtepi32_ps(codes), _mm512_set1_ps(grid.scale));
  return _mm512_add_ps(product, _mm512_set1_ps(grid.zero));
}

template <int kBits>
SYLVIE_INLINE Vector unpack_vector(const uint8_t* codes, const Grid& grid) {
  if constexpr (kBits == 1) {
    return _mm512_mask_blend_ps(load<uint16_t>(codes), _mm512_set1_ps(value_of(0, grid)),
                                _mm512_set1_ps(value_of(1, grid)));
  } else if constexpr (kBits == 2) {
    const __m512i shift = _mm512_slli_epi32(lane_numbers(), 1);
    return levels_of(_mm512_and_si512(_mm512_srlv_epi32(spread(load<uint32_t>(codes)), shift), spread(3)), grid);
  } else if constexpr (kBits == 4) {
    const __m512i shift = _mm512_and_si512(_mm512_slli_epi32(lane_numbers(), 2), spread(31));
    const __m512i words =
        _mm512_mask_mov_epi32(spread(load<uint32_t>(codes)), 0xff00, spread(load<uint32_t>(codes + 4)));
    return levels_of(_mm512_and_si512(_mm512_srlv_epi32(words, shift), spread(15)), grid);
  } else {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    return levels_of(_mm512_cvtepu8_epi32(bytes), grid);
  }
}

template <int kBits>
SYLVIE_INLINE Block unpack(const uint8_t* codes, const Grid& grid) {
  return {{unpack_vector<kBits>(codes, grid), unpack_vector<kBits>(codes + 2 * kBits, grid)}};
}

// The values times a factor, with the sign turned where a bit is set; lane is the bit of the first value.
SYLVIE_INLINE Vector signed_vector(Vector a, uint32_t word, int lane, float factor) {
  const auto is_negative = static_cast<__mmask16>(word >> lane);
  const Vector scaled = factor == 1.0f ? a : _mm512_mul_ps(a, _mm512_set1_ps(factor));
  const __m512i bits = _mm512_castps_si512(scaled);
  return _mm512_castsi512_ps(_mm512_mask_xor_epi32(bits, is_negative, bits, spread(0x80000000u)));
}
SYLVIE_INLINE Block signed_block(const Block& a, uint32_t word, float factor) {
  return {{signed_vector(a.part[0], word, 0, factor), signed_vector(a.part[1], word, kLanes, factor)}};
}

constexpr int kWordsAtOnce = 16;
SYLVIE_INLINE void random_words(RowKey key, uint32_t counter, uint32_t* words) {
  _mm512_storeu_si512(words, random_vector(key, _mm512_add_epi32(spread(counter), lane_numbers())));
}

SYLVIE_INLINE uint32_t sign_bits(const Block& block) {
  return static_cast<uint32_t>(_mm512_movepi32_mask(_mm512_castps_si512(block.part[0]))) |
         static_cast<uint32_t>(_mm512_movepi32_mask(_mm512_castps_si512(block.part[1]))) << kLanes;
}

// One level of the transform inside a vector: a partner's value is added to a value or its negative. The product with
// 1 or -1 is exact, so this fused operation rounds as an addition does.
SYLVIE_INLINE Vector level(Vector v, Vector partner, __mmask16 is_negative) {
  return _mm512_fmadd_ps(v, _mm512_mask_blend_ps(is_negative, _mm512_set1_ps(1.0f), _mm512_set1_ps(-1.0f)), partner);
}
SYLVIE_INLINE Vector hadamard_vector(Vector v) {
  v = level(v, _mm512_shuffle_f32x4(v, v, 0x4e), 0xff00);
  v = level(v, _mm512_shuffle_f32x4(v, v, 0xb1), 0xf0f0);
  v = level(v, _mm512_permute_ps(v, 0x4e), 0xcccc);
  return level(v, _mm512_permute_ps(v, 0xb1), 0xaaaa);
}

// Unnormalized Hadamard transform of the block, the widest level first.
SYLVIE_INLINE Block hadamard_block(const Block& block) {
  return {{hadamard_vector(_mm512_add_ps(block.part[0], block.part[1])),
           hadamard_vector(_mm512_sub_ps(block.part[0], block.part[1]))}};
}

// The bits of the largest absolute value so far, as integers: NaN and infinity are largest.
class Largest {
 public:
  SYLVIE_INLINE Largest() : bits_(_mm512_setzero_si512()) {}
  SYLVIE_INLINE void add(const Block& block) {
    for (int i = 0; i < 2; ++i) {
      const __m512i bits = _mm512_castps_si512(block.part[i]);
      bits_ = _mm512_max_epu32(bits_, _mm512_and_si512(bits, spread(0x7fffffffu)));
    }
  }
  SYLVIE_INLINE uint32_t bits() const { return _mm512_reduce_max_epu32(bits_); }

 private:
  __m512i bits_;
};

// A sum in an order that all kernels share: 32 lanes, which are then added in halves.
class LaneSum {
 public:
  SYLVIE_INLINE LaneSum() : lanes_(fill(0.0f)) {}
  SYLVIE_INLINE void add(const Block& block) { lanes_ = avx512::add(lanes_, block); }
  SYLVIE_INLINE float total() const {
    const Vector sum = _mm512_add_ps(lanes_.part[0], lanes_.part[1]);
    const __m256 quarter = _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1));
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(quarter), _mm256_extractf128_ps(quarter, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }

 private:
  Block lanes_;
};

}  // namespace avx512
}  // namespace sylvie
