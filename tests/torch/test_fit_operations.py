"""Operations and losses one by one: predicted memory equals a real step, or the deviation has a named reason.

Real steps run without a mode: a recorder of PyTorch's operations makes autograd choose otherwise, as tensors
without memory do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mempool.torch.estimate.fake.mode import ValuelessMode

if TYPE_CHECKING:
    from collections.abc import Callable

OPERATIONS = Path(__file__).parents[1] / "support" / "fit_operations.py"
#: Numbers that PyTorch wraps as tensors, a few at once.
SCALARS = 24
#: Operations for which fake tensors take more memory than a real run (docs/predicted.md).
MORE = {
    "another formula": {"cumprod", "prod", "prod of rows", "clamp by tensors"},
    "a chain out of place": {"bce with logits, weighed"},
    "draws that are repeated less often": {"trunc_normal_, narrow"},
}
if torch.__version__ >= (2, 14):
    MORE["another sum of gradients"] = {"quantile"}
#: Operations with buffers that no operation shows, such as inside the CPU's kernels.
LESS = {"index by mask", "nansum", "scatter_reduce", "amax", "max of all", "median of all", "masked_scatter"}
LESS |= {"instance_norm", "batch_norm", "embedding_bag", "kthvalue", "sort"}
LESS |= {"median", "Tensor.unfold", "group_norm", "attention", "attention, masked", "svdvals", "eigh"}


@pytest.fixture(scope="module")
def peaks() -> dict[str, tuple[int, int]]:
    """Return the predicted and the real peak of each operation."""
    command = [sys.executable, "-W", "ignore", str(OPERATIONS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_peaks_equal_a_real_run(peaks: dict[str, tuple[int, int]]) -> None:
    named = set().union(*MORE.values(), LESS)
    off = {
        name: (said, real)
        for name, (said, real) in peaks.items()
        if name not in named and not 0 <= real - said <= SCALARS
    }
    assert not off
    assert len(peaks.keys() - named) > 100


def test_listed_deviations_exist(peaks: dict[str, tuple[int, int]]) -> None:
    assert all(peaks[name][0] > peaks[name][1] for name in set().union(*MORE.values()))
    assert all(peaks[name][0] < peaks[name][1] - SCALARS for name in LESS)


def test_only_zeros_of_a_gradient_function_are_filled_in_place() -> None:
    index = torch.zeros(3, 4, dtype=torch.int64)
    with ValuelessMode() as mode:
        index = mode.from_tensor(index)
        zeros = torch.zeros(3, 4)
        assert zeros.scatter_add(1, index, zeros) is not zeros
        kept = torch.rand(3, 4, requires_grad=True)
        first = torch.autograd.grad(kept.square().gather(1, index).square().sum(), kept, create_graph=True)
        (second,) = torch.autograd.grad(first[0].sum(), kept)
        assert second.shape == kept.shape
        seen = []
        hooked = kept * 1.0
        hooked.register_hook(lambda grad: seen.append(grad.scatter_add(1, index, grad) is grad))
        hooked.sin().sum().backward()
        assert seen == [False]


@pytest.mark.parametrize("held", [False, True])
def test_gradients_add_in_place_unless_the_first_is_held(held: bool) -> None:
    found, kept = [], []
    with ValuelessMode():
        twice = torch.empty(3, 4, requires_grad=True) * 1.0
        first = twice.sin()
        second = twice + 0.0

        def of_second(gradient: torch.Tensor) -> None:
            found.append(gradient.untyped_storage()._cdata)
            if held:
                kept.append(gradient)

        second.register_hook(of_second)
        twice.register_hook(lambda gradient: found.append(gradient.untyped_storage()._cdata))
        other = torch.empty(3, 4, requires_grad=True) * 1.0  # whose gradients tell what nobody holds
        (other.sin() + other.exp()).sum().backward()
        (first + second.exp()).sum().backward()
    assert (found[0] == found[1]) is not held


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
