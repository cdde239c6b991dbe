"""Offloading and recomputation in compiled PyTorch graphs: `torch.compile(model, backend="mempool")`.

Importing this package does not import PyTorch. A graph passes through `backend`, `partition`, `joint_graph`
(merges forward and backward graph), `graph` (converts to numbers), `decide`, and `graph_passes` (changes both
graphs); the changed graphs run with `ops` and `runtime`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mempool.torch.compiled.reports import Report


def report() -> Report:
    """Return the report of all compiled graphs: moved and recomputed values, predictions and measurements."""
    from mempool.torch.compiled.reports import make_report

    return make_report()
