// Sections of time: one section for each maximal set of jobs that are alive at the same time.
//
// Jobs that meet share an instant. The jobs alive at any instant are all alive at some instant with a maximal
// set of jobs, one that no neighbouring instant extends (the maximal cliques of an interval graph: Fulkerson
// and Gross, 1965). All other instants are dropped.
#pragma once

#include "packing/jobs.hpp"

namespace packing {

struct Sections {
  std::vector<Piece> span;  // per piece, in sections [start, end); never empty
  int32_t count = 0;
};

// Without `merge`, every instant at which a piece begins is a section (for tests).
inline Sections sections_of(const Jobs& jobs, bool merge) {
  std::vector<bool> begins(jobs.instants, false), ends(jobs.instants, false);
  for (const Piece& piece : jobs.pieces) begins[piece.start] = ends[piece.end] = true;
  // A section is a sequence of instants at which jobs begin, up to the first instant at which a job ends.
  // the section open at an instant, or the last one opened before
  std::vector<int32_t> of = filled(jobs.instants, 0);
  int32_t current = -1;
  bool closed = true;
  for (int32_t t = 0; t < jobs.instants; ++t) {
    closed = closed || ends[t] || !merge;
    if (begins[t] && closed) ++current, closed = false;
    of[t] = current;
  }
  Sections result;
  result.count = current + 1;
  reserve(result.span, jobs.pieces.size());
  for (const Piece& piece : jobs.pieces) result.span.push_back({of[piece.start], of[piece.end - 1] + 1});
  return result;
}

}  // namespace packing
