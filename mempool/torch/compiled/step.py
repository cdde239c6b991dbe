"""The step to decide about: both graphs as numbers, and the times of operations and copies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from mempool.torch.compiled.capture import capture
from mempool.torch.compiled.copy_overhead import calls_of
from mempool.torch.compiled.costs import Measured, by_roofline, in_kernels, number
from mempool.torch.compiled.external_memory import with_most
from mempool.torch.compiled.runtime import RUNTIME
from solvers.rewriting.copy_overhead import CopyOverhead
from solvers.swap.link import PRESETS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from mempool.torch.compiled.capture import Captured
    from mempool.torch.compiled.merged_graph import Joined
    from mempool.torch.compiled.options import Options
    from solvers.rewriting import Graph
    from solvers.swap.link import Link


@dataclass(frozen=True, eq=False)
class Step:
    """The graphs of a step and their times.

    Attributes:
        captured: the graphs as numbers, with seconds and workspaces.
        link: the transfer times of copies.
        calls: the seconds that copies cost the program itself.
        workspace: returns the workspace bytes of an operation while the operation runs.
        fused: true if a compiler fuses operations into kernels.
    """

    captured: Captured
    link: Link
    calls: CopyOverhead
    workspace: Callable[[fx.Node], int]
    fused: bool

    @cached_property
    def decidable(self) -> Graph:
        """Return the graph in which only values that can be offloaded are movable."""
        return decidable(self.captured)

    def nominal(self) -> Step:
        """Return the same step with nominal times, which depend on no device and no measurement."""
        told = by_roofline()
        seconds = in_kernels(told) if self.fused else told
        columns = {"seconds": [seconds(node) for node in self.captured.operations]}
        captured = replace(self.captured, graph=self.captured.graph.with_columns(**columns))
        return replace(self, captured=captured, link=PRESETS["nvlink-c2c"], calls=CopyOverhead())


def measured(joined: Joined, options: Options) -> Step:
    """Measure operations on the device, once per distinct call, and copies if no link is given."""
    device = device_of(joined.module)
    devices = [device] if device.type == "cuda" else []
    clock = clock_of(device, torch.get_num_threads())
    with _disable_current_modes(), torch.random.fork_rng(devices):
        seconds = in_kernels(clock) if options.fused else clock
        captured = capture(joined.module, joined.halves.outputs, seconds=seconds)
        workspace = [clock.workspace(node) for node in captured.operations]
        captured = replace(captured, graph=captured.graph.with_columns(workspace=workspace))
        link, calls = options.link, CopyOverhead()
        if link is None:
            calls = calls_of(device, options.host_limit)
            link = calls.overlapped(RUNTIME.engine(device, options.host_limit).link())
    return Step(captured, link, calls, clock.workspace, options.fused)


@cache
def clock_of(device: torch.device, threads: int) -> Measured:  # noqa: ARG001  # another number, another clock
    """Return the measured times of operations on a device, kept for the life of the process.

    A recompilation happens while the program holds memory, and a second measurement would need additional
    memory.
    """
    return Measured(device)


def device_of(module: torch.fx.GraphModule) -> torch.device:
    """Return the device that holds most bytes of a graph's inputs."""
    found: dict[torch.device, int] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        held = node.meta.get("val")
        if isinstance(held, torch.Tensor):
            size = int(number(held.numel())) * held.element_size()
            found[held.device] = found.get(held.device, 0) + size
    return with_most(found)


def decidable(captured: Captured) -> Graph:
    """Return the graph in which only whole memories from the forward pass are movable."""
    graph = captured.graph
    forward = ~graph.backward[graph.producer] & (graph.producer >= 0)
    whole = [node is not None and _is_whole(node.meta.get("val")) for node in captured.values]
    return graph.with_columns(movable=graph.movable & (forward & np.array(whole, bool))[graph.base])


def _is_whole(held: Any) -> bool:
    """Return true if a traced value is a strided tensor that covers the whole storage in element order."""
    if not isinstance(held, torch.Tensor) or held.layout != torch.strided or held.is_quantized:
        return False
    if held.is_conj() or held.is_neg():
        return False
    shape, strides = map(number, held.shape), map(number, held.stride())
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return bool(extent * held.element_size() >= number(held.untyped_storage().nbytes()) > 0)
