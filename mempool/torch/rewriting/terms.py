"""On what terms a step is decided: what lies beside it, and what it has to leave to others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outside:
    """Bytes on the device that a step's graphs do not see.

    Attributes:
        always: that are there all the time.
        forward: besides, during the forward pass.
        backward: besides, during the backward pass.
    """

    always: int = 0
    forward: int = 0
    backward: int = 0

    def during(self, *, backward: bool) -> int:
        """All of them in one of the passes."""
        return self.always + (self.backward if backward else self.forward)


NOTHING = Outside()


@dataclass(frozen=True)
class Terms:
    """Of a step among others.

    Attributes:
        outside: what lies on the device beside what the graphs see.
        going: values that are given to it, and gone after its forward pass but for those it keeps.
        gradients_stay: whether what its backward pass is given is there until that ends.
        least: keep no more from the forward to the backward pass than must be.
        keep: but for so many bytes, which may be kept.
        between: bytes that somebody else takes for a while between its passes.
        host_limit: bytes of the host, where it is not all that the options allow.
    """

    outside: Outside = NOTHING
    going: tuple[int, ...] = ()
    gradients_stay: bool = False
    least: bool = False
    keep: int = 0
    between: int = 0
    host_limit: int | None = None


ALONE = Terms()
