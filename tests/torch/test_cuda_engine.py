"""Copies by streams: no order that streams can run in makes a wrong byte, and the host waits for none.

A device in small: places of its memory are handed out in the order of the program, as PyTorch's allocator
does, and written by kernels that are queued; moves of a storage follow the rules of `TransferManager`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from fake_streams import FakeRuntime, Stream

from mempool.errors import UsageError
from mempool.torch.eager.mode import OffloadMode
from mempool.torch.offload import cuda_engine, pinned_memory
from mempool.torch.offload.cuda_engine import CudaEngine
from mempool.torch.offload.engine import HostFullError
from mempool.torch.offload.host_memory import PAGE
from mempool.torch.offload.link import SIZES
from solvers.swap import Link

if TYPE_CHECKING:
    from mempool.torch.offload.engine import HostCopy, Transfer

SIZE = 256
CPU = torch.device("cpu")
HERE, LEAVING, AWAY, COMING = range(4)


class Storage:
    """A storage: what it holds, where, and how it moves."""

    def __init__(self, value: int, data: torch.Tensor, owner: Stream) -> None:
        self.value, self.state, self.clean = value, HERE, False
        self.data: torch.Tensor | None = data
        self.owner = self.user = owner  # the stream that took the memory, and the last one at work on it
        self.copy: HostCopy | None = None
        self.transfer: Transfer | None = None


class Device:
    """Few places, each taken again at once by what its stream asks for next, and written by that at once."""

    def __init__(self, seed: int, streams: int, host: int) -> None:
        self.runtime = FakeRuntime(seed)
        self.streams = [self.runtime.main, *(self.runtime.stream() for _ in range(streams - 1))]
        self.engine = CudaEngine(CPU, host * PAGE, runtime=self.runtime)
        self.free: dict[Stream, list[torch.Tensor]] = {stream: [] for stream in self.streams}
        self.storages: list[Storage] = []
        self.wrong: list[str] = []
        self._values = 0

    def take(self, stream: Stream) -> torch.Tensor:
        data = self.free[stream].pop() if self.free[stream] else torch.zeros(SIZE, dtype=torch.uint8)
        stream.do(lambda: data.fill_(255))
        return data

    def new(self, stream: Stream) -> None:
        self._values = self._values % 250 + 1
        made = Storage(self._values, self.take(stream), stream)
        self.storages.append(made)
        data, value = made.data, made.value
        stream.do(lambda: data.fill_(value))

    def kernel(self, storage: Storage, stream: Stream, *, writes: bool) -> None:
        """An operation on a stream: what it needs is brought; the program orders its own streams."""
        self.bring(storage)
        if storage.user is not stream:
            stream.wait_event(self.runtime.event(storage.user))
            storage.user = stream
        self.engine.note_stream()
        data, value = storage.data, storage.value
        assert data is not None

        def run() -> None:
            if not bool((data == value).all()):
                self.wrong.append(f"{data[0]} instead of {value}")

        stream.do(run)
        if writes:
            self._values = self._values % 250 + 1
            storage.value = after = self._values
            stream.do(lambda: data.fill_(after))
            storage.clean = False

    def leave(self, storage: Storage) -> None:
        if storage.state == HERE and not storage.clean:
            if storage.copy is not None:
                self.engine.drop(storage.copy)
                storage.copy = None
            assert storage.data is not None
            try:
                storage.copy, storage.transfer = self.engine.offload(storage.data)
            except HostFullError:
                return
            storage.state, storage.clean = LEAVING, True

    def release(self, storage: Storage) -> None:
        self.settle(storage)
        if storage.state == HERE and storage.clean:
            self.engine.fence()
            assert storage.data is not None
            self.free[storage.owner].append(storage.data)
            storage.data, storage.state = None, AWAY

    def fetch(self, storage: Storage) -> None:
        if storage.state == AWAY:
            stream = self.runtime.current()
            storage.data, storage.owner = self.take(stream), stream
            storage.transfer = self.engine.reload(storage.copy, storage.data)
            storage.state = COMING

    def settle(self, storage: Storage) -> None:
        if storage.transfer is not None:
            assert self.engine.wait(storage.transfer) == 0.0
            storage.transfer, storage.state = None, HERE

    def bring(self, storage: Storage) -> None:
        self.fetch(storage)
        if storage.state == COMING:
            self.settle(storage)

    def end(self, storage: Storage) -> None:
        """The program lets go of it; the allocator orders what another stream was at work on."""
        self.storages.remove(storage)
        self.settle(storage)
        if storage.data is not None:
            if storage.user is not storage.owner:
                storage.owner.wait_event(self.runtime.event(storage.user))
            self.free[storage.owner].append(storage.data)
        if storage.copy is not None:
            self.engine.drop(storage.copy)

    def step(self, what: str, number: int) -> None:
        stream = self.streams[number % len(self.streams)]
        with self.runtime.using(stream):
            if what == "n" or not self.storages:
                self.engine.mark()
                self.new(stream)
                return
            storage = self.storages[number // 7 % len(self.storages)]
            if what in "rw":
                self.kernel(storage, stream, writes=what == "w")
            else:
                {"l": self.leave, "g": self.release, "f": self.fetch, "b": self.bring, "e": self.end}[what](
                    storage
                )
        self.runtime.advance(number % 5)


@settings(max_examples=int(os.environ.get("MEMPOOL_SWAP_EXAMPLES", "150")), deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.integers(1, 3),
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from("nnrwwllggfbe"), st.integers(0, 1 << 12)), max_size=80),
)
def test_no_interleaving_of_streams_corrupts_bytes(
    seed: int, streams: int, host: int, steps: list[tuple[str, int]]
) -> None:
    device = Device(seed, streams, host)
    for what, number in steps:
        device.step(what, number)
    for storage in device.storages:
        device.kernel(storage, device.runtime.main, writes=False)
    device.engine.close()
    device.runtime.finish()
    assert device.wrong == []


def trained(limit: int | None, *, seed: int = 0) -> tuple[list[str], list[Any], Any]:
    """Losses, parameters and what swapping did, of a model whose copies come as late as they can."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    runtime = FakeRuntime(seed, eager=True)
    swapper: Any = contextlib.nullcontext()
    if limit is not None:
        made = CudaEngine(CPU, 1 << 24, runtime=runtime)
        made._link = Link.of_rate(1e9)
        swapper = OffloadMode(made, CPU, limit)
    losses = []
    with swapper:
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(512, 32)).square().mean()
            loss.backward()
            losses.append(loss.item().hex())
            optimizer.step()
    return losses, [one.detach().clone() for one in model.parameters()], swapper


def test_training_is_bit_identical_with_late_copies() -> None:
    losses, parameters, _ = trained(None)
    _, _, whole = trained(1 << 40)
    for seed in range(2):
        same, alike, swapper = trained(whole.counts.peak_bytes // 2, seed=seed)
        assert swapper.counts.out_bytes > 0
        assert swapper.counts.peak_bytes <= swapper.limit_bytes
        assert same == losses
        assert all(torch.equal(one, other) for one, other in zip(parameters, alike, strict=True))


def engine(host: int = 1 << 20, **options: int) -> tuple[FakeRuntime, CudaEngine]:
    runtime = FakeRuntime(**options)
    return runtime, CudaEngine(CPU, host, runtime=runtime)


def bytes_of(engine: CudaEngine, copy: HostCopy) -> set[int]:
    return set(ctypes.string_at(engine.address(copy), copy.size))


@pytest.mark.parametrize("seed", range(12))
def test_late_streams_wait_for_copies_and_copies_for_them(seed: int) -> None:
    """Memory of a stream that was at work before the engine was made, which then moves on another."""
    runtime, made = engine(seed=seed)
    late, memory = runtime.stream(), torch.zeros(SIZE, dtype=torch.uint8)
    late.do(lambda: memory.fill_(7))
    made.mark()
    copy, leaving = made.offload(memory)
    made.wait(leaving)
    again = torch.zeros(SIZE, dtype=torch.uint8)
    made.wait(made.reload(copy, again))
    wrong = list[str]()
    with runtime.using(late):
        made.note_stream()
        late.do(lambda: wrong.extend([] if again.eq(7).all() else ["read before it was back"]))
        late.do(lambda: memory.fill_(9))  # taken by the next that asks on this stream
    runtime.finish()
    assert wrong == []
    assert bytes_of(made, copy) == {7}


def test_cuda_is_not_initialized_before_the_program_does() -> None:
    """This PyTorch is perhaps built without CUDA, and would say so."""
    made = CudaEngine(torch.device("cuda", 3), 1 << 20)
    made.note_stream()
    made.fence()
    assert made.seconds([made.mark(), made.mark()]) == [0.0]
    assert made.host_bytes == 0
    made.close()


def test_forked_child_does_not_use_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, made = engine()
    copy, transfer = made.offload(torch.zeros(SIZE, dtype=torch.uint8))
    runtime.finish()
    monkeypatch.setattr(made, "_process", -1)
    monkeypatch.setattr(made, "_runtime", None)  # whatever asks it, dies
    made.note_stream()
    made.fence()
    made.mark()
    assert made.wait(transfer) == 0.0
    with pytest.raises(HostFullError, match="no forked child"):
        made.offload(torch.zeros(SIZE, dtype=torch.uint8))
    with pytest.raises(UsageError, match="no forked child"):
        made.reload(copy, torch.zeros(SIZE, dtype=torch.uint8))
    made.close()


def test_memory_read_by_reloads_is_reused_in_stream_order() -> None:
    runtime, made = engine(host=PAGE)
    left, target = torch.full((SIZE,), 7, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
    copy, _ = made.offload(left)
    made.reload(copy, target)
    with pytest.raises(HostFullError, match="bytes are left on the host"):
        made.offload(left)
    made.drop(copy)
    made.drop(copy)
    made.offload(torch.full((SIZE,), 9, dtype=torch.uint8))
    with pytest.raises(HostFullError):
        made.offload(left)
    assert not target.any()  # nobody waited
    runtime.finish()
    assert target.eq(7).all()


def test_pinned_memory_is_bounded_and_copies_lie_in_a_single_part() -> None:
    runtime, made = engine(host=300 << 20)
    copies = [made.offload(torch.zeros(20 << 20, dtype=torch.uint8))[0] for _ in range(12)]
    assert made.host_bytes <= 300 << 20
    locks = runtime.locks
    with pytest.raises(HostFullError):
        made.offload(torch.zeros(40 << 20, dtype=torch.uint8))
    assert runtime.locks == locks
    assert len({copy.at for copy in copies}) == 12
    made.close()


def test_refused_lock_is_no_room() -> None:
    runtime, made = engine(host=80 << 20, lockable=3 * PAGE)
    made.offload(torch.zeros(2 * PAGE, dtype=torch.uint8))
    with pytest.raises(HostFullError):
        made.offload(torch.zeros(2 * PAGE, dtype=torch.uint8))
    assert made.host_bytes == 2 * PAGE
    with pytest.raises(UsageError, match="CUDA locks no"):
        made.link()
    runtime.finish()


def test_planned_bytes_are_locked_at_once() -> None:
    runtime, made = engine(host=300 << 20)
    made.reserve(200 << 20)
    for _ in range(10):
        made.offload(torch.zeros(20 << 20, dtype=torch.uint8))
    made.reserve(100 << 20)
    assert runtime.locks == 1
    made.close()


def test_copy_lies_at_the_planned_offset_of_a_dropped_copy() -> None:
    """Also before the last copy out of it has ended, for which then the next one waits."""
    runtime, made = engine(host=8 * PAGE)
    made.reserve(6 * PAGE)
    data, target = (torch.full((2 * PAGE,), k, dtype=torch.uint8) for k in (7, 0))
    first, _ = made.offload(data, 4 * PAGE)
    assert first.at == 4 * PAGE
    made.reload(first, target)
    made.drop(first)
    second, _ = made.offload(torch.full((2 * PAGE,), 9, dtype=torch.uint8), 4 * PAGE)
    assert second.at == 4 * PAGE
    third, _ = made.offload(data, 4 * PAGE)
    assert third.at != 4 * PAGE
    runtime.finish()
    assert target.eq(7).all()
    assert bytes_of(made, second) == {9}
    made.close()


def test_graph_capture_refuses_offloads_and_reloads() -> None:
    runtime, made = engine()
    copy, _ = made.offload(torch.zeros(SIZE, dtype=torch.uint8))
    runtime.graph = True
    tasks = len(runtime.main.tasks)
    made.mark()
    assert len(runtime.main.tasks) == tasks
    with pytest.raises(HostFullError, match="a graph is captured"):
        made.offload(torch.zeros(SIZE, dtype=torch.uint8))
    with pytest.raises(UsageError, match="what a CUDA graph uses is on the host"):
        made.reload(copy, torch.zeros(SIZE, dtype=torch.uint8))


def test_marks_exclude_stream_waits() -> None:
    runtime, made = engine()
    first = made.mark()
    runtime.finish()
    _, transfer = made.offload(torch.zeros(SIZE, dtype=torch.uint8))
    assert made.wait(transfer) == 0.0
    made._out.tasks.appendleft(lambda: setattr(runtime, "now", runtime.now + 1000))
    made._out.tasks.appendleft(transfer.waits[0][0])  # it takes a second from when it is waited for
    last = made.mark()
    (seconds,) = made.seconds([first, last])
    assert made.waited(transfer) > 0.9
    assert seconds < 0.1


def test_tensor_of_another_device_is_refused() -> None:
    _, made = engine()
    with pytest.raises(HostFullError, match="what lies on meta does not leave cpu"):
        made.offload(torch.zeros(SIZE, dtype=torch.uint8, device="meta"))


def test_finished_copies_release_their_data_without_a_wait() -> None:
    runtime, made = engine()
    _, transfer = made.offload(torch.zeros(SIZE, dtype=torch.uint8))
    made.mark()
    assert transfer.data is not None
    runtime.finish()
    made.mark()
    assert transfer.data is None
    assert made.waited(transfer) == 0.0


class Driver:
    """As much of libcuda as locks memory."""

    def __init__(self, _: str) -> None:
        self.locked: dict[int, int] = {}

    def cuMemHostRegister_v2(self, address: Any, size: Any, flags: int) -> int:  # noqa: N802
        assert flags == 1 | 2  # portable, and mapped for kernels
        assert address.value % PAGE == size.value % PAGE == 0
        if sum(self.locked.values()) + size.value > 10 * PAGE:
            return 2
        self.locked[address.value] = size.value
        return 0

    def cuMemHostUnregister(self, address: Any) -> int:  # noqa: N802
        del self.locked[address.value]
        return 0


def test_pinned_memory_is_locked_and_unlocked_by_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned_memory.ctypes, "CDLL", Driver)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: None)
    memory = pinned_memory.PinnedMemory(20 * PAGE, CPU)
    assert memory.lock(0, 4 * PAGE)
    assert not memory.lock(4 * PAGE, 8 * PAGE)
    assert memory.lock(4 * PAGE, 6 * PAGE)
    memory.data(PAGE, 3).fill_(7)
    assert memory.data(PAGE - 1, 5).tolist() == [0, 7, 7, 7, 0]
    driver = memory._driver
    assert len(driver.locked) == 2
    memory.close()
    assert driver.locked == {}


def test_link_is_measured_by_device_events_and_unlocks_its_memory() -> None:
    runtime, made = engine()
    link = made.link()
    assert link is made.link()
    assert runtime.locks == 1
    assert made.host_bytes == 0
    assert link.out_fixed > 0
    assert max(SIZES) * link.out_per_byte < 1e-2  # every copy of the fake one takes a millisecond or some


def test_measurement_registers_no_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_engine, "SIZES", (1, PAGE))
    monkeypatch.setattr(cuda_engine, "measure", lambda copies: copies.timed(PAGE, out=True, back=True))
    _, made = engine()
    with OffloadMode(made, CPU, 1 << 30) as swapper:
        assert made.link()
        assert swapper.storages.resident_bytes == 0
