"""Graphs of PyTorch rewritten so that a step fits: `torch.compile(model, backend="mempool")`.

Importing this imports no PyTorch. The way of a graph: `backend` -> `partition` -> `joined` (both graphs as
one) -> `capture` (as numbers) -> `decide` -> `applied` (back into both); they run with `ops` and `runtime`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mempool.torch.rewriting.reports import Report


def report() -> Report:
    """What moves, what is made again, what is predicted and measured, of all graphs compiled so far."""
    from mempool.torch.rewriting.reports import reported

    return reported()
