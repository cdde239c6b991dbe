"""Interface of the copy engines between device and host: one copy after the other per direction."""

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
    """Copy of a storage's bytes on the host."""

    size: int


class Transfer(Protocol):
    """A requested copy."""

    size: int


class SyncCopier(Protocol):
    """Synchronous copies by the program's thread itself.

    Attributes:
        sync_bytes: above this size, asynchronous copies are faster.
    """

    sync_bytes: int

    def offload_now(self, tensor: torch.Tensor, size: int, at: int = -1) -> HostCopy:
        """Copy `size` bytes from a tensor's first element on to the host; ``at`` as of `Engine.offload`.

        Raises:
            HostFullError: the arena has no room for the copy.
        """

    def reload_now(self, copy: Any, tensor: torch.Tensor) -> None:
        """Copy the bytes saved by `offload_now` to a tensor's first element and on."""


class Engine(Protocol):
    """Asynchronous copies between a device and the host, in the order of the requests.

    The program's thread makes all requests; the copies run concurrently with the program.

    Attributes:
        streams: whether operations run on streams, so that `note_stream` must be called.
        sync_copier: makes small copies at once, if that is faster; None: not supported.
    """

    streams: bool

    def bytes_of(self, storage: Any) -> Any:
        """Return all bytes of a storage, as `offload` and `reload` take them, unseen by the program."""

    def address(self, copy: Any) -> int:
        """Return the address of a copy on the host."""

    @property
    def sync_copier(self) -> SyncCopier | None:
        """Return the interface for synchronous copies, or None."""

    def offload(self, data: torch.Tensor, at: int = -1) -> tuple[HostCopy, Transfer]:
        """Request an offload of uint8[n] from the device to the host, after all device work so far.

        The engine keeps the data until the copy has ended, or is waited for. The copy lies ``at`` this page
        of the host's arena, if free; else as far back as there is room, and for -1 at the best fit.

        Raises:
            OffloadRefusedError: the arena has no room for the copy, or nothing is offloaded now.
        """

    def reload(self, copy: HostCopy, data: torch.Tensor) -> Transfer:
        """Request a reload of a host copy into uint8[n] of newly allocated device memory."""

    def wait(self, transfer: Transfer) -> float:
        """Order all later device work after a transfer, and drop the data.

        Returns:
            Seconds that the program waited, 0 without a wait.
        """

    def drop(self, copy: HostCopy) -> None:
        """Free a host copy's memory; if a transfer still uses the copy, as soon as that ends."""

    def fence(self) -> None:
        """Let device memory freed from now on be reused only after all device work so far.

        Needed for memory freed without a copy that was waited for: any stream but the memory's own may still
        use that memory.
        """

    def waited(self, transfer: Transfer) -> float:
        """Return the seconds that the program, or its stream, waited for a transfer, as far as known."""

    def note_stream(self) -> None:
        """Make reloaded data available to an operation about to run, on any stream; also done by `mark`."""

    def current_stream(self) -> Any:
        """Return the stream of this thread's operations; None on a device without streams."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which operations run on a stream, unless that is captured into a graph."""

    def begin_capture(self) -> None:
        """Note that work on the current stream is captured into a graph from now on."""

    def end_capture(self) -> None:
        """Note the end of a capture."""

    def is_capturing(self) -> bool:
        """Return whether this thread's work is captured."""

    def check_reload(self) -> None:
        """Raise UsageError if no reload is possible now."""

    def mark(self, prepare: Callable[[Any], object] | None = None) -> Any:
        """Return the moment at which all device work so far is done, for `seconds`.

        A device with streams first calls `prepare` with the current stream; waits meanwhile belong
        to no duration.
        """

    def seconds(self, marks: list[Any]) -> list[float]:
        """Return the seconds between neighbouring marks, waits for copies excluded."""

    def reserve(self, size: int) -> None:
        """Prepare host memory of `size` bytes for a schedule, if that preparation is slow."""

    def end_iteration(self) -> None:
        """End an iteration; host memory unused in this iteration and the last may return to the system."""

    @property
    def host_bytes(self) -> int:
        """Return the host memory taken at present, in bytes."""

    def link(self) -> Link:
        """Return the speed of copies on this machine, measured once."""

    def close(self) -> None:
        """Shut down; all transfers have been waited for, or their data are no longer wanted."""
