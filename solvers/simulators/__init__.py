"""What a trace would have been under other allocators: addresses, memory held, calls to the driver."""

from solvers.simulators.judge import Judgement, judge
from solvers.simulators.registry import ALLOCATORS
from solvers.simulators.simulate import simulate
from solvers.simulators.simulation import Segments, Simulation

__all__ = ["ALLOCATORS", "Judgement", "Segments", "Simulation", "judge", "simulate"]
