// Bindings of devices, and of single parts of the core for tests that feed synthetic input.
#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "core/occupancy.hpp"
#include "core/threads.hpp"
#include "devices/cuda_device.hpp"
#include "devices/device.hpp"
#include "devices/host_device.hpp"
#include "devices/simulated_device.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mempool;

namespace {

std::vector<std::string> cuda_devices(const std::string& driver) {
  const nb::gil_scoped_release release;
  try {
    return CudaDriver::open(driver).names();
  } catch (const std::runtime_error&) {
    return {};
  }
}

std::optional<int> index_of(const CudaDevice& device) {
  const int index = device.index();
  return index == CudaDevice::kUnbound ? std::nullopt : std::optional(index);
}

std::optional<std::string> last_error(const CudaDevice& device) {
  return device.errors() == 0 ? std::nullopt : std::optional(device.last_error_text());
}

CudaKind kind_of(const std::string& name) {
  const auto found = std::find(std::begin(kCudaKindNames), std::end(kCudaKindNames), name);
  if (found == std::end(kCudaKindNames)) throw nb::value_error("memory is plain, growing, managed, pinned or hosted");
  return static_cast<CudaKind>(found - std::begin(kCudaKindNames));
}

void bind_cuda(nb::module_& m) {
  m.def("cuda_devices", &cuda_devices, "driver"_a = "libcuda.so.1",
        "Return the names of the CUDA devices; empty without a driver or a device. Makes no context.");

  nb::class_<CudaDevice, Device>(m, "CudaDevice", "A CUDA device's memory of one kind: plain, growing, managed, pinned or hosted.")
      .def(
          "__init__",
          [](CudaDevice* self, std::optional<int> index, const std::string& driver, const std::string& memory,
             bool else_plain) {
            if (index && *index < 0) throw nb::value_error("index must not be negative");
            const CudaKind kind = kind_of(memory);
            const nb::gil_scoped_release release;
            new (self) CudaDevice(index.value_or(CudaDevice::kUnbound), CudaDriver::open(driver), kind, else_plain);
          },
          "index"_a = nb::none(), nb::kw_only(), "driver"_a = "libcuda.so.1", "memory"_a = "plain", "else_plain"_a = false,
          "Make a device. Without an index: the device that bind() names. The driver starts with the first call "
          "that needs it; refused calls are counted. ``else_plain``: use plain memory if the device has no "
          "growing memory; bind() then decides.\n\nRaises:\n    RuntimeError: there is no driver, or one "
          "too old for this memory.\n    ValueError: a negative index, or no such kind of memory.")
      .def_prop_ro("kind", [](const CudaDevice& d) { return kCudaKindNames[static_cast<std::size_t>(d.kind())]; })
      .def("check", &CudaDevice::check, nb::call_guard<nb::gil_scoped_release>(),
           "Start the driver without making a context.\n\nRaises:\n    RuntimeError: there is no such device, or "
           "it has no such memory.")
      .def("context_of",
           [](const CudaDevice& d, Stream stream) { return reinterpret_cast<std::uintptr_t>(d.context_of(stream)); },
           "stream"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Return another context that the calling thread means by this stream, for pinned memory; 0: the "
           "device's own.")
      .def("wait_elsewhere",
           [](CudaDevice& d, std::uintptr_t context, Stream stream) {
             return d.wait_elsewhere(reinterpret_cast<CuContext>(context), stream);
           },
           "context"_a, "stream"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Wait for a stream of another context. False: refused, or a graph is captured there.")
      .def_prop_ro("index", &index_of, "Index of the device; None: not bound yet.")
      .def("bind", &CudaDevice::bind, "index"_a,
           "Bind the device to this index unless bound; return true if the device has this index.")
      .def_prop_ro("errors", &CudaDevice::errors, "Number of calls that the driver refused, except for lack of "
                                                  "memory.")
      .def_prop_ro("last_error", &last_error, "The latest of these.")
      .def_prop_ro("refusals", &CudaDevice::refusals,
                   "Number of the calling thread's memory requests that the driver refused for another reason "
                   "than lack of memory.")
      .def_prop_ro("last_refusal", &CudaDevice::last_refusal_text, "The latest of these.");
}

}  // namespace

void bind_device(nb::module_& m) {
  nb::class_<Device>(m, "Device", "Owner of memory and streams.")
      .def_prop_ro("alignment", [](const Device& d) { return d.traits().alignment; }, "Alignment in bytes.")
      .def_prop_ro("page", [](const Device& d) { return d.traits().page; },
                   "Bytes committed and returned at a time; 0: a reservation is memory, all or nothing.")
      .def_prop_ro("slow_return", [](const Device& d) { return d.traits().slow_return; },
                   "True if releasing memory waits for all queued work.")
      .def_prop_ro("large", [](const Device& d) { return d.traits().large; },
                   "Size in bytes from which a request gets a separate segment.")
      .def("memory",
           [](const Device& d) {
             const nb::gil_scoped_release release;
             const DeviceMemory memory = d.memory();
             return std::pair(memory.free, memory.total);
           },
           "Return (free, total) bytes of the whole device, for all users; zeros: unknown.");

  nb::class_<HostDevice, Device>(m, "HostDevice", "Host memory by mmap.").def(nb::init<>());

  nb::class_<SimulatedCounts>(m, "SimulatedCounts", "Counts of the calls to a simulated device.")
      .def_ro("committed", &SimulatedCounts::committed)
      .def_ro("peak_committed", &SimulatedCounts::peak_committed)
      .def_ro("reserves", &SimulatedCounts::reserves)
      .def_ro("releases", &SimulatedCounts::releases)
      .def_ro("resizes", &SimulatedCounts::resizes)
      .def_ro("refusals", &SimulatedCounts::refusals)
      .def_ro("live_reservations", &SimulatedCounts::live_reservations)
      .def_ro("events_alive", &SimulatedCounts::events_alive)
      .def_ro("synchronizes", &SimulatedCounts::synchronizes)
      .def_ro("errors", &SimulatedCounts::errors);

  nb::class_<SimulatedDevice, Device>(m, "SimulatedDevice", "Addresses without memory, of a given capacity.")
      .def(
          "__init__",
          [](SimulatedDevice* self, std::size_t capacity, std::size_t page, std::size_t alignment,
             std::size_t shared_segment, std::size_t large) {
            if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
              throw nb::value_error("alignment must be a power of two");
            }
            new (self) SimulatedDevice({capacity, page, alignment, shared_segment, large});
          },
          nb::kw_only(), "capacity"_a = std::size_t{1} << 40, "page"_a = 0, "alignment"_a = 512,
          "shared_segment"_a = std::size_t{2} << 20, "large"_a = std::size_t{1} << 20)
      .def("counts", &SimulatedDevice::counts)
      .def("finish", &SimulatedDevice::finish, "stream"_a, "Complete all work queued on the stream.")
      .def("capture", &SimulatedDevice::capture, "streams"_a,
           "Capture these streams into a graph; calls that would break the capture count as errors. None: end "
           "the capture.")
      .def("set_capacity", &SimulatedDevice::set_capacity, "capacity"_a)
      .def("fail_after", &SimulatedDevice::fail_after, "calls"_a,
           "Refuse every request for memory after this many more.");

  bind_cuda(m);
}

// Bindings of single parts of the core, for tests that feed synthetic input.
namespace {

struct DeviceCalls {
  Device& device;
};

template <class Answer, class... Arguments>
auto call(Answer (Device::*method)(Arguments...) noexcept) {
  return [method](DeviceCalls& calls, Arguments... arguments) { return (calls.device.*method)(arguments...); };
}

void bind_device_calls(nb::module_& m) {
  const auto released = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<DeviceCalls>(m, "DeviceCalls", "Calls that a pool makes to a device, one at a time.")
      .def("__init__", [](DeviceCalls* self, Device& device) { new (self) DeviceCalls{device}; }, "device"_a,
           nb::keep_alive<1, 2>())
      .def("reserve", call(&Device::reserve), "bytes"_a, "alignment"_a = 512, released)
      .def("commit", call(&Device::commit), "address"_a, "bytes"_a, released)
      .def("decommit", call(&Device::decommit), "address"_a, "bytes"_a, released)
      .def("resize", call(&Device::resize), "address"_a, "from_bytes"_a, "to_bytes"_a, released)
      .def("release", call(&Device::release), "address"_a, "bytes"_a, released)
      .def("copy", call(&Device::copy), "to"_a, "source"_a, "bytes"_a, "stream"_a = 0, released)
      .def("zero", call(&Device::zero), "address"_a, "bytes"_a, "stream"_a = 0, released)
      .def("record", call(&Device::record), "stream"_a, released)
      .def("query", call(&Device::query), "event"_a, released)
      .def("wait", call(&Device::wait), "stream"_a, "event"_a, released)
      .def("forget", call(&Device::forget), "event"_a, released)
      .def("synchronize", call(&Device::synchronize), released)
      .def("capturing", call(&Device::capturing), "stream"_a, released)
      .def("capture", call(&Device::capture), "stream"_a, released);
}

}  // namespace

void bind_harness(nb::module_& m) {
  bind_device_calls(m);
  m.def("thread_stream", &ThreadStream::mine, "Return the calling thread's number of the per-thread default stream.");
  nb::class_<Occupancy>(m, "Occupancy", "The overlap guard alone.")
      .def(nb::init<>())
      .def("set_planned_slots", &Occupancy::set_planned_slots, "starts"_a)
      .def("is_free", [](const Occupancy& o, Offset begin, Offset end) { return o.is_free(begin, end, o.slots_before(end)); },
           "begin"_a, "end"_a)
      .def("take", [](Occupancy& o, Offset begin, Offset end) { o.take(begin, end, 0); }, "begin"_a, "end"_a)
      .def("release", &Occupancy::release, "begin"_a,
           "End the live range that starts at `begin`; return its end, or 0 if there is none.")
      .def("find_hole", &Occupancy::find_hole, "bytes"_a, "alignment"_a, "limit"_a)
      .def("end_of_last", &Occupancy::end_of_last)
      .def("live_ranges", &Occupancy::live_ranges);
}
