"""Pool for PyTorch's tensors on CUDA devices, through PyTorch's pluggable allocator.

PyTorch calls the core's functions by address, without Python. PyTorch accepts another allocator only before
CUDA is in use, and keeps that allocator: a closed pool still serves, without plans, until another pool is
installed. One device is planned; other devices have a pool without plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool import _core, cuda, sharing
from mempool.cuda import DRIVER
from mempool.errors import UsageError
from mempool.logs import log
from mempool.settings import TESTED, settings
from mempool.torch import compiled_library
from mempool.torch.cuda_tensors import CudaTensorPool, check_index
from mempool.torch.introspection import diagnosis, statistics

if TYPE_CHECKING:
    from mempool.settings import Memory

OLDEST = ".".join(map(str, TESTED["torch"][0]))
#: The pool's allocator object in PyTorch, in use until the process ends; None before.
_allocator: Any = None
#: The serving pool; a closed pool serves until the next installation.
_serving: CudaPool | None = None


def is_there(driver: str = DRIVER) -> bool:
    """Return true if PyTorch is built for CUDA, and a device and a driver exist; do not initialise CUDA."""
    import torch

    # `is_available` starts the driver, which then ignores later changes of CUDA_VISIBLE_DEVICES.
    # `device_count` asks the management library (NVML) instead, if installed.
    if torch.version.cuda is None or statistics.devices() == 0:
        return False
    try:
        _core.CudaDevice(driver=driver)
    except RuntimeError:  # some containers have only the management library
        return False
    return True


def is_serving() -> bool:
    """Return true if the pool has replaced PyTorch's CUDA allocator, which is irreversible."""
    return _allocator is not None


class CudaPool(CudaTensorPool):
    """A pool for tensors on one CUDA device."""

    #: Growing memory reserves the fewest bytes; without support by device and driver, plain memory is used.
    memory = "growing"

    def __init__(self, index: int | None = None, *, driver: str = DRIVER, **options: Any) -> None:
        """Make a pool for device number `index`, or for the device of the first tensor.

        Raises:
            UsageError: the device or the driver does not exist, or an option is not for CUDA.
        """
        self._driver = driver
        check_index(index)
        memory = settings(memory=options.get("memory")).memory
        options["share"] = sharing.pool_of(options.get("share"), index)
        try:
            if memory is None and options["share"] is None:
                self._cuda, options["memory"] = _growing_or_plain(index, driver)
            else:
                self._cuda = sharing.cuda_device(index, driver, options["share"], memory or self.memory)
        except UsageError:
            _refuse_without_cuda()  # raises a better message
            raise
        super().__init__(self._cuda, **options)

    def serve(self) -> None:
        """Become PyTorch's CUDA allocator.

        Raises:
            UsageError: CUDA is in use already, or this PyTorch cannot change the allocator.
        """
        global _serving
        hook = _core.torch_cuda_hook(self._driver)  # first: PyTorch may call the functions next
        if _allocator is None:
            _become_allocator()
        hook.serve(self.client, instead=True)  # instead of a closed pool
        _serving = self
        statistics.replace_functions(serving_client)
        _keep_benchmark_off()
        diagnosis.warn(diagnosis.diagnose(serving=True))

    def stop_serving(self) -> None:
        """Do nothing: PyTorch keeps the pool's functions."""

    def close(self) -> None:
        """Continue without plans, as a caching allocator. Tensors stay valid."""
        super().close()
        if self._final is None:
            self._final = super().report()
        self.client.drop_patterns()  # after the planner's end, which may still install a plan
        sharing.keep_as_closed(self)


def _growing_or_plain(index: int | None, driver: str) -> tuple[_core.CudaDevice, Memory]:
    """Return a device that chooses its kind of memory on first use, and the kind until then."""
    try:
        return _core.CudaDevice(index, driver=driver, memory="growing", else_plain=True), "growing"
    except RuntimeError:  # no driver, or a driver before CUDA 10.2
        return cuda.device(index, driver), "plain"


def _refuse_without_cuda() -> None:
    import torch

    if not torch.backends.cuda.is_built():
        raise UsageError(f"PyTorch {torch.__version__} was built without CUDA: install a build with CUDA")


def _become_allocator() -> None:
    """Make the core's functions PyTorch's allocator until the process ends."""
    global _allocator
    import torch

    for finding in diagnosis.diagnose().findings:
        if finding.name in diagnosis.IN_THE_WAY:
            raise UsageError(f"{finding.problem}: {finding.remedy}")
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise UsageError(f"PyTorch {torch.__version__} cannot change its CUDA allocator")
    functions = _core.torch_cuda_functions()
    made = torch._C._cuda_customAllocator(functions.pop("alloc"), functions.pop("free"))
    if missing := [name for name in functions if not hasattr(made, name)]:
        raise UsageError(
            f"PyTorch {torch.__version__} lacks {', '.join(missing)}; {OLDEST} and later have them"
        )
    for name, address in functions.items():
        getattr(made, name)(address)
    try:
        torch.cuda.memory.change_current_allocator(torch.cuda.memory._CUDAAllocator(made))
    except RuntimeError as error:
        raise UsageError(f"PyTorch does not take another allocator: {error}") from None
    _allocator = made
    _core.torch_cuda_refuse_by(_refusal())


def _refusal() -> int:
    """Return the address of the function that throws `torch.OutOfMemoryError`; 0 if the build fails."""
    try:
        return compiled_library.out_of_memory_function()
    except Exception as error:  # tolerable: only the error's class differs
        log.warning("out of memory will be a RuntimeError instead of torch.OutOfMemoryError: %s", error)
        return 0


def _keep_benchmark_off() -> None:
    """Keep cuDNN's benchmark off, since PyTorch's query of it fails with a pluggable allocator."""
    import torch

    plain = torch._C._set_cudnn_benchmark
    if getattr(plain, "_mempool", False):
        return

    def set_benchmark(value: Any) -> None:
        if value:
            diagnosis.warn(diagnosis.Diagnosis((diagnosis.BENCHMARK,)))
        plain(False)  # noqa: FBT003

    set_benchmark._mempool = True  # type: ignore[attr-defined]
    torch._C._set_cudnn_benchmark = set_benchmark
    # `torch.backends.cudnn.benchmark` is a property with a separate reference to the function.
    vars(type(torch.backends.cudnn))["benchmark"].setter = set_benchmark
    if torch._C._get_cudnn_benchmark():
        set_benchmark(value=True)


def serving_client(index: int) -> tuple[_core.Client, _core.Pool] | None:
    """Return the client and pool of a device's statistics; before the first tensor, of the waiting pool."""
    if _serving is not None and _serving.index in (index, None):
        return _serving.client, _serving.core
    plain = _core.torch_cuda_plain(index)
    return None if plain is None else (plain, plain.pool)
