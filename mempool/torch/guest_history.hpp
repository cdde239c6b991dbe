// History of planned requests, as PyTorch's allocator, the host, records that of all others, and the merge of both. Included by
// guest.cpp.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/ApproximateClock.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

class History {
 public:
  using Context = std::shared_ptr<c10::GatheredContext>;
  using Entry = c10::cuda::CUDACachingAllocator::TraceEntry;
  using Recorder = c10::cuda::CUDACachingAllocator::CreateContextFn;
  using Level = c10::cuda::CUDACachingAllocator::RecordContext;

  struct Tensor {
    void* address = nullptr;
    size_t bytes = 0;
    int device = 0;
    void* stream = nullptr;
    std::string metadata = {};
  };

  bool records() const noexcept { return records_.load(std::memory_order_relaxed); }
  // False: the end of a planned tensor need not be told.
  bool knows_any() const noexcept { return knows_any_.load(std::memory_order_relaxed); }
  void configure(bool enabled, Recorder recorder, size_t entries, Level level, bool clear, const std::vector<std::string>& skipped) {
    const std::lock_guard<std::mutex> guard(lock_);
    if (recorder != nullptr) recorder_.store(recorder);  // never null again: a thread may be about to call it
    level_.store(enabled ? level : Level::NEVER);
    most_ = std::max<size_t>(entries, 1);
    const auto skips = [&](const char* name) { return std::find(skipped.begin(), skipped.end(), name) != skipped.end(); };
    skips_ = {skips("alloc"), skips("free_requested"), skips("free_completed")};
    skips_.resize(kAnnotate);
    skips_.push_back(skips("annotate"));
    if (!enabled || clear) logs_.clear();
    records_.store(enabled);
    knows_any_.store(enabled || !contexts_.empty());
  }
  // The recorder that the host calls before each request. What it returns is noted, since the host's entries have times in
  // microseconds only, and several requests happen in one.
  Context gather_for_host() {
    Context context = recorder_.load()();
    c10::DeviceIndex device = 0;
    C10_CUDA_IGNORE_ERROR(c10::cuda::GetDevice(&device));
    const std::lock_guard<std::mutex> guard(lock_);
    if (context != nullptr) add(device, Entry(Entry::SNAPSHOT, kMark, 0, 0, nullptr, {}, 0, context));
    return context;
  }
  void allocated(const Tensor& tensor) noexcept try {
    Context context = gather(Level::STATE);
    const std::lock_guard<std::mutex> guard(lock_);
    record(Entry::ALLOC, tensor, context);
    if (context != nullptr) contexts_[tensor.address] = std::move(context);
  } catch (...) {  // no memory for the entry
  }
  // To be called before the memory is free for others.
  void freed(const Tensor& tensor) noexcept try {
    Context context = gather(Level::ALL);
    const std::lock_guard<std::mutex> guard(lock_);
    Context& of_allocation = contexts_[tensor.address];
    if (context == nullptr) context = std::move(of_allocation);
    contexts_.erase(tensor.address);
    record(Entry::FREE_REQUESTED, tensor, context);
    record(Entry::FREE_COMPLETED, tensor, context);
    knows_any_.store(records() || !contexts_.empty());
  } catch (...) {  // no memory for the entry
  }
  // The text is the tensor's metadata.
  void annotated(const Tensor& tensor) noexcept try {
    const Context context = gather(Level::ALLOC);
    const std::lock_guard<std::mutex> guard(lock_);
    record(static_cast<Entry::Action>(kAnnotate), tensor, context);
  } catch (...) {  // no memory for the entry
  }
  void push_compile_context(const std::string& text) {
    if (records()) compile_contexts().push_back(text);
  }
  void pop_compile_context() {
    if (records() && !compile_contexts().empty()) compile_contexts().pop_back();
  }
  Context context_of(void* address) {
    const std::lock_guard<std::mutex> guard(lock_);
    const auto found = contexts_.find(address);
    return found == contexts_.end() ? nullptr : found->second;
  }
  // Put the planned requests of a device among the host's entries, which are in order, in place of the arenas. A history from
  // before the guest has the arenas.
  void merge(int device, std::vector<Entry>& host) {
    const std::lock_guard<std::mutex> guard(lock_);
    std::unordered_set<const void*> of_host;
    for (const Entry& entry : host) of_host.insert(entry.context_.get());
    std::vector<const Numbered*> log;  // of the device, with the marks of its entries
    for (const auto& [any, numbered] : logs_) {
      for (const Numbered& one : numbered) {
        const bool marks = is_mark(one.entry) && of_host.count(one.entry.context_.get()) != 0;
        if (marks || one.entry.device_ == device) log.push_back(&one);
      }
    }
    std::sort(log.begin(), log.end(), [](const Numbered* one, const Numbered* other) { return one->number < other->number; });
    std::unordered_map<const void*, size_t> places;
    for (size_t i = 0; i < log.size(); ++i) {
      if (is_mark(log[i]->entry)) places.emplace(log[i]->entry.context_.get(), i);
    }
    const auto nanoseconds = clock_.makeConverter();
    const auto time = [&](size_t i) { return nanoseconds(log[i]->entry.time_.approx_t_) / 1000; };
    std::vector<Entry> all;
    size_t next = 0;
    const auto add_next = [&](int64_t before) {
      if (!is_mark(log[next]->entry)) {
        all.push_back(log[next]->entry);
        const int64_t after = all.size() == 1 ? 0 : all[all.size() - 2].time_.t_;
        all.back().time_.t_ = std::max(after, std::min(before, time(next)));
      }
      ++next;
    };
    for (Entry& entry : host) {
      const auto place = places.find(entry.context_.get());
      const auto is_earlier = [&] {
        if (place != places.end() && next <= place->second) return true;
        return !is_mark(log[next]->entry) && time(next) < entry.time_.t_;
      };
      while (next < log.size() && is_earlier()) add_next(entry.time_.t_);
      std::string& text = entry.user_metadata_;
      const bool of_arena = text.size() >= kArena.size() && text.compare(text.size() - kArena.size(), kArena.size(), kArena) == 0;
      if (of_arena) text.resize(text.size() - kArena.size());
      const bool of_segment = entry.action_ >= Entry::SEGMENT_ALLOC && entry.action_ <= Entry::SEGMENT_UNMAP;
      if (!of_arena || !records() || of_segment) all.push_back(std::move(entry));
    }
    while (next < log.size()) add_next(INT64_MAX);
    if (all.size() > most_) all.erase(all.begin(), all.end() - static_cast<std::ptrdiff_t>(most_));
    host = std::move(all);
  }

  inline static const std::string kArena = "\x1f" "arena of mempool";  // ends the metadata of an arena's entries

 private:
  static constexpr int kAnnotate = 9;  // action of releases from 2.14 on
  static constexpr c10::DeviceIndex kMark = -1;  // device of an entry that notes a context of the host
  static bool is_mark(const Entry& entry) { return entry.device_ == kMark; }

  static std::vector<std::string>& compile_contexts() {
    static thread_local std::vector<std::string> contexts;
    return contexts;
  }
  Context gather(Level least) { return level_.load() < least ? nullptr : recorder_.load()(); }
  void record(Entry::Action action, const Tensor& tensor, const Context& context) {
    if (!records() || skips_[action]) return;
    const auto device = static_cast<c10::DeviceIndex>(tensor.device);
    add(device, Entry(action, device, reinterpret_cast<size_t>(tensor.address), tensor.bytes, tensor.stream, {0, 0},
                      c10::getApproximateTime(), level_.load() >= Level::ALLOC ? context : nullptr,
                      compile_contexts().empty() ? "N/A" : compile_contexts().back(), tensor.metadata));
  }
  void add(c10::DeviceIndex device, Entry entry) {
    std::deque<Numbered>& log = logs_[{device, is_mark(entry)}];
    log.push_back({next_number_++, std::move(entry)});
    if (log.size() > most_) log.pop_front();
  }

  std::atomic<bool> records_{false}, knows_any_{false};
  std::atomic<Recorder> recorder_{nullptr};
  std::atomic<Level> level_{Level::NEVER};
  std::mutex lock_;
  size_t most_ = SIZE_MAX;
  std::vector<bool> skips_;  // by action
  struct Numbered {
    uint64_t number;  // in the order of all logs
    Entry entry;
  };
  // Entries of a device; or marks made while the device was the current one, which frees of other devices' tensors make, too.
  std::map<std::pair<c10::DeviceIndex, bool>, std::deque<Numbered>> logs_;
  uint64_t next_number_ = 0;
  std::unordered_map<void*, Context> contexts_;  // of live planned tensors
  c10::ApproximateClockToUnixTimeConverter clock_;
};

}  // namespace
