"""Pool for PyTorch's tensors on CUDA devices, through PyTorch's pluggable allocator.

PyTorch calls the core's functions by their addresses; no Python runs when a tensor is made. PyTorch accepts
another allocator only before CUDA is in use, and keeps that allocator: a closed pool goes on serving,
without plans, until another pool is installed. One device is planned; other devices have a plain pool.
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
#: PyTorch's allocator object, once replaced by the pool's: the object and its functions are in use until the
#: process ends.
_allocator: Any = None
#: The pool in service; a closed pool stays in service until the next one.
_serving: CudaPool | None = None


def is_there(driver: str = DRIVER) -> bool:
    """Return true if PyTorch is built for CUDA, sees a device and a driver exists; initialise nothing."""
    import torch

    # `is_available` starts the driver, which from then on ignores changes of CUDA_VISIBLE_DEVICES. Counting
    # devices asks the management library (NVML) instead, where that library exists.
    if torch.version.cuda is None or statistics.devices() == 0:
        return False
    try:
        _core.CudaDevice(driver=driver)
    except RuntimeError:  # only the management library is present, as in some containers
        return False
    return True


def is_serving() -> bool:
    """Return true if PyTorch's CUDA allocator is the pool's, which then is final."""
    return _allocator is not None


class CudaPool(CudaTensorPool):
    """A pool for tensors on one CUDA device."""

    #: Growing memory holds the fewest bytes; a device without it, or an old driver, has plain memory.
    memory = "growing"

    def __init__(self, index: int | None = None, *, driver: str = DRIVER, **options: Any) -> None:
        """Make a pool for the device of this index, or for the first device that a tensor is made on.

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
        hook = _core.torch_cuda_hook(self._driver)  # first: from here on PyTorch may call our functions
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
        """Go on without plans, as a caching allocator. Tensors stay valid."""
        super().close()
        if self._final is None:
            self._final = super().report()
        self.client.drop_patterns()  # after the planner's end: a plan may have been about to be installed
        sharing.keep_as_closed(self)


def _growing_or_plain(index: int | None, driver: str) -> tuple[_core.CudaDevice, Memory]:
    """Return a device that chooses plain memory where there is no growing memory, and the kind until then."""
    try:
        return _core.CudaDevice(index, driver=driver, memory="growing", else_plain=True), "growing"
    except RuntimeError:  # no driver, which plain memory refuses too, or one before CUDA 10.2
        return cuda.device(index, driver), "plain"


def _refuse_without_cuda() -> None:
    import torch

    if not torch.backends.cuda.is_built():
        raise UsageError(f"PyTorch {torch.__version__} was built without CUDA: install a build with CUDA")


def _become_allocator() -> None:
    """Make the core's functions PyTorch's allocator for the rest of the process."""
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
    except Exception as error:  # any failure is tolerable here: PyTorch's allocator is already replaced
        log.warning("out of memory will be a RuntimeError instead of torch.OutOfMemoryError: %s", error)
        return 0


def _keep_benchmark_off() -> None:
    """Keep cuDNN's benchmark off: it queries a value that no pluggable allocator provides; PyTorch raises."""
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
    # `torch.backends.cudnn.benchmark` is a property with a reference of its own to the function.
    vars(type(torch.backends.cudnn))["benchmark"].setter = set_benchmark
    if torch._C._get_cudnn_benchmark():
        set_benchmark(value=True)


def serving_client(index: int) -> tuple[_core.Client, _core.Pool] | None:
    """Return the client and pool of a device's statistics; before any tensor, those of the waiting pool."""
    if _serving is not None and _serving.index in (index, None):
        return _serving.client, _serving.core
    plain = _core.torch_cuda_plain(index)
    return None if plain is None else (plain, plain.pool)
