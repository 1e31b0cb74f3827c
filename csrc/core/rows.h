// Arithmetic on rows that CPU and CUDA kernels share, so that both give the same bits.
// Neither torch nor CUDA headers: any compiler can read this file.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define SYLVIE_HOST_DEVICE __host__ __device__ inline
#elif defined(__GNUC__)
// Always inlined: the code is compiled for the instruction set of the kernel around it.
#define SYLVIE_HOST_DEVICE __attribute__((always_inline)) inline
#else
#define SYLVIE_HOST_DEVICE inline
#endif

namespace sylvie {

// The 16-bit floats as bits. Compilers disagree about native types for them; integers they all have.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <typename To, typename From>
SYLVIE_HOST_DEVICE To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

SYLVIE_HOST_DEVICE float widen(float value) { return value; }
SYLVIE_HOST_DEVICE void narrow(float value, float& result) { result = value; }

// Exact.
SYLVIE_HOST_DEVICE float widen(BFloat16 value) { return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

// Exact: a subnormal half counts units of 2^-24, a normal one changes its exponent's bias from 15 to 127.
SYLVIE_HOST_DEVICE float widen(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t size = value.bits & 0x7fffu;
  uint32_t bits;
  if (size >= 0x7c00u) {  // infinity or NaN
    bits = 0x7f800000u | (size & 0x3ffu) << 13;
  } else if (size >= 0x400u) {
    bits = (size << 13) + (112u << 23);
  } else {
    bits = bit_cast<uint32_t>(static_cast<float>(size) * 5.9604644775390625e-8f);
  }
  return bit_cast<float>(bits | sign);
}

// To the nearest value, ties to even, as torch casts.
SYLVIE_HOST_DEVICE void narrow(float value, BFloat16& result) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  result.bits = static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded);
}

// To the nearest value, ties to even, as torch casts.
SYLVIE_HOST_DEVICE void narrow(float value, Half& result) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t size = bits & 0x7fffffffu;
  uint32_t rounded;
  if (size > 0x7f800000u) {
    rounded = 0x7e00u;  // NaN
  } else if (size >= 0x47800000u) {
    rounded = 0x7c00u;  // 65536 and above; 65520..65536 reach infinity by rounding, below
  } else if (size >= 0x38800000u) {
    rounded = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
  } else {
    // Below 2^-14 the last place of a half is 2^-24, which is that of 0.5f: the adder rounds for us.
    rounded = bit_cast<uint32_t>(bit_cast<float>(size) + 0.5f) - 0x3f000000u;
  }
  result.bits = static_cast<uint16_t>(rounded | sign);
}

// One contribution: 16-bit floats are added in float and rounded once.
template <typename Value>
SYLVIE_HOST_DEVICE Value add(Value a, Value b) {
  return a + b;
}
SYLVIE_HOST_DEVICE BFloat16 add(BFloat16 a, BFloat16 b) {
  BFloat16 sum;
  narrow(widen(a) + widen(b), sum);
  return sum;
}
SYLVIE_HOST_DEVICE Half add(Half a, Half b) {
  Half sum;
  narrow(widen(a) + widen(b), sum);
  return sum;
}

// Reads a value from message bytes, which have no alignment.
template <typename Value>
SYLVIE_HOST_DEVICE Value load(const uint8_t* bytes) {
  Value value;
  memcpy(&value, bytes, sizeof(Value));
  return value;
}

}  // namespace sylvie
