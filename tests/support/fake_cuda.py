"""Python interface of the fake CUDA driver in mempool/rehearsal/native/driver/."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from mempool import _core

T = TypeVar("T")
#: Modes of captures and of threads towards them.
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
OUT_OF_MEMORY, INVALID_VALUE, DEINITIALIZED, NOT_INITIALIZED = 2, 1, 4, 3
#: Functions that allocate memory, by kind of memory.
GETS_MEMORY = {
    "plain": ("cuMemAlloc_v2",),
    "growing": ("cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"),
    "managed": ("cuMemAllocManaged",),
    "pinned": ("cuMemHostAlloc",),
}
KINDS = list(GETS_MEMORY)
_ARGUMENTS = {
    "reset": "i",
    "set_capacity": "iz",
    "set_alignment": "z",
    "set_lockable": "z",
    "set_attribute": "iii",
    "set_granularity": "z",
    "fail": "siii",
    "slow": "si",
    "shut_down": "",
    "primary": "i>p",
    "context": "i>p",
    "current": ">p",
    "context_depth": ">i",
    "mode": ">i",
    "set_current": "p",
    "stream": "pi>p",
    "finish": "pp",
    "pending": "pp>z",
    "write": "pppzB>i",
    "expect": "pppzB>i",
    "begin_capture": "ppi>i",
    "capture_status": "pp>i",
    "fork": "ppp>i",
    "end_capture": "pp>i",
    "launch": "ipp>i",
    "destroy_graph": "i",
    "calls": "s>i",
    "live_bytes": "i>z",
    "peak_bytes": "i>z",
    "live_allocations": ">z",
    "live_memories": ">z",
    "live_streams": ">i",
    "page_faults": "i>z",
    "has_access": "pi>i",
    "logged": ">z",
    "log": "zsz",
    "advised": ">z",
    "advice": "zsz",
    "primary_retained": "i>i",
    "faults": ">z",
    "fault": "zsz",
}
_TYPES = {
    "i": ctypes.c_int,
    "z": ctypes.c_size_t,
    "p": ctypes.c_void_p,
    "s": ctypes.c_char_p,
    "B": ctypes.c_ubyte,
}


class FakeCuda:
    """A driver with a number of devices, or in its present state.

    Streams belong to the first device's primary context by default.

    Work is done when ``finish`` lets its stream go on, or when somebody waits for it.

    Attributes:
        by_hand: the test frees memory itself, and may leave some behind.
    """

    def __init__(self, library: Path, devices: int | None = 2) -> None:
        self.driver = str(library)
        self.by_hand = False
        self._library = ctypes.CDLL(self.driver)
        for name, signature in _ARGUMENTS.items():
            function = getattr(self._library, f"fake_{name}")
            arguments, _, answer = signature.partition(">")
            function.argtypes = [_TYPES[kind] for kind in arguments]
            function.restype = _TYPES[answer] if answer else None
        if devices is not None:
            self.reset(devices)

    def _call(self, name: str, *arguments: int | bytes | None) -> int:
        return getattr(self._library, f"fake_{name}")(*arguments) or 0

    # --- set up

    def reset(self, devices: int = 2) -> None:
        self._call("reset", devices)

    def device(self, index: int | None = 0, memory: str = "plain") -> _core.CudaDevice:
        from mempool import _core  # not at the top: the driver itself is of use without

        return _core.CudaDevice(index, driver=self.driver, memory=memory)

    def set_capacity(self, capacity: int, device: int = 0) -> None:
        self._call("set_capacity", device, capacity)

    def set_lockable(self, size: int) -> None:
        """Limit the page-locked bytes of the host."""
        self._call("set_lockable", size)

    def set_alignment(self, alignment: int) -> None:
        self._call("set_alignment", alignment)

    def set_attribute(self, attribute: int, value: int, device: int = 0) -> None:
        self._call("set_attribute", device, attribute, value)

    def set_granularity(self, granularity: int) -> None:
        """Set the size of pages in bytes."""
        self._call("set_granularity", granularity)

    def fail(self, symbol: str, code: int = INVALID_VALUE, *, after: int = 0, times: int = 1 << 30) -> None:
        """Let `times` calls of a function fail after `after` successful calls; ``times=0``: no failures."""
        self._call("fail", symbol.encode(), code, after, times)

    def slow(self, symbol: str, ms: int) -> None:
        """Delay each call of a function; other threads can call the driver meanwhile."""
        self._call("slow", symbol.encode(), ms)

    def shut_down(self) -> None:
        """Let all calls fail as they do at the end of a process; memory is not returned."""
        self.by_hand = True
        self._call("shut_down")

    # --- contexts and threads

    def primary(self, device: int = 0) -> int:
        return self._call("primary", device)

    def context(self, device: int = 0) -> int:
        """Make a further context next to the primary one."""
        return self._call("context", device)

    @property
    def current(self) -> int:
        return self._call("current")

    @property
    def context_depth(self) -> int:
        return self._call("context_depth")

    def set_current(self, context: int) -> None:
        """Set the calling thread's only context; 0: none."""
        self._call("set_current", context)

    @property
    def mode(self) -> int:
        """Set the calling thread's capture mode."""
        return self._call("mode")

    # --- streams

    def stream(self, context: int | None = None, *, blocking: bool = False) -> int:
        return self._call("stream", context or self.primary(), blocking)

    def finish(self, stream: int) -> None:
        self._call("finish", stream, self.primary())

    def pending(self, stream: int) -> int:
        """Return the number of queued tasks."""
        return self._call("pending", stream, self.primary())

    def write(self, stream: int, address: int, size: int, value: int) -> None:
        """Queue a kernel that writes a value to all bytes."""
        assert self._call("write", stream, self.primary(), address, size, value) == 0

    def expect(self, stream: int, address: int, size: int, value: int, device: int = 0) -> None:
        """Queue a kernel that reports a fault unless all bytes have a value."""
        assert self._call("expect", stream, self.primary(device), address, size, value) == 0

    # --- captures

    def begin_capture(self, stream: int, mode: int = GLOBAL) -> None:
        assert self._call("begin_capture", stream, self.primary(), mode) == 0

    def is_captured(self, stream: int) -> bool:
        return self._call("capture_status", stream, self.primary()) != 0

    def is_broken(self, stream: int) -> bool:
        """Return true if the capture is invalidated."""
        return self._call("capture_status", stream, self.primary()) == 2

    def fork(self, origin: int, side: int) -> None:
        """Join another stream to the capture."""
        assert self._call("fork", origin, side, self.primary()) == 0

    def end_capture(self, stream: int) -> int:
        """End the capture; return the number of the graph, or a negative error."""
        return self._call("end_capture", stream, self.primary())

    def launch(self, graph: int, stream: int) -> None:
        assert self._call("launch", graph, stream, self.primary()) == 0

    def destroy_graph(self, graph: int) -> None:
        self._call("destroy_graph", graph)

    # --- look

    def calls(self, symbol: str) -> int:
        return self._call("calls", symbol.encode())

    def live_bytes(self, device: int = 0) -> int:
        return self._call("live_bytes", device)

    def peak_bytes(self, device: int = 0) -> int:
        return self._call("peak_bytes", device)

    @property
    def live_allocations(self) -> int:
        return self._call("live_allocations")

    @property
    def live_memories(self) -> int:
        """Return the number of live physical allocations, which back the pages."""
        return self._call("live_memories")

    @property
    def live_streams(self) -> int:
        """Return the number of created streams that still exist."""
        return self._call("live_streams")

    def page_faults(self, device: int = 0) -> int:
        """Return the number of page faults of kernels on managed memory."""
        return self._call("page_faults", device)

    def access(self, address: int) -> set[int]:
        """Return the devices with access to the page at an address."""
        return {index for index in range(2) if self._call("has_access", address, index)}

    @property
    def log(self) -> list[str]:
        """Return the symbols of all driver calls since the last reset."""
        return self._texts("logged", "log")

    @property
    def advice(self) -> list[tuple[int, int, int, int]]:
        """Return (address, bytes, advice, device) of each advice."""
        return [tuple(map(int, text.split())) for text in self._texts("advised", "advice")]  # type: ignore[misc]

    def primary_retained(self, device: int = 0) -> int:
        return self._call("primary_retained", device)

    @property
    def faults(self) -> list[str]:
        """Return the faults of the program since the last reset."""
        return self._texts("faults", "fault")

    def _texts(self, count: str, one: str) -> list[str]:
        found = []
        for index in range(self._call(count)):
            text = ctypes.create_string_buffer(200)
            getattr(self._library, f"fake_{one}")(index, text, len(text))
            found.append(text.value.decode())
        return found


def calls(
    fake: FakeCuda, device: _core.CudaDevice | int | None = 0, memory: str = "plain"
) -> _core.DeviceCalls:
    """Yield the device calls of a pool; the test may leave memory behind."""
    from mempool import _core

    fake.by_hand = True
    return _core.DeviceCalls(device if isinstance(device, _core.CudaDevice) else fake.device(device, memory))


def on_another_thread(work: Callable[[], T]) -> T:
    """Return the result of a function in another thread."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    thread.join()
    return answers[0]


def eventually(true: Callable[[], object]) -> bool:
    """Return whether a condition holds soon.

    Thread-local objects end shortly after the thread does in Python.
    """
    deadline = time.monotonic() + 60
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


@contextlib.contextmanager
def ticking() -> Iterator[list[int]]:
    """Append to the list, in another thread, every few milliseconds in which Python can run."""
    ticks: list[int] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.005):
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    yield ticks
    done.set()
    thread.join()
