// Deterministic addition into rows by several threads: every task owns a range of rows and adds the peers' entries
// for them in peer order.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "checks.h"

namespace sylvie {

constexpr int64_t kBytesPerTask = 64 * 1024;  // of rows; below this a second thread costs more than it saves
constexpr int64_t kNone = -1;

// Rows to look ahead: 3 KB to 8 KB of rows in flight, found best for rows of 256 to 2408 bytes.
inline int64_t prefetch_distance(int64_t row_bytes) {
  return std::min<int64_t>(12, std::max<int64_t>(4, 6144 / row_bytes));
}

inline bool is_inside(int64_t row, int64_t begin, int64_t end) { return begin <= row && row < end; }

// The entries of one peer.
struct Group {
  int64_t begin;
  int64_t end;
};

inline std::vector<Group> make_groups(const std::vector<int64_t>& counts) {
  std::vector<Group> groups;
  int64_t begin = 0;
  for (const int64_t count : counts) {
    groups.push_back({begin, begin + count});
    begin += count;
  }
  return groups;
}

// First row of each task and the end of the last. The limits cut the largest group evenly: equal work, wherever its
// rows lie.
inline std::vector<int64_t> row_limits(const std::vector<Group>& groups, const int64_t* entries, int64_t num_rows,
                                       int64_t row_bytes) {
  const Group largest = *std::max_element(
      groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.end - a.begin < b.end - b.begin; });
  const int64_t size = largest.end - largest.begin;
  const int64_t wanted = groups.back().end * row_bytes / kBytesPerTask;
  const int64_t num_threads = torch::stable::get_num_threads();
  const int64_t num_tasks = std::max<int64_t>(1, std::min({wanted, num_threads, size}));
  std::vector<int64_t> limits{0};
  for (int64_t task = 1; task < num_tasks; ++task) {
    const int64_t row = entries[largest.begin + size * task / num_tasks];  // unchecked as yet
    limits.push_back(std::clamp<int64_t>(row, 0, num_rows));
  }
  limits.push_back(num_rows);
  return limits;
}

// Calls body(k, row, next_row) for the entries of one group whose rows lie in [first_row, last_row). Returns the
// first entry that is not where it must be, or kNone. Tasks look for the same limits, so their pieces join without
// gap or overlap exactly if every entry passes: the order of a group is checked in full while it is used.
template <typename Body>
int64_t visit_group(const int64_t* entries, Group group, int64_t first_row, int64_t last_row, int64_t num_rows,
                    int64_t ahead, Body& body) {
  const auto find = [&](int64_t row) {
    return std::lower_bound(entries + group.begin, entries + group.end, row) - entries;
  };
  const int64_t begin = first_row == 0 ? group.begin : find(first_row);
  const int64_t end = last_row == num_rows ? group.end : find(last_row);
  if (begin > end) {
    return end;
  }
  int64_t lowest = first_row;
  for (int64_t k = begin; k < end; ++k) {
    if (!is_inside(entries[k], lowest, last_row)) {
      return k;
    }
    lowest = entries[k] + 1;
    const int64_t next = entries[std::min(k + ahead, end - 1)];
    body(k, entries[k], is_inside(next, first_row, last_row) ? next : 0);
  }
  return kNone;
}

// Calls make_body() once in every thread, and what it returned for every entry, see visit_group. Raises if an entry
// lies outside the rows or a group is not ascending.
template <typename MakeBody>
void visit_groups(const std::vector<int64_t>& counts, const int64_t* entries, int64_t num_rows, int64_t row_bytes,
                  const MakeBody& make_body) {
  const std::vector<Group> groups = make_groups(counts);
  const std::vector<int64_t> limits = row_limits(groups, entries, num_rows, row_bytes);
  const int64_t ahead = prefetch_distance(row_bytes);
  // An exception must not cross the C interface of parallel_for, so a bad entry is noted, and raised after it.
  std::atomic<int64_t> bad_entry{kNone};
  const auto run = [&](int64_t begin, int64_t end) {
    auto body = make_body();
    for (int64_t task = begin; task < end; ++task) {
      for (const Group group : groups) {  // in peer order: the sum is the same for any number of tasks
        const int64_t bad = visit_group(entries, group, limits[task], limits[task + 1], num_rows, ahead, body);
        if (bad != kNone) {
          bad_entry = bad;
        }
      }
    }
  };
  torch::stable::parallel_for(0, static_cast<int64_t>(limits.size()) - 1, 1, run);
  const int64_t bad = bad_entry;
  SYLVIE_CHECK(bad == kNone, "index: expected rows 0..", num_rows - 1,
               ", ascending and unique in each group of counts; not so near index[", bad, "]");
}

}  // namespace sylvie
