"""Offload planning: a step and a link in, a schedule out, judged by a replay that shares no planner code."""

from solvers.swap.bounds import LinkBound
from solvers.swap.copy_times import copied_later, fetched_earlier
from solvers.swap.gaps import packed
from solvers.swap.link import PRESETS, Link, parse_link
from solvers.swap.planner import Swap, SwapPlanner
from solvers.swap.replay import Replayed, replay
from solvers.swap.schedule import Schedule
from solvers.swap.step import Step
from solvers.swap.step_of_trace import step_of

__all__ = [
    "PRESETS",
    "Link",
    "LinkBound",
    "Replayed",
    "Schedule",
    "Step",
    "Swap",
    "SwapPlanner",
    "copied_later",
    "fetched_earlier",
    "packed",
    "parse_link",
    "replay",
    "step_of",
]
