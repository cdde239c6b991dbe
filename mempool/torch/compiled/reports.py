"""Report on the compiled graphs: offloaded and recomputed values, predictions and measurements."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mempool.torch.compiled.runtime import RUNTIME
from mempool.torch.compiled.runtime_observer import allocated_bytes
from mempool.torch.compiled.shared_limit import SHARED_LIMITS

if TYPE_CHECKING:
    from mempool.torch.compiled.records import CompiledGraph


@dataclass(frozen=True)
class Report:
    """Report on this process.

    Attributes:
        graphs: one entry per graph of a training step, with bytes and seconds of one step. The measured time
            is the median of the last 32 forward and backward passes; None before both have run.
        transfers: totals of the copies made since the start.
        host_bytes: host memory that the copies use now.
        peak_bytes: PyTorch's peak on the device; None without a counter, such as on a CPU without a pool.
    """

    graphs: list[dict[str, Any]]
    transfers: dict[str, Any]
    host_bytes: int
    peak_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary that can be written as JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [_graph_line(i, graph) for i, graph in enumerate(self.graphs)] or ["no graph was rewritten"]
        transfers = self.transfers
        lines.append(
            f"copied so far: {transfers['offload_bytes']:,} bytes offloaded, "
            f"{transfers['reload_bytes']:,} reloaded; waited {transfers['wait_seconds']:.3f} s; "
            f"{self.host_bytes:,} bytes on the host now"
        )
        if transfers["host_full"]:
            lines.append(
                f"{transfers['host_full']} copies found no room on the host: values stayed on the device"
            )
        if self.peak_bytes is not None:
            lines.append(f"measured peak {self.peak_bytes:,} bytes")
        else:
            lines.append("no measured peak: on a CPU nobody counts without mempool.torch.install()")
        return "\n".join(lines)


def make_report() -> Report:
    """Return the report of all decisions and of the copies made so far."""
    compiled_graphs = [
        (limit, compiled) for limit in SHARED_LIMITS for _, compiled in sorted(limit.graphs.items())
    ]
    peak = None if (bytes_there := allocated_bytes()) is None else bytes_there.most
    graphs = [
        {"function": limit.observer.function(compiled.number), **_graph_entry(compiled)}
        for limit, compiled in compiled_graphs
    ]
    return Report(graphs, asdict(RUNTIME.counters), RUNTIME.host_bytes, peak)


def _graph_entry(compiled: CompiledGraph) -> dict[str, Any]:
    decision = compiled.decision
    graph, nodes = decision.captured.graph, decision.captured.values
    timed, plain = decision.simulated, decision.plain

    def named(value: int) -> dict[str, Any]:
        operation = int(graph.producer[value])
        module = int(graph.module[operation])
        return {
            "value": str(nodes[value]),
            "operation": graph.kinds[graph.kind[operation]],
            "module": graph.modules[module] if module >= 0 else "",
            "bytes": int(graph.size[value]),
        }

    return {
        "name": compiled.options.name,
        "operations": len(graph),
        "limit_bytes": compiled.options.limit,
        "least_limit_bytes": compiled.least_limit_bytes,
        "outside_bytes": decision.outside.always,
        "outside_forward_bytes": decision.outside.forward,
        "outside_backward_bytes": decision.outside.backward,
        "plain_peak_bytes": plain.peak_bytes,
        "predicted_peak_bytes": decision.peak_bytes,
        "plain_seconds": plain.seconds,
        "predicted_seconds": timed.seconds,
        "measured_seconds": compiled.timer.seconds(),
        "stall_seconds": timed.stall_seconds,
        "recomputed_seconds": timed.recomputed_seconds,
        "offloaded_bytes": timed.moved_bytes,
        "reloaded_bytes": timed.returned_bytes,
        "predicted_host_bytes": timed.host_bytes,
        "offloaded": [named(swap.value) for swap in decision.rewriting.offloads],
        "recomputed": [named(value) for value in decision.rewriting.recomputed],
    }


def _graph_line(number: int, graph: dict[str, Any]) -> str:
    limit = "" if graph["limit_bytes"] is None else f" within {graph['limit_bytes']:,}"
    peaks = f"{graph['plain_peak_bytes']:,} -> {graph['predicted_peak_bytes']:,} bytes"
    took = graph["measured_seconds"]
    measured = "not run yet" if took is None else f"measured {took:.4f} s"
    of = " of ".join(name for name in (graph["function"], graph["name"]) if name)
    return (
        f"graph {number}{of and f' ({of})'}: peak {peaks}{limit}; "
        f"{graph['plain_seconds']:.4f} -> {graph['predicted_seconds']:.4f} s, of which "
        f"{graph['stall_seconds']:.4f} s stall and {graph['recomputed_seconds']:.4f} s recompute, "
        f"{measured}; {len(graph['offloaded'])} values offloaded, {len(graph['recomputed'])} recomputed"
    )
