"""Graphs of a step by the size of its batch: traced, or between two that were traced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from joint_trace import trace_joint

from mempool.hardware.gpu_throughput import Rates
from mempool.torch.compiled.costs import roofline_seconds
from mempool.torch.compiled.graph import capture

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from solvers.rewriting import Graph


@dataclass
class Sized:
    """A step of training with SGD with momentum, whose state is counted; gradients are the graph's results.

    Attributes:
        model: makes it.
        inputs: of a size, makes them.
        tflops: operations that the device does in a second, in 1e12; it moves 200e9 bytes of its memory.
        states: tensors that the optimizer keeps of each parameter.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    tflops: float = 4.0
    states: int = 1
    _traced: dict[int, Graph] = field(default_factory=dict)

    def at(self, size: int) -> Graph:
        """Traced."""
        if size not in self._traced:
            rate = self.tflops * 1e12
            joint = trace_joint(self.model, lambda: self.inputs(size))
            self._traced[size] = capture(
                joint.module,
                joint.forward_outputs,
                seconds=roofline_seconds(Rates("", 200e9, rate, rate, rate, "")),
                outside_bytes=self.states * joint.parameter_bytes,
            ).graph
        return self._traced[size]

    def near(self, size: int) -> Graph:
        """Sizes and seconds on the line through two batches: exact of bytes, nearly of seconds."""
        one, two = self.at(8), self.at(512)
        part = (size - 8) / (512 - 8)
        columns = {
            name: getattr(one, name) + part * (getattr(two, name) - getattr(one, name))
            for name in ("size", "seconds")
        }
        return one.with_columns(size=np.rint(columns["size"]), seconds=np.maximum(columns["seconds"], 0))


def largest(fits: Callable[[int], bool], least: int = 1, most: int = 1 << 14) -> int:
    """The largest number for which that holds, if it holds for all below; 0 where for none."""
    if not fits(least):
        return 0
    high = least
    while high < most and fits(2 * high):
        high *= 2
    low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
