// Rows into a message and back, on the CPU.
#include "core/rows.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "checks.h"

namespace sylvie {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kBytesPerTask = 64 * 1024;  // below this a second thread costs more than it saves
constexpr int64_t kNone = -1;

// Entries to look ahead: 3 KB to 8 KB of rows in flight, found best for rows of 256 to 2408 bytes.
int64_t prefetch_distance(int64_t row_bytes) { return std::min<int64_t>(12, std::max<int64_t>(4, 6144 / row_bytes)); }

// Copies a row and meanwhile asks for the one that is needed soon, line by line: asked for at once, a wide row's
// lines queue up and the copy waits behind them.
void copy_row(const uint8_t* source, uint8_t* target, int64_t row_bytes, const uint8_t* next_source) {
  int64_t byte = 0;
  for (; byte + kCacheLine <= row_bytes; byte += kCacheLine) {
    __builtin_prefetch(next_source + byte);
    std::memcpy(target + byte, source + byte, kCacheLine);
  }
  __builtin_prefetch(next_source + byte);
  std::memcpy(target + byte, source + byte, row_bytes - byte);
}

bool is_inside(int64_t row, int64_t begin, int64_t end) { return begin <= row && row < end; }

void select_rows(const Tensor& rows, const Tensor& index, const Tensor& message, int64_t offset) {
  const Layout layout = check_layout(rows, index, message, offset);
  if (layout.is_empty()) {
    return;
  }
  const auto* const source = static_cast<const uint8_t*>(rows.const_data_ptr());
  const auto* const entries = index.const_data_ptr<int64_t>();
  auto* const target = static_cast<uint8_t*>(message.mutable_data_ptr()) + layout.offset;
  const int64_t ahead = prefetch_distance(layout.row_bytes);
  // An exception must not cross the C interface of parallel_for, so a bad entry is noted, and raised after it.
  std::atomic<int64_t> bad_entry{kNone};
  const auto row = [&](int64_t number) { return source + number * layout.row_bytes; };
  const auto copy = [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      if (!is_inside(entries[k], 0, layout.num_rows)) {
        bad_entry = k;
        return;
      }
      const int64_t next = entries[std::min(k + ahead, end - 1)];
      copy_row(row(entries[k]), target + k * layout.stride, layout.row_bytes,
               row(is_inside(next, 0, layout.num_rows) ? next : 0));
    }
  };
  torch::stable::parallel_for(0, layout.num_entries, kBytesPerTask / layout.row_bytes + 1, copy);
  const int64_t bad = bad_entry;
  SYLVIE_CHECK(bad == kNone, "index[", bad, "]: expected 0..", layout.num_rows - 1, ", got ", entries[bad]);
}

// The entries of one peer.
struct Group {
  int64_t begin;
  int64_t end;
};

std::vector<Group> make_groups(const std::vector<int64_t>& counts) {
  std::vector<Group> groups;
  int64_t begin = 0;
  for (const int64_t count : counts) {
    groups.push_back({begin, begin + count});
    begin += count;
  }
  return groups;
}

// First row of each task and the end of the last. Every task owns the rows between two limits, so no two write
// the same row and no lock is needed. The limits cut the largest group evenly: equal work, wherever its rows lie.
std::vector<int64_t> row_limits(const std::vector<Group>& groups, const int64_t* entries, const Layout& layout) {
  const Group largest = *std::max_element(
      groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.end - a.begin < b.end - b.begin; });
  const int64_t size = largest.end - largest.begin;
  const int64_t wanted = layout.num_entries * layout.row_bytes / kBytesPerTask;
  const int64_t num_threads = torch::stable::get_num_threads();
  const int64_t num_tasks = std::max<int64_t>(1, std::min({wanted, num_threads, size}));
  std::vector<int64_t> limits{0};
  for (int64_t task = 1; task < num_tasks; ++task) {
    const int64_t row = entries[largest.begin + size * task / num_tasks];  // unchecked as yet
    limits.push_back(std::clamp<int64_t>(row, 0, layout.num_rows));
  }
  limits.push_back(layout.num_rows);
  return limits;
}

template <typename Value>
class Adder {
 public:
  Adder(const uint8_t* source, const int64_t* entries, Value* rows, const Layout& layout)
      : source_(source), entries_(entries), rows_(rows), layout_(layout), ahead_(prefetch_distance(layout.row_bytes)) {}

  // Adds the entries of one group whose rows lie in [first_row, last_row). Returns the first entry that is not
  // where it must be, or kNone. Tasks look for the same limits, so their pieces join without gap or overlap
  // exactly if every entry passes: the order of a group is checked in full while it is used.
  int64_t operator()(Group group, int64_t first_row, int64_t last_row) const {
    const int64_t begin = first_row == 0 ? group.begin : find(group, first_row);
    const int64_t end = last_row == layout_.num_rows ? group.end : find(group, last_row);
    if (begin > end) {
      return end;
    }
    int64_t lowest = first_row;
    for (int64_t k = begin; k < end; ++k) {
      if (!is_inside(entries_[k], lowest, last_row)) {
        return k;
      }
      lowest = entries_[k] + 1;
      const int64_t next = entries_[std::min(k + ahead_, end - 1)];
      add_row(source_ + k * layout_.stride, row(entries_[k]), row(is_inside(next, first_row, last_row) ? next : 0));
    }
    return kNone;
  }

 private:
  int64_t find(Group group, int64_t row) const {
    return std::lower_bound(entries_ + group.begin, entries_ + group.end, row) - entries_;
  }

  Value* row(int64_t number) const { return rows_ + number * layout_.width; }

  // As copy_row, but it is the target that lies scattered.
  void add_row(const uint8_t* source, Value* target, const Value* next_target) const {
    constexpr int64_t kBlock = kCacheLine / sizeof(Value);
    int64_t j = 0;
    for (; j + kBlock <= layout_.width; j += kBlock) {
      __builtin_prefetch(next_target + j, 1);
      add_values(source + j * sizeof(Value), target + j, kBlock);
    }
    __builtin_prefetch(next_target + j, 1);
    add_values(source + j * sizeof(Value), target + j, layout_.width - j);
  }

  static void add_values(const uint8_t* source, Value* target, int64_t num_values) {
    for (int64_t j = 0; j < num_values; ++j) {
      target[j] = add(target[j], load<Value>(source + j * sizeof(Value)));
    }
  }

  const uint8_t* source_;
  const int64_t* entries_;
  Value* rows_;
  Layout layout_;
  int64_t ahead_;
};

void scatter_add_rows(const Tensor& message, int64_t offset, const Tensor& index, const std::vector<int64_t>& counts,
                      const Tensor& rows) {
  const Layout layout = check_layout(rows, index, message, offset);
  check_counts(counts, layout);
  if (layout.is_empty()) {
    return;
  }
  const auto* const source = static_cast<const uint8_t*>(message.const_data_ptr()) + layout.offset;
  const auto* const entries = index.const_data_ptr<int64_t>();
  const std::vector<Group> groups = make_groups(counts);
  const std::vector<int64_t> limits = row_limits(groups, entries, layout);
  std::atomic<int64_t> bad_entry{kNone};
  with_float_type(rows.scalar_type(), [&](auto zero) {
    using Value = decltype(zero);
    const Adder<Value> adder(source, entries, static_cast<Value*>(rows.mutable_data_ptr()), layout);
    const auto run = [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        for (const Group group : groups) {  // in peer order: the sum is the same for any number of tasks
          const int64_t bad = adder(group, limits[task], limits[task + 1]);
          if (bad != kNone) {
            bad_entry = bad;
          }
        }
      }
    };
    torch::stable::parallel_for(0, static_cast<int64_t>(limits.size()) - 1, 1, run);
  });
  const int64_t bad = bad_entry;
  SYLVIE_CHECK(bad == kNone, "index: expected rows 0..", layout.num_rows - 1,
               ", ascending and unique in each group of counts; not so near index[", bad, "]");
}

}  // namespace
}  // namespace sylvie

STABLE_TORCH_LIBRARY_IMPL(lightning_sylvie, CPU, m) {
  m.impl("select_rows", TORCH_BOX(&sylvie::select_rows));
  m.impl("scatter_add_rows", TORCH_BOX(&sylvie::scatter_add_rows));
}
