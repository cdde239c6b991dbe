"""Offloading among the remedies: planned for the predicted step, and reported as planned."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from fit_programs import fit_of

from mempool.hardware.gpu_memory import CARDS
from mempool.hardware.gpu_throughput import rates_of
from mempool.hardware.roofline import Roofline
from mempool.torch.estimate import Fit, Job
from mempool.torch.estimate.fake.fake_run import run
from mempool.torch.estimate.fake.mode import fake_mode
from mempool.torch.estimate.options import OPTIONS
from mempool.torch.estimate.remedies.advise import advise
from mempool.torch.estimate.remedies.offloading import plan_offload
from mempool.units import parse_bytes
from solvers.swap import PRESETS, step_of

pytestmark = pytest.mark.usefixtures("shared_isolation")

ops = torch.ops.aten


class Deep(nn.Module):
    """Layers whose activations are most of all, with enough to compute."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def deep(**more: Any) -> Job:
    return Job(
        **{
            "model": Deep,
            "inputs": lambda batch: ((torch.randn(batch, 1024),), {}),
            "batch": 16384,
            "optimizer": torch.optim.SGD,
            "margin": {"cuda_context": 1000},
            "link": "1e-5,1e-11",
        }
        | more
    )


@pytest.fixture(scope="module")
def plain() -> Fit:
    return fit_of(deep())


def test_rates_of_every_card_are_known() -> None:
    """Rates are in order (16 bits are not slower than 32), and the link is known."""
    for card in CARDS:
        rates = rates_of(card.name, card.capability)
        assert 0 < rates.single <= rates.convolutions <= max(rates.half, rates.single)
        assert rates.bandwidth > 1e11
        assert rates.link in PRESETS
        assert card.name in str(rates)


def test_a_roofline_is_the_longer_of_products_and_bytes() -> None:
    """Products in their type's rate, everything else by bytes, views in no time."""
    rates = rates_of("A100 80GB")
    clock = Roofline(rates).nanoseconds
    with fake_mode():
        a, b = torch.empty(4096, 4096), torch.empty(4096, 4096)
        products = 2 * 4096**3
        assert clock(ops.mm.default, (a, b), {}, a.clone()) == round(1e9 * products / rates.single)
        half = a.bfloat16(), b.bfloat16()
        took = clock(ops.mm.default, half, {}, half[0].clone())
        assert took == round(1e9 * products / rates.half)
        bytes_of = 4 * 4096**2
        added = clock(ops.add.Tensor, (a, b), {}, a.clone())
        assert added == round(1e9 * 3 * bytes_of / rates.bandwidth)
        assert clock(ops.add_.Tensor, (a, b), {}, a) == added  # what is written is read before
        assert clock(ops.t.default, (a,), {}, a.t()) == 0
        image, kernel = torch.empty(8, 64, 32, 32), torch.empty(64, 64, 3, 3)
        more = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        result = torch.empty(8, 64, 32, 32)
        took = clock(ops.convolution.default, (image, kernel, None, *more), {}, result)
        assert took == round(1e9 * 2 * result.numel() * 64 * 9 / rates.convolutions)


def test_the_step_repeats_and_has_the_predicted_peak(plain: Fit) -> None:
    """The planned step is a circular iteration with the peak that `fit` predicts."""
    trace = run(deep(), 3, clock=Roofline(rates_of()).nanoseconds)
    assert trace.metadata["clock"] == "modelled"
    step = step_of(trace)
    assert step.circular
    assert step.duration > 0
    assert step.peak_bytes == pytest.approx(plain.peak_bytes, rel=0.01)


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_offload_schedule_holds_the_limit(plain: Fit, share: float) -> None:
    """Arena and margins fit the limit, or the schedule is reported not to fit; bounds hold."""
    fit = fit_of(deep(), int(plain.needed_bytes * share))
    found = plan_offload(deep(), fit)
    assert found is not None
    assert found.at_limit is not None
    assert fit.limit_bytes is not None
    assert found.fits == (found.at_limit.needed_bytes <= fit.limit_bytes)
    assert found.fits
    assert found.at_limit.peak_bytes + sum(fit.margin_bytes.values()) <= found.at_limit.needed_bytes
    assert found.at_limit.slower >= found.at_limit.slowdown_bound >= 0
    assert found.without_stall.slower == 0
    assert found.floor_bytes <= found.without_stall.peak_bytes <= fit.peak_bytes
    assert found.at_limit.host_bytes <= found.at_limit.swapped_bytes


def test_without_a_limit_the_peak_at_the_allowed_slowdown_is_given(plain: Fit) -> None:
    found = plan_offload(deep(link="1e-5,2e-10"), plain)
    assert found is not None
    assert found.slower is not None
    assert found.at_limit is None
    assert found.fits is None
    assert found.slower.slower <= OPTIONS.slowdown
    assert found.slower.peak_bytes <= found.without_stall.peak_bytes < plain.peak_bytes


def test_offloading_is_a_remedy_and_in_the_json(plain: Fit) -> None:
    """The remedy names rates and link, and the line of code."""
    fit = fit_of(deep(), int(plain.needed_bytes * 0.7))
    advice = advise(deep(card="RTX 4090"), fit, most_runs=3)
    (one,) = [help_ for help_ in advice.remedies if help_.name == "swapping"]
    assert advice.swapping is not None
    assert one.fits
    assert one.saves_bytes == fit.needed_bytes - advice.swapping.reported.needed_bytes
    assert 'limit="' in one.code
    said = parse_bytes(one.code.split('limit="')[1].split('"')[0])
    assert said is not None
    assert 0 <= said - (one.needed_bytes - sum(fit.margin_bytes.values())) < 2**20
    assert "RTX 4090" in one.how
    assert "GB/s each way" in advice.swapping.assumed
    written = json.loads(json.dumps(advice.to_dict()))
    assert written["swapping"]["at_limit"]["needed_bytes"] == one.needed_bytes
    assert advice.cheapest is not None
    assert advice.cheapest.fits


def test_useless_offloading_gives_a_hint() -> None:
    """One layer: the peak is what its operation touches."""

    def one() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 4096, bias=False))

    job = Job(
        model=one,
        inputs=lambda batch: ((torch.randn(batch, 16),), {}),
        loss=lambda output: output.sum(),
        batch=64,
        optimizer=torch.optim.SGD,
        hold_output=False,
    )
    advice = advise(job, fit_of(job), most_runs=1)
    assert advice.swapping is not None
    assert any("swapping gains nothing" in hint for hint in advice.hints)


@pytest.mark.parametrize("more", [{"mode": "inference", "optimizer": None}, {"device": "cpu"}])
def test_other_jobs_get_no_offload_plan(more: dict[str, Any]) -> None:
    job = deep(batch=64, **more)
    assert plan_offload(job, fit_of(job)) is None


def test_invalid_link_is_among_the_untried_changes(plain: Fit) -> None:
    advice = advise(deep(link="rope"), plain, most_runs=1)
    assert advice.swapping is None
    assert ("swapping", "ValueError") in [(name, why.split(":")[0]) for name, why in advice.not_tried]


@pytest.mark.full
def test_change_and_offloading_combine_if_neither_suffices() -> None:
    from test_fit_remedies import squares

    job = squares(batch=4)
    plain = fit_of(job)
    none = advise(job, fit_of(job, 1000))
    assert none.combined is not None
    assert none.swapping is not None
    assert none.cheapest is None  # a thousand bytes are too few for both
    lowest = none.swapping.floor_bytes + sum(plain.margin_bytes.values())
    limit = min(none.combined.needed_bytes, lowest) - (1 << 20)
    fit = fit_of(job, limit)
    advice = advise(job, fit)
    found = advice.cheapest
    assert found is not None
    assert found.parts[-1] == "swapping" != found.parts[0]
    assert found.fits
    assert found.needed_bytes <= limit
    assert found.saves_bytes == fit.needed_bytes - found.needed_bytes
    assert advice.combined is None
    assert found.code.count("\n") >= 1
