"""Report on the compiled graphs: offloaded and recomputed values, predictions and measurements."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mempool.torch.compiled.graph_budget import BUDGETS
from mempool.torch.compiled.memory_counters import counted
from mempool.torch.compiled.runtime import RUNTIME

if TYPE_CHECKING:
    from mempool.torch.compiled.graph_budget import Part


@dataclass(frozen=True)
class Report:
    """Results of this process so far.

    Attributes:
        graphs: one entry per graph of a training step; sizes in bytes, times in seconds, of one step. The
            measured time covers a forward and a backward pass, as the median of the last 32; None before both
            have run.
        moved: totals of the copies made since the start.
        host_bytes: host memory that the copies use now.
        peak_bytes: PyTorch's peak on the device; None where no counter exists, such as on a CPU without
            a pool.
    """

    graphs: list[dict[str, Any]]
    moved: dict[str, Any]
    host_bytes: int
    peak_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary that can be written as JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [_line(i, graph) for i, graph in enumerate(self.graphs)] or ["no graph was rewritten"]
        moved = self.moved
        lines.append(
            f"copied so far: {moved['out_bytes']:,} bytes out, {moved['in_bytes']:,} back; "
            f"waited {moved['waited_seconds']:.3f} s; {self.host_bytes:,} bytes on the host now"
        )
        if moved["host_full"]:
            lines.append(
                f"{moved['host_full']} copies found no room on the host: what should leave has stayed"
            )
        if self.peak_bytes is not None:
            lines.append(f"measured peak {self.peak_bytes:,} bytes")
        else:
            lines.append("no measured peak: on a CPU nobody counts without mempool.torch.install()")
        return "\n".join(lines)


def reported() -> Report:
    """Return the report of all decisions and of the copies made so far."""
    parts = [(budget, part) for budget in BUDGETS for _, part in sorted(budget.parts.items())]
    peak = None if (bytes_there := counted()) is None else bytes_there.most
    graphs = [{"function": budget.looks.function(part.number), **_graph(part)} for budget, part in parts]
    return Report(graphs, asdict(RUNTIME.moved), RUNTIME.host_bytes, peak)


def _graph(part: Part) -> dict[str, Any]:
    made = part.decided
    graph, nodes = made.captured.graph, made.captured.values
    timed, plain = made.timed, made.plain

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
        "name": part.options.name,
        "operations": len(graph),
        "limit_bytes": part.options.limit,
        "outside_bytes": made.outside.always,
        "outside_forward_bytes": made.outside.forward,
        "outside_backward_bytes": made.outside.backward,
        "plain_peak_bytes": plain.peak_bytes,
        "predicted_peak_bytes": made.peak_bytes,
        "plain_seconds": plain.seconds,
        "predicted_seconds": timed.seconds,
        "measured_seconds": part.clock.seconds(),
        "stall_seconds": timed.stall_seconds,
        "recomputed_seconds": timed.recomputed_seconds,
        "moved_bytes": timed.moved_bytes,
        "returned_bytes": timed.returned_bytes,
        "predicted_host_bytes": timed.host_bytes,
        "swapped": [named(swap.value) for swap in made.rewriting.offloads],
        "recomputed": [named(value) for value in made.rewriting.recomputed],
    }


def _line(number: int, graph: dict[str, Any]) -> str:
    limit = "" if graph["limit_bytes"] is None else f" within {graph['limit_bytes']:,}"
    peaks = f"{graph['plain_peak_bytes']:,} -> {graph['predicted_peak_bytes']:,} bytes"
    took = graph["measured_seconds"]
    measured = "not run yet" if took is None else f"measured {took:.4f} s"
    of = " of ".join(one for one in (graph["function"], graph["name"]) if one)
    return (
        f"graph {number}{of and f' ({of})'}: peak {peaks}{limit}; "
        f"{graph['plain_seconds']:.4f} -> {graph['predicted_seconds']:.4f} s, of which "
        f"{graph['stall_seconds']:.4f} s wait and {graph['recomputed_seconds']:.4f} s run again, {measured}; "
        f"{len(graph['swapped'])} values leave, {len(graph['recomputed'])} are made again"
    )
