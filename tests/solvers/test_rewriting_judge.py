"""The judge of rewritten graphs: against a slow model, and against the judge of swap schedules."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rewriting_graphs import graphs, rewritings
from rewriting_model import slow_loads, slow_seconds
from swap_steps import links, schedules

from solvers.rewriting import Graph, Rewriting, apply_rewriting
from solvers.rewriting.judge import simulate
from solvers.rewriting.step_conversion import graph_step, offloadable
from solvers.swap import Schedule, replay


@given(st.data(), graphs(), links())
def test_simulation_agrees_with_a_slow_model(data, graph, link):
    made = apply_rewriting(graph, data.draw(rewritings(graph)))
    timed = simulate(made, link, outside_bytes=7)
    assert (timed.load - 7).tolist() == slow_loads(made, host=False)
    assert timed.host_load.tolist() == slow_loads(made, host=True)
    assert timed.seconds == pytest.approx(slow_seconds(made, link), abs=1e-9)
    assert timed.seconds == pytest.approx(
        graph.seconds.sum() + timed.stall_seconds + timed.recomputed_seconds, abs=1e-9
    )


def _dropped_later(schedule: Schedule) -> Schedule:
    """Return the moves as a rewriting can have them: one copy out, and a release after the last read."""
    order = np.lexsort([schedule.last, schedule.buffer])
    s = schedule.select(order)
    copied = np.concatenate([[True], s.buffer[1:] != s.buffer[:-1]])[: len(s)]
    asked = np.where(copied, s.out, s.last)
    return dataclasses.replace(s, out=asked, release=np.where(copied, s.release, s.last + 1), copied=copied)


def _free_views(graph: Graph) -> Graph:
    """Return the graph with views of zero duration, since schedules do not remake views at copies back."""
    views = np.flatnonzero(graph.base != np.arange(len(graph.size)))
    free = np.isin(np.arange(len(graph)), graph.producer[views])
    return graph.with_columns(
        seconds=np.where(free, 0, graph.seconds), workspace=np.where(free, 0, graph.workspace)
    )


@given(st.data(), graphs().map(_free_views), links())
def test_simulation_agrees_with_the_replay_of_schedules(data, graph, link):
    plan = graph_step(graph, offloadable(graph), outside=5)
    schedule = _dropped_later(data.draw(schedules(plan.step)))
    # Who is first of those that are asked for at one operation is told by names there, by rows here.
    outs, ins = schedule.out[schedule.copied], schedule.fetch
    if len(set(outs.tolist())) < len(outs) or len(set(ins.tolist())) < len(ins):
        schedule = schedule.select(schedule.buffer == (schedule.buffer[:1].sum() if len(schedule) else 0))
    made = apply_rewriting(graph, Rewriting(plan.offloads(schedule)))
    timed, replayed = simulate(made, link, outside_bytes=5), replay(plan.step, link, schedule)
    original = made.role == 0
    assert timed.load[original].tolist() == replayed.load.tolist()
    assert timed.peak_bytes == replayed.peak_bytes
    assert timed.seconds == pytest.approx(replayed.iteration_seconds, abs=1e-9)
    assert timed.moved_bytes == replayed.moved_bytes
    assert timed.returned_bytes == replayed.returned_bytes
