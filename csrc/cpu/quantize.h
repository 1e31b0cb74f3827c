// What the quantize ops of all codes have in common on the CPU: loops over rows, in parallel.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/groups.h"
#include "quantized.h"

namespace sylvie {

constexpr int64_t kNoBadRow = std::numeric_limits<int64_t>::max();

inline void keep_smaller(std::atomic<int64_t>& smallest, int64_t value) {
  int64_t known = smallest;
  while (value < known && !smallest.compare_exchange_weak(known, value)) {
  }
}

// Calls make_body() once in every thread and what it returned, body(k, row, next_row), for every message row k, where
// row is entries[k] or k. Writes the smallest k for which body returned false into bad, if smaller than what it holds.
template <typename MakeBody>
void quantize_each(const Layout& layout, const int64_t* entries, const Tensor& bad, const MakeBody& make_body) {
  SYLVIE_CHECK(bad.numel() == 1 && bad.scalar_type() == ScalarType::Long, "bad: expected int64 (1,)");
  std::atomic<int64_t> bad_entry{kNone};
  std::atomic<int64_t> bad_row{kNoBadRow};
  const int64_t ahead = prefetch_distance(layout.row_bytes);
  const auto row_of = [&](int64_t k) { return entries == nullptr ? k : entries[k]; };
  const auto run = [&](int64_t begin, int64_t end) {
    auto body = make_body();
    for (int64_t k = begin; k < end; ++k) {
      const int64_t row = row_of(k);
      if (!is_inside(row, 0, layout.num_rows)) {
        bad_entry = k;
        return;
      }
      const int64_t next = row_of(std::min(k + ahead, end - 1));
      if (!body(k, row, is_inside(next, 0, layout.num_rows) ? next : 0)) {
        keep_smaller(bad_row, k);
      }
    }
  };
  torch::stable::parallel_for(0, layout.num_entries, kBytesPerTask / layout.row_bytes + 1, run);
  const int64_t entry = bad_entry;
  SYLVIE_CHECK(entry == kNone, "index[", entry, "]: expected 0..", layout.num_rows - 1, ", got ", entries[entry]);
  auto* const result = static_cast<int64_t*>(bad.mutable_data_ptr());
  *result = std::min(*result, bad_row.load());
}

// As above, for every row k of a message that becomes row k.
template <typename MakeBody>
void dequantize_each(const Layout& layout, const MakeBody& make_body) {
  const int64_t ahead = prefetch_distance(layout.row_bytes);
  const auto run = [&](int64_t begin, int64_t end) {
    auto body = make_body();
    for (int64_t k = begin; k < end; ++k) {
      body(k, k, std::min(k + ahead, end - 1));
    }
  };
  torch::stable::parallel_for(0, layout.num_entries, kBytesPerTask / layout.row_bytes + 1, run);
}

}  // namespace sylvie
