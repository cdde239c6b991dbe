"""PyTorch's tensors on CUDA devices, through its pluggable allocator.

PyTorch calls the core's functions by their addresses; no Python runs when a tensor is made. It takes another
allocator only before CUDA is in use, and keeps it: a closed pool goes on serving, without plans, until
another one is installed. One device is planned; what is made on others has a plain pool there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool import _core, sharing
from mempool.cuda import DRIVER
from mempool.errors import UsageError
from mempool.logs import log
from mempool.settings import NEVER, settings
from mempool.torch import TensorPool, companion, diagnosis, statistics
from mempool.versions import TESTED

if TYPE_CHECKING:
    import torch

    from mempool.report import Report

OLDEST = ".".join(map(str, TESTED["torch"][0]))
#: PyTorch's allocator object, once it is ours: it and our functions are in use until the process ends.
_allocator: Any = None
#: The pool that serves, which a closed one does until the next.
_serving: CudaPool | None = None


def is_there(driver: str = DRIVER) -> bool:
    """Whether PyTorch is built for CUDA and sees a device, and there is a driver; initialises nothing."""
    import torch

    # `is_available` starts the driver, which from then on never looks at CUDA_VISIBLE_DEVICES. Counting asks
    # the library for managing GPUs instead, where that is there.
    if torch.version.cuda is None or statistics.devices() == 0:
        return False
    try:
        _core.CudaDevice(driver=driver)
    except RuntimeError:  # only the library for managing GPUs is there, as in some containers
        return False
    return True


def is_serving() -> bool:
    """Whether PyTorch's CUDA allocator is ours, which it then is for good."""
    return _allocator is not None


class CudaPool(TensorPool):
    """A pool for tensors on one CUDA device."""

    #: Programs may have a use by another stream waited for after the free, before their next allocation.
    wait_bytes = NEVER

    def __init__(self, index: int | None = None, *, driver: str = DRIVER, **options: Any) -> None:
        """Make a pool for the device of this index, or for the first that a tensor is made on.

        Raises:
            UsageError: there is no such device or no driver, or an option does not go with CUDA.
        """
        self._driver = driver
        self._final: Report | None = None
        if index is not None and index >= (count := statistics.devices()) > 0:
            raise UsageError(f"no CUDA device {index}; PyTorch sees {count}")
        memory = settings(memory=options.get("memory")).memory
        options["share"] = sharing.pool_of(options.get("share"), index)
        try:
            self._cuda = sharing.cuda_device(index, driver, options["share"], memory)
        except UsageError:
            _refuse_without_cuda()  # which explains it better
            raise
        super().__init__(self._cuda, **options)

    @property
    def index(self) -> int | None:
        """Of the device; None while no tensor has decided."""
        return self._cuda.index

    @property
    def torch_device(self) -> torch.device:
        """The device; without an index while no tensor has decided."""
        import torch

        return torch.device("cuda") if self.index is None else torch.device("cuda", self.index)

    def serve(self) -> None:
        """Take PyTorch's CUDA tensors over.

        Raises:
            UsageError: CUDA is in use already, or this PyTorch cannot change its allocator.
        """
        global _serving
        hook = _core.torch_cuda_hook(self._driver)  # first: from then on our functions may be called
        if _allocator is None:
            _become_allocator()
        hook.serve(self.client, instead=True)  # of a closed pool
        _serving = self
        statistics.begin(_who_serves)
        _keep_benchmark_off()
        diagnosis.warn(diagnosis.diagnose(serving=True))

    def stop_serving(self) -> None:
        """Nothing yet: PyTorch keeps our functions."""

    def close(self) -> None:
        """Go on without plans, as a caching allocator. Tensors stay valid."""
        super().close()
        if self._final is None:
            self._final = super().report()
        self.client.drop_patterns()  # after the planner, which may have been about to install one
        sharing.keep_as_closed(self)

    def report(self) -> Report:
        """Counts and sizes; of a closed pool, as they were when it was closed."""
        return super().report() if self._final is None else self._final


def _refuse_without_cuda() -> None:
    import torch

    if not torch.backends.cuda.is_built():
        raise UsageError(f"PyTorch {torch.__version__} was built without CUDA: install a build with CUDA")


def _become_allocator() -> None:
    """Make our functions PyTorch's allocator, for good."""
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
    """Address of what throws `torch.OutOfMemoryError`; 0 where it cannot be built."""
    try:
        return companion.refusal()
    except Exception as error:  # whatever goes wrong there, ours is the allocator already
        log.warning("out of memory will be a RuntimeError instead of torch.OutOfMemoryError: %s", error)
        return 0


def _keep_benchmark_off() -> None:
    """The benchmark of cuDNN asks the allocator for what a plugged-in one cannot say, and PyTorch raises."""
    import torch

    plain = getattr(torch._C, "_set_cudnn_benchmark", None)
    if plain is None or getattr(plain, "_mempool", False):
        return

    def set_benchmark(value: Any) -> None:
        if value:
            diagnosis.warn(diagnosis.Diagnosis((diagnosis.BENCHMARK,)))
        plain(False)  # noqa: FBT003

    set_benchmark._mempool = True  # type: ignore[attr-defined]
    torch._C._set_cudnn_benchmark = set_benchmark
    if torch._C._get_cudnn_benchmark():
        set_benchmark(value=True)


def _who_serves(index: int) -> tuple[_core.Client, _core.Pool] | None:
    """Whose statistics answer for a device; before the first tensor, those of the pool that waits for it."""
    if _serving is not None and _serving.index in (index, None):
        return _serving.client, _serving.core
    plain = _core.torch_cuda_plain(index)
    return None if plain is None else (plain, plain.pool)
