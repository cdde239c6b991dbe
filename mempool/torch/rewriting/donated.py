"""What a backward graph is given and goes with its last reader, and what of it may be written over."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch._functorch import config
from torch._inductor import graph as lowering

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mempool.torch.rewriting.decided import Decided
    from mempool.torch.rewriting.joined import Joined

#: Whether inductor can be told what it may write over.
CAN_BE_TOLD = hasattr(lowering, "get_donated_idxs")


def handed_over(joined: Joined, made: Decided) -> Mapping[str, tuple[int, int]]:
    """Of inputs of the backward graph that go with their last readers, by name, the memory and its bytes.

    Memories are values of the captured graph, which knows what shares one, or below 0.

    Args:
        joined: the graphs, changed as was decided.
        made: what was decided.
    """
    graph, halves, lasting = made.captured.graph, joined.halves, made.lasting
    inside = {joined.source[node]: value for node, value in made.captured.value_of.items()}
    value_of = {node.name: value for node, value in inside.items() if node.graph is halves.forward.graph}
    given: dict[str, tuple[int, int]] = {}
    for i, (name, node) in enumerate(halves.handed.items()):
        base = int(graph.base[value_of[name]]) if name in value_of else -1
        if base < 0 and isinstance(node.meta["val"], torch.Tensor):  # a ticket
            given[node.name] = -1 - i, node.meta["val"].nbytes
        elif base >= 0 and not lasting[base] and not graph.host[base]:
            given[node.name] = base, int(graph.size[base])
    return given


def donated(joined: Joined, made: Decided) -> list[int]:
    """The places of inputs of the backward graph whose memory nobody else has; arguments as of `handed_over`.

    PyTorch takes all that the forward graph saves for such, but for what shares memory with what the function
    is given or returns. But a value and a view of it may both be saved, and one be read when the other has
    been written over.
    """
    if not config.donated_buffer:
        return []
    given, lasting = handed_over(joined, made), made.captured.graph.lasting
    times = Counter(memory for memory, _ in given.values())
    own = {memory for memory, often in times.items() if memory >= 0 and often == 1 and not lasting[memory]}
    alone = {name for name, (memory, _) in given.items() if memory in own}
    inputs = joined.halves.backward.graph.find_nodes(op="placeholder")
    return [i for i, node in enumerate(inputs) if node.name in alone]


@contextlib.contextmanager
def told(places: Sequence[int] | None) -> Iterator[None]:
    """Have inductor write over these inputs of a backward graph alone; None: over those that it likes."""
    if places is None or not CAN_BE_TOLD:
        yield
        return
    asked = lowering.get_donated_idxs
    lowering.get_donated_idxs = lambda: list(places)
    try:
        yield
    finally:
        lowering.get_donated_idxs = asked
