"""What a trace would have been under other allocators: addresses, memory held, calls to the driver."""

from solvers.simulators.registry import ALLOCATORS
from solvers.simulators.simulate import simulate
from solvers.simulators.simulation import Segments, Simulation

__all__ = ["ALLOCATORS", "Segments", "Simulation", "simulate"]
