"""Interface of the copy engines between device and host, with sequential copies per direction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from mempool.errors import UsageError
from mempool.units import sized

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from solvers.swap import Link


class OffloadRefusedError(UsageError):
    """Error for an offload that is impossible now."""


class HostFullError(OffloadRefusedError):
    """Error for a copy that does not fit into the host's arena."""

    def __init__(self, size: int, most: int) -> None:
        """Describe a copy of `size` bytes for which the arena of `most` bytes has no room."""
        super().__init__(f"no {size:,} of the {sized(most)} for copies are left on the host")


class HostCopy(Protocol):
    """Copy of a storage's bytes on the host: `size` bytes at offset `at` in the engine's memory."""

    size: int
    at: int


class Transfer(Protocol):
    """A requested copy."""

    size: int


class SyncCopier(Protocol):
    """Synchronous copies by the program's thread.

    Attributes:
        sync_bytes: above this size, asynchronous copies are faster.
    """

    sync_bytes: int

    def offload_now(self, tensor: torch.Tensor, size: int, at: int = -1) -> HostCopy:
        """Copy `size` bytes, from a tensor's first element, to the host; ``at`` as for `Engine.offload`.

        Raises:
            HostFullError: the arena has no room for the copy.
        """

    def reload_now(self, copy: Any, tensor: torch.Tensor) -> None:
        """Copy the bytes of `offload_now` back, from a tensor's first element."""


class NativeCopies(Protocol):
    """Copies that C++ code requests, and a range of host memory for them.

    Attributes:
        handles: table of functions, object of the copies, the program's stream, the streams out and in,
            address of the host's arena, and the range's offset there, for `mempool_moves_begin`.
    """

    handles: tuple[int, int, int, int, int, int, int]

    def release(self, held: list[HostCopy], places: list[tuple[int, int]]) -> None:
        """Release the range and the copies `held`, then take `places`, as (offset, bytes), for `copy_at`."""

    def copy_at(self, at: int, size: int) -> HostCopy:
        """Return a copy of `size` bytes that lies at a place taken by `release`."""


class Engine(Protocol):
    """Asynchronous copies between a device and the host, in the order of the requests.

    The program's thread makes all requests; the copies run concurrently with the program.

    Attributes:
        streams: whether operations run on streams, so that `note_stream` must be called.
        sync_copier: interface for small synchronous copies; None: not supported.
    """

    streams: bool

    def bytes_of(self, storage: Any) -> Any:
        """Return all bytes of a storage for `offload` and `reload`, hidden from the program."""

    def address(self, copy: Any) -> int:
        """Return the address of a copy on the host."""

    @property
    def sync_copier(self) -> SyncCopier | None:
        """Return the interface for synchronous copies, or None."""

    def offload(self, data: torch.Tensor, at: int = -1) -> tuple[HostCopy, Transfer]:
        """Request an offload of uint8[n] from the device to the host, after all device work so far.

        The engine keeps the data until the copy has ended or was waited for. The copy's offset in the host's
        arena is ``at`` if free, else the highest free offset; for -1, the best fit.

        Raises:
            OffloadRefusedError: the arena is full, or offloads are impossible now.
        """

    def reload(self, copy: HostCopy, data: torch.Tensor) -> Transfer:
        """Request a reload of a host copy into uint8[n] of newly allocated device memory."""

    def wait(self, transfer: Transfer) -> float:
        """Order all later device work after a transfer, and drop the data.

        Returns:
            Seconds that the program waited, 0 without a wait.
        """

    def drop(self, copy: HostCopy) -> None:
        """Free a host copy's memory, after the end of its transfers."""

    def native_copies(self, size: int) -> NativeCopies | None:
        """Return the interface for copies by C++ code into a range of `size` bytes on the host.

        Return None if the program uses several streams, or the host has no such range.
        """

    def fence(self) -> None:
        """Order reuse of later freed device memory after all device work so far.

        This is needed for memory freed without a wait for a copy, since streams other than the memory's own
        may still use it.
        """

    def waited(self, transfer: Transfer) -> float:
        """Return the known seconds that the program, or its stream, waited for a transfer."""

    def take_waits(self) -> list[float]:
        """Return the seconds of each wait that has ended since the last call, unless `wait` returned it."""

    def note_stream(self) -> None:
        """Make reloaded data available to the next operation, on any stream; `mark` does so, too."""

    def current_stream(self) -> Any:
        """Return the stream of this thread's operations; None on a device without streams."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which operations run on a stream, unless under capture."""

    def begin_capture(self) -> None:
        """Record the start of a capture on the current stream."""

    def end_capture(self) -> None:
        """Record the end of a capture."""

    def is_capturing(self) -> bool:
        """Return whether this thread's work is under capture."""

    def check_reload(self) -> None:
        """Raise UsageError if no reload is possible now."""

    def mark(self, prepare: Callable[[Any], object] | None = None) -> Any:
        """Return a mark at the end of all device work so far, for `seconds`.

        A device with streams first calls `prepare` with the current stream; its waits belong to no duration.
        """

    def seconds(self, marks: list[Any]) -> list[float]:
        """Return the seconds between successive marks, without waits for copies."""

    def reserve(self, size: int) -> None:
        """Prepare `size` bytes of host memory for a schedule, if preparation is slow."""

    def end_iteration(self) -> None:
        """End an iteration; release host memory that was long unused."""

    @property
    def host_bytes(self) -> int:
        """Return the host memory taken at present, in bytes."""

    def link(self) -> Link:
        """Return the link with the copy speed of this machine, measured once."""

    def close(self) -> None:
        """Shut down; the caller has waited for all transfers, or no longer needs their data."""
