// NCCL: communicators that know their size and rank. Nothing comes from other ranks: of a result, the part that this rank
// contributes is copied on the stream. Work carries the ranges of its buffers, so that memory reused too early is seen.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "driver/call.hpp"
#include "runtime/contents.hpp"
#include "settings.hpp"

extern "C" int cudaMalloc(void** pointer, std::size_t bytes);
extern "C" int cudaFree(void* pointer);

namespace {

struct Communicator {
  int size, rank, device;
};
struct UniqueId {
  char bytes[128];
};

int make(Communicator** into, int size, int rank) {
  *into = new Communicator{size, rank, fake::current() != nullptr ? fake::current()->device : 0};
  return 0;
}

// Bytes of an element of ncclDataType_t.
std::size_t element(int type) {
  constexpr std::size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < 12 ? kSizes[type] : 1;
}

using fake::Range;

Range reads(const void* buffer, std::size_t bytes) { return {reinterpret_cast<std::uintptr_t>(buffer), bytes, false}; }
Range writes(void* buffer, std::size_t bytes) { return {reinterpret_cast<std::uintptr_t>(buffer), bytes, true}; }

// Queue work that uses these ranges, and copies `bytes`, this rank's part of the result; NCCL's code for an error of CUDA is 1.
int queue(const std::vector<Range>& uses, const void* from, void* to, std::size_t bytes, fake::Handle stream) {
  const fake::Call call(NAMED("ncclCollective"));
  if (call.refused() != 0) return 1;
  fake::Work work;
  work.name = "a collective";
  for (const Range& range : uses) {
    if (range.bytes != 0) work.uses.push_back(range);
  }
  if (from != to && bytes != 0) {
    work.run = [=] { standin::copy_contents(to, from, bytes); };
    work.cost = fake::gpu->copy_cost(reinterpret_cast<std::uintptr_t>(to), reinterpret_cast<std::uintptr_t>(from), bytes);
  }
  fake::Stream* const on = fake::gpu->stream(stream, fake::current());
  return on != nullptr && fake::gpu->enqueue(on, std::move(work)) == 0 ? 0 : 1;
}

// Memory that communicators have registered, by handle.
std::map<const Communicator*, std::vector<std::unique_ptr<Range>>>& registrations() {
  static auto* const all = new std::map<const Communicator*, std::vector<std::unique_ptr<Range>>>;
  return *all;
}

}  // namespace

EXPORTED int ncclAllReduce(const void* from, void* to, std::size_t count, int type, int, Communicator*, fake::Handle stream) {
  const std::size_t bytes = count * element(type);
  return queue({reads(from, bytes), writes(to, bytes)}, from, to, bytes, stream);
}
EXPORTED int ncclReduce(const void* from, void* to, std::size_t count, int type, int, int root, Communicator* in,
                        fake::Handle stream) {
  const std::size_t bytes = count * element(type), result = in->rank == root ? bytes : 0;
  return queue({reads(from, bytes), writes(to, result)}, from, to, result, stream);
}
EXPORTED int ncclBroadcast(const void* from, void* to, std::size_t count, int type, int root, Communicator* in,
                           fake::Handle stream) {
  const std::size_t bytes = count * element(type), own = in->rank == root ? bytes : 0;
  return queue({reads(from, own), writes(to, bytes)}, from, to, own, stream);
}
EXPORTED int ncclAllGather(const void* from, void* to, std::size_t count, int type, Communicator* in, fake::Handle stream) {
  const std::size_t bytes = count * element(type), ranks = static_cast<std::size_t>(in->size);
  char* const own = static_cast<char*>(to) + static_cast<std::size_t>(in->rank) * bytes;
  return queue({reads(from, bytes), writes(to, ranks * bytes)}, from, own, bytes, stream);
}
EXPORTED int ncclReduceScatter(const void* from, void* to, std::size_t count, int type, int, Communicator* in,
                               fake::Handle stream) {
  const std::size_t bytes = count * element(type), ranks = static_cast<std::size_t>(in->size);
  const char* const own = static_cast<const char*>(from) + static_cast<std::size_t>(in->rank) * bytes;
  return queue({reads(from, ranks * bytes), writes(to, bytes)}, own, to, bytes, stream);
}
EXPORTED int ncclSend(const void* from, std::size_t count, int type, int, Communicator*, fake::Handle stream) {
  return queue({reads(from, count * element(type))}, nullptr, nullptr, 0, stream);
}
EXPORTED int ncclRecv(void* to, std::size_t count, int type, int, Communicator*, fake::Handle stream) {
  return queue({writes(to, count * element(type))}, nullptr, nullptr, 0, stream);
}

EXPORTED int ncclGetVersion(int* version) {
  *version = 22800;
  return 0;
}
EXPORTED int ncclGetUniqueId(UniqueId* id) {
  std::memset(id, 0, sizeof *id);
  return 0;
}
EXPORTED int ncclCommInitRank(Communicator** made, int size, UniqueId, int rank) { return make(made, size, rank); }
EXPORTED int ncclCommInitRankConfig(Communicator** made, int size, UniqueId, int rank, void*) { return make(made, size, rank); }
EXPORTED int ncclCommInitRankScalable(Communicator** made, int size, int rank, int, void*, void*) { return make(made, size, rank); }
EXPORTED int ncclCommInitAll(Communicator** made, int size, const int*) {
  for (int rank = 0; rank < size; ++rank) make(made + rank, size, rank);
  return 0;
}
EXPORTED int ncclCommSplit(Communicator* of, int color, int key, Communicator** made, void*) {
  *made = nullptr;
  return color < 0 ? 0 : make(made, of->size, key);
}
EXPORTED int ncclCommDestroy(Communicator* communicator) {
  delete communicator;
  return 0;
}
EXPORTED int ncclCommAbort(Communicator* communicator) { return ncclCommDestroy(communicator); }
EXPORTED int ncclCommCount(const Communicator* communicator, int* size) {
  *size = communicator->size;
  return 0;
}
EXPORTED int ncclCommUserRank(const Communicator* communicator, int* rank) {
  *rank = communicator->rank;
  return 0;
}
EXPORTED int ncclCommCuDevice(const Communicator* communicator, int* device) {
  *device = communicator->device;
  return 0;
}
EXPORTED int ncclCommGetAsyncError(Communicator*, int* code) {
  *code = 0;
  return 0;
}
EXPORTED const char* ncclGetErrorString(int) { return "no error"; }
EXPORTED const char* ncclGetLastError(Communicator*) { return ""; }
EXPORTED int ncclMemAlloc(void** pointer, std::size_t bytes) { return cudaMalloc(pointer, bytes) == 0 ? 0 : 1; }
EXPORTED int ncclMemFree(void* pointer) { return cudaFree(pointer) == 0 ? 0 : 1; }
EXPORTED int ncclCommRegister(const Communicator* communicator, void* buffer, std::size_t bytes, void** handle) {
  const fake::Call call(NAMED("ncclCommRegister"));
  if (call.refused() != 0) return 1;
  if (!fake::gpu->is_allocated(reads(buffer, bytes))) fake::gpu->fault("memory is registered that is not allocated");
  auto& registered = registrations()[communicator];
  *handle = registered.emplace_back(std::make_unique<Range>(reads(buffer, bytes))).get();
  return 0;
}
EXPORTED int ncclCommDeregister(const Communicator* communicator, void* handle) {
  const fake::Call call(NAMED("ncclCommDeregister"));
  auto& registered = registrations()[communicator];
  const auto found = std::find_if(registered.begin(), registered.end(), [&](const auto& range) { return range.get() == handle; });
  if (found == registered.end()) return 4;
  registered.erase(found);
  return 0;
}
// Return how many communicators have registered all of a range.
EXPORTED int fake_registrations(std::uintptr_t address, std::size_t bytes) {
  const std::lock_guard<std::recursive_mutex> guard(fake::gpu->mutex);
  int found = 0;
  for (const auto& [communicator, registered] : registrations()) {
    found += std::any_of(registered.begin(), registered.end(), [&](const auto& range) {
      return range->begin <= address && address + bytes <= range->begin + range->bytes;
    });
  }
  return found;
}
EXPORTED int ncclRedOpCreatePreMulSum(int* operation, void*, int, int, Communicator*) {
  *operation = 5;
  return 0;
}
