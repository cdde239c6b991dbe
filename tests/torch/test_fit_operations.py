"""Operations one by one: what `fit` says of a step is what the pool is asked for, or there is a named reason.

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

import torch

from mempool.torch.estimate.fake.mode import ValuelessMode

OPERATIONS = Path(__file__).parents[1] / "support" / "fit_operations.py"
#: Numbers that PyTorch wraps as tensors, a few at once.
SCALARS = 24
#: Where tensors without memory take more than a run does (docs/predicted.md).
MORE = {
    "another formula": {"cumprod", "prod", "prod of rows", "clamp by tensors"},
    "a chain out of place": {"bce with logits, weighed"},
    "draws that are repeated less often": {"trunc_normal_, narrow"},
}
#: Where a run takes buffers that no operation shows, such as inside of the CPU's kernels.
LESS = {"index by mask", "nansum", "scatter_reduce", "amax", "max of all", "median of all", "masked_scatter"}
LESS |= {"smooth_l1_loss", "mse_loss", "instance_norm", "batch_norm", "embedding_bag", "kthvalue", "sort"}
LESS |= {"median", "Tensor.unfold", "group_norm", "attention", "attention, masked", "svdvals", "eigh"}


@pytest.fixture(scope="module")
def peaks() -> dict[str, tuple[int, int]]:
    """Of each operation what is said, and what is real."""
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
