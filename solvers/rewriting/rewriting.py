"""Decisions about a graph: which values are offloaded to host memory, and which are recomputed."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Sync(enum.IntFlag):
    """Synchronisation modes of Le et al. (ISMM 2019), 0 to 3: extra waits beyond the data dependencies."""

    NONE = 0
    OUT = 1  # readers of the value itself wait until the copy out is complete
    IN = 2  # a swap-in waits for all other inputs of its first consumer, and directly precedes that consumer
    BOTH = 3


@dataclass(frozen=True)
class SwapIn:
    """One reload of a value, with the readers.

    Operation i of a graph of N operations is *run* i; the recompute of operation i is run N + i.

    Attributes:
        consumers: runs that read the value, or a view, from this copy.
        trigger: the run after which the reload begins and takes memory; -1: right before the first consumer.
    """

    consumers: tuple[int, ...]
    trigger: int = -1


@dataclass(frozen=True)
class Swap:
    """Offload of one value, once per step, with all reloads. The whole memory leaves, including views.

    Attributes:
        value: the offloaded value, which is no view.
        ins: the reloads; a reader that is in none of them reads the value itself.
        after: the run after which the copy out begins; -1: the producer of the value.
        release: the run that waits for the copy out, and before which the memory is freed; -1: no run waits,
            and the memory is freed after the last read.
    """

    value: int
    ins: tuple[SwapIn, ...]
    after: int = -1
    release: int = -1


@dataclass(frozen=True)
class Rewriting:
    """Offload and recompute decisions for the values of one graph; by default none.

    Attributes:
        swaps: at most one per value.
        recomputed: values that are recomputed right before their first reader in the backward pass, for all
            readers there; so are their views and all other outputs of the same operations.
        sync: the extra waits.
    """

    swaps: tuple[Swap, ...] = ()
    recomputed: tuple[int, ...] = ()
    sync: Sync = Sync.NONE
