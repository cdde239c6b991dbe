"""Strides that a compiler chooses, and operators of third parties."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from compiled_programs import ALL, PLAIN, same, trained
from torch import nn

from mempool.torch.compiled.runtime import RUNTIME

CALLS = itertools.count()


@torch.library.custom_op("mempool_tests::mask", mutates_args=())
def mask(x: torch.Tensor) -> torch.Tensor:
    """Draw random numbers without declaring so, and count the calls."""
    next(CALLS)
    return (torch.rand(x.shape) > 0.5).to(x.dtype) * 2


@mask.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (layer(x) * mask(x.detach())).tanh()
        return x


@pytest.mark.parametrize("stride", [(256, 1, 32, 4), (256, 64, 8, 1)], ids=["last", "as asked"])
def test_reloads_have_the_requested_strides(
    stride: tuple[int, ...],
) -> None:
    left = torch.empty_strided((4, 4, 8, 8), stride).uniform_()
    ticket = RUNTIME.offload(left, 0)
    handle = RUNTIME.offload_wait(ticket)
    back = RUNTIME.reload_wait(RUNTIME.reload(handle, torch.zeros(4, 4, 8, 8)))
    at_once = RUNTIME.reload_sync(RUNTIME.offload_sync(left, 0), torch.zeros(4, 4, 8, 8))
    for one in (back, at_once):
        assert one.is_contiguous()
        assert torch.equal(one, left)


@pytest.mark.parametrize("limit", [1 << 30, 92_000])
def test_foreign_operators_run_once_per_step(limit: int) -> None:
    """A foreign operator is neither recomputed nor run for a measurement."""
    plain = trained(Masked, PLAIN, width=32)
    before = next(CALLS)
    got = trained(Masked, PLAIN | {"limit": limit, "link": "1,1e-3"}, width=32)
    assert next(CALLS) - before - 1 == 3 * 4
    assert same(got, plain)


def test_results_of_foreign_operators_may_be_offloaded() -> None:
    plain = trained(Masked, PLAIN, width=32)
    assert same(trained(Masked, ALL, width=32), plain)
    assert RUNTIME.counters.reloads > 0
