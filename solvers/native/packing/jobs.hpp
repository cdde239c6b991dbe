// Packing problem: jobs, each with a size and one or more pieces of lifetime on a time line.
//
// A buffer whose lifetime wraps around the circle, or has gaps, is one job of several pieces; two jobs may
// not overlap in addresses if any of their pieces meet in time. So the kernels need no notion of circles or
// gaps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "packing/large_pages.hpp"

namespace packing {

struct Piece {
  int32_t start;  // rank of the first instant among all instants at which a piece starts or ends
  int32_t end;    // rank of the first instant after the piece; start < end

  bool covers(int32_t instant) const { return start <= instant && instant < end; }
};

struct Jobs {
  std::vector<int32_t> first;   // job j owns pieces [first[j], first[j + 1]), in order of time; at least one
  std::vector<Piece> pieces;
  std::vector<int64_t> size;    // bytes, > 0
  std::vector<int64_t> mask;    // alignment - 1; the alignment is a power of two
  std::vector<int64_t> fixed;   // required offset, or -1
  int32_t instants = 0;         // number of distinct instants; every rank is below

  int32_t count() const { return static_cast<int32_t>(size.size()); }
  int64_t aligned(int32_t job, int64_t offset) const { return (offset + mask[job]) & ~mask[job]; }
  bool single(int32_t job) const { return first[job + 1] - first[job] == 1; }

  // Adds a job of one piece.
  void add(Piece piece, int64_t bytes, int64_t alignment_mask, int64_t fixed_at) {
    if (first.empty()) first.push_back(0);
    pieces.push_back(piece);
    first.push_back(static_cast<int32_t>(pieces.size()));
    size.push_back(bytes), mask.push_back(alignment_mask), fixed.push_back(fixed_at);
  }
};

// Bytes alive at each instant except the last, at which all jobs have ended.
inline std::vector<int64_t> load_of(const Jobs& jobs) {
  std::vector<int64_t> load(std::max(jobs.instants, 1), 0);
  for (int32_t j = 0; j < jobs.count(); ++j)
    for (int32_t k = jobs.first[j]; k < jobs.first[j + 1]; ++k) {
      load[jobs.pieces[k].start] += jobs.size[j];
      load[jobs.pieces[k].end] -= jobs.size[j];
    }
  for (int32_t t = 1; t < jobs.instants; ++t) load[t] += load[t - 1];
  load.pop_back();
  return load;
}

// The smallest arena in bytes that holds all jobs at their offsets.
inline int64_t arena_of(const Jobs& jobs, const std::vector<int64_t>& offset) {
  int64_t arena = 0;
  for (int32_t j = 0; j < jobs.count(); ++j) arena = std::max(arena, offset[j] + jobs.size[j]);
  return arena;
}

// Replaces times by their ranks, so that the kernels compare 32-bit numbers for any clock.
inline void rank_times(Jobs& jobs, const int64_t* start, const int64_t* end, size_t pieces) {
  reserve(jobs.pieces, pieces), jobs.pieces.resize(pieces);
  if (pieces == 0) return;
  const int64_t first = *std::min_element(start, start + pieces);
  const auto span = static_cast<uint64_t>(*std::max_element(end, end + pieces)) - static_cast<uint64_t>(first);
  if (span <= 16 * pieces) {  // counting sort, which is quicker here
    std::vector<int32_t> rank = filled(span + 2, 0);
    for (size_t k = 0; k < pieces; ++k) rank[start[k] - first + 1] = rank[end[k] - first + 1] = 1;
    for (size_t t = 1; t < rank.size(); ++t) rank[t] += rank[t - 1];
    for (size_t k = 0; k < pieces; ++k) jobs.pieces[k] = {rank[start[k] - first], rank[end[k] - first]};
    jobs.instants = rank.back();
    return;
  }
  std::vector<int64_t> times(start, start + pieces);
  times.insert(times.end(), end, end + pieces);
  std::sort(times.begin(), times.end());
  times.erase(std::unique(times.begin(), times.end()), times.end());
  auto rank = [&](int64_t t) {
    return static_cast<int32_t>(std::lower_bound(times.begin(), times.end(), t) - times.begin());
  };
  for (size_t k = 0; k < pieces; ++k) jobs.pieces[k] = {rank(start[k]), rank(end[k])};
  jobs.instants = static_cast<int32_t>(times.size());
}

}  // namespace packing
