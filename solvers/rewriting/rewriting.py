"""What is decided about a graph: which values wait in the host's memory, and which are made again."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Sync(enum.IntFlag):
    """What waits beyond what it reads: the synchronisation modes of Le et al. (ISMM 2019), 0 to 3."""

    NONE = 0
    OUT = 1  # who still reads the value itself waits until its copy is out
    IN = 2  # a swap-in waits for everything else that its first consumer reads: it stands right before that
    BOTH = 3


@dataclass(frozen=True)
class SwapIn:
    """One copy back, and who reads it.

    Operation i of a graph of N operations is *run* i; what is recomputed runs again as run N + i.

    Attributes:
        consumers: runs that read the value, or a view of it, from this copy.
        trigger: the run after which the copy stands, and takes its memory; -1: right before its
            first consumer.
    """

    consumers: tuple[int, ...]
    trigger: int = -1


@dataclass(frozen=True)
class Swap:
    """One value that leaves the device once, and its copies back. A whole memory leaves: views follow.

    Attributes:
        value: who leaves, which is no view.
        ins: its copies back; who reads it and is in none of them reads the value itself.
        after: the run after which the copy out stands; -1: what makes the value.
        release: the run that waits for the copy out, and before which the memory is given back; -1: nobody
            waits, and it goes when it has been read for the last time.
    """

    value: int
    ins: tuple[SwapIn, ...]
    after: int = -1
    release: int = -1


@dataclass(frozen=True)
class Rewriting:
    """What to do with the values of one graph; nothing, where nothing is given.

    Attributes:
        swaps: at most one of a value.
        recomputed: values that are made again, right before their first reader in the backward pass, for all
            readers there; views of them follow, and all else that the same operations make.
        sync: what waits beyond what it reads.
    """

    swaps: tuple[Swap, ...] = ()
    recomputed: tuple[int, ...] = ()
    sync: Sync = Sync.NONE
