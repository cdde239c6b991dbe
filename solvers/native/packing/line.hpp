// Converts lifetimes to the line that the kernels use: a circle is cut, and each buffer becomes one job.
#pragma once

#include "packing/load.hpp"

namespace packing {

struct Line {
  std::vector<int64_t> row, pieces;  // per job: the buffer, and the number of pieces
  std::vector<int64_t> start, end;   // per piece; the pieces of a job are consecutive and in order of time
};

// Jobs in the order of their buffers, on the line [0, period) that begins at `cut`; without a period, time is
// already a line.
class Cut {
 public:
  // Takes spells sorted by (owner, start), on a circle from 0 and none longer than the period; the cut must
  // lie within the period.
  Cut(const Spells& spells, int64_t period, int64_t cut) {
    reserve(jobs_, spells.count + 1), reserve(pieces_, spells.count);
    for (size_t k = 0; k < spells.count;) {
      const int64_t row = spells.owner[k];
      const size_t first = pieces_.size();
      jobs_.push_back({row, static_cast<int32_t>(first)});
      for (; k < spells.count && spells.owner[k] == row; ++k) add(spells.start[k], spells.end[k], period, cut);
      if (pieces_.size() - first > 1) std::sort(pieces_.begin() + first, pieces_.end());
    }
    jobs_.push_back({-1, static_cast<int32_t>(pieces_.size())});
  }

  // Returns the jobs in their order, or sorted by their first pieces.
  Line line(bool by_start) const {
    const size_t count = jobs_.size() - 1;
    const auto start = [&](size_t job) { return pieces_[jobs_[job].first].first; };
    const std::vector<int32_t> order = by_start ? order_of_times(count, start) : std::vector<int32_t>();
    Line line;
    for (auto* column : {&line.row, &line.pieces}) *column = filled(count, int64_t{0});
    for (auto* column : {&line.start, &line.end}) *column = filled(pieces_.size(), int64_t{0});
    for (size_t j = 0, piece = 0; j < count; ++j) {
      if (by_start && j + 2 * ahead < count) {
        __builtin_prefetch(&jobs_[order[j + 2 * ahead]]);
        __builtin_prefetch(&pieces_[jobs_[order[j + ahead]].first]);
      }
      const Job* job = &jobs_[by_start ? order[j] : j];
      line.row[j] = job[0].row, line.pieces[j] = job[1].first - job[0].first;
      for (int32_t k = job[0].first; k < job[1].first; ++k, ++piece)
        line.start[piece] = pieces_[k].first, line.end[piece] = pieces_[k].second;
    }
    return line;
  }

 private:
  static constexpr size_t ahead = 16;  // prefetch distance, in jobs
  struct Job {
    int64_t row;
    int32_t first;  // index of the first piece; the pieces end where those of the next job begin
  };

  void add(int64_t start, int64_t end, int64_t period, int64_t cut) {
    const int64_t length = end - start;
    if (period > 0) {
      start -= cut;
      if (start < 0 || start >= period) start = (start % period + period) % period;
      if (length > period - start) {
        pieces_.emplace_back(0, length - (period - start));
        pieces_.emplace_back(start, period);
        return;
      }
    }
    pieces_.emplace_back(start, start + length);
  }

  std::vector<Job> jobs_;  // plus a sentinel at the end
  std::vector<std::pair<int64_t, int64_t>> pieces_;  // start, end
};

}  // namespace packing
