"""Convert a joint graph (FX) into columns of numbers, with the node of each operation and value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mempool.torch.compiled.costs import by_roofline
from mempool.torch.compiled.effects import is_ordered, writes
from mempool.torch.compiled.values import Values
from solvers.rewriting import Graph, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray
    from torch import fx

_FORWARD = ("is_forward", "must_be_in_forward")


@dataclass(frozen=True, eq=False)
class Captured:
    """A numbered graph and the nodes that the numbers stand for.

    Attributes:
        graph: the step as columns.
        operations: the node of each operation.
        values: the node of each value; None for an unused result and for memory outside the graph.
        sizes: the bytes of each value, as a symbol if they depend on sizes known only at run time.
        inputs: the value of each placeholder, in order.
        outputs: the value of each output, in order; -1 if an output is no value.
        forward_outputs: number of outputs of the forward pass, which come first.
    """

    graph: Graph
    operations: tuple[fx.Node, ...]
    values: tuple[fx.Node | None, ...]
    sizes: tuple[Any, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    forward_outputs: int

    @cached_property
    def value_of(self) -> dict[fx.Node, int]:
        """Return the value of each node; an operation with several results has no value."""
        return {node: value for value, node in enumerate(self.values) if node is not None}

    @cached_property
    def results(self) -> tuple[int, ...]:
        """Return the memories of forward results that the program requested."""
        graph = self.graph
        made = {int(graph.base[one]) for one in self.outputs[: self.forward_outputs] if one >= 0}
        return tuple(sorted(one for one in made if graph.producer[one] >= 0))

    def given(self, places: Iterable[int]) -> tuple[int, ...]:
        """Return the values of the function's arguments at some positions."""
        names = {f"primals_{place + 1}" for place in places}
        return tuple(one for one in self.inputs if str(self.values[one]) in names)

    @cached_property
    def incoming(self) -> tuple[int, ...]:
        """Return the gradients given to the backward pass."""
        return tuple(one for one in self.inputs if _is_tangent(self.values[one]))


def capture(
    joint: fx.GraphModule,
    forward_outputs: int,
    *,
    seconds: Callable[[fx.Node], float] | None = None,
    beside_bytes: int = 0,
) -> Captured:
    """Convert the joint graph of a step.

    Parameters, buffers and other inputs stay for the whole step and never move; results of the forward pass
    and gradients stay to the end of the step. Forward operations are all operations up to the last one that
    the forward pass needs. Control edges keep the order of operations that draw random numbers, communicate
    or are opaque, and of writers and readers of the same value; a value that is written to does not move.

    Args:
        joint: a graph with fake tensors in ``meta["val"]``, as made by AOTAutograd.
        forward_outputs: number of outputs of the forward pass, which come first.
        seconds: returns the seconds of a node; default: the roofline minimum on
            `mempool.hardware.gpu_throughput.DEFAULT`.
        beside_bytes: bytes in use all the time, such as an optimizer's state; added as one more input.
    """
    values = Values()
    operations: list[fx.Node] = []
    inputs: list[int] = []
    nodes = list(joint.graph.nodes)
    for node in nodes[:-1]:
        if node.op in ("placeholder", "get_attr"):
            held = node.meta.get("val")
            if held is None and node.op == "get_attr":
                held = getattr(joint, str(node.target), None)
            value = values.given(node, held)
            inputs += [value] if node.op == "placeholder" else []
        elif not values.takes(node):
            values.made(node, len(operations))
            operations.append(node)
    if beside_bytes:
        values.beside(beside_bytes)
    returned = nodes[-1].args[0]
    outputs = [values.results[one][0] if isinstance(one, torch.fx.Node) else -1 for one in returned]
    forward = _forward(nodes, returned[:forward_outputs])
    graph = Graph(
        **_of_operations(operations, values, forward, seconds or by_roofline()),
        **_of_values(
            values, outputs, [values.results[one][0] for node in operations for one in writes(node)]
        ),
    )
    return Captured(
        graph,
        tuple(operations),
        tuple(values.node),
        tuple(values.symbolic),
        tuple(inputs),
        tuple(outputs),
        forward_outputs,
    )


def _forward(nodes: Sequence[fx.Node], outputs: Sequence[Any]) -> set[fx.Node]:
    """Return the nodes up to the last one that the forward pass needs."""
    left = [one for one in outputs if isinstance(one, torch.fx.Node)]
    left += [one for one in nodes if one.meta.get("partitioner_tag") in _FORWARD]
    needed: set[fx.Node] = set()
    while left:
        node = left.pop()
        if node not in needed:
            needed.add(node)
            left += node.all_input_nodes
    last = max((place for place, node in enumerate(nodes) if node in needed), default=-1)
    return set(nodes[: last + 1])


def _of_operations(
    operations: list[fx.Node], values: Values, forward: set[fx.Node], seconds: Callable[[fx.Node], float]
) -> dict[str, Any]:
    count = len(operations)
    reads = [values.read(node) for node in operations]
    base = np.array(values.base, np.int64)
    kinds, kind = _indices([_kind(node) for node in operations])
    modules, module = _indices(_modules(operations))
    control, again = _effects(operations, values, [set(base[one].tolist()) for one in reads])
    return {
        "seconds": np.array([seconds(node) for node in operations]),
        "workspace": np.zeros(count),
        "backward": [node not in forward for node in operations],
        "repeatable": again,
        "role": np.full(count, Role.ORIGINAL),
        "kind": kind,
        "module": np.where(np.array(modules or ("",))[module] == "", -1, module),
        "reads_start": np.cumsum([0, *map(len, reads)]),
        "reads": [value for row in reads for value in row],
        "control": control,
        "names": tuple(node.name for node in operations),
        "kinds": kinds,
        "modules": modules,
    }


def _of_values(values: Values, outputs: list[int], written: list[int]) -> dict[str, Any]:
    base = np.array(values.base, np.int64)
    producer = np.array(values.producer, np.int64)
    lasting = (producer < 0) & ~np.array([_is_tangent(node) for node in values.node], bool)
    lasting[[one for one in outputs if one >= 0]] = True
    lasting[base[lasting]] = True
    fixed = np.zeros(len(base), bool)
    fixed[base[lasting | ~np.array(values.movable, bool)]] = True
    fixed[base[written]] = True
    host = [one == "cpu" and set(values.device) - {"cpu", ""} != set() for one in values.device]
    return {
        "size": values.size,
        "producer": producer,
        "base": base,
        "content": np.arange(len(base)),
        "rank": values.rank,
        "lasting": lasting,
        "movable": ~fixed[base],
        "host": np.array(host, bool)[base],
    }


def _is_tangent(node: fx.Node | None) -> bool:
    return node is not None and node.op == "placeholder" and "tangents" in str(node.target)


def _kind(node: fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", getattr(node.target, "__name__", node.target)))


def _indices(texts: list[str]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the distinct texts in sorted order, and the index of each text."""
    each = sorted(set(texts))
    place = {text: i for i, text in enumerate(each)}
    return tuple(each), np.array([place[text] for text in texts], np.int64)


def _modules(operations: list[fx.Node]) -> list[str]:
    """Return the innermost module path of each operation; for backward, that of the forward operation."""
    of_number: dict[Any, str] = {}
    paths = []
    for node in operations:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        number = node.meta.get("seq_nr")
        path = next(reversed(stack.values()))[0] if stack else of_number.get(number, "")
        paths.append(path)
        if number is not None and stack:
            of_number.setdefault(number, path)
    return paths


def _effects(
    operations: list[fx.Node], values: Values, touched: list[set[int]]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return pairs of operations that keep their order, and a mask of the operations that may run again."""
    ordered = [i for i, node in enumerate(operations) if is_ordered(node)]
    pairs = set(pairwise(ordered))
    again = np.ones(len(operations), bool)
    again[ordered] = False
    for i, node in enumerate(operations):
        for one in writes(node):
            memory = values.base[values.results[one][0]]
            beside = [j for j, bases in enumerate(touched) if memory in bases]
            again[beside] = False
            pairs |= {(min(i, j), max(i, j)) for j in beside if j != i}
    return np.array(sorted(pairs), np.int64).reshape(-1, 2), again
