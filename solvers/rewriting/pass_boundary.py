"""The boundary between the forward and the backward pass.

A graph that is one part of a step pauses at the boundary while other parts run. For two graphs, one for each
pass, decisions are split at the boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from solvers.rewriting.graph import Graph, Role
from solvers.rewriting.judge import simulate
from solvers.rewriting.records import Offload, Reload
from solvers.swap.link import Link

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.rewriting.records import Rewriting, Simulation

PAUSE, RESUMED = "(between the passes)", "(before the backward pass)"


@dataclass(frozen=True)
class Pause:
    """Memory and values of the other parts that run during the pause.

    Attributes:
        extra_bytes: bytes held during the pause alone.
        forward_bytes: bytes held from the beginning to the end of the pause, which no operation reads.
        leaving: values held to the end of the pause, or to their last reader in the backward pass.
        arriving: values that the backward pass receives.
    """

    extra_bytes: int = 0
    forward_bytes: int = 0
    leaving: tuple[int, ...] = ()
    arriving: tuple[int, ...] = ()


NOTHING = Pause()


def insert_pause(graph: Graph, pause: Pause = NOTHING) -> Graph:
    """Insert two operations before the backward pass: the pause, and the resumption of the step.

    The pause waits for copies out that began earlier, and reads the leaving values; the resumption produces
    the arriving values.

    Args:
        graph: a graph with a backward pass, rewritten or not.
        pause: the memory and values of the pause.
    """
    at = int(graph.backward.argmax())
    if pause.forward_bytes:
        graph = _with_value(graph, pause.forward_bytes, -1)
    read = [*pause.leaving, *([len(graph.size) - 1] if pause.forward_bytes else [])]

    def put(column: NDArray[Any], *values: float) -> NDArray[Any]:
        return np.insert(column, at, values)

    control = graph.control + 2 * (graph.control >= at)
    outs = np.flatnonzero(graph.role[:at] == Role.OFFLOAD)
    awaited = np.stack([outs, np.full(len(outs), at)], axis=1)
    begin = int(graph.reads_start[at])
    reads_start = put(graph.reads_start, begin, begin)
    reads_start[at + 1 :] += len(read)
    producer = graph.producer + 2 * (graph.producer >= at)
    producer[list(pause.arriving)] = at + 1
    return graph.with_columns(
        seconds=put(graph.seconds, 0.0, 0.0),
        workspace=put(graph.workspace, pause.extra_bytes, 0),
        backward=put(graph.backward, 1, 1),
        repeatable=put(graph.repeatable, 0, 0),
        role=put(graph.role, Role.ORIGINAL, Role.ORIGINAL),
        kind=put(graph.kind, -1, -1),
        module=put(graph.module, -1, -1),
        producer=producer,
        lasting=graph.lasting & ~np.isin(graph.base, pause.leaving),
        reads_start=reads_start,
        reads=np.insert(graph.reads, begin, read),
        control=np.concatenate([control, awaited]),
        names=(*graph.names[:at], PAUSE, RESUMED, *graph.names[at:]),
    )


def simulate_with_pause(graph: Graph, pause: Pause, link: Link, *, outside_bytes: int = 0) -> Simulation:
    """Simulate a graph with a pause; the result has rows of the graph's operations only."""
    timed = simulate(insert_pause(graph, pause), link, outside_bytes=outside_bytes)
    at = int(graph.backward.argmax())
    timed.wait[at + 2] += timed.wait[at : at + 2].sum()
    added = [at, at + 1]
    load, host_load = (np.delete(column, added) for column in (timed.load, timed.host_load))
    begins, wait = (np.delete(column, added) for column in (timed.begins, timed.wait))
    return replace(timed, load=load, host_load=host_load, begins=begins, wait=wait)


def bytes_between_passes(graph: Graph, arriving: tuple[int, ...] = ()) -> int:
    """Return the bytes on the device between the two passes of a graph.

    Args:
        graph: a graph with a backward pass, rewritten or not.
        arriving: values that first exist in the backward pass.
    """
    during = insert_pause(graph, Pause(arriving=arriving))
    return int(simulate(during, Link.of_rate(1.0)).load[during.names.index(PAUSE)])


def add_backward_results(graph: Graph, size: int) -> Graph:
    """Add ``size`` bytes from the start of the backward pass to the end of the step."""
    return _with_value(graph, size, int(graph.backward.argmax())) if graph.backward.any() else graph


def _with_value(graph: Graph, size: int, producer: int) -> Graph:
    """Add a last value that no operation reads and that never moves."""
    more = {
        "size": size,
        "producer": producer,
        "base": len(graph.size),
        "content": len(graph.size),
        "rank": -1,
        "lasting": producer >= 0,
        "movable": False,
        "host": False,
    }
    return graph.with_columns(
        **{name: np.append(getattr(graph, name), value) for name, value in more.items()}
    )


def remove_pause(graph: Graph, rewriting: Rewriting) -> Rewriting:
    """Convert decisions about a graph with a pause to the graph without the pause.

    Args:
        graph: the graph without the pause.
        rewriting: decisions about the graph with the pause.
    """
    at = int(graph.backward.argmax())

    def behind(run: int) -> int:
        """Map a run that an action follows: "after the pause" becomes "after the forward pass"."""
        return run - (run >= at) - (run >= at + 1)

    def before(run: int) -> int:
        """Map a run that an action precedes: "before the pause" becomes "before the backward pass"."""
        return run - (run > at) - (run > at + 1)

    def without(offload: Offload) -> Offload:
        reloads = tuple(
            replace(reload, consumers=tuple(map(before, reload.consumers)), trigger=behind(reload.trigger))
            for reload in offload.reloads
        )
        return replace(offload, reloads=reloads, after=behind(offload.after), release=before(offload.release))

    return replace(rewriting, offloads=tuple(map(without, rewriting.offloads)))


def split_by_pass(graph: Graph, rewriting: Rewriting) -> Rewriting:
    """Change the decisions so that no copy and no wait spans both passes.

    The copy out of a forward value begins and ends within the forward pass. If both passes have readers, each
    pass has a separate reload, which begins within the pass. Rewriting the whole graph with these decisions
    equals rewriting the two graphs. Only absences span both passes.
    """
    if not graph.backward.any() or graph.backward.all():
        return rewriting
    turn = int(graph.backward.argmax())
    return replace(rewriting, offloads=tuple(_within(graph, offload, turn) for offload in rewriting.offloads))


def _within(graph: Graph, offload: Offload, turn: int) -> Offload:
    n, made = len(graph), int(graph.producer[offload.value])
    if made >= turn:
        return offload

    def is_forward(run: int) -> bool:
        return run < n and not graph.backward[run]

    reloads = []
    for reload in offload.reloads:
        early = tuple(run for run in reload.consumers if is_forward(run))
        late = tuple(run for run in reload.consumers if not is_forward(run))
        trigger = reload.trigger
        if early:
            reloads.append(Reload(early, trigger if trigger >= 0 and is_forward(trigger) else -1))
        if late:
            reloads.append(Reload(late, turn - 1 if 0 <= trigger < turn else trigger))
    after = offload.after if offload.after < 0 or is_forward(offload.after) else turn - 1
    release = offload.release if offload.release < 0 or is_forward(offload.release) else turn
    return Offload(offload.value, tuple(reloads), after, release)
