"""What copies bytes between the device and the host: one copy after the other in each direction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from mempool.errors import UsageError

if TYPE_CHECKING:
    import torch

    from solvers.swap import Link


class HostFullError(UsageError):
    """The host's arena has no room for a copy."""


class HostCopy(Protocol):
    """Bytes of a storage on the host."""

    size: int


class Transfer(Protocol):
    """A copy that was asked for."""

    size: int


class Own(Protocol):
    """Copies that the program's thread makes itself.

    Attributes:
        own_bytes: of more bytes, others make them quicker.
    """

    own_bytes: int

    def out_now(self, tensor: torch.Tensor, size: int, at: int = -1) -> HostCopy:
        """Copy so many bytes from a tensor's first element on to the host; ``at`` as of `Engine.out`.

        Raises:
            HostFullError: there is no room for it.
        """

    def back_now(self, copy: Any, tensor: torch.Tensor) -> None:
        """Copy what `out_now` copied to where a tensor's first element lies."""


class Engine(Protocol):
    """Copies between a device and the host, in the order in which they are asked for.

    All is asked for by the program's thread; the copies run beside it.

    Attributes:
        streams: whether operations run on streams, so that `look` is to be called.
        own: who makes small copies at once, where that is quicker; None: nobody.
    """

    streams: bool

    @property
    def own(self) -> Own | None:
        """See above."""

    def out(self, data: torch.Tensor, at: int = -1) -> tuple[HostCopy, Transfer]:
        """Ask for a copy of uint8[n] on the device to the host, after what was asked of the device so far.

        The data is kept until the copy has ended, or is waited for. It lies ``at`` this page of the host's
        arena, if that is free; else as far behind as there is room, and at -1 where it fits best.

        Raises:
            HostFullError: there is no room for it.
        """

    def back(self, copy: HostCopy, data: torch.Tensor) -> Transfer:
        """Ask for a copy of a host's copy into uint8[n] on the device, whose memory was taken just now."""

    def wait(self, transfer: Transfer) -> float:
        """Let what is asked of the device from now on come after a copy, and drop the data.

        Returns:
            Seconds that the program waited, 0 where it did not have to.
        """

    def drop(self, copy: HostCopy) -> None:
        """Give the host's memory of a copy back; one that a transfer still uses as soon as that ends."""

    def fence(self) -> None:
        """Let memory of the device that is given back from now on be used again after what was asked so far.

        For what is given back without a copy that was waited for: on any stream but its own it may be in use.
        """

    def waited(self, transfer: Transfer) -> float:
        """Seconds that the program, or its stream, waited for a copy, as far as that is known."""

    def look(self) -> None:
        """An operation is about to run, on any stream: what came back is there for it. So does `mark`."""

    def mark(self) -> Any:
        """The moment at which what was asked of the device so far is done, for `seconds`."""

    def seconds(self, marks: list[Any]) -> list[float]:
        """Seconds between each two neighbours of the marks, without those that went by waiting for copies."""

    def reserve(self, size: int) -> None:
        """A plan will have so many bytes on the host at once: what it takes long to get is got now."""

    def rest(self) -> None:
        """An iteration has ended: host memory that was not needed in it or the one before may go back."""

    @property
    def host_bytes(self) -> int:
        """What is taken of the host's memory now, bytes."""

    def link(self) -> Link:
        """What copies take here, measured once."""

    def close(self) -> None:
        """End; all transfers have been waited for, or nobody wants their data."""
