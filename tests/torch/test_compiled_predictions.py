"""Predictions describe the edited graphs; host limits, name filters and copy costs are honoured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from compiled_programs import PLAIN, compiled, waves

from mempool.torch.compiled.shared_limit import SHARED_LIMITS
from solvers.swap import Link

if TYPE_CHECKING:
    from mempool.torch.compiled.decide import StepDecision

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

LINK = Link(1e-5, 1e-10, 1e-5, 1e-10)


def last() -> StepDecision:
    """Return the decision about the latest graph."""
    (part,) = SHARED_LIMITS[-1].graphs.values()
    return part.decision


def point() -> torch.Tensor:
    return torch.linspace(0, 1, 4096).view(64, 64).requires_grad_()


def test_checkpoint_recomputations_have_separate_memory() -> None:
    """A node of the same name in both graphs stands for two values."""

    def again(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.utils.checkpoint.checkpoint(waves, x * 2, use_reentrant=False)
        return result.sum()

    compiled(again, {**PLAIN, "limit": 1 << 30, "link": LINK})(point())
    graph = last().captured.graph
    made_again = np.flatnonzero(graph.backward[graph.producer] & (graph.producer >= 0) & (graph.size > 0))
    kinds = {graph.kinds[graph.kind[graph.producer[value]]] for value in made_again}
    assert {"aten.exp", "aten.sin", "aten.tanh"} <= kinds


def test_host_limit_is_checked_when_deciding() -> None:
    """The refusal comes before anything runs."""
    options = {**PLAIN, "link": LINK}
    compiled(waves, {**options, "limit": 1 << 30})(point())
    limit = int(0.9 * last().plain.peak_bytes)
    compiled(waves, {**options, "limit": limit})(point())
    host = last().simulated.host_bytes
    with pytest.raises(Exception, match=f"with {host - 1} bytes on the host"):
        compiled(waves, {**options, "limit": limit, "host_limit": host - 1})(point())


def test_name_filter_without_match_warns() -> None:
    options = {**PLAIN, "limit": 1 << 30, "link": LINK, "exclude": ["aten.tanh", "encodr.*"]}
    with pytest.warns(UserWarning, match=r"no operation or module is named 'encodr\.\*'"):
        compiled(waves, options)(point())
