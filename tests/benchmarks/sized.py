"""Graphs of a training step for any batch size: traced, or interpolated between two traced graphs."""

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
class StepFamily:
    """A family of training steps, one for each batch size, with SGD with momentum.

    Attributes:
        model: constructor of the model.
        inputs: function from the batch size to the inputs.
        tflops: throughput of the device in 1e12 operations per second; its memory bandwidth is 200e9 bytes
            per second.
        states: number of the optimizer's state tensors per parameter.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    tflops: float = 4.0
    states: int = 1
    _traced: dict[int, Graph] = field(default_factory=dict)

    def traced_graph(self, size: int) -> Graph:
        """Return the traced graph of a batch size."""
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

    def interpolated_graph(self, size: int) -> Graph:
        """Interpolate a graph between two batch sizes: bytes are exact, seconds approximate."""
        one, two = self.traced_graph(8), self.traced_graph(512)
        part = (size - 8) / (512 - 8)
        columns = {
            name: getattr(one, name) + part * (getattr(two, name) - getattr(one, name))
            for name in ("size", "seconds")
        }
        return one.with_columns(size=np.rint(columns["size"]), seconds=np.maximum(columns["seconds"], 0))


def largest(fits: Callable[[int], bool], least: int = 1, most: int = 1 << 14) -> int:
    """Return the largest number that satisfies a monotonic condition; 0 if ``least`` does not."""
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
