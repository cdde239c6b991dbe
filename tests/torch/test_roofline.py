"""Rates of cards, the times of operations on them, and the timed step of an estimate."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from fit_programs import fit_of, job_of

from mempool.hardware.gpu_memory import CARDS
from mempool.hardware.gpu_throughput import rates_of
from mempool.hardware.roofline import Roofline
from mempool.torch.estimate.fake.fake_run import run
from mempool.torch.estimate.fake.mode import fake_mode
from solvers.swap import PRESETS, step_of

ops = torch.ops.aten


def test_rates_of_every_card_are_known() -> None:
    """Rates are in order (16 bits are not slower than 32), and the link is known."""
    for card in CARDS:
        rates = rates_of(card.name, card.capability)
        assert 0 < rates.single <= rates.convolutions <= max(rates.half, rates.single)
        assert rates.bandwidth > 1e11
        assert rates.link in PRESETS
        assert card.name in str(rates)


def test_a_roofline_is_the_longer_of_products_and_bytes() -> None:
    """Products are timed by the rate of their type, other operations by bytes; views take no time."""
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
        assert clock(ops.add_.Tensor, (a, b), {}, a) == added  # an in-place operation reads its output
        assert clock(ops.t.default, (a,), {}, a.t()) == 0
        image, kernel = torch.empty(8, 64, 32, 32), torch.empty(64, 64, 3, 3)
        more = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        result = torch.empty(8, 64, 32, 32)
        took = clock(ops.convolution.default, (image, kernel, None, *more), {}, result)
        assert took == round(1e9 * 2 * result.numel() * 64 * 9 / rates.convolutions)


def test_the_timed_step_repeats_and_has_the_predicted_peak() -> None:
    job = job_of("dropping", device="cuda")
    trace = run(job, 3, clock=Roofline(rates_of()).nanoseconds)
    assert trace.metadata["clock"] == "modelled"
    step = step_of(trace)
    assert step.circular
    assert step.duration > 0
    assert step.peak_bytes == pytest.approx(fit_of(job).peak_bytes, rel=0.02)
