// Rows to codes and back by min/max, in terms of blocks of 32 values. Included once per instruction set, after its
// blocks_*.h: every function is compiled for that set alone, so none may run on a processor without it.

namespace sylvie {
namespace SYLVIE_ISA {
namespace {

// Bytes beyond a row may belong to others: the last, incomplete block is worked on in a copy.
struct TailCodes {
  uint8_t bytes[kBlock] = {};
};

template <typename Value>
SYLVIE_TARGET inline void prefetch_block(const Value* next) {
  constexpr int64_t kLine = 64 / sizeof(Value);
  for (int64_t j = 0; j < kBlock; j += kLine) {
    __builtin_prefetch(next + j);
  }
}

template <typename Value>
SYLVIE_TARGET inline Block load_tail(const Value* source, int64_t count, Value padding) {
  Value values[kBlock];
  for (int64_t j = 0; j < kBlock; ++j) {
    values[j] = j < count ? source[j] : padding;
  }
  return load_block(values);
}

template <typename Value, int kBits>
SYLVIE_TARGET void write_codes(const Value* row, int64_t width, const Grid& grid, RowKey key, uint8_t* codes,
                               const Value* next) {
  const int64_t num_whole = width / kBlock;
  for (int64_t block = 0; block < num_whole; ++block) {
    prefetch_block(next + block * kBlock);
    pack<kBits>(load_block(row + block * kBlock), grid, key, block, codes + block * 4 * kBits);
  }
  const int64_t count = width - num_whole * kBlock;
  if (count > 0) {
    prefetch_block(next + num_whole * kBlock);
    TailCodes tail;
    pack<kBits>(load_tail(row + num_whole * kBlock, count, row[0]), grid, key, num_whole, tail.bytes);
    const int64_t num_bytes = code_bytes(count, kBits);
    tail.bytes[num_bytes - 1] &= static_cast<uint8_t>(0xff >> (num_bytes * 8 - count * kBits));
    std::memcpy(codes + num_whole * 4 * kBits, tail.bytes, num_bytes);
  }
}

template <typename Value, int kBits>
SYLVIE_TARGET bool quantize_row(const Value* row, int64_t width, RowKey key, uint8_t* record, const Value* next) {
  const int64_t num_whole = width / kBlock;
  Extremes extremes;
  for (int64_t block = 0; block < num_whole; ++block) {
    extremes.add(load_block(row + block * kBlock));
  }
  if (num_whole * kBlock < width) {
    extremes.add(load_tail(row + num_whole * kBlock, width - num_whole * kBlock, row[0]));
  }
  Grid grid{0.0f, 0.0f, 0.0f};
  if (extremes.is_finite()) {
    grid = make_grid(extremes.low(), extremes.high(), kBits, width);
  }
  if (grid.scale > 0.0f) {
    write_codes<Value, kBits>(row, width, grid, key, record, next);
    store_grid(grid, record + code_bytes(width, kBits), width, kBits);
    return true;
  }
  std::memset(record, 0, code_bytes(width, kBits));
  const bool is_constant = extremes.is_finite() && grid.scale == 0.0f;
  store_constant(is_constant ? widen(row[0]) : bit_cast<float>(0x7fc00000u), key, record, width, kBits);
  return is_constant;
}

template <bool kAdd, typename Value>
SYLVIE_TARGET inline void put(const Block& block, Value* target) {
  if constexpr (kAdd) {
    store_block(add(load_block(target), block), target);
  } else {
    store_block(block, target);
  }
}

template <bool kAdd, typename Value>
SYLVIE_TARGET inline void put_tail(const Block& block, Value* target, int64_t count) {
  Value values[kBlock] = {};
  std::memcpy(values, target, count * sizeof(Value));
  put<kAdd>(block, values);
  std::memcpy(target, values, count * sizeof(Value));
}

template <bool kAdd, typename Value>
SYLVIE_TARGET void put_constant(float value, int64_t width, Value* row) {
  const Block block = fill(value);
  int64_t j = 0;
  for (; j + kBlock <= width; j += kBlock) {
    put<kAdd>(block, row + j);
  }
  put_tail<kAdd>(block, row + j, width - j);
}

template <typename Value, int kBits, bool kAdd>
SYLVIE_TARGET void dequantize_row(const uint8_t* record, int64_t width, Value* row, const Value* next) {
  const Grid grid = load_grid(record + code_bytes(width, kBits), width, kBits);
  if (grid.scale == 0.0f) {
    return put_constant<kAdd>(load_constant(record, width, kBits), width, row);
  }
  const int64_t num_whole = width / kBlock;
  for (int64_t block = 0; block < num_whole; ++block) {
    prefetch_block(next + block * kBlock);
    put<kAdd>(unpack<kBits>(record + block * 4 * kBits, grid), row + block * kBlock);
  }
  const int64_t count = width - num_whole * kBlock;
  if (count > 0) {
    prefetch_block(next + num_whole * kBlock);
    TailCodes tail;
    std::memcpy(tail.bytes, record + num_whole * 4 * kBits, code_bytes(count, kBits));
    put_tail<kAdd>(unpack<kBits>(tail.bytes, grid), row + num_whole * kBlock, count);
  }
}

template <typename Value, int kBits>
MinmaxKernels<Value> minmax_kernels_of() {
  return {quantize_row<Value, kBits>, dequantize_row<Value, kBits, false>, dequantize_row<Value, kBits, true>};
}

}  // namespace

template <typename Value>
MinmaxKernels<Value> minmax_kernels(int bits) {
  switch (bits) {
    case 1:
      return minmax_kernels_of<Value, 1>();
    case 2:
      return minmax_kernels_of<Value, 2>();
    case 4:
      return minmax_kernels_of<Value, 4>();
    default:
      return minmax_kernels_of<Value, 8>();
  }
}

template MinmaxKernels<float> minmax_kernels<float>(int);
template MinmaxKernels<BFloat16> minmax_kernels<BFloat16>(int);
template MinmaxKernels<Half> minmax_kernels<Half>(int);

}  // namespace SYLVIE_ISA
}  // namespace sylvie
