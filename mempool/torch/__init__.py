"""PyTorch's tensors in a pool.

    import mempool.torch

    pool = mempool.torch.install()
    pool.watch(optimizer)  # or pool.step(), or nothing: the pool finds the iteration by itself
    for batch in batches:
        train(batch)
    print(pool.report())

With ``limit="12GiB"`` tensors that wait for their next use do so in the host's memory: see
`mempool.torch.swapping`.

Every tensor on the chosen kind of device whose memory PyTorch allocates is served, of every thread, and may
outlive the pool, its thread, and the interpreter. `mempool.torch.cpu` and `mempool.torch.cuda` say what is
particular to each.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from mempool.errors import UsageError
from mempool.place import Place, place_of
from mempool.pool import Pool

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from mempool.torch.accesses import AccessRecording
    from mempool.torch.diagnosis import Diagnosis
    from mempool.torch.fitting import Fit
    from mempool.torch.found_steps import FoundSteps
    from mempool.torch.swapping.attached import Swapping


def install(*, device: str | torch.device | None = None, **options: Any) -> TensorPool:
    """Serve the tensors of this process from a new pool, until it is closed.

    On CUDA this comes before anything has initialised CUDA, and stays: PyTorch cannot change its allocator
    later, so a pool that is closed goes on serving, without plans.

    The first time with a version of PyTorch a small library is compiled against it, which takes some seconds
    and a C++ compiler, and is kept for later (see `mempool.torch.companion`).

    Args:
        device: "cpu"; "cuda", the first CUDA device that a tensor is made on; "cuda:1", that one. By default
            "cuda" where PyTorch sees a GPU, else "cpu".
        options: as for `mempool.Pool`. With ``limit`` the calling thread's tensors and those of its
            backwards are swapped.

    Returns:
        The pool; leaving its ``with``, its ``close`` and `uninstall` all end it. Its report stays readable.

    Raises:
        UsageError: a pool is installed already, there is no such device, CUDA is initialised already, the
            options make no sense, or PyTorch or the compiler does not permit it.
        OSError, solvers.PlanError, traces.TraceError: the plan file cannot be read, or is no plan.
    """
    make = _maker(device, options)
    return _place.install(lambda: make(**options), lambda pool: pool.begin())


def uninstall() -> None:
    """Close the installed pool: PyTorch is as before, living tensors stay valid. Warns if there is none."""
    _place.uninstall()


def installed() -> TensorPool | None:
    """The pool that serves PyTorch, or None."""
    return _place.pool


def is_installed() -> bool:
    """Whether a pool serves PyTorch."""
    return _place.pool is not None


def diagnose() -> Diagnosis:
    """What a CUDA pool cannot live with, and what to do about it, before training dies of it.

    Returns:
        The findings: print them; ``ok`` if nothing stops. It touches neither the GPU nor any setting.
    """
    from mempool.torch import cuda, diagnosis

    return diagnosis.diagnose(serving=cuda.is_serving())


def fit(*args: Any, **options: Any) -> Fit:
    """Tell what a training step, or an inference, would need before it runs: see `mempool.torch.fitting.fit`.

        print(mempool.torch.fit(model, torch.zeros(32, 3, 224, 224), limit="24GiB"))

    Neither a GPU nor memory is needed, and no pool is installed.
    """
    from mempool.torch import fitting

    return fitting.fit(*args, **options)


def record(
    path: str | os.PathLike[str] | None = None,
    model: torch.nn.Module | Iterable[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
) -> AccessRecording:
    """Record what operations read and write, beside all that the installed pool allocates and frees.

        with mempool.torch.record("run.trace", model, optimizer) as recording:
            for batch in batches:
                train(batch)
        recording.trace

    Without an installed pool the trace has what the recorder sees alone: storages, not what kernels allocate
    inside. It holds the operations of the thread that enters, of its backward too.

    Args:
        path: of the trace; None writes none.
        model: one or more, whose parameters and buffers are named from the beginning; others when called.
        optimizer: one or more; the steps of the last end iterations, without any those of the first to step.

    Raises:
        UsageError: the pool writes a trace itself.
    """
    from mempool.torch.accesses import AccessRecording

    return AccessRecording(path, model, optimizer)


class TensorPool(Pool):
    """A pool that leaves PyTorch when it is closed."""

    framework = "torch"
    swaps = True

    def __init__(self, device: Any, **options: Any) -> None:
        self._swapping: Swapping | None = None
        self._found_steps: FoundSteps | None = None
        super().__init__(device, **{"name": "torch", **options})

    def begin(self) -> None:
        """Serve PyTorch's tensors, and keep them within the limit if there is one."""
        self.serve()
        ends = self.settings.mode == "replay" and self.settings.limit is None  # swapping finds steps itself
        shown = self._tape is not None and self.settings.limit is None
        if ends or shown:
            from mempool.torch.found_steps import FoundSteps

            self._found_steps = FoundSteps(self, ends=ends, shown=shown)
        if (limit := self.settings.limit) is not None:
            from mempool.torch.swapping.attached import Swapping

            try:
                self._swapping = Swapping(self, self.torch_device, limit)
            except BaseException:
                self.stop_serving()
                raise

    @property
    def torch_device(self) -> torch.device:
        """The device as PyTorch names it; without an index while none is decided."""
        raise NotImplementedError

    def serve(self) -> None:
        """Take PyTorch's tensors over."""
        raise NotImplementedError

    def stop_serving(self) -> None:
        """Leave PyTorch, whose living tensors stay valid."""
        raise NotImplementedError

    def mark_found_step(self) -> None:
        """Mark the end of an iteration that was found by the steps of an optimizer."""
        with contextlib.suppress(
            UsageError
        ):  # inside of `iteration`, which has just begun for the first time
            self._step(found=True)

    def _end_finding_steps(self) -> None:
        if self._found_steps is not None:
            self._found_steps.end()

    def watch(self, optimizer: torch.optim.Optimizer) -> Any:
        """End an iteration at every step of the optimizer.

        One that a framework stands around another counts as that other: a call that only adds up gradients
        ends nothing. Inside `iteration`, which ends iterations itself, a step raises `UsageError` before it
        begins.

        Returns:
            A handle, whose ``remove()`` ends it.

        Raises:
            UsageError: it is no optimizer of PyTorch's, nor around one.
        """
        from traces.recorders.optimizers import hooked_optimizer

        hooked = hooked_optimizer(optimizer)
        if hooked is None:
            raise UsageError(
                f"watch() takes an optimizer of torch.optim, not {type(optimizer).__name__}; where something "
                "else steps, call pool.step() after it"
            )
        hooks = _Watch(
            hooked.register_step_pre_hook(lambda *_: self._check_outside_iterations()),
            hooked.register_step_post_hook(lambda *_: self.step()),
        )
        if self._swapping is not None:
            self._swapping.marked()
        self._end_finding_steps()
        self.expect_marks()
        return hooks

    def step(self) -> None:
        """Mark the end of one iteration and the beginning of the next; the swapping's likewise."""
        self._end_finding_steps()
        super().step()
        if self._swapping is not None:
            self._swapping.mark()

    @contextlib.contextmanager
    def iteration(self) -> Iterator[None]:
        """Mark one iteration: see `mempool.Pool.iteration`."""
        self._end_finding_steps()
        with super().iteration():
            if self._swapping is not None:
                self._swapping.begin()
            try:
                yield
            finally:
                if self._swapping is not None:
                    self._swapping.mark()

    def swapping_values(self) -> dict[str, Any] | None:
        """What the report says of swapping; None where nothing is swapped."""
        return None if self._swapping is None else self._swapping.values()

    def close(self) -> None:
        """Leave PyTorch and stop planning. Tensors stay valid, and what was swapped is on the device."""
        if self._swapping is not None:
            self._swapping.end()
        self._end_finding_steps()
        _place.leave(self, self.stop_serving)
        super().close()


class _Watch:
    """Hooks of an optimizer."""

    def __init__(self, *hooks: Any) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        """Take them away."""
        for hook in self._hooks:
            hook.remove()


_place: Place[TensorPool] = place_of("PyTorch", "mempool.torch")


def _maker(device: str | torch.device | None, options: dict[str, Any]) -> Callable[..., TensorPool]:
    """What makes a pool for this device."""
    from mempool.cuda import DRIVER
    from mempool.torch import cpu, cuda

    chosen = (
        ("cuda" if cuda.is_there(options.get("driver", DRIVER)) else "cpu") if device is None else str(device)
    )
    kind, _, index = chosen.partition(":")
    if kind == "cpu" and index in ("", "0"):
        return cpu.CpuPool
    if kind == "cuda" and (index == "" or (index.isascii() and index.isdigit())):
        return functools.partial(cuda.CudaPool, int(index) if index else None)
    raise UsageError(f"no device {device!r}; there are 'cpu', 'cuda' and 'cuda:1'")
