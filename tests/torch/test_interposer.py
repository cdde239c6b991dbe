"""Operations and readers unseen by the offloading mode: other threads, no modes, C code, traces."""

from __future__ import annotations

import _thread
import ctypes
import gc
import itertools
import random
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import scripts
from adversary import Adversary, offloaded_range, resident_bytes
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import mempool.torch
from mempool.recording.torch import operations
from mempool.torch.eager import interposer
from mempool.torch.eager.mode import OffloadMode
from mempool.torch.offload.host_engine import HostEngine

SUM = float(sum(range(1, 1001)))
CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:FOUND weight out of range"),
]


def run_native(work: Callable[[], None]) -> None:
    """Run a function in a thread that Python did not start."""
    call = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: work())
    thread = ctypes.c_ulong()
    library = ctypes.CDLL(None)
    assert library.pthread_create(ctypes.byref(thread), None, call, None) == 0
    library.pthread_join(thread, None)


def run_raw(work: Callable[[], None]) -> None:
    """Run a function in a thread that module `threading` does not know."""
    done = threading.Event()
    _thread.start_new_thread(lambda: (work(), done.set()), ())
    done.wait()


@pytest.mark.parametrize("run", [run_native, run_raw])
def test_unannounced_threads_read_and_write_offloaded_tensors(run: Any, mode: Adversary) -> None:
    tensors = [offloaded_range(mode) for _ in range(3)]
    sparse = tensors[2].to_sparse()
    found: list[float] = []

    def work() -> None:
        found.extend(tensor.sum().item() for tensor in (tensors[0], tensors[1], sparse))
        tensors[0].add_(1)

    mode.offload_all()
    run(work)
    mode.offload_all()
    assert found == [SUM] * 3
    assert [tensor.sum().item() for tensor in tensors] == [SUM + 1000, SUM, SUM]


def test_first_operation_of_an_unannounced_thread_bars_evictions(mode: Adversary) -> None:
    entered, left = threading.Event(), threading.Event()

    @torch.library.custom_op("mempool_tests::slow_copy", mutates_args=())
    def slow_copy(x: torch.Tensor) -> torch.Tensor:
        entered.set()
        left.wait()
        return x.clone()

    tensor, found = offloaded_range(mode), []
    tensor.sum()  # which reloads the tensor
    thread = threading.Thread(target=lambda: found.append(slow_copy(tensor)))
    thread.start()
    entered.wait()
    mode.offload_all()
    assert resident_bytes(mode, tensor) == 4000
    left.set()
    thread.join()
    mode.offload_all()
    assert resident_bytes(mode, tensor) == 0
    assert found[0].sum().item() == SUM


class DisabledMode(TorchDispatchMode):
    """A mode of the program that runs operations without any mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _disable_current_modes():
            return func(*args, **(kwargs or {}))


def in_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def in_inference_mode(tensor: torch.Tensor) -> None:
    with torch.inference_mode():
        torch.zeros(1)
    tensor.add_(1)
    with torch.inference_mode():
        tensor.add_(1)


def by_kernel(tensor: torch.Tensor) -> None:
    with torch.library._scoped_library("mempool_tests", "FRAGMENT") as library:
        library.define("bump_hidden(Tensor x) -> Tensor")
        library.impl("bump_hidden", lambda x: (tensor.add_(1), x * 2)[1], "CPU")
        torch.ops.mempool_tests.bump_hidden(torch.ones(8))


def by_mode(tensor: torch.Tensor) -> None:
    with DisabledMode():
        tensor.add_(1)


def by_hook(tensor: torch.Tensor) -> None:
    def pack(saved: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            tensor.add_(1)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        torch.ones(1, requires_grad=True).exp()


WRITERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "first operation of a thread": lambda tensor: in_thread(lambda: tensor.add_(1)),
    "thread in inference mode": lambda tensor: in_thread(lambda: in_inference_mode(tensor)),
    "kernel in Python": by_kernel,
    "mode of the program": by_mode,
    "hook of saved tensors": by_hook,
}


def written_twice(name: str) -> list[float]:
    """Return the values of `offloaded_range` after two writes in plain PyTorch."""
    plain = torch.arange(1000.0).add_(1)
    with _disable_current_modes():
        WRITERS[name](plain)
        WRITERS[name](plain)
    values: list[float] = plain.tolist()
    return values


@pytest.mark.parametrize("under_way", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_unseen_writes_survive_evictions_and_reloads_under_way(
    name: str, under_way: bool, mode: Adversary
) -> None:
    tensor = offloaded_range(mode)
    record = mode.storages.find(tensor.untyped_storage())
    assert record is not None
    for _ in range(2):
        if under_way:
            mode.transfers.reload(record)
        else:
            tensor.sum()  # it is here now, and its copy on the host is good
        WRITERS[name](tensor)
        if under_way:
            tensor.sum()
        mode.offload_all()
    assert tensor.tolist() == written_twice(name)


def test_forked_script_branches_find_their_arguments() -> None:
    xs, w = [torch.full((1 << 14,), i / 16) for i in range(16)], torch.full((1 << 14,), 0.25)
    branch, forked, bumped = scripts.branch(), scripts.forked(), scripts.bumped()
    expected = [branch(x, w, 6) for x in xs]
    with mempool.torch.install(device="cpu", limit="768KiB"):
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(forked(xs, w), expected, strict=True))
            for x in xs:
                x.sum()
            bumped(xs)
            expected = [branch(x, w, 6) for x in xs]
        assert [x[0].item() for x in xs] == [i / 16 + 20 for i in range(16)]


def test_operations_without_the_mode_find_and_keep_bytes(mode: Adversary) -> None:
    tensor = offloaded_range(mode)
    with _disable_current_modes():
        assert tensor.sum().item() == SUM
    mode.offload_all()
    with torch._C._DisableTorchDispatch():
        assert tensor.sum().item() == SUM
    tensor.sum()  # it is here now, and its copy on the host is good
    with torch._C._DisableTorchDispatch():
        tensor.add_(1)
    mode.offload_all()
    assert tensor.sum().item() == SUM + 1000


def test_readers_with_an_old_address_find_the_bytes(mode: Adversary) -> None:
    tensor = offloaded_range(mode)
    address = torch._C.TensorBase.data_ptr(tensor)  # as C code has it, unseen
    assert (ctypes.c_float * 1000).from_address(address)[:3] == [1.0, 2.0, 3.0]
    assert resident_bytes(mode, tensor) == 0


def test_composite_operations_with_memory_of_their_own_are_right(mode: Adversary) -> None:
    def drawn(disturb: Callable[[], None]) -> list[Any]:
        engine = torch.quasirandom.SobolEngine(200, scramble=False)
        found = []
        for _ in range(3):
            found.append(engine.draw(16).sum().item())
            disturb()
        return found

    def saturated(disturb: Callable[[], None]) -> list[Any]:
        weight = torch.full((10, 100), 1.0)
        weight.sum()
        disturb()
        weight.add_(1e6).sum()
        disturb()
        weight.sum()  # it is here now, and its copy on the host is good
        torch._saturate_weight_to_fp16(weight)
        disturb()
        return [weight.sum().item()]

    for program in (drawn, saturated):
        got = program(mode.offload_all)
        with _disable_current_modes():
            assert got == program(lambda: None)


@pytest.mark.parametrize("name", ["mm", "add", "view", "conv"])
def test_traced_graphs_are_identical_within_a_limit(name: str, mode: Adversary) -> None:
    function: Any = {
        "mm": lambda a: a @ a + 1,
        "add": lambda a: a + 1,
        "view": lambda a: a.view(-1) * 2,
        "conv": lambda a: torch.nn.functional.conv2d(a.view(1, 1, 32, 32), a[:3, :3].reshape(1, 1, 3, 3)),
    }[name]
    x = torch.randn(32, 32)
    mode.offload_all()
    traced = torch.jit.trace(function, x)
    assert torch.allclose(traced(x), function(x))
    with _disable_current_modes():
        assert str(traced.graph) == str(torch.jit.trace(function, x).graph)


def test_aliases_from_before_the_limit_stay_aliases() -> None:
    y = torch.ones(1000)
    z = torch.from_dlpack(y)
    with mempool.torch.install(device="cpu", limit="1MiB") as pool:
        mode = pool.offloading.mode
        y.add_(1)
        mode.eviction.clear(set(), 0)
        assert z.tolist() == [2.0] * 1000
        z.add_(1)
        mode.eviction.clear(set(), 0)
        assert y.tolist() == [3.0] * 1000


def test_ctrl_c_at_any_time_leaves_values_and_counters_right() -> None:
    """Signals come after random processor times; completed work of the program stays valid."""
    chosen = random.Random(0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    kept = [torch.full((5000,), float(i)) for i in range(12)]
    gc.collect()
    gc.disable()  # Python drops what is raised in callbacks of the collection, of other tests' garbage
    try:
        with OffloadMode(HostEngine(1 << 24), CPU, 60_000, client=None) as mode:
            mode.transfers.min_bytes = 1
            for _ in range(40):
                try:
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005 + 0.004 * chosen.random())
                    while True:
                        for one, other in itertools.pairwise(kept):
                            torch.add(one, other)
                except KeyboardInterrupt:
                    pass
                finally:
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            assert torch.is_grad_enabled()
            assert [tensor.mean().item() for tensor in kept] == [float(i) for i in range(12)]
            mode.operations.remove_dead()
            records = list(mode.storages.records.values())
            here = sum(record.rounded_bytes for record in records if record.state != 2)
            assert mode.storages.resident_bytes == here
    finally:
        gc.enable()
        signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize(
    "view", [lambda tensor: tensor.unfold(0, 10, 10), lambda tensor: tensor.unflatten(0, (10, 100))]
)
def test_write_outside_inference_mode_to_its_first_view_of_a_kind_is_an_error(
    mode: Adversary, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = offloaded_range(mode).requires_grad_().clone()
    with torch.inference_mode():
        made = view(tensor)
    with pytest.raises(RuntimeError, match="created in inference mode"):
        made.add_(1)


def test_profile_has_each_operation_once(mode: Adversary) -> None:
    tensor = offloaded_range(mode)
    for _ in range(2):  # the first time, the mode estimates the memory needed by operations without memory
        with torch.profiler.profile() as profile:
            tensor.relu()
        names = [event.name for event in profile.events()]
        assert (names.count("aten::relu"), names.count("aten::clamp_min")) == (1, 1)


class Named(torch.Tensor):
    """A tensor subclass without a constructor."""


@pytest.mark.parametrize("arguments", [(), (2, 3), ([1.0, 2.0],)])
def test_classes_of_tensors_are_called_as_without_a_mode(mode: Adversary, arguments: tuple[Any]) -> None:
    assert type(Named(*arguments)) is Named
    named = Named(offloaded_range(mode))
    assert named.sum().item() == SUM
    assert named.add(1).sum().item() == SUM + 1000


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.parametrize("key", ["CPU", "CompositeExplicitAutograd"])
def test_kernels_in_python_without_autograd_compute_gradients(mode: Adversary, key: str) -> None:
    with torch.library._scoped_library("mempool_tests", "FRAGMENT") as library:
        library.define(f"doubled_{key}(Tensor x) -> Tensor")
        library.impl(f"doubled_{key}", lambda x: x * 2, key)
        tensor = offloaded_range(mode).requires_grad_()
        mode.offload_all()
        result = getattr(torch.ops.mempool_tests, f"doubled_{key}")(tensor)
        mode.offload_all()
        result.sum().backward()
    assert result.sum().item() == 2 * SUM
    assert tensor.grad.sum().item() == 2000


def test_undeclared_writes_have_the_same_names_in_python_and_in_front_of_the_dispatcher() -> None:
    source = Path(interposer.__file__).with_name("operations.hpp").read_text()

    def names(constant: str) -> list[str]:
        return re.findall(r'"(\w+)"', re.findall(rf"{constant} = \{{(.*?)\}};", source, re.DOTALL)[0])

    assert set(names("kUndeclared")) == operations.UNDECLARED
    assert tuple(names("kOnlyRead")) == operations.ONLY_READ
    for operation, argument in operations.UNDECLARED_OF:
        assert (
            f'starts_with("{operation.removeprefix("aten::")}.") && argument.name() == "{argument}"' in source
        )
