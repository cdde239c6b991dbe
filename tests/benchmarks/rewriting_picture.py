"""The picture of docs/rewriting.md: a small step as a graph before and after, as SVG.

python tests/benchmarks/rewriting_picture.py > docs/img/rewriting.svg
"""

from __future__ import annotations

import sys

import numpy as np

from solvers.rewriting import Graph, Offload, Reload, Rewriting, Role, apply_rewriting
from solvers.rewriting.judge import simulate
from solvers.swap import Link

_STEP = 58  # between operations
_LEFT, _TOP, _BAR = 70, 130, 90
_MIB = 1 << 20
#: Colours that the colour-blind tell apart (Okabe and Ito), by role; the first by pass.
_FILL = {Role.OFFLOAD: "#9ad0f3", Role.RELOAD: "#9ad0f3", Role.RECOMPUTED: "#f5cf7a"}


def step() -> Graph:
    """Two layers, each a convolution and a GELU that keeps what it reads, a loss, and the way back."""
    made = ["a", "h", "b", "g", "loss", "dg", "db", "dh", "da", "dw"]
    names = ("conv1", "gelu1", "conv2", "gelu2", "loss", "loss'", "gelu2'", "conv2'", "gelu1'", "conv1'")
    reads = [["x"], ["a"], ["h"], ["b"], ["g"], ["g"], ["dg", "b"], ["db", "h"], ["dh", "a"], ["da", "x"]]
    number = {name: value for value, name in enumerate(["x", *made])}
    n, m = len(names), len(number)
    small = {"loss": 0, "dw": 2, "x": 4}
    return Graph(
        seconds=np.array([8, 1, 8, 1, 1, 1, 2, 16, 2, 16]) * 1e-3,
        workspace=np.zeros(n),
        backward=np.arange(n) > 4,
        repeatable=np.ones(n, bool),
        role=np.zeros(n),
        kind=np.zeros(n),
        module=np.full(n, -1),
        size=np.array([small.get(name, 16) for name in number]) * _MIB,
        producer=np.arange(m) - 1,
        base=np.arange(m),
        content=np.arange(m),
        rank=np.full(m, 4),
        lasting=np.isin(list(number), ["x", "loss", "dw"]),
        movable=np.ones(m, bool),
        host=np.zeros(m, bool),
        reads_start=np.cumsum([0, *map(len, reads)]),
        reads=[number[value] for row in reads for value in row],
        control=np.zeros((0, 2)),
        names=names,
        kinds=("aten",),
    )


def decided(graph: Graph) -> Rewriting:
    """The first layer's output waits in the host's memory, its GELU's is made again from what comes back."""
    a, h, again = 1, 2, len(graph) + 1
    back = Reload(consumers=(again, 8), trigger=5)
    return Rewriting((Offload(a, (back,), after=1, release=3),), recomputed=(h,))


def drawn(graph: Graph, title: str, top: int) -> tuple[str, int]:
    """A graph and its bytes below it, and the height of that."""
    load = simulate(graph, Link(0.0, 1e-10, 0.0, 1e-10)).load
    row, base = top + _TOP, top + _TOP + 110 + _BAR
    peak = int(load.max()) // _MIB
    parts = [f'<text x="{_LEFT - 56}" y="{top + 20}" font-size="14">{title}: peak {peak} MiB</text>']
    parts += [_arcs(graph, row), *(_operation(graph, op, row) for op in range(len(graph)))]
    for op, size in enumerate((load // _MIB).tolist()):
        x, height = _x(op) - 20, size * _BAR / 110
        parts.append(f'<rect x="{x}" y="{base - height:.1f}" width="40" height="{height:.1f}" fill="#bbb"/>')
        parts.append(f'<text x="{_x(op)}" y="{base - height - 4:.1f}" text-anchor="middle">{size}</text>')
    parts.append(f'<text x="{_LEFT - 56}" y="{base}">MiB</text>')
    return "".join(parts), base + 16


def _x(op: int) -> int:
    return _LEFT + op * _STEP


def _lane(graph: Graph, op: int, row: int) -> int:
    return row + (50 if graph.role[op] in (Role.OFFLOAD, Role.RELOAD) else 0)


def _operation(graph: Graph, op: int, row: int) -> str:
    role, y = Role(int(graph.role[op])), _lane(graph, op, row)
    fill = _FILL.get(role, "#e8e8e8" if graph.backward[op] else "#fff")
    kinds = {Role.OFFLOAD: "out", Role.RELOAD: "in"}
    name = kinds.get(role, graph.names[op].removeprefix("recompute."))
    return (
        f'<rect x="{_x(op) - 25}" y="{y}" width="50" height="24" rx="5" fill="{fill}" stroke="#333"/>'
        f'<text x="{_x(op)}" y="{y + 16}" text-anchor="middle">{name}</text>'
    )


def _arcs(graph: Graph, row: int) -> str:
    parts = []
    for op in range(len(graph)):
        for value in graph.read_by(op).tolist():
            maker = int(graph.producer[value])
            if maker < 0:
                continue
            parts.append(_arc(graph, maker, op, row))
    return "".join(parts)


def _arc(graph: Graph, maker: int, op: int, row: int) -> str:
    """Over the row where both ends stand in it, else a line to the copy below it or back up."""
    x1, x2 = _x(maker), _x(op)
    y1, y2 = _lane(graph, maker, row), _lane(graph, op, row)
    if y1 == y2 == row:
        high = row - min(12 + (x2 - x1) / 5, 105) * (0 if x2 - x1 == _STEP else 1)
        shape = f"M{x1} {row}C{x1} {high:.1f} {x2} {high:.1f} {x2} {row}"
        shape = f"M{x1 + 25} {row + 12}H{x2 - 25}" if x2 - x1 == _STEP else shape
    elif y1 == y2:
        shape = f"M{x1 + 25} {y1 + 12}H{x2 - 25}"
    else:
        shape = f"M{x1} {y1 + 24 * (y1 < y2)}L{x2} {y2 + 24 * (y2 < y1)}"
    dash = ' stroke-dasharray="5 3"' if y1 == y2 != row else ""
    return f'<path d="{shape}" fill="none" stroke="#0072b2" stroke-width="1.3"{dash} marker-end="url(#to)"/>'


def picture() -> str:
    """Both graphs, one below the other."""
    graph = step()
    before, height = drawn(graph, "Before", 0)
    new = apply_rewriting(graph, decided(graph))
    after, height = drawn(new, "After", height)
    width = _x(len(new) - 1) + 60
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="11"><rect width="100%" height="100%" '
        'fill="#fff"/><defs><marker id="to" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#0072b2"/></marker></defs>'
    )
    return f"{head}{before}{after}</svg>\n"


if __name__ == "__main__":
    sys.stdout.write(picture())
