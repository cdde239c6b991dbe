"""Read the edited graphs of a step back into one `solvers.rewriting.Graph`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import fx
from torch._functorch.partitioners import default_partition

from mempool.torch.compiled import ops
from mempool.torch.compiled.graph import capture
from mempool.torch.compiled.graph_editor import is_number, producing_node
from mempool.torch.compiled.joint_graph import GraphPair, join
from solvers.rewriting import Graph, Role
from solvers.rewriting.apply import COPY_OPERATORS

if TYPE_CHECKING:
    from mempool.torch.compiled.graph import CapturedGraph
    from mempool.torch.compiled.joint_graph import JointGraph, MergedGraph


def partitioned(joint: JointGraph) -> tuple[MergedGraph, CapturedGraph]:
    """Partition a joint graph; return the merged graph and its capture."""
    nodes = joint.module.graph.find_nodes(op="placeholder")
    inputs = [node.meta["val"] for node in nodes]
    halves = GraphPair(*default_partition(joint.module, inputs, num_fwd_outputs=joint.forward_outputs),
                    joint.forward_outputs)  # fmt: skip
    merged = join(halves)
    return merged, capture(merged.module, joint.forward_outputs)


class GraphReader:
    """Reads both halves in their order, knowing the nodes that were there before decisions were carried out.

    What copies begin is an operation; what waits for one is an order: of a copy out the next operation, of a
    copy back whoever reads it.
    """

    def __init__(self, merged: MergedGraph, captured: CapturedGraph) -> None:
        self.was, self.halves = captured.graph, merged.halves
        self.operation = {merged.source[node]: i for i, node in enumerate(captured.operations)}
        self.values: dict[fx.Node, list[int]] = {
            merged.source[node]: [value] for node, value in captured.value_of.items()
        }
        self.names = {merged.source[node]: node.name for node in captured.operations}
        self.results: dict[int, list[int]] = {}
        for i, node in enumerate(captured.operations):
            made = np.flatnonzero(self.was.producer == i).tolist()
            self.results[i] = _spread(node, made)
        self.content = list(range(len(self.was.size)))
        self.base, self.producer = self.was.base.tolist(), [-1] * len(self.content)
        self.host = self.was.host.tolist()
        self.rows: list[tuple[int, Role, str, list[int], bool]] = []
        self.control: list[tuple[int, int]] = []
        self.waits: list[int] = []
        before = {node: [value] for node, value in captured.value_of.items()}
        before |= {node: self.results[i] for i, node in enumerate(captured.operations)}
        self.known = {self._key(node, before): i for i, node in enumerate(captured.operations)}

    def graph(self) -> Graph:
        """Return both graphs as one."""
        for half, backward in ((self.halves.forward, False), (self.halves.backward, True)):
            if backward:
                self._hand_over()
            for node in half.graph.nodes:
                if node.op == "call_function":
                    self._call(node, backward=backward)
                elif node.op == "get_attr" and node not in self.values:
                    same = [n for n in self.values if n.op == "get_attr" and n.target == node.target]
                    self.values[node] = self.values[same[0]]
        return self._built()

    def _hand_over(self) -> None:
        """Connect saved values to placeholders by position: numbers, then tensors."""
        saved = self.halves.saved
        given = [*filter(is_number, saved), *(node for node in saved if not is_number(node))]
        placeholders = self.halves.backward.graph.find_nodes(op="placeholder")
        for node, source in zip(placeholders, given, strict=False):
            self.values[node] = self.values[source]

    def _reads(self, node: fx.Node) -> list[int]:
        found: list[int] = []
        fx.map_arg((node.args, node.kwargs), lambda one: found.extend(self.values[one]))
        return [value for value in found if value >= 0]

    def _key(self, node: fx.Node, values: dict[fx.Node, list[int]]) -> str:
        """Return a key of the computed contents, equal for each run of an operation."""

        def shown(one: fx.Node) -> Any:
            return f"<{[self.content[v] if v >= 0 else v for v in values[one]]}>"

        args, kwargs = fx.map_arg((node.args, node.kwargs), shown)
        return f"{node.target} {args} {kwargs}"

    def _call(self, node: fx.Node, *, backward: bool) -> None:
        if producing_node(node) is not node:
            self.values[node] = [self.values[node.args[0]][node.args[1]]]
        elif node.target is ops.offload:
            (value,) = self.values[node.args[0]]
            self.values[node] = self._row(node, -1, Role.OFFLOAD, [value], [value], backward)
        elif node.target is ops.offload_wait:
            self.values[node] = self.values[node.args[0]]
            self.waits.append(self.producer[self.values[node][0]])
        elif node.target is ops.reload:
            (value,) = self.values[node.args[0]]
            self.values[node] = self._row(node, -1, Role.RELOAD, [value], [self.content[value]], backward)
        elif node.target is ops.reload_wait:
            self.values[node] = self.values[node.args[0]]
        elif node in self.operation:
            i = self.operation[node]
            self._row(node, i, Role.ORIGINAL, self._reads(node), [], backward)
            for value in filter(lambda v: v >= 0, self.results[i]):
                self.producer[value] = len(self.rows) - 1
            self.values[node] = self.results[i]
        else:
            i = self.known[self._key(node, self.values)]
            made = [value for value in self.results[i] if value >= 0]
            new = iter(self._row(node, i, Role.RECOMPUTED, self._reads(node), made, backward))
            self.values[node] = [next(new) if value >= 0 else -1 for value in self.results[i]]

    def _row(
        self, node: fx.Node, like: int, role: Role, reads: list[int], made: list[int], backward: bool
    ) -> list[int]:
        self.control += [(out, len(self.rows)) for out in self.waits]
        self.waits.clear()
        name = self.names.get(node, f"{len(self.rows)}.{node.name}")
        self.rows.append((like, role, name, reads, backward))
        first = len(self.content)
        self.content += made
        self.producer += [len(self.rows) - 1] * len(made)
        self.host += [role == Role.OFFLOAD] * len(made)
        self.base += range(first, first + len(made))
        return list(range(first, first + len(made)))

    def _bases(self) -> None:
        m = len(self.was.size)
        of = [int(self.was.base[c]) for c in self.content]
        views = [v for v, c in enumerate(self.content) if of[v] != c and self.producer[v] >= 0]
        for view in sorted(views, key=lambda v: self.producer[v]):
            same = [v for v in self.rows[self.producer[view]][3] if of[v] == of[view]]
            assert same or view < m, "a view of what it does not read"
            self.base[view] = self.base[same[0]] if same else self.base[view]

    def _built(self) -> Graph:
        g, n = self.was, len(self.rows)
        self._bases()
        like, role, names, reads, backward = zip(*self.rows, strict=True)
        like, role = np.array(like), np.array(role)
        no = role % 3 != 0  # a copy
        content = np.array(self.content)
        new = np.arange(len(content)) >= len(g.size)
        gone = (g.producer[content] >= 0) & (np.array(self.producer) < 0)  # of operations that are left out
        return g.with_columns(
            seconds=np.where(no, 0.0, g.seconds[like]),
            workspace=np.where(no, 0, g.workspace[like]),
            backward=np.array(backward),
            repeatable=~no & g.repeatable[like],
            role=role,
            kind=np.where(no, len(g.kinds) + role - 1, g.kind[like]),
            module=np.where(no, -1, g.module[like]),
            size=np.where(gone, 0, g.size[content]),
            rank=g.rank[content],
            producer=np.array(self.producer),
            base=np.where(gone, np.arange(len(content)), self.base),
            content=content,
            lasting=g.lasting[content] & ~new,
            movable=g.movable[content] & ~new,
            host=np.array(self.host),
            reads_start=np.cumsum([0, *map(len, reads)]),
            reads=[v for row in reads for v in row],
            control=np.array([(a, b) for a, b in self.control if b < n], np.int64).reshape(-1, 2),
            names=names,
            kinds=(*g.kinds, *COPY_OPERATORS),
        )


def _spread(node: fx.Node, made: list[int]) -> list[int]:
    """Return the value of each result of an operation; -1 for None."""
    held = node.meta.get("val")
    if not isinstance(held, (tuple, list)):
        return made
    left = iter(made)
    return [-1 if one is None else next(left) for one in held]
