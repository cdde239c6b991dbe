"""Rewriting of PyTorch graphs so that a step fits: `torch.compile(model, backend="mempool")`.

Importing this package does not import PyTorch. A graph passes through `backend` -> `partition` -> `joined`
(both graphs merged) -> `capture` (as numbers) -> `decide` -> `applied` (changes in both graphs); the changed
graphs run with `ops` and `runtime`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mempool.torch.compiled.reports import Report


def report() -> Report:
    """Return the report of all compiled graphs: moved and recomputed values, predictions and measurements."""
    from mempool.torch.compiled.reports import make_report

    return make_report()
