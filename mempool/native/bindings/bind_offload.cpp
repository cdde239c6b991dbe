// Bindings of host memory for offloaded tensors, and of the copies.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "offload/cuda_copies.hpp"
#include "offload/free_list.hpp"
#include "offload/signal.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mempool;

namespace {

CuStream stream_of(std::uintptr_t handle) { return reinterpret_cast<CuStream>(handle); }

void bind_copies(nb::module_& m) {
  nb::class_<StreamEvent>(m, "StreamEvent", "A moment of a CUDA stream: all work queued there before.")
      .def("query", &StreamEvent::query, "Return whether the moment has passed.\n\nRaises:\n    RuntimeError: work on the device failed.")
      .def("order_before", [](const StreamEvent& self, std::uintptr_t stream) { self.order_before(stream_of(stream)); }, "stream"_a,
           "Let later work of a stream, given by handle, wait for the moment.\n\nRaises:\n    RuntimeError: the driver refused.");

  nb::class_<CudaCopies>(m, "CudaCopies", "Copies between a GPU and page-locked host memory on CUDA streams, given by handle.")
      .def(nb::init<const std::string&>(), "driver"_a = "libcuda.so.1", "Open the driver, and work in the context that is this thread's current one.\n\nRaises:\n    RuntimeError: there is none.")
      .def("record", [](const CudaCopies& self, std::uintptr_t stream) { return self.record(stream_of(stream)); }, "stream"_a,
           "Return the present moment of a stream.\n\nRaises:\n    RuntimeError: the driver refused.")
      .def("copy",
           [](const CudaCopies& self, std::uintptr_t stream, CuAddress target, CuAddress source, std::size_t size,
              const std::vector<std::uintptr_t>& after, const std::vector<const StreamEvent*>& events) {
             std::vector<CuStream> streams;
             for (const std::uintptr_t one : after) streams.push_back(stream_of(one));
             const nb::gil_scoped_release unlocked;  // a copy of pageable memory waits for the device
             return self.copy(stream_of(stream), target, source, size, streams, events);
           },
           "stream"_a, "target"_a, "source"_a, "size"_a, "after"_a, "events"_a,
           "Copy `size` bytes from address `source` to address `target` on a stream, after the work so far of the streams `after` and "
           "after `events`. Return the moment after the copy.\n\nRaises:\n    RuntimeError: the driver refused.")
      .def_prop_ro("address", [](const CudaCopies& self) { return reinterpret_cast<std::uintptr_t>(&self); },
                   "Address of the object, for the functions of `cuda_copy_functions`.");
  m.def("cuda_copy_functions", [] { return reinterpret_cast<std::uintptr_t>(&copy_functions()); },
        "Return the address of the table of C functions for copies (see cuda_copies.hpp).");
}

}  // namespace

void bind_offload(nb::module_& m) {
  bind_copies(m);
  nb::set_leak_warnings(false);  // an offloaded tensor may be alive when the interpreter ends
  nb::class_<Signal>(m, "Signal", "Event that is set once; Ctrl-C leaves no wait half-done.")
      .def(nb::init<>(), "An event that is not set.")
      .def("set", &Signal::set, "Set the event.")
      .def("is_set", &Signal::is_set, "Return whether the event is set.")
      .def("wait", &Signal::wait, "seconds"_a = 1e9, nb::call_guard<nb::gil_scoped_release>(),
           "Wait until the event is set, at most so many seconds; return whether it is set. Ctrl-C is raised afterwards.");

  nb::class_<TakenRange>(m, "TakenRange", "A range taken from a free list; released with the object.")
      .def_prop_ro("at", &TakenRange::at, "Offset, bytes.");

  nb::class_<FreeList>(m, "FreeList", "Free list of an arena of host memory, in whole pages; offsets and sizes in bytes.")
      .def(nb::init<FreeList::Size>(), "size"_a, "An empty list of `size` bytes, a multiple of a page.")
      .def_prop_ro("size", &FreeList::size, "Bytes of the arena.")
      .def_prop_ro("used", &FreeList::used, "Bytes taken, in whole pages.")
      .def("allocate", &FreeList::allocate, "size"_a,
           "Take `size` bytes, 1 or more, of the best fit and return their offset; None if no free range is large enough.")
      .def("allocate_last", &FreeList::allocate_last, "size"_a,
           "Take the end of the last large enough free range, away from other places: see `allocate`.")
      .def("allocate_at", &FreeList::allocate_at, "at"_a, "size"_a,
           "Take `size` bytes, 1 or more, from page `at` on; return False if some of them are taken.")
      .def("take", &TakenRange::of, "size"_a, "at"_a = -1,
           "Take `size` bytes until the returned object ends: from page `at` on if free, else as far back as possible; for -1 at the best "
           "fit. None if no free range is large enough.")
      .def("release", &FreeList::release, "at"_a, "size"_a, "Free bytes taken before, and merge them with adjacent free ranges.")
      .def("take_peak", &FreeList::take_peak, "Return the high-water mark since the last call, in bytes.")
      .def("free_ranges", &FreeList::free_ranges, "Return the free ranges as (begin, end), by place.");
}
