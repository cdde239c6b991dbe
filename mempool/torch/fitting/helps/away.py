"""What offloading saves: by hooks on what the backward needs, and at most, by absences."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from mempool.torch.fitting.shares import AtPeak, steps_of
from traces import Kind, buffers_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from traces import Trace

#: Smaller buffers are not worth a copy, and so many events an absence lasts at least.
LEAST_BYTES, LEAST_EVENTS = 1 << 20, 16


def save_on_host(model: nn.Module) -> nn.Module:
    """Make the forward keep nothing for the backward on the device, as under ``save_on_cpu``.

    On tensors without memory: what is kept away has none, and what comes back is new, as there.

    Args:
        model: changed in place, and returned.
    """
    model.forward = functools.partial(_hooked, model.forward)
    return model


def _hooked(forward: Any, *args: Any, **kwargs: Any) -> Any:
    with saved_tensors_hooks(lambda t: (t.size(), t.dtype), lambda kept: torch.empty(kept[0], dtype=kept[1])):
        return forward(*args, **kwargs)


@dataclass(frozen=True)
class Away:
    """What offloading buffers of a category saves at most, if each is away whenever nobody touches it.

    Attributes:
        saves_bytes: of the peak load.
        moved_bytes: copied out, and back, in a step.
        held_bytes: of the peak load, what such buffers have.
    """

    saves_bytes: int
    moved_bytes: int
    held_bytes: int


def away(trace: Trace, category: str, least_bytes: int = LEAST_BYTES) -> Away:
    """An estimate: perfect prefetching into a link that is never late.

    An absence is the time between two accesses, at least `LEAST_EVENTS` long; a buffer is there at both. Only
    absences that span a time of more load than is reached in the end count as moved.

    Args:
        trace: of a job, with sizes as the device rounds them, accesses and marks of steps.
        category: of the buffers.
        least_bytes: smaller buffers stay.
    """
    if category not in trace.names:
        return Away(0, 0, 0)
    first, last, size = _absences(trace, trace.names.index(category), least_bytes)
    load, steps = trace.load(), steps_of(trace)
    gone = np.zeros(len(trace) + 1, np.int64)
    np.add.at(gone, first, size)
    np.add.at(gone, last, -size)
    begin = int(steps[0]) if len(steps) > 1 else 0
    left = (load - np.cumsum(gone)[:-1])[begin:]
    peak = int(left.max(initial=0))
    over = np.concatenate(([0], np.cumsum((load > peak) & (np.arange(len(load)) >= begin))))
    moved = over[last] > over[first]
    most, buffers = AtPeak.of(trace), buffers_of(trace)
    mine = trace.category[buffers.start] == trace.names.index(category)
    mine &= (buffers.start <= most.event) & (most.event < buffers.end) & (buffers.size >= least_bytes)
    return Away(most.bytes - peak, int(size[moved].sum()), int(buffers.size[mine].sum()))


def _absences(
    trace: Trace, category: int, least_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """First row of each absence, the row after its last one, and the buffer's size, int64[k] each."""
    rows = np.flatnonzero((trace.kind == Kind.READ) | (trace.kind == Kind.WRITE))
    birth = trace.births[rows]
    mine = (trace.category[birth] == category) & (trace.size[birth] >= least_bytes)
    rows, birth = rows[mine], birth[mine]
    order = np.lexsort((rows, birth))
    rows, birth = rows[order], birth[order]
    if not len(rows):
        return rows, rows, rows
    follows = np.append(birth[1:] == birth[:-1], False)
    # After its last access in the trace a buffer that is never freed is away: the next step comes.
    freed = np.full(len(trace), len(trace))
    frees = np.flatnonzero(trace.kind == Kind.FREE)
    freed[trace.births[frees]] = frees
    stays = ~follows & (freed[birth] == len(trace))
    until = np.where(follows, np.append(rows[1:], 0), len(trace))
    long = (follows | stays) & (until - rows > LEAST_EVENTS)
    return rows[long] + 1, until[long], trace.size[birth[long]]
