"""CuPy's allocator as CuPy calls it, in a module that sanitizers watch; see cupy_module/module.cpp.

    cupy_calls.py MODULE DRIVER SEED ROUNDS KIND [stay]

Threads make buffers on their streams of two devices of the fake driver, write to them, hand them over, drop
them or leave them to the garbage collector, among requests that are refused and calls that fail. What is
reused too early, or lost, is noticed. With "stay", some live until the interpreter ends.
"""

from __future__ import annotations

import gc
import itertools
import random
import sys
import threading
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from fake_cuda import FakeCuda

MIB = 1 << 20
CAPACITY = 64 * MIB
PER_THREAD = 2
#: One iteration that is planned: bytes and offset.
PLAN = ((10_000, 0), (20_000, 10_240), (30_000, 30_720), (5_000, 0))


def module_at(path: str) -> Any:
    """The module in this file."""
    loader = ExtensionFileLoader("cupy_module", path)
    spec = spec_from_loader("cupy_module", loader)
    assert spec is not None
    return module_from_spec(spec)


class Memory:
    """As `cupy.cuda.UnownedMemory`; now and then it cannot be made."""

    refused = threading.local()

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int) -> None:
        if getattr(self.refused, "next", False):
            self.refused.next = False
            raise KeyError("no memory object")
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class Pointer:
    """As `cupy.cuda.MemoryPointer`."""

    def __init__(self, mem: Memory, offset: int) -> None:
        self.mem, self.ptr, self.me = mem, mem.ptr + offset, None


class Setting:
    """What the threads share."""

    def __init__(self, cupy: Any, fake: FakeCuda, kind: str) -> None:
        self.cupy, self.fake, self.kind = cupy, fake, kind
        self.lock = threading.Lock()
        self.clients: dict[int, Any] = {}
        self.alive: dict[int, int] = {}
        self.mailbox: list[Buffer] = []
        self.shortages = 0
        self.allocate = self.allocator()

    def allocator(self) -> Any:
        return self.cupy.allocator(Memory, Pointer, self.client, self.shortage)

    def client(self, index: int) -> Any:
        with self.lock:
            if index not in self.clients:
                self.clients[index] = self.cupy.client(self.fake.driver, index, self.kind)
            return self.clients[index]

    def shortage(self, index: int, size: int, again: bool) -> bool:
        gc.collect()
        self.shortages += 1
        if again:
            raise MemoryError(f"{size} bytes on device {index}")
        return True


class Buffer:
    """A pointer, and what was written there."""

    def __init__(self, setting: Setting, size: int, device: int, stream: int, value: int) -> None:
        self.setting, self.device, self.stream, self.value = setting, device, stream, value
        setting.cupy.set_current(device, stream)
        self.pointer = setting.allocate(size)
        self.begin, self.size = self.pointer.ptr, size
        assert self.pointer.mem.device_id == device
        with setting.lock:
            for begin, end in setting.alive.items():
                assert self.begin + size <= begin or end <= self.begin, "two live buffers overlap"
            setting.alive[self.begin] = self.begin + size
        for begin, count in self.ends():
            setting.fake.write(stream, begin, count, value)

    def ends(self) -> list[tuple[int, int]]:
        """Where it is looked at: streams of the first device alone, which others can name."""
        if self.device or self.stream == PER_THREAD:
            return []
        count = min(self.size, 1024)
        return [(self.begin, count), (self.begin + self.size - count, count)]

    def over(self) -> None:
        """Its last use is queued; whoever drops it next frees it."""
        for begin, count in self.ends():
            self.setting.fake.expect(self.stream, begin, count, self.value)
        with self.setting.lock:
            del self.setting.alive[self.begin]


class Worker:
    """One thread's part."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.s, self.random, self.kept = setting, random.Random(seed), list[Buffer]()
        self.streams = [0, PER_THREAD, setting.fake.stream(), setting.fake.stream(setting.fake.primary(1))]

    def run(self, steps: int) -> None:
        rare = [self.refused, self.wrong, self.hand_over, self.take_over, self.finish, self.give_back]
        acts = [*rare, self.another_allocator, *[self.make] * 5, *[self.drop] * 4]
        for _ in range(steps):
            self.random.choice(acts)()
            assert not self.s.fake.faults, self.s.fake.faults

    def make(self) -> None:
        if len(self.kept) == 20:
            return
        device = int(self.random.random() < 0.3)
        stream = self.streams[3 if device else self.random.randrange(3)]
        size = self.random.choice([1, 500, 5_000, 100_000, MIB, 3 * MIB])
        self.kept.append(Buffer(self.s, size, device, stream, self.random.randrange(256)))

    def drop(self) -> None:
        if not self.kept:
            return
        buffer = self.kept.pop(self.random.randrange(len(self.kept)))
        buffer.over()
        if self.random.random() < 0.3:  # a cycle: it goes in some collection, in some thread
            buffer.pointer.me = buffer.pointer

    def hand_over(self) -> None:
        with self.s.lock:
            self.s.mailbox += [self.kept.pop()] if self.kept else []

    def take_over(self) -> None:
        with self.s.lock:
            self.kept += [self.s.mailbox.pop()] if self.s.mailbox else []

    def finish(self) -> None:
        self.s.fake.finish(self.streams[2])

    def give_back(self) -> None:
        for client in list(self.s.clients.values()):
            self.s.cupy.give_back(client)

    def refused(self) -> None:
        more = 1 << 60 if self.s.kind == "managed" else 2 * CAPACITY  # managed: than the host has
        self.s.cupy.set_current(0, 0)
        try:
            self.s.allocate(more)
        except MemoryError:
            return
        raise AssertionError("more than there is")

    def wrong(self) -> None:
        self.s.cupy.set_current(0, self.streams[2])
        assert self.s.allocate(0).ptr == 0
        for bad, error in ((-1, ValueError), ("1", TypeError), (1 << 70, OverflowError)):
            self.fails(error, bad)
        self.fails(TypeError)
        Memory.refused.next = True
        self.fails(KeyError, 70_000)
        self.s.cupy.set_current(1 << 20, 0)
        self.fails(RuntimeError, 100)

    def fails(self, kind: type[Exception], *arguments: Any) -> None:
        try:
            self.s.allocate(*arguments)
        except kind:
            return
        raise AssertionError(f"no {kind}")

    def another_allocator(self) -> None:
        """In a cycle with its parts, and gone while its buffer lives."""
        asked = Asked(self.s)
        asked.allocate = self.s.cupy.allocator(Memory, Pointer, asked, self.s.shortage)
        self.s.cupy.set_current(0, 0)
        pointer = asked.allocate(4096)
        del asked
        assert pointer.ptr != 0


class Asked:
    """Who is asked for clients, and knows the allocator that asks."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.allocate: Any = None

    def __call__(self, index: int) -> Any:
        return self.setting.client(index)


def replay(setting: Setting) -> None:
    client = setting.client(0)
    setting.cupy.load(client, PLAN)
    before = setting.cupy.counts(client)[0]
    for _ in range(4):
        setting.cupy.mark(client)
        kept = [Buffer(setting, size, 0, 0, 1) for size, _ in PLAN[:3]]
        kept.pop(0).over()
        kept.append(Buffer(setting, PLAN[3][0], 0, 0, 2))
        while kept:
            kept.pop().over()
    assert setting.cupy.counts(client)[0] >= before + 4, "nothing is replayed"


def one_round(cupy: Any, fake: FakeCuda, seed: int, kind: str) -> Setting:
    setting = Setting(cupy, fake, kind)
    replay(setting)
    workers = [Worker(setting, 8 * seed + i) for i in range(3)]
    errors: list[BaseException] = []

    def run(worker: Worker) -> None:
        try:
            worker.run(150)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert setting.shortages
    last = [buffer for worker in workers for buffer in worker.kept] + setting.mailbox
    for worker in workers:
        worker.kept.clear()
    setting.mailbox.clear()
    if seed % 2:  # the last buffers end the pools
        setting.clients.clear()
        setting.allocate = None
    for buffer in last:
        buffer.over()
    for stream in itertools.chain.from_iterable(worker.streams for worker in workers):
        fake.finish(stream)
    return setting


def main(path: str, driver: str, seed: str, rounds: str, kind: str, stay: str = "") -> None:
    cupy = module_at(path)
    fake = FakeCuda(Path(driver))
    for device in range(2):
        fake.set_capacity(CAPACITY, device)
    gc.set_threshold(50)
    for number in range(int(seed), int(seed) + int(rounds)):
        setting = one_round(cupy, fake, number, kind)
        gc.collect()
        left = [cupy.counts(client)[1:] for client in setting.clients.values()]
        assert not any(map(any, left)), f"seed {number}: (buffers left, frees too many) are {left}"
        del setting, left
        gc.collect()
        assert cupy.live_clients() == 0, f"seed {number}: a client is left"
        assert (fake.live_allocations, fake.live_memories, fake.live_events) == (0, 0, 0), "memory is left"
        assert not fake.faults, fake.faults
    if stay:
        leave(cupy, fake, kind)
    print("holds")


def leave(cupy: Any, fake: FakeCuda, kind: str) -> None:
    """In a module, in a cycle, in an object that ends last of all, and in a thread that goes on."""
    setting = Setting(cupy, fake, kind)

    class Last:
        def __del__(self, allocate: Any = setting.allocate) -> None:
            self.pointer = allocate(3000)

    sys.kept = [Buffer(setting, 4096, 0, 0, 1), Last()]  # type: ignore[attr-defined]
    cycle = Buffer(setting, MIB, 0, 0, 1)
    cycle.pointer.me = cycle.pointer
    begun = threading.Event()

    def work() -> None:
        mine = None
        while True:
            mine = setting.allocate(10_000), mine and mine[0]
            begun.set()

    threading.Thread(target=work, daemon=True).start()
    begun.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
