"""Constraints on the decision about a step: outside memory and the bytes to leave to others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outside:
    """Bytes on the device that the graphs of a step do not contain.

    Attributes:
        always: bytes in use in both passes.
        forward: additional bytes during the forward pass.
        backward: additional bytes during the backward pass.
    """

    always: int = 0
    forward: int = 0
    backward: int = 0

    def during(self, *, backward: bool) -> int:
        """Return all outside bytes during one of the passes."""
        return self.always + (self.backward if backward else self.forward)


NOTHING = Outside()


@dataclass(frozen=True)
class Terms:
    """Constraints on the decision about one step.

    Attributes:
        outside: bytes in use on the device outside the graphs.
        going: inputs that are freed after the forward pass unless the step keeps them.
        gradients_stay: true if the gradients given to the backward pass stay alive until the pass ends.
        least: keep as few bytes as possible between the forward and the backward pass.
        keep: bytes that may be kept in spite of `least`.
        between: bytes that other code uses temporarily between the two passes.
        host_limit: host bytes for copies; None: as many as the options allow.
    """

    outside: Outside = NOTHING
    going: tuple[int, ...] = ()
    gradients_stay: bool = False
    least: bool = False
    keep: int = 0
    between: int = 0
    host_limit: int | None = None


ALONE = Terms()
