#include <pthread.h>

#include <cstdlib>

#include "bindings/bindings.hpp"
#include "core/client.hpp"

NB_MODULE(_core, m) {
  m.doc() = "Native core of the pool: devices, arena and guard, fallback, state machine, entry points of the "
            "adapters.";
  pthread_atfork(mempool::Client::prepare_fork, mempool::Client::after_fork_in_parent,
                 mempool::Client::after_fork_in_child);
  if (const char* const path = std::getenv("MEMPOOL_FLIGHT")) mempool::flight::begin(path);
  m.def("begin_flight", &mempool::flight::begin, nanobind::arg("path"), nanobind::arg("records") = mempool::flight::kRecords,
        "Record the calls of pools and driver in a file; an empty path ends the recording.");
  bind_device(m);
  bind_pattern(m);
  bind_offload(m);
  bind_pool(m);
  bind_client(m);
  bind_recording(m);
  bind_snapshot(m);
  bind_checked(m);
  bind_hook(m);
  bind_numpy(m);
  bind_torch(m);
  bind_cupy(m);
  bind_replay(m);
  bind_harness(m);
}
