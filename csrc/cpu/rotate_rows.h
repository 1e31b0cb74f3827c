// Rows to rotated sign codes and back, in terms of blocks of 32 values; see core/rotate.h. Included once per
// instruction set, after its blocks_*.h and minmax_rows.h.

namespace sylvie {
namespace SYLVIE_ISA {
namespace {

// Levels of the transform between `kCount` vectors, `stride` values apart, the widest first.
template <int kCount>
SYLVIE_TARGET inline void butterflies(float* values, int64_t stride) {
  for (int64_t lane = 0; lane < stride; lane += kLanes) {
    Vector v[kCount];
    for (int i = 0; i < kCount; ++i) {
      v[i] = load_vector(values + i * stride + lane);
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
      store_vector(v[i], values + i * stride + lane);
    }
  }
}

// Unnormalized Hadamard transform of a power of two of values, in place.
SYLVIE_TARGET inline void hadamard(float* values, int64_t size) {
  if (size < kBlock) {
    for (int64_t half = size / 2; half > 0; half /= 2) {
      for (int64_t i = 0; i < size; ++i) {
        if ((i & half) == 0) {
          const float a = values[i], b = values[i + half];
          values[i] = a + b;
          values[i + half] = a - b;
        }
      }
    }
    return;
  }
  switch (size / kBlock) {
    case 8:
      butterflies<8>(values, kBlock);
      break;
    case 4:
      butterflies<4>(values, kBlock);
      break;
    case 2:
      butterflies<2>(values, kBlock);
      break;
  }
  for (int64_t j = 0; j < size; j += kBlock) {
    store_block(hadamard_block(load_block(values + j)), values + j);
  }
}

// Multiplies by a factor, with the signs of the random bits from `counter` on.
SYLVIE_TARGET inline void multiply_signs(float* values, int64_t size, RowKey key, uint32_t counter, float factor) {
  if (size < kBlock) {
    const uint32_t word = random_bits(key, counter);
    for (int64_t j = 0; j < size; ++j) {
      values[j] *= word >> j & 1u ? -factor : factor;
    }
    return;
  }
  for (int64_t j = 0; j < size; j += kBlock, ++counter) {
    const Block signs = signed_block(random_bits(key, counter), factor);
    store_block(multiply(load_block(values + j), signs), values + j);
  }
}

// One round: random signs and transforms of pieces of `size` values.
SYLVIE_TARGET inline void rotate(float* values, int64_t width, int64_t size, RowKey key, uint32_t counter) {
  const float factor = rotation_factor(size);
  for (int64_t begin = 0; begin + size <= width; begin += size) {
    multiply_signs(values + begin, size, key, counter + static_cast<uint32_t>(begin / kBlock), factor);
    hadamard(values + begin, size);
  }
  if (width % size != 0) {
    multiply_signs(values + width - size, size, key, counter + kLastPieceSigns, factor);
    hadamard(values + width - size, size);
  }
}

SYLVIE_TARGET inline void rotate_back(float* values, int64_t width, int64_t size, RowKey key, uint32_t counter) {
  const float factor = rotation_factor(size);
  if (width % size != 0) {
    hadamard(values + width - size, size);
    multiply_signs(values + width - size, size, key, counter + kLastPieceSigns, factor);
  }
  for (int64_t begin = 0; begin + size <= width; begin += size) {
    hadamard(values + begin, size);
    multiply_signs(values + begin, size, key, counter + static_cast<uint32_t>(begin / kBlock), factor);
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

// The row less its mean, normalized, at `values`; the mean and the normalizer. False if a value is not finite.
template <typename Value>
SYLVIE_TARGET bool normalize(const Value* row, int64_t width, float* values, float& mean, float& normal) {
  Largest largest;
  LaneSum sum;
  for (int64_t j = 0; j < width; j += kBlock) {
    const Block block = load_part(row + j, width - j);
    largest.add(block);
    sum.add(block);
  }
  if (largest.bits() >= 0x7f800000u) {
    return false;
  }
  mean = sent_mean(sum.total(), width);
  normal = normalizer(largest.bits());
  for (int64_t j = 0; j < width; j += kBlock) {
    const Block block = load_part(row + j, width - j);
    store_block(multiply(subtract(block, mean), fill(normal)), values + j);
  }
  return true;
}

// Writes the scale of every piece. False if one is not finite.
SYLVIE_TARGET inline bool write_scales(const float* values, int64_t width, RowKey key, bool unbiased, float normal,
                                       uint8_t* scales) {
  bool is_good = true;
  for (int64_t number = 0; number < num_scales(width); ++number) {
    const Piece piece = piece_of(width, number);
    LaneSum sizes;
    LaneSum squares;
    for (int64_t j = 0; j < piece.size; j += kBlock) {
      const Block block = load_part(values + piece.begin + j, piece.size - j);
      sizes.add(absolute(block));
      squares.add(multiply(block, block));
    }
    const uint32_t noise = random_bits(key, kScaleNoise + static_cast<uint32_t>(number));
    const float scale = sent_scale(sizes.total(), squares.total(), piece.size, unbiased, normal, noise);
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

// A row of one value, or of NaN: its lower half in place of the first codes, its upper half in place of the mean.
SYLVIE_TARGET inline void write_constant(float value, int64_t width, uint8_t* record) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  std::memset(record, 0, rotated_bytes(width));
  store16(record, static_cast<uint16_t>(bits));
  store16(record + code_bytes(width, 1), kConstantMark);
  store16(record + rotated_bytes(width) - 2, static_cast<uint16_t>(bits >> 16));
}

template <typename Value>
SYLVIE_TARGET bool quantize_rotated(const Value* row, int64_t width, RowKey key, bool unbiased, uint8_t* record,
                                    float* values, const Value* next) {
  for (int64_t j = 0; j < width; j += kBlock) {
    prefetch_block(next + j);
  }
  uint8_t* const scales = record + code_bytes(width, 1);
  float mean = 0.0f;
  float normal = 1.0f;
  if (!is_narrow(width) && is_finite(widen(row[0])) && is_constant(row, width)) {
    write_constant(widen(row[0]), width, record);
    return true;
  }
  bool is_good = normalize(row, width, values, mean, normal);
  if (is_good) {
    rotate(values, width, first_rotation_size(width), key, 0);
    rotate(values, width, rotation_size(width), key, kRoundSigns);
    is_good = write_scales(values, width, key, unbiased, normal, scales);
  }
  if (!is_good) {
    std::memset(record, 0, code_bytes(width, 1));
    for (int64_t byte = code_bytes(width, 1); byte < rotated_bytes(width); byte += 2) {
      store16(record + byte, 0x7fc0u);
    }
    return false;
  }
  write_signs(values, width, record);
  if (!is_narrow(width)) {
    store16(record + rotated_bytes(width) - 2, static_cast<uint16_t>(bit_cast<uint32_t>(mean) >> 16));
  }
  return true;
}

// The values of every code: plus or minus its piece's scale.
SYLVIE_TARGET inline void read_signs(const uint8_t* record, int64_t width, float* values) {
  const uint8_t* const scales = record + code_bytes(width, 1);
  int64_t j = 0;
  for (int64_t number = 0; number < num_scales(width); ++number) {
    const Piece piece = piece_of(width, number);
    const float scale = widen(BFloat16{load16(scales + 2 * number)});
    for (; j < piece.begin + piece.size && (j % kBlock != 0 || j + kBlock > piece.begin + piece.size); ++j) {
      values[j] = record[j / 8] >> j % 8 & 1 ? -scale : scale;
    }
    for (; j + kBlock <= piece.begin + piece.size; j += kBlock) {
      store_block(signed_block(load<uint32_t>(record + j / 8), scale), values + j);
    }
    for (; j < piece.begin + piece.size; ++j) {
      values[j] = record[j / 8] >> j % 8 & 1 ? -scale : scale;
    }
  }
}

template <typename Value, bool kAdd>
SYLVIE_TARGET void dequantize_rotated(const uint8_t* record, int64_t width, RowKey key, Value* row, float* values,
                                      const Value* next) {
  for (int64_t j = 0; j < width; j += kBlock) {
    prefetch_block(next + j);
  }
  const uint16_t upper = is_narrow(width) ? 0 : load16(record + rotated_bytes(width) - 2);
  if (load16(record + code_bytes(width, 1)) == kConstantMark) {
    const uint32_t bits = static_cast<uint32_t>(upper) << 16 | load16(record);
    return put_constant<kAdd>(bit_cast<float>(bits), width, row);
  }
  read_signs(record, width, values);
  rotate_back(values, width, rotation_size(width), key, kRoundSigns);
  rotate_back(values, width, first_rotation_size(width), key, 0);
  const Block mean = fill(widen(BFloat16{upper}));
  int64_t j = 0;
  for (; j + kBlock <= width; j += kBlock) {
    put<kAdd>(add(load_block(values + j), mean), row + j);
  }
  if (j < width) {
    put_tail<kAdd>(add(load_block(values + j), mean), row + j, width - j);
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
