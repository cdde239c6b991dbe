"""Offload planning: schedules from a step and a link, judged by a replay without code of the planner."""

from solvers.swap.link import PRESETS, Link, parse_link
from solvers.swap.planner import OffloadPlanner
from solvers.swap.replay import ReplayResult, replay
from solvers.swap.schedule import PlannedSchedule, Schedule
from solvers.swap.step import Step
from solvers.swap.step_of_trace import step_of
from solvers.swap.transfer_times import advance_reloads, delay_offloads, reduce_fragmentation, tightened
from solvers.swap.tunables import OffloadTunables

__all__ = [
    "PRESETS",
    "Link",
    "OffloadPlanner",
    "OffloadTunables",
    "PlannedSchedule",
    "ReplayResult",
    "Schedule",
    "Step",
    "advance_reloads",
    "delay_offloads",
    "parse_link",
    "reduce_fragmentation",
    "replay",
    "step_of",
    "tightened",
]
