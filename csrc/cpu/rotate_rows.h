// Rows to rotated sign codes and back, in terms of blocks of 32 values; see core/rotate.h. Included once per
// instruction set, after its blocks_*.h and minmax_rows.h.

namespace sylvie {
namespace SYLVIE_ISA {
namespace {

// The random signs of a row's rounds: a word for 32 values.
struct Signs {
  uint32_t* whole[2];  // of the whole pieces
  uint32_t* last[2];   // of the last piece
};

SYLVIE_TARGET inline void write_words(RowKey key, uint32_t counter, int64_t count, uint32_t* words) {
  for (int64_t i = 0; i < count; i += kWordsAtOnce) {
    random_words(key, counter + static_cast<uint32_t>(i), words + i);
  }
}

SYLVIE_TARGET inline Signs make_signs(const Rotation& rotation, RowKey key, float* space) {
  auto* words = reinterpret_cast<uint32_t*>(space + padded_width(rotation.width));
  Signs signs;
  for (int round = 0; round < 2; ++round) {
    const uint32_t counter = static_cast<uint32_t>(round) * kRoundSigns;
    signs.whole[round] = words;
    signs.last[round] = words + num_sign_words(rotation.width);
    words = signs.last[round] + kWordBlock;
    write_words(key, counter, std::max<int64_t>(rotation.whole[round] / kBlock, 1), signs.whole[round]);
    if (rotation.whole[round] < rotation.width) {
      write_words(key, counter + kLastPieceSigns, kMaxRotation / kBlock, signs.last[round]);
    }
  }
  return signs;
}

// The plain form, for pieces smaller than a block.
SYLVIE_TARGET inline void multiply_few(float* values, int64_t size, uint32_t word, float factor) {
  for (int64_t j = 0; j < size; ++j) {
    values[j] *= (word >> j & 1u) != 0u ? -factor : factor;
  }
}

SYLVIE_TARGET inline void hadamard_few(float* values, int64_t size) {
  for (int64_t half = size / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < size; ++i) {
      if ((i & half) == 0) {
        const float a = values[i], b = values[i + half];
        values[i] = a + b;
        values[i + half] = a - b;
      }
    }
  }
}

// Levels of the transform between `kCount` blocks, the widest first. Before them values may get random signs.
template <int kCount, bool kSigns>
SYLVIE_TARGET inline void butterflies(float* values, const uint32_t* words, float factor) {
  for (int lane = 0; lane < kBlock; lane += kLanes) {
    Vector v[kCount];
    for (int i = 0; i < kCount; ++i) {
      v[i] = load_vector(values + i * kBlock + lane);
      v[i] = kSigns ? signed_vector(v[i], words[i], lane, factor) : v[i];
    }
    for (int half = kCount / 2; half > 0; half /= 2) {
      for (int i = 0; i < kCount; ++i) {
        if ((i & half) == 0) {
          const Vector a = v[i], b = v[i + half];
          v[i] = add_vector(a, b);
          v[i + half] = subtract_vector(a, b);
        }
      }
    }
    for (int i = 0; i < kCount; ++i) {
      store_vector(v[i], values + i * kBlock + lane);
    }
  }
}

template <bool kSigns>
SYLVIE_TARGET inline void block_levels(float* values, int64_t size, const uint32_t* words, float factor) {
  switch (size / kBlock) {
    case 8:
      return butterflies<8, kSigns>(values, words, factor);
    case 4:
      return butterflies<4, kSigns>(values, words, factor);
    case 2:
      return butterflies<2, kSigns>(values, words, factor);
    default:
      return butterflies<1, kSigns>(values, words, factor);
  }
}

// Random signs and the unnormalized Hadamard transform of a piece, a power of two of values, in place.
SYLVIE_TARGET inline void rotate_piece(float* values, int64_t size, const uint32_t* words, float factor) {
  if (size < kBlock) {
    multiply_few(values, size, words[0], factor);
    return hadamard_few(values, size);
  }
  block_levels<true>(values, size, words, factor);
  for (int64_t j = 0; j < size; j += kBlock) {
    store_block(hadamard_block(load_block(values + j)), values + j);
  }
}

SYLVIE_TARGET inline void rotate_piece_back(float* values, int64_t size, const uint32_t* words, float factor) {
  if (size < kBlock) {
    hadamard_few(values, size);
    return multiply_few(values, size, words[0], factor);
  }
  if (size > kBlock) {
    block_levels<false>(values, size, words, factor);
  }
  for (int64_t j = 0; j < size; j += kBlock, ++words) {
    store_block(signed_block(hadamard_block(load_block(values + j)), *words, factor), values + j);
  }
}

// One round, without the whole pieces before column `begin`.
SYLVIE_TARGET inline void rotate(const Rotation& rotation, int round, int64_t begin, const Signs& signs,
                                 float* values) {
  const int64_t size = rotation.size[round];
  const float factor = rotation.factor[round];
  for (; begin < rotation.whole[round]; begin += size) {
    rotate_piece(values + begin, size, signs.whole[round] + begin / kBlock, factor);
  }
  if (rotation.whole[round] < rotation.width) {
    rotate_piece(values + rotation.width - size, size, signs.last[round], factor);
  }
}

SYLVIE_TARGET inline void rotate_back(const Rotation& rotation, int round, int64_t begin, const Signs& signs,
                                      float* values) {
  const int64_t size = rotation.size[round];
  const float factor = rotation.factor[round];
  if (rotation.whole[round] < rotation.width) {
    rotate_piece_back(values + rotation.width - size, size, signs.last[round], factor);
  }
  for (; begin < rotation.whole[round]; begin += size) {
    rotate_piece_back(values + begin, size, signs.whole[round] + begin / kBlock, factor);
  }
}

// Whether all values are one. Rows that are not seldom need a second look.
template <typename Value>
SYLVIE_TARGET bool is_constant(const Value* row, int64_t width) {
  const float first = widen(row[0]);
  int64_t j = 1;
  while (j < width && widen(row[j]) == first) {
    ++j;
  }
  return j == width;
}

template <typename Value>
SYLVIE_TARGET inline Block load_part(const Value* row, int64_t count) {
  return count < kBlock ? load_tail(row, count, Value{}) : load_block(row);
}

// What is subtracted from a row, and what then multiplies it.
struct Normal {
  float mean;
  float factor;
};

// False if a value is not finite.
template <typename Value>
SYLVIE_TARGET inline bool measure(const Rotation& rotation, const Value* row, const Value* next, Normal& normal) {
  const int64_t width = rotation.width;
  Largest largest;
  LaneSum sum;
  for (int64_t j = 0; j < width; j += kBlock) {
    prefetch_block(next + j);
    const Block block = load_part(row + j, width - j);
    largest.add(block);
    sum.add(block);
  }
  normal = {sent_mean(sum.total(), rotation), normalizer(largest.bits())};
  return largest.bits() < 0x7f800000u;
}

// The normalized row, rotated. Blocks of the first round are complete while they are in registers.
template <typename Value>
SYLVIE_TARGET inline void rotate_row(const Rotation& rotation, const Value* row, const Normal& normal,
                                     const Signs& signs, float* values) {
  const int64_t width = rotation.width;
  const float factor = rotation.factor[0];
  int64_t j = 0;
  for (; j + kBlock <= width; j += kBlock) {
    const Block block = multiply(subtract(load_block(row + j), normal.mean), fill(normal.factor));
    store_block(hadamard_block(signed_block(block, signs.whole[0][j / kBlock], factor)), values + j);
  }
  if (j < width) {
    const Block block = multiply(subtract(load_part(row + j, width - j), normal.mean), fill(normal.factor));
    store_block(block, values + j);
  }
  rotate(rotation, 0, j, signs, values);
  rotate(rotation, 1, 0, signs, values);
}

// 1 for the values of a block that have a code at half a bit, from any column on.
alignas(64) constexpr float kSent[2 * kBlock] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0,
                                                 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};

SYLVIE_TARGET inline uint32_t low_bits(int64_t count) { return static_cast<uint32_t>((uint64_t{1} << count) - 1u); }

SYLVIE_TARGET inline void store_part(const Block& block, float* values, int64_t count) {
  if (count >= kBlock) {
    return store_block(block, values);
  }
  float part[kBlock];
  store_block(block, part);
  std::memcpy(values, part, count * sizeof(float));
}

// A one for every value below the limit between the sizes.
SYLVIE_TARGET inline uint32_t small_bits(const Block& values) { return sign_bits(subtract(absolute(values), 1.0f)); }

// The sizes of codes at 2 bits.
SYLVIE_TARGET inline Block sizes_of(uint32_t small) {
  return add(signed_block(fill(kSizeHalf), small, 1.0f), fill(kSizeMiddle));
}

// See Sums. At 2 bits the values leave with the limit between the sizes at 1.
template <int kRate>
SYLVIE_TARGET inline Sums sum_piece(const Piece& piece, float* values) {
  values += piece.begin;
  LaneSum squares;
  LaneSum products;
  for (int64_t j = 0; j < piece.size; j += kBlock) {
    const Block block = load_part(values + j, piece.size - j);
    squares.add(multiply(block, block));
    if constexpr (kRate == 1) {
      products.add(multiply(absolute(block), load_block(kSent + piece.begin % kBlock)));
    } else if constexpr (kRate == 2) {
      products.add(absolute(block));
    }
  }
  if constexpr (kRate == 4) {
    LaneSum codes;
    const float factor = size_normalizer(squares.total(), piece.size);
    for (int64_t j = 0; j < piece.size; j += kBlock) {
      const int64_t count = piece.size - j;
      const Block block = load_part(values + j, count);
      const Block normal = multiply(block, fill(factor));
      Block sizes = sizes_of(small_bits(normal));
      store_part(normal, values + j, count);
      if (count < kBlock) {
        float part[kBlock];
        store_block(sizes, part);
        sizes = load_tail(part, count, 0.0f);
      }
      products.add(multiply(absolute(block), sizes));
      codes.add(multiply(sizes, sizes));
    }
    return {squares.total(), products.total(), codes.total()};
  }
  const int64_t num_codes = num_sent(piece.begin + piece.size, kRate) - num_sent(piece.begin, kRate);
  return {squares.total(), products.total(), static_cast<float>(num_codes)};
}

// Writes the scale of every piece. False if one is not finite.
template <int kRate>
SYLVIE_TARGET inline bool write_scales(const Rotation& rotation, float* values, RowKey key, bool unbiased, float normal,
                                       uint8_t* scales) {
  bool is_good = true;
  for (int64_t number = 0; number < rotation.num_scales; ++number) {
    const Sums sums = sum_piece<kRate>(piece_of(rotation, number), values);
    const uint32_t noise = random_bits(key, kScaleNoise + static_cast<uint32_t>(number));
    const float scale = sent_scale(sums, unbiased, normal, rotation, noise);
    store16(scales + 2 * number, static_cast<uint16_t>(bit_cast<uint32_t>(scale) >> 16));
    is_good &= is_finite(scale);
  }
  return is_good;
}

// The codes of a block in a word: its signs, then at 2 bits which values are large.
template <int kRate>
SYLVIE_TARGET inline void write_rotated(const float* values, int64_t width, uint8_t* codes) {
  for (int64_t j = 0; j < width; j += kBlock) {
    const int64_t count = std::min<int64_t>(width - j, kBlock);
    const Block block = load_part(values + j, count);
    uint64_t word = sign_bits(block);
    if constexpr (kRate == 4) {
      word |= static_cast<uint64_t>(~small_bits(block) & low_bits(count)) << count;
    } else if constexpr (kRate == 1) {
      word &= low_bits(kBlock / 2);
    }
    std::memcpy(codes + rotated_code_bytes(j, kRate), &word, rotated_code_bytes(count, kRate));
  }
}

// A row of one value: its lower half in place of the first codes, its upper half in place of the mean.
SYLVIE_TARGET inline void write_constant(const Rotation& rotation, float value, uint8_t* record) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  std::memset(record, 0, rotation.record_bytes);
  store16(record, static_cast<uint16_t>(bits));
  store16(record + rotation.num_codes, kConstantMark);
  store16(record + rotation.record_bytes - 2, static_cast<uint16_t>(bits >> 16));
}

// Codes of 0, then NaN in place of scales and mean.
SYLVIE_TARGET inline bool write_bad(const Rotation& rotation, uint8_t* record) {
  std::memset(record, 0, rotation.num_codes);
  for (int64_t byte = rotation.num_codes; byte < rotation.record_bytes; byte += 2) {
    store16(record + byte, 0x7fc0u);
  }
  return false;
}

template <typename Value, int kRate>
SYLVIE_TARGET bool quantize_rotated(const Rotation& rotation, const Value* row, RowKey key, bool unbiased,
                                    uint8_t* record, float* values, const Value* next) {
  if (rotation.has_mean && is_finite(widen(row[0])) && is_constant(row, rotation.width)) {
    write_constant(rotation, widen(row[0]), record);
    return true;
  }
  Normal normal;
  if (!measure(rotation, row, next, normal)) {
    return write_bad(rotation, record);
  }
  rotate_row(rotation, row, normal, make_signs(rotation, key, values), values);
  if (!write_scales<kRate>(rotation, values, key, unbiased, normal.factor, record + rotation.num_codes)) {
    return write_bad(rotation, record);
  }
  write_rotated<kRate>(values, rotation.width, record);
  if (rotation.has_mean) {
    store16(record + rotation.record_bytes - 2, static_cast<uint16_t>(bit_cast<uint32_t>(normal.mean) >> 16));
  }
  return true;
}

// The values of the `count` codes of a block, given the scale.
template <int kRate>
SYLVIE_TARGET inline Block read_block(const uint8_t* codes, int64_t count, const Block& scale) {
  uint64_t word = 0;
  std::memcpy(&word, codes, rotated_code_bytes(count, kRate));
  const auto signs = static_cast<uint32_t>(word);
  if constexpr (kRate == 1) {
    return multiply(signed_block(scale, signs, 1.0f), load_block(kSent));
  } else if constexpr (kRate == 4) {
    return signed_block(multiply(scale, sizes_of(~static_cast<uint32_t>(word >> count))), signs, 1.0f);
  }
  return signed_block(scale, signs, 1.0f);
}

// The values of every code. A block may lie in two pieces: the right one writes it whole, and the left one then its
// own part.
template <int kRate>
SYLVIE_TARGET inline void read_rotated(const Rotation& rotation, const uint8_t* record, float* values) {
  const uint8_t* const scales = record + rotation.num_codes;
  for (int64_t number = rotation.num_scales - 1; number >= 0; --number) {
    const Piece piece = piece_of(rotation, number);
    const int64_t end = piece.begin + piece.size;
    const Block scale = fill(size_of(load16(scales + 2 * number), rotation));
    int64_t j = piece.begin / kBlock * kBlock;
    const uint8_t* codes = record + rotated_code_bytes(j, kRate);
    for (; j + kBlock <= end; j += kBlock, codes += rotated_code_bytes(kBlock, kRate)) {
      store_block(read_block<kRate>(codes, kBlock, scale), values + j);
    }
    if (j < end) {
      store_part(read_block<kRate>(codes, std::min<int64_t>(rotation.width - j, kBlock), scale), values + j, end - j);
    }
  }
}

template <typename Value, int kRate, bool kAdd>
SYLVIE_TARGET void dequantize_rotated(const Rotation& rotation, const uint8_t* record, RowKey key, Value* row,
                                      float* values, const Value* next) {
  const int64_t width = rotation.width;
  const uint16_t upper = rotation.has_mean ? load16(record + rotation.record_bytes - 2) : 0;
  if (load16(record + rotation.num_codes) == kConstantMark) {
    const uint32_t bits = static_cast<uint32_t>(upper) << 16 | load16(record);
    return put_constant<kAdd>(bit_cast<float>(bits), width, row);
  }
  const Signs signs = make_signs(rotation, key, values);
  const Block mean = fill(widen(BFloat16{upper}));
  const int64_t whole = width / kBlock * kBlock;
  read_rotated<kRate>(rotation, record, values);
  rotate_back(rotation, 1, 0, signs, values);
  rotate_back(rotation, 0, whole, signs, values);
  for (int64_t j = 0; j < whole; j += kBlock) {  // the rest of the first round, in registers
    prefetch_block(next + j);
    const Block block = hadamard_block(load_block(values + j));
    put<kAdd>(add(signed_block(block, signs.whole[0][j / kBlock], rotation.factor[0]), mean), row + j);
  }
  if (whole < width) {
    prefetch_block(next + whole);
    put_tail<kAdd>(add(load_block(values + whole), mean), row + whole, width - whole);
  }
}

template <typename Value, int kRate>
RotateKernels<Value> kernels_of_rate() {
  return {quantize_rotated<Value, kRate>, dequantize_rotated<Value, kRate, false>,
          dequantize_rotated<Value, kRate, true>};
}

}  // namespace

template <typename Value>
RotateKernels<Value> rotate_kernels(int rate) {
  switch (rate) {
    case 1:
      return kernels_of_rate<Value, 1>();
    case 2:
      return kernels_of_rate<Value, 2>();
    default:
      return kernels_of_rate<Value, 4>();
  }
}

template RotateKernels<float> rotate_kernels<float>(int rate);
template RotateKernels<BFloat16> rotate_kernels<BFloat16>(int rate);
template RotateKernels<Half> rotate_kernels<Half>(int rate);

}  // namespace SYLVIE_ISA
}  // namespace sylvie
