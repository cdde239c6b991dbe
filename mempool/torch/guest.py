"""Pool for PyTorch's tensors on CUDA devices, in front of PyTorch's own allocator.

The *guest* (``guest.cpp``, compiled against the user's PyTorch) serves planned requests from the arena, which
is one block of PyTorch's allocator. PyTorch's allocator handles all other requests and functions. The guest
can be installed while CUDA is in use, and serves until the pool is closed; planned tensors stay valid after
that. One device is planned.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from mempool import _core, cuda
from mempool.cuda import DRIVER
from mempool.errors import UsageError
from mempool.settings import TESTED, settings
from mempool.torch import compiled_library
from mempool.torch.cuda_tensors import CudaTensorPool, check_index

#: Remedy for each option that only the pluggable backend has.
_NOT_HERE = {
    "share": "only a pool that replaces PyTorch's allocator can share memory",
    "limit": "only a pool that replaces PyTorch's allocator can offload",
    "memory": "PyTorch's allocator has its own kinds: set PYTORCH_ALLOC_CONF",
    "max_reserved": "PyTorch's allocator has its own limit: torch.cuda.set_per_process_memory_fraction",
    "check": "on the host only",
}

#: Settings of PyTorch's allocator that the guest makes: any free page of an expandable segment can serve the
#: arena, and smaller pages leave fewer bytes in partly used pages. The size is the smallest that PyTorch
#: accepts (figures: docs/benchmarks.md).
_SETTINGS = {"expandable_segments": "True", "large_segment_size_mb": "12"}

#: Environment variables by which NCCL registers PyTorch's memory, and what PyTorch takes for true.
_REGISTRATION = ("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK")
_TRUE = ("1", "y", "yes", "t", "true")


def obstacle() -> str | None:
    """Build the guest's library; return the reason why the guest cannot serve, or None."""
    import torch

    if not torch.backends.cuda.is_built():
        return f"PyTorch {torch.__version__} was built without CUDA"
    oldest, newest = TESTED["torch"]
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not oldest <= version <= newest:
        return f"the guest does not know the allocator of PyTorch {torch.__version__}"
    if (name := torch.cuda.get_allocator_backend()) != "native":
        return f"PyTorch's allocator is {name!r}, not 'native'"
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return "PyTorch's allocator does not cache (PYTORCH_NO_CUDA_MEMORY_CACHING)"
    try:
        compiled_library.guest_library()
    except UsageError as error:
        return str(error)
    return None


def refused_options(options: dict[str, Any]) -> list[str]:
    """Return the names of the given options, and of set environment variables, that the guest refuses."""
    names = [name for name in _NOT_HERE if name != "share"]
    chosen = settings(environment=True, **{name: options.get(name) for name in names})
    given = {"share": options.get("share"), **{name: getattr(chosen, name) for name in names}}
    return [name for name in _NOT_HERE if given[name]]


class GuestPool(CudaTensorPool):
    """A pool for tensors on one CUDA device whose arena is a block of PyTorch's allocator."""

    can_be_shared = False

    def __init__(self, index: int | None = None, *, driver: str = DRIVER, **options: Any) -> None:
        """Make a pool for the device of this index, or for the first device that a tensor is made on.

        Raises:
            UsageError: the device or the driver does not exist, or an option is of the pluggable backend.
        """
        check_index(index)
        for name in refused_options(options):
            raise UsageError(f"{name} is not for backend='guest': {_NOT_HERE[name]}")
        self._cuda = cuda.device(index, driver, "hosted")
        super().__init__(self._cuda, **options)

    def serve(self) -> None:
        """Serve planned tensors from now on.

        Raises:
            UsageError: a graph is being captured, compiled functions have captured graphs, or another
                allocator has come in front of the guest.
        """
        import torch

        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise UsageError("a CUDA graph is being captured: install the pool before or after")
        # PyTorch compares the deleters of the graphs' tensors, which differ from the guest's.
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        if trees is not None and any(
            container.tree_manager is not None for container in trees.local.tree_manager_containers.values()
        ):
            raise UsageError(
                "a compiled function has captured CUDA graphs: install the pool before its first call,"
                " or call torch._dynamo.reset()"
            )
        compiled_library.install_guest()
        _use_expandable_segments()
        _core.torch_guest_hook().serve(self.client)

    def memory_counters(self) -> dict[str, Any]:
        """Return the counters of the memory, whose reserved bytes are all bytes of PyTorch's allocator."""
        import torch

        held = torch.cuda.memory_stats_as_nested_dict(self.index).get("reserved_bytes", {}).get("all", {})
        keys = {"current": "current", "peak": "peak", "total": "allocated"}
        return super().memory_counters() | {
            "reserved": {key: held.get(name, 0) for key, name in keys.items()}
        }

    def stop_serving(self) -> None:
        """Let PyTorch's allocator serve all requests; planned tensors stay valid."""
        if self.settings.mode != "off":
            _core.torch_guest_stop()

    def close(self) -> None:
        """Stop planning, and let PyTorch's allocator serve all requests and, once unused, have the arena."""
        super().close()
        if self._final is None:
            self._final = super().report()
            self.client.drop_patterns()
            if self.settings.mode != "off":
                compiled_library.hand_back_arena()


def _use_expandable_segments() -> None:
    """Switch PyTorch's expandable segments on, unless the program has set them.

    With them PyTorch does not register memory for collectives.
    """
    import torch

    if any(os.environ.get(name, "0").lower() in _TRUE for name in _REGISTRATION):
        return
    own = compiled_library.allocator_settings()
    if any(name in own for name in ("expandable_segments", "max_split_size_mb")):
        return
    missing = [f"{name}:{value}" for name, value in _SETTINGS.items() if name not in own]
    torch._C._accelerator_setAllocatorSettings(",".join([own, *missing] if own else missing))
    compiled_library.share_by_files()
