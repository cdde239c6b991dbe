"""Memory of losses: PyTorch's own as a real run has them, and those that a script writes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.nn.functional as F
from torch import Tensor

from mempool.torch.estimate.fake.mode import ValuelessMode

if TYPE_CHECKING:
    from collections.abc import Callable

LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce": lambda o, y, **more: F.binary_cross_entropy(o.sigmoid(), y.sigmoid(), **more),
    "bce_with_logits": lambda o, y, **more: F.binary_cross_entropy_with_logits(o, y.sigmoid(), **more),
    "soft_margin": lambda o, y, **more: F.soft_margin_loss(o, y.sign(), **more),
    "kl": lambda o, y, **more: F.kl_div(o, y, **more),
    "poisson": F.poisson_nll_loss,
    "cross_entropy": lambda o, _, **more: F.cross_entropy(o, torch.zeros(8, dtype=torch.int64), **more),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_storage_of_a_reduced_loss_is_as_large_as_in_a_real_run(
    loss: Callable[..., Tensor], reduction: str
) -> None:
    """PyTorch writes the mean of some losses into the storage of the loss of each element."""

    def storage_bytes() -> Any:
        output = torch.zeros(8, 5).requires_grad_()
        made = loss(output, torch.zeros(8, 5), reduction=reduction)
        made.sum().backward()
        return made.untyped_storage().nbytes(), made.shape, output.grad is not None

    real = storage_bytes()
    with ValuelessMode():
        assert storage_bytes() == real
