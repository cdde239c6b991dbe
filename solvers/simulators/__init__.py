"""Simulated allocators: addresses, reserved memory and driver calls of a trace under other allocators."""

from solvers.simulators.simulate import ALLOCATORS, simulate
from solvers.simulators.simulation import Segments, Simulation

__all__ = ["ALLOCATORS", "Segments", "Simulation", "simulate"]
