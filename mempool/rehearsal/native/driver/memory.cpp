// The fake driver's memory: plain, in pages, managed, and the host's.
#include <fcntl.h>

#include <algorithm>
#include <cstring>

#include "call.hpp"

using namespace fake;

namespace {

int queue_bytes(Handle handle, std::shared_ptr<Cost> cost, std::vector<Range> uses, std::function<void()> run) {
  Stream* const stream = gpu->stream(handle, current());
  if (stream == nullptr) return kInvalidHandle;
  // A copy of pageable memory is a fault unless locking may be refused.
  const auto pageable = [](const Range& one) { return gpu->lockable != SIZE_MAX && gpu->is_pageable(one.begin); };
  const auto on_host = [&](const Range& one) { return gpu->is_registered(one.begin) || pageable(one); };
  const bool waits = std::any_of(uses.begin(), uses.end(), pageable);
  uses.erase(std::remove_if(uses.begin(), uses.end(), on_host), uses.end());
  Work work{std::move(run), std::move(uses), nullptr, nullptr};
  work.cost = std::move(cost);
  const int code = gpu->enqueue(stream, std::move(work));
  if (code == kSuccess && waits && stream->capture == nullptr) {
    gpu->force(stream, stream->queued);
    gpu->host_waited(*stream);
  }
  return code;
}

}  // namespace

EXPORTED int cuMemAlloc_v2(std::uintptr_t* address, std::size_t bytes) {
  CALL("cuMemAlloc_v2");
  if (const int code = gpu->unsafe(self().mode)) return code;
  return gpu->allocate(bytes, current()->device, *address);
}

EXPORTED int cuMemFree_v2(std::uintptr_t address) {
  CALL("cuMemFree_v2");
  if (const int code = gpu->unsafe(self().mode)) return code;
  return gpu->free(address);
}

EXPORTED int cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  CALL("cuMemGetInfo_v2");
  const Device& device = gpu->devices[static_cast<std::size_t>(current()->device)];
  *total = device.capacity;
  *free = device.capacity - device.live_bytes;
  if (const Answer* const answer = call.answer()) *free = answer->first, *total = answer->second;
  return 0;
}

EXPORTED int cuMemcpyAsync(std::uintptr_t to, std::uintptr_t from, std::size_t bytes, Handle stream) {
  CALL("cuMemcpyAsync");
  return queue_bytes(stream, gpu->copy_cost(to, from, bytes), {{to, bytes, true}, {from, bytes}}, [=] {
    gpu->copy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  });
}

EXPORTED int cuMemsetD8Async(std::uintptr_t address, unsigned char value, std::size_t bytes, Handle stream) {
  CALL("cuMemsetD8Async");
  return queue_bytes(stream, gpu->fill_cost(bytes), {{address, bytes, true}},
                     [=] { gpu->fill(reinterpret_cast<void*>(address), value, bytes); });
}

// --- pages, which old drivers lack

#ifndef FAKE_WITHOUT_PAGES
struct Prop {
  int type, shared_as, place_type, device;
  void* of_windows;
  unsigned char flags[8];
};
struct Access {
  int place_type, device, flags;
};
static_assert(sizeof(Prop) == 32 && sizeof(Access) == 12, "as the driver has them");

EXPORTED int cuMemGetAllocationGranularity(std::size_t* bytes, const Prop* prop, int) {
  CALL("cuMemGetAllocationGranularity", kInit);
  if (prop->type != 1 || prop->place_type != 1) return kInvalidValue;
  *bytes = gpu->granularity;
  return 0;
}

EXPORTED int cuMemAddressReserve(std::uintptr_t* address, std::size_t bytes, std::size_t alignment, std::uintptr_t,
                                 unsigned long long) {
  CALL("cuMemAddressReserve", kInit);
  if (bytes % Gpu::kWhole != 0 || (alignment & (alignment - 1)) != 0) return kInvalidValue;
  return gpu->allocate(bytes, 0, *address, kAddresses);
}

EXPORTED int cuMemAddressFree(std::uintptr_t address, std::size_t bytes) {
  CALL("cuMemAddressFree", kInit);
  if (gpu->allocations.count(address) != 0 && gpu->allocations[address].bytes != bytes) {
    gpu->fault("address space is freed otherwise than it was reserved");
  }
  return gpu->free(address, {kAddresses});
}

EXPORTED int cuMemCreate(unsigned long long* handle, std::size_t bytes, const Prop* prop, unsigned long long) {
  CALL("cuMemCreate", kInit);
  if (prop->type != 1 || prop->place_type != 1 || bytes % Gpu::kWhole != 0) return kInvalidValue;
  if (const int code = gpu->take(prop->device, bytes)) return code;
  *handle = gpu->next_memory++;
  gpu->memories[*handle] = {bytes, prop->device, 1, 0};
  return 0;
}

EXPORTED int cuMemRelease(unsigned long long handle) {
  CALL("cuMemRelease", kInit);
  const auto found = gpu->memories.find(handle);
  if (found == gpu->memories.end() || found->second.handles == 0) {
    gpu->fault("a handle of memory is released twice");
    return kInvalidValue;
  }
  --found->second.handles;
  gpu->perhaps_gone(found);
  return 0;
}

EXPORTED int cuMemMap(std::uintptr_t address, std::size_t bytes, std::size_t offset, unsigned long long handle,
                      unsigned long long) {
  CALL("cuMemMap", kInit);
  return offset != 0 ? kInvalidValue : gpu->map(address, bytes, handle);
}

EXPORTED int cuMemUnmap(std::uintptr_t address, std::size_t bytes) {
  CALL("cuMemUnmap", kInit);
  if (const int code = gpu->unsafe(self().mode)) return code;
  return gpu->unmap(address, bytes);
}

// Access of devices that are not listed stays.
EXPORTED int cuMemSetAccess(std::uintptr_t address, std::size_t bytes, const Access* access, std::size_t count) {
  CALL("cuMemSetAccess", kInit);
  std::uintptr_t begin = 0;
  Allocation* const in = gpu->found(address, begin);
  if (in == nullptr || count == 0 || access[0].flags != 3) return kInvalidValue;
  for (std::uintptr_t page = address; page < address + bytes; page += Gpu::kWhole) {
    if (in->mapped.count(page) == 0) {
      gpu->fault("access to where no memory is mapped");
      return kInvalidValue;
    }
    Mapping& mapping = in->mapped[page];
    for (const Access* one = access; one != access + count; ++one) mapping.users.insert(one->device);
    mapping.usable = mapping.users.count(gpu->memories[mapping.memory].device) != 0;
  }
  return 0;
}

// The handle for other processes leads nowhere: there is no import.
EXPORTED int cuMemExportToShareableHandle(void* shared, unsigned long long handle, int type, unsigned long long) {
  CALL("cuMemExportToShareableHandle", kInit);
  constexpr int kFileDescriptor = 1, kFabric = 8;
  if (gpu->memories.count(handle) == 0) return kInvalidValue;
  if (type == kFabric) return std::memset(shared, 0, 64), 0;
  if (type != kFileDescriptor) return kNotSupported;
  const int file = open("/dev/null", O_RDONLY | O_CLOEXEC);
  std::memcpy(shared, &file, sizeof file);
  return file < 0 ? kNotSupported : 0;
}

#endif  // FAKE_WITHOUT_PAGES

// --- managed and host memory

EXPORTED int cuMemAllocManaged(std::uintptr_t* address, std::size_t bytes, unsigned int flags) {
  CALL("cuMemAllocManaged");
  if (const int code = gpu->unsafe(self().mode)) return code;
  return flags != 1 ? kInvalidValue : gpu->allocate(bytes, current()->device, *address, kManaged);
}

EXPORTED int cuMemAdvise(std::uintptr_t address, std::size_t bytes, int advice, int device) {
  CALL("cuMemAdvise");
  std::uintptr_t begin = 0;
  const Allocation* const in = gpu->found(address, begin);
  if (in == nullptr || in->kind != kManaged || address + bytes > begin + in->bytes) return kInvalidValue;
  gpu->advice.push_back(std::to_string(address) + " " + std::to_string(bytes) + " " + std::to_string(advice) + " " +
                        std::to_string(device));
  return 0;
}

EXPORTED int cuMemPrefetchAsync(std::uintptr_t address, std::size_t bytes, int device, Handle handle) {
  CALL("cuMemPrefetchAsync");
  Stream* const stream = gpu->stream(handle, current());
  std::uintptr_t begin = 0;
  const Allocation* const in = gpu->found(address, begin);
  if (in == nullptr || in->kind != kManaged || address + bytes > begin + in->bytes || device != current()->device) {
    gpu->fault("a prefetch of what is not managed memory");
    return kInvalidValue;
  }
  gpu->use(device, {address, bytes}, true);  // at once: it is only a question of when
  return stream == nullptr ? kInvalidHandle : kSuccess;
}

EXPORTED int cuMemHostAlloc(std::uintptr_t* address, std::size_t bytes, unsigned int flags) {
  CALL("cuMemHostAlloc");
  if (const int code = gpu->unsafe(self().mode)) return code;
  return flags != 1 ? kInvalidValue : gpu->allocate(bytes, current()->device, *address, kHost);
}

EXPORTED int cuMemFreeHost(std::uintptr_t address) {
  CALL("cuMemFreeHost");
  if (const int code = gpu->unsafe(self().mode)) return code;
  return gpu->free(address, {kHost});
}
