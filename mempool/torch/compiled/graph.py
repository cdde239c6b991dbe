"""Convert a joint graph (FX) into columns of numbers, with the node of each operation and value."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from mempool.torch.compiled.costs import hint, is_pytorchs_own, roofline_seconds
from mempool.torch.compiled.joint_graph import has_several_results
from solvers.rewriting import Graph, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray
    from torch import fx

_FORWARD = ("is_forward", "must_be_in_forward")


@dataclass(frozen=True, eq=False)
class CapturedGraph:
    """A joint graph as numbers, with the node of each number.

    Attributes:
        graph: the step as columns.
        operations: the node of each operation.
        values: the node of each value; None for an unused result and for memory outside the graph.
        sizes: the bytes of each value, as a symbol if they depend on sizes known only at run time.
        inputs: the value of each placeholder, in order.
        outputs: the value of each output, in order; -1 for an output that is no tensor.
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
        made = {int(graph.base[value]) for value in self.outputs[: self.forward_outputs] if value >= 0}
        return tuple(sorted(value for value in made if graph.producer[value] >= 0))

    def arguments_at(self, places: Iterable[int]) -> tuple[int, ...]:
        """Return the values of the function's arguments at the positions `places`."""
        names = {f"primals_{place + 1}" for place in places}
        return tuple(value for value in self.inputs if str(self.values[value]) in names)

    @cached_property
    def incoming_gradients(self) -> tuple[int, ...]:
        """Return the values of the gradients that the backward pass receives."""
        return tuple(value for value in self.inputs if _is_tangent(self.values[value]))


def capture(
    joint: fx.GraphModule,
    forward_outputs: int,
    *,
    seconds: Callable[[fx.Node], float] | None = None,
    outside_bytes: int = 0,
) -> CapturedGraph:
    """Convert the joint graph of a step.

    Parameters, buffers and other inputs live for the whole step and never move; results of the forward pass
    and gradients live to the end of the step. Forward operations are all operations up to the last one that
    the forward pass needs. Control edges preserve the order of operations that draw random numbers,
    communicate or are opaque, and of writers and readers of the same value. A value that an operation
    overwrites does not move.

    Args:
        joint: a graph with fake tensors in ``meta["val"]``, as made by AOTAutograd.
        forward_outputs: number of outputs of the forward pass, which come first.
        seconds: returns the seconds of a node; default: the roofline minimum on
            `mempool.hardware.gpu_throughput.DEFAULT`.
        outside_bytes: bytes in use for the whole step, such as an optimizer's state; added as an input.
    """
    values = ValueTable()
    operations: list[fx.Node] = []
    inputs: list[int] = []
    nodes = list(joint.graph.nodes)
    for node in nodes[:-1]:
        if node.op in ("placeholder", "get_attr"):
            held = node.meta.get("val")
            if held is None and node.op == "get_attr":
                held = getattr(joint, str(node.target), None)
            value = values.add_input(node, held)
            inputs += [value] if node.op == "placeholder" else []
        elif not values.add_getitem(node):
            values.add_results(node, len(operations))
            operations.append(node)
    if outside_bytes:
        values.add_memory(outside_bytes)
    returned = nodes[-1].args[0]
    outputs = [values.results[result][0] if isinstance(result, torch.fx.Node) else -1 for result in returned]
    forward = _forward(nodes, returned[:forward_outputs])
    graph = Graph(
        **_operation_columns(operations, values, forward, seconds or roofline_seconds()),
        **_value_columns(
            values,
            outputs,
            [values.results[node_written][0] for node in operations for node_written in writes(node)],
        ),
    )
    return CapturedGraph(
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
    left = [node for node in outputs if isinstance(node, torch.fx.Node)]
    left += [node for node in nodes if node.meta.get("partitioner_tag") in _FORWARD]
    needed: set[fx.Node] = set()
    while left:
        node = left.pop()
        if node not in needed:
            needed.add(node)
            left += node.all_input_nodes
    last = max((place for place, node in enumerate(nodes) if node in needed), default=-1)
    return set(nodes[: last + 1])


def _operation_columns(
    operations: list[fx.Node], values: ValueTable, forward: set[fx.Node], seconds: Callable[[fx.Node], float]
) -> dict[str, Any]:
    count = len(operations)
    reads = [values.read(node) for node in operations]
    base = np.array(values.base, np.int64)
    kinds, kind = _distinct_texts([_kind_of(node) for node in operations])
    modules, module = _distinct_texts(_module_paths(operations))
    control, repeatable = _order_constraints(operations, values, [set(base[row].tolist()) for row in reads])
    return {
        "seconds": np.array([seconds(node) for node in operations]),
        "workspace": np.zeros(count),
        "backward": [node not in forward for node in operations],
        "repeatable": repeatable,
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


def _value_columns(values: ValueTable, outputs: list[int], written: list[int]) -> dict[str, Any]:
    base = np.array(values.base, np.int64)
    producer = np.array(values.producer, np.int64)
    lasting = (producer < 0) & ~np.array([_is_tangent(node) for node in values.node], bool)
    lasting[[value for value in outputs if value >= 0]] = True
    lasting[base[lasting]] = True
    fixed = np.zeros(len(base), bool)
    fixed[base[lasting | ~np.array(values.movable, bool)]] = True
    fixed[base[written]] = True
    host = [device == "cpu" and set(values.device) - {"cpu", ""} != set() for device in values.device]
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


def _kind_of(node: fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", getattr(node.target, "__name__", node.target)))


def _distinct_texts(texts: list[str]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the distinct texts in sorted order, and the index of each text."""
    each = sorted(set(texts))
    place = {text: i for i, text in enumerate(each)}
    return tuple(each), np.array([place[text] for text in texts], np.int64)


def _module_paths(operations: list[fx.Node]) -> list[str]:
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


def _order_constraints(
    operations: list[fx.Node], values: ValueTable, touched: list[set[int]]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return pairs of operations whose order is fixed, and a mask of the operations that may run again."""
    ordered = [i for i, node in enumerate(operations) if is_ordered(node)]
    pairs = set(pairwise(ordered))
    repeatable = np.ones(len(operations), bool)
    repeatable[ordered] = False
    for i, node in enumerate(operations):
        for target in writes(node):
            memory = values.base[values.results[target][0]]
            sharing = [j for j, bases in enumerate(touched) if memory in bases]
            repeatable[sharing] = False
            pairs |= {(min(i, j), max(i, j)) for j in sharing if j != i}
    return np.array(sorted(pairs), np.int64).reshape(-1, 2), repeatable


@dataclass
class ValueTable:
    """Columns of `solvers.rewriting.Graph`, filled one value at a time in the order of the nodes.

    Attributes:
        node: the node of each value; None for an unused result.
        symbolic: the bytes of each value, as a symbol if they depend on sizes known only at run time.
        device: the device type of each value; "" for a number.
        results: maps a node to the values of the results; -1 where a result is no value. Nested results are
            nested lists.
    """

    node: list[fx.Node | None] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    symbolic: list[Any] = field(default_factory=list)
    producer: list[int] = field(default_factory=list)
    base: list[int] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    movable: list[bool] = field(default_factory=list)
    device: list[str] = field(default_factory=list)
    results: dict[fx.Node, list[Any]] = field(default_factory=dict)
    _owners: dict[int, int] = field(default_factory=dict)

    def add_input(self, node: fx.Node, held: Any) -> int:
        """Add an input; return the value."""
        self.results[node] = [self._add(node, held, -1)]
        return len(self.size) - 1

    def add_memory(self, size: int) -> None:
        """Add memory that belongs to no node."""
        self._add(None, None, -1)
        self.size[-1] = self.symbolic[-1] = size

    def add_results(self, node: fx.Node, producer: int) -> None:
        """Add the results of an operation."""
        held = node.meta.get("val")
        if has_several_results(held):
            self.results[node] = self._add_parts(held, producer)
        else:
            self.results[node] = [self._add(node, held, producer)]

    def add_getitem(self, node: fx.Node) -> bool:
        """Bind a `getitem` node to the value of the result that it selects; return false for other nodes."""
        if node.target is not operator.getitem:
            return False
        source, index = node.args
        if source.op != "call_function" or not has_several_results(source.meta.get("val")):
            return False
        value = self.results[source][index]
        self.results[node] = value if has_several_results(value) else [value]
        if not has_several_results(value) and value >= 0:
            self.node[value] = node
        return True

    def read(self, node: fx.Node) -> list[int]:
        """Return the values among a node's arguments, in order."""
        found: list[int] = []
        torch.fx.map_arg((node.args, node.kwargs), lambda node: found.extend(tree_leaves(self.results[node])))
        return [value for value in found if value >= 0]

    def _add_parts(self, held: Any, producer: int) -> list[Any]:
        """Add several results, which may be nested."""
        return [
            self._add_parts(part, producer)
            if has_several_results(part)
            else -1
            if part is None
            else self._add(None, part, producer)
            for part in held
        ]

    def _add(self, node: fx.Node | None, held: Any, producer: int) -> int:
        value = len(self.size)
        memory = _memory(held)
        base = self._owners.setdefault(memory[0][0], value) if memory else value
        new = sum(size for key, size in memory if self._owners.setdefault(key, value) == value)
        is_tensor = isinstance(held, torch.Tensor)
        self.node.append(node)
        self.symbolic.append(new if base == value else 0)
        self.size.append(hint(self.symbolic[-1]))
        self.producer.append(producer)
        self.base.append(base)
        self.rank.append(held.dim() if is_tensor else -1)
        self.movable.append(is_tensor and producer >= 0)
        self.device.append(held.device.type if is_tensor else "")
        return value


def _memory(held: Any) -> list[tuple[int, Any]]:
    """Return (identity, bytes) of each storage of a traced value."""
    found = {}
    for tensor in tree_leaves(held):
        if isinstance(tensor, torch.Tensor):
            try:
                storage = tensor.untyped_storage()
                found[storage._cdata] = storage.nbytes()
            except (NotImplementedError, RuntimeError):  # such as sparse tensors, which have no storage
                found[id(tensor)] = tensor.numel() * tensor.element_size()
    return list(found.items())


def writes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory an operation writes to."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    written: list[fx.Node] = []
    for place, parameter in enumerate(node.target._schema.arguments):
        given = node.args[place] if place < len(node.args) else node.kwargs.get(parameter.name)
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            torch.fx.map_arg(given, written.append)
    return written


def is_ordered(node: fx.Node) -> bool:
    """Return true if an operation draws random numbers or has unknown side effects."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    return isinstance(target, torch._ops.OpOverload) and (
        not is_pytorchs_own(node) or _is_random(node, target)
    )


def _is_random(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # Attention carries the tag because of its dropout, which is 0 in most cases.
    for place, parameter in enumerate(target._schema.arguments):
        if parameter.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else node.kwargs.get(parameter.name, 0.0)
            return bool(given != 0.0)
    return True
