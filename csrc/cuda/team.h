// The threads that work on one row: a warp, or for wide rows a block of warps.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "checks.h"
#include "core/format.h"
#include "cuda/launch.h"
#include "quantized.h"

namespace sylvie {

constexpr int kWarpsPerBlock = 8;
constexpr int kThreadsPerBlock = kWarpsPerBlock * kBlock;
constexpr int64_t kMaxGrid = 1 << 20;  // a grid-stride loop does the rest
constexpr int64_t kWarpWidth = 1024;   // wider rows get a block each
constexpr unsigned kAllLanes = 0xffffffffu;

template <int kWarps>
struct Team {
  static constexpr int kPerBlock = kWarpsPerBlock / kWarps;
  static constexpr int kSize = kWarps * kBlock;

  int lane;
  int warp;
  int number;  // of the team in its block

  __device__ Team()
      : lane(static_cast<int>(threadIdx.x) % kBlock),
        warp(static_cast<int>(threadIdx.x) / kBlock % kWarps),
        number(static_cast<int>(threadIdx.x) / kBlock / kWarps) {}

  __device__ bool is_first() const { return lane == 0 && warp == 0; }
  __device__ int64_t first_row() const { return static_cast<int64_t>(blockIdx.x) * kPerBlock + number; }
  __device__ int64_t row_step() const { return static_cast<int64_t>(gridDim.x) * kPerBlock; }

  // Thread t of the team has the columns t, t + kSize, ...: neighbours read neighbours.
  __device__ int thread() const { return warp * kBlock + lane; }

  __device__ void sync() const {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // combine() over a value of every thread of the team, in all of them. `space` holds kWarpsPerBlock values.
  template <typename Value, typename Combine>
  __device__ Value all(Value value, Value* space, const Combine& combine) const {
    for (int half = kBlock / 2; half > 0; half /= 2) {
      value = combine(value, __shfl_xor_sync(kAllLanes, value, half));
    }
    if constexpr (kWarps > 1) {
      __syncthreads();  // the space may still be read from the last time
      if (lane == 0) {
        space[warp] = value;
      }
      __syncthreads();
      value = space[0];
      for (int i = 1; i < kWarps; ++i) {
        value = combine(value, space[i]);
      }
    }
    return value;
  }
};

// Stands for a team where there are no threads yet.
template <typename AnyTeam>
struct TeamType {
  using Type = AnyTeam;
};

// Calls body with the type of team that suits a width.
template <typename Body>
void with_team(int64_t width, const Body& body) {
  if (width <= kWarpWidth) {
    body(TeamType<Team<1>>{});
  } else {
    body(TeamType<Team<kWarpsPerBlock>>{});
  }
}

template <typename AnyTeam>
unsigned num_blocks(int64_t num_rows) {
  return static_cast<unsigned>(std::min((num_rows + AnyTeam::kPerBlock - 1) / AnyTeam::kPerBlock, kMaxGrid));
}

// Stops the program with a message: an index that leaves its tensor must not read or write there.
__device__ inline void check_row(int64_t row, int64_t num_rows) {
  if (row < 0 || row >= num_rows) {
    printf("lightning_sylvie: index: expected 0..%lld, got %lld\n", static_cast<long long>(num_rows - 1),
           static_cast<long long>(row));
    __trap();
  }
}

__device__ inline void report_bad(int64_t* bad, int64_t row) {
  atomicMin(reinterpret_cast<long long*>(bad), static_cast<long long>(row));
}

// Writes a value, or adds it and rounds once.
template <bool kAdd, typename Value>
__device__ void put(float value, Value* target) {
  narrow(kAdd ? widen(*target) + value : value, *target);
}

// Launches one peer's rows after the other, in peer order: the same sum every time. Inside a group rows differ, so
// every value has one writer and needs no atomic.
template <typename Launch>
void for_each_group(const std::vector<int64_t>& counts, const Launch& launch) {
  int64_t begin = 0;
  for (const int64_t count : counts) {
    if (count > 0) {
      launch(begin, count);
    }
    begin += count;
  }
}

}  // namespace sylvie
