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

// Writes the scale of every piece. False if one is not finite.
SYLVIE_TARGET inline bool write_scales(const Rotation& rotation, const float* values, RowKey key, bool unbiased,
                                       float normal, uint8_t* scales) {
  bool is_good = true;
  for (int64_t number = 0; number < rotation.num_scales; ++number) {
    const Piece piece = piece_of(rotation, number);
    LaneSum sizes;
    LaneSum squares;
    for (int64_t j = 0; j < piece.size; j += kBlock) {
      const Block block = load_part(values + piece.begin + j, piece.size - j);
      sizes.add(absolute(block));
      squares.add(multiply(block, block));
    }
    const uint32_t noise = random_bits(key, kScaleNoise + static_cast<uint32_t>(number));
    const float scale = sent_scale(sizes.total(), squares.total(), piece.size, unbiased, normal, rotation, noise);
    store16(scales + 2 * number, static_cast<uint16_t>(bit_cast<uint32_t>(scale) >> 16));
    is_good &= is_finite(scale);
  }
  return is_good;
}

// A one for every negative value.
SYLVIE_TARGET inline void write_signs(const float* values, int64_t width, uint8_t* codes) {
  for (int64_t j = 0; j < width; j += kBlock) {
    const int64_t count = std::min<int64_t>(width - j, kBlock);
    const uint32_t word = sign_bits(load_part(values + j, count));
    std::memcpy(codes + j / 8, &word, code_bytes(count, 1));
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

template <typename Value>
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
  if (!write_scales(rotation, values, key, unbiased, normal.factor, record + rotation.num_codes)) {
    return write_bad(rotation, record);
  }
  write_signs(values, rotation.width, record);
  if (rotation.has_mean) {
    store16(record + rotation.record_bytes - 2, static_cast<uint16_t>(bit_cast<uint32_t>(normal.mean) >> 16));
  }
  return true;
}

// The values of every code: plus or minus the size of its piece. A block may lie in two pieces: the right one writes
// it whole, and the left one then its own part.
SYLVIE_TARGET inline void read_signs(const Rotation& rotation, const uint8_t* record, float* values) {
  const uint8_t* const scales = record + rotation.num_codes;
  for (int64_t number = rotation.num_scales - 1; number >= 0; --number) {
    const Piece piece = piece_of(rotation, number);
    const int64_t end = piece.begin + piece.size;
    const Block size = fill(size_of(load16(scales + 2 * number), rotation));
    int64_t j = piece.begin / kBlock * kBlock;
    for (; j + kBlock <= end; j += kBlock) {
      store_block(signed_block(size, load<uint32_t>(record + j / 8), 1.0f), values + j);
    }
    if (j < end) {
      uint32_t word = 0;
      std::memcpy(&word, record + j / 8, code_bytes(end - j, 1));
      float part[kBlock];
      store_block(signed_block(size, word, 1.0f), part);
      std::memcpy(values + j, part, (end - j) * sizeof(float));
    }
  }
}

template <typename Value, bool kAdd>
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
  read_signs(rotation, record, values);
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

}  // namespace

template <typename Value>
RotateKernels<Value> rotate_kernels() {
  return {quantize_rotated<Value>, dequantize_rotated<Value, false>, dequantize_rotated<Value, true>};
}

template RotateKernels<float> rotate_kernels<float>();
template RotateKernels<BFloat16> rotate_kernels<BFloat16>();
template RotateKernels<Half> rotate_kernels<Half>();

}  // namespace SYLVIE_ISA
}  // namespace sylvie
