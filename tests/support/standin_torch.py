"""Random programs of PyTorch's on the stand-in for CUDA, whose late queues show memory used too early."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from fake_cuda import FakeCuda

from mempool.rehearsal.standin import LIBRARY

if TYPE_CHECKING:
    from collections.abc import Callable

    import mempool.torch

MOST = 1 << 20  #: bytes of the largest tensor
SIZES = (100, 5000, 70_000, 300_000, MOST, MOST)
#: Held during a capture, while a private pool is active, and while waiting for the device, since CUDA forbids
#: these at the same time; also while a stream is recorded, since PyTorch's allocator forgets that during a
#: capture or with a private pool.
_CAPTURING = threading.RLock()


def driver() -> FakeCuda:
    """Return the driver below PyTorch, in its present state."""
    return FakeCuda(LIBRARY, None)


def check_faults() -> None:
    faults = driver().faults
    assert not faults, faults


def registrations(tensor: torch.Tensor) -> int:
    """Return the number of NCCL's communicators that have registered the memory of a tensor."""
    library = ctypes.CDLL(str(LIBRARY))
    return int(library.fake_registrations(*map(ctypes.c_size_t, (tensor.data_ptr(), tensor.nbytes))))


def wait_for_device() -> None:
    with _CAPTURING:
        torch.cuda.synchronize()


@dataclass(eq=False)
class Tensor:
    """A tensor of bytes.

    Attributes:
        data: the tensor.
        value: value of each byte once all queued work is done.
        owner: the stream of the allocation.
        users: streams with work on it.
    """

    data: torch.Tensor
    value: int
    owner: torch.cuda.Stream
    users: set[torch.cuda.Stream] = field(default_factory=set)


class Program:
    """A program that makes, copies, overwrites and frees tensors on several streams, and captures graphs.

    The program follows PyTorch's rules for streams. Its kernels are copies, whose results are compared on the
    device.
    """

    def __init__(
        self, seed: int, pool: mempool.torch.TensorPool, *, streams: int = 3, in_thread: bool = False
    ) -> None:
        self._random, self._pool, self._in_thread = random.Random(seed), pool, in_thread
        self._driver = driver()
        self._host = [torch.full((MOST,), value, dtype=torch.uint8).pin_memory() for value in range(1, 17)]
        self._streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(streams - 1))]
        self._tensors: list[Tensor] = []
        self._graphs: list[tuple[torch.cuda.CUDAGraph, Tensor, torch.Tensor]] = []
        self._private: torch.cuda.MemPool | None = None
        self._shared: list[tuple[Tensor, int, tuple[Any, ...]]] = []
        self.replays = 0
        self.before_order: Callable[[], object] = lambda: None
        self._steps: list[Callable[[], object]] = [
            *[self._make] * 6, *[self._use] * 8, *[self._free] * 3, *[self._free_and_join] * 2,
            *[self._capture] * 2, *[self._replay] * 2, self._wait, self._mark,
        ]  # fmt: skip
        if torch.cuda.get_allocator_backend() == "native":
            self._steps += [*[self._share] * 2, self._collect, *[self._make_in_private_pool] * 2]

    def step(self) -> None:
        self._random.choice(self._steps)()
        if len(self._tensors) > 30:
            self._free()
        check_faults()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        for tensor in self._tensors:
            self._expect(tensor, self._streams[0])
        self._tensors.clear()
        self._graphs.clear()
        while self._shared:
            self._collect()
        with _CAPTURING:
            self._private = None
        gc.collect()
        wait_for_device()
        check_faults()

    def _any(self) -> Tensor | None:
        return self._random.choice(self._tensors) if self._tensors else None

    def _fill(self, tensor: Tensor) -> None:
        tensor.value = self._random.randrange(1, 17)
        tensor.data.copy_(self._host[tensor.value - 1][: tensor.data.numel()], non_blocking=True)

    def _expect(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Copy on a stream, and compare the copy, after all work on the tensor so far."""
        self._order(stream, tensor.users)
        tensor.users.add(stream)
        with torch.cuda.stream(stream):
            copy = tensor.data.clone()
            self._driver.expect(stream.cuda_stream, copy.data_ptr(), copy.numel(), tensor.value)

    def _order(self, stream: torch.cuda.Stream, others: Any) -> None:
        self.before_order()
        for other in others:
            if other != stream:
                stream.wait_stream(other)

    # --- steps

    def _make(self) -> None:
        stream = self._random.choice(self._streams)
        with torch.cuda.stream(stream):
            data = torch.empty(self._random.choice(SIZES), dtype=torch.uint8, device="cuda")
            self._tensors.append(Tensor(data, 0, stream, {stream}))
            self._fill(self._tensors[-1])

    def _use(self) -> None:
        if (tensor := self._any()) is None:
            return
        stream = self._random.choice(self._streams)
        self._expect(tensor, stream)
        with torch.cuda.stream(stream):
            if stream != tensor.owner:
                with _CAPTURING:
                    tensor.data.record_stream(stream)
            if self._random.random() < 0.4:
                self._fill(tensor)

    def _free(self) -> None:
        if self._tensors:
            with torch.cuda.stream(self._random.choice(self._streams)):
                self._tensors.pop(self._random.randrange(len(self._tensors)))

    def _free_and_join(self) -> None:
        """Free a tensor that another stream uses, and let the tensor's own stream wait for that.

        The wait may follow the free, but precedes the own stream's next allocation. On the default stream, on
        which another thread may allocate in between, it precedes the free.
        """
        if (tensor := self._any()) is not None:
            self._expect(tensor, self._random.choice(self._streams))
            owner, users = tensor.owner, tensor.users
            if self._in_thread and owner == self._streams[0]:
                self._order(owner, users)
            self._tensors.remove(tensor)
            del tensor
            self._order(owner, users)

    def _capture(self) -> None:
        """Capture a graph that copies a tensor, makes others, and frees some."""
        if (tensor := self._any()) is None or self._random.random() < 0.5:
            return
        graph, modes = torch.cuda.CUDAGraph(), ("thread_local", "global", "relaxed")
        mode = modes[0] if self._in_thread else self._random.choice(modes)
        stream = self._random.choice([None, *self._streams[1:]])
        with _CAPTURING:
            try:
                with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
                    between = tensor.data.clone()
                    result = between.clone()
                    del between
                    if self._random.random() < 0.3:
                        self._free()
            except RuntimeError as error:
                if "is on the host" not in f"{error} {error.__context__}":
                    raise
                torch.cuda.synchronize()
                return
        self._graphs.append((graph, tensor, result))

    def _replay(self) -> None:
        if not self._graphs:
            return
        graph, tensor, result = self._random.choice(self._graphs)
        stream = self._random.choice(self._streams)
        self._order(stream, self._streams)
        with torch.cuda.stream(stream):
            graph.replay()
            self._driver.expect(stream.cuda_stream, result.data_ptr(), result.numel(), tensor.value)
        self.replays += 1
        tensor.users.add(stream)
        for other in self._streams:
            self._order(other, [stream])
        if self._random.random() < 0.3:
            wait_for_device()
            self._graphs.remove((graph, tensor, result))

    def _make_in_private_pool(self) -> None:
        with _CAPTURING:
            if self._private is None or self._random.random() < 0.1:
                self._private = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(self._private):
                self._make()
        address = self._tensors[-1].data.data_ptr()
        segments = [(one["address"], one["total_size"]) for one in self._private.snapshot()]
        assert any(begin <= address < begin + size for begin, size in segments)

    def _share(self) -> None:
        """Share a tensor with a process that keeps its memory, also when it is free here."""
        if (tensor := self._any()) is None:
            return
        with torch.cuda.stream(tensor.owner):
            shared = tensor.data.untyped_storage()._share_cuda_()
        users = {torch.cuda.current_stream(), *tensor.users}
        copy = Tensor(tensor.data.new_empty(0), tensor.value, tensor.owner, users)
        self._shared.append((copy, tensor.data.data_ptr(), shared))
        self._tensors.remove(tensor)

    def _collect(self) -> None:
        """Let the other process check and release a tensor."""
        if not self._shared:
            return
        tensor, address, (_, _, size, _, counter, place, *_) = self._shared.pop(
            self._random.randrange(len(self._shared))
        )
        self._order(self._streams[0], tensor.users)
        self._driver.expect(self._streams[0].cuda_stream, address, size, tensor.value)
        wait_for_device()
        torch.UntypedStorage._release_ipc_counter(counter, place, device="cuda")
        torch.cuda.ipc_collect()

    def _wait(self) -> None:
        chance = self._random.random()
        if chance < 0.3:
            wait_for_device()
        elif chance < 0.7:
            self._random.choice(self._streams).synchronize()
        else:
            torch.cuda.empty_cache()

    def _mark(self) -> None:
        if not self._in_thread:
            self._pool.step()
            self._pool.plan_now()


def run_on_threads(seed: int, pool: mempool.torch.TensorPool) -> None:
    """Run three programs at once, and check that each ends without an error."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            Program(100 * seed + number, pool, in_thread=True).run(120)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def run_interleaved(seed: int, pool: mempool.torch.TensorPool) -> None:
    """Run a program, and a step of another, as if of another thread, before each wait of a stream."""
    program, other = (Program(100 * seed + number, pool, in_thread=True) for number in range(2))
    program.before_order = other.step
    program.run(120)
    other.run(0)


def check_nothing_is_left(pool: mempool.torch.TensorPool) -> None:
    """Check that nothing is alive, nothing is held after the closing, and nothing was used too early."""
    assert torch.cuda.memory_allocated() == 0
    pool.close()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    check_faults()
