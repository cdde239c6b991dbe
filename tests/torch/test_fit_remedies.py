"""Remedies: savings add up, equal a run of the changed job, and leave the model unchanged."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from fit_programs import fit_of
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mempool.torch.estimate import Job
from mempool.torch.estimate.checkpointing import repeated_blocks
from mempool.torch.estimate.fake.mode import fake_mode
from mempool.torch.estimate.remedies.advise import advise, cheapest_of
from mempool.torch.estimate.remedies.changes import Change, Cost, applied, changes_of
from mempool.torch.estimate.result import TriedRemedy

pytestmark = pytest.mark.usefixtures("shared_isolation")


class Squares(nn.Module):
    """Three blocks whose activations are most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).sin()
        return x.square().mean()


def squares(**more: Any) -> Job:
    return Job(
        **{
            "model": Squares,
            "inputs": lambda batch: ((torch.randn(batch, 1024, 256),), {}),
            "batch": 16,
            "optimizer": torch.optim.AdamW,
        }
        | more
    )


@pytest.fixture(scope="module")
def tried() -> Any:
    """Return the estimate with remedies of a job that lacks a quarter of its peak."""
    job = squares()
    limit = int(fit_of(job).needed_bytes - 0.25 * fit_of(job).peak_bytes)
    fit, names = fit_of(job, limit), []
    return job, fit, advise(job, fit, progress=names.append), names


def test_savings_are_differences_in_descending_order(tried: Any) -> None:
    _, fit, advice, _ = tried
    assert advice.remedies
    for one in [*advice.remedies, advice.cheapest]:
        assert one.saves_bytes == fit.needed_bytes - one.needed_bytes > 0
        assert one.fits == (one.needed_bytes <= fit.limit_bytes)
        assert one.code
        assert one.how
    saved = [one.saves_bytes for one in advice.remedies]
    assert saved == sorted(saved, reverse=True)


def test_saving_equals_a_run_of_the_changed_job(tried: Any) -> None:
    """Each saving is compared with a separate estimate."""
    job, fit, advice, _ = tried
    changes = {change.name: change for strengths in changes_of(job) for change in strengths}
    for one in [*advice.remedies, advice.cheapest]:
        parts = [changes[name] for name in one.parts]
        assert fit_of(applied(job, parts), fit.limit_bytes).peak_bytes == one.peak_bytes


def test_batch_in_fewer_parts_does_not_fit(tried: Any) -> None:
    job, fit, advice, _ = tried
    (found,) = (one for one in advice.remedies if "batches of" in one.name)
    (steps,) = (strengths for strengths in changes_of(job) if strengths[0].kind == "batch")
    at = [step.name for step in steps].index(found.name)
    assert found.fits
    assert at == 0 or not fit_of(applied(job, [steps[at - 1]]), fit.limit_bytes).fits


def test_advice_reports_progress_and_is_ready_for_json(tried: Any) -> None:
    *_, advice, names = tried
    assert len(names) == len(set(names)) > 5
    assert json.loads(json.dumps(advice.to_dict()))["cheapest"]["fits"] is True


def test_fitting_jobs_get_no_combination() -> None:
    job = squares(mode="inference", optimizer=None)
    for limit in (None, 1 << 40):
        advice = advise(job, fit_of(job, limit), most_seconds=-1)
        assert advice.cheapest is None
        assert advice.combined is None


def test_insufficient_changes_give_their_combined_saving() -> None:
    job = squares(batch=1)
    advice = advise(job, fit_of(job, 1000))
    assert advice.cheapest is None
    assert advice.combined is not None
    assert advice.combined.fits is False
    assert advice.combined.saves_bytes >= max(
        one.saves_bytes for one in advice.remedies if one.cost != Cost.TRAINING.name.lower()
    )


def test_untried_changes_have_a_reason() -> None:
    class Picky(Squares):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype is not torch.float32:
                raise TypeError("only float32 here")
            return super().forward(x)

    job = squares(model=Picky)
    told = dict(advise(job, fit_of(job)).not_tried)
    assert "only float32 here" in told["bfloat16 weights"]
    assert "checkpointing" not in told
    job = squares(mode="inference", optimizer=None)
    late = advise(job, fit_of(job), most_seconds=-1)
    assert {why for _, why in late.not_tried} == {"no time is left"}
    assert {one.name for one in late.remedies} <= {"planned pool", "expandable segments"}  # which need no run


@pytest.mark.parametrize("fake", [False, pytest.param(True, marks=pytest.mark.full)])
def test_model_of_the_user_stays_unchanged(fake: bool) -> None:
    """A model on real tensors, and a fake model shared by all runs."""
    with fake_mode() if fake else torch.no_grad():
        model = Squares()
        before = [(name, p, p.dtype, p.grad, p._version) for name, p in model.named_parameters()]
        job = squares(model=lambda: model)
        with torch.enable_grad():
            advise(job, fit_of(job))
        after = [(name, p, p.dtype, p.grad, p._version) for name, p in model.named_parameters()]
        assert all(a[1] is b[1] and a[2:] == b[2:] for a, b in zip(before, after, strict=True))
        assert all("forward" not in vars(module) for module in model.modules())
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_inference_gets_only_changes_of_a_forward() -> None:
    job = squares(mode="inference", optimizer=None)
    assert {strengths[0].kind for strengths in changes_of(job)} == {"allocator", "precision", "batch"}
    assert advise(job, fit_of(job)).hints == []


# -- blocks -----------------------------------------------------------------------------------------------
def block() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2))


def test_repeated_blocks_are_outermost_children_of_a_class() -> None:
    inner = nn.ModuleList(nn.ModuleDict({"a": block(), "b": block()}) for _ in range(2))
    model = nn.ModuleDict(
        {
            "listed": nn.ModuleList(block() for _ in range(3)),
            "deep": inner,
            "one": nn.ModuleDict({"only": block()}),
            "leaves": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        }
    )
    assert repeated_blocks(model) == [
        "listed.0", "listed.1", "listed.2", "deep.0.a", "deep.0.b", "deep.1.a", "deep.1.b",
    ]  # fmt: skip


# -- the cheapest of many ---------------------------------------------------------------------------------
class Additive:
    """Fake trials: each change saves the bytes in its name, alone or with other changes."""

    def __init__(self, needed: int, limit: int) -> None:
        self.needed, self.limit = needed, limit

    def try_changes(self, changes: Any) -> TriedRemedy:
        saved = sum(int(change.code) for change in changes)
        parts = tuple(change.name for change in changes)
        cost = max(change.cost for change in changes).name.lower()
        left = self.needed - saved
        return TriedRemedy("", saved, "", "", left, left, left <= self.limit, cost, parts)


def change(name: str, kind: int, saves: int, cost: Cost) -> Change:
    return Change(name, str(kind), str(saves), "", cost)


found = st.tuples(
    st.integers(0, 4), st.lists(st.integers(1, 20), min_size=1, max_size=3), st.sampled_from(Cost)
)


@given(st.lists(found, min_size=1, max_size=7), st.integers(1, 60))
def test_cheapest_combination_is_minimal_in_cost_and_size(given_: Any, missing: int) -> None:
    """Compare with all choices of at most one change of each kind."""
    alone = [
        tuple(change(f"{at}.{s}", kind, size, cost) for s, size in enumerate(sorted(saves)))
        for at, (kind, saves, cost) in enumerate(given_)
    ]
    trials = Additive(1000, 1000 - missing)
    cheapest, combined = cheapest_of(trials, [(one, trials.try_changes([one[-1]])) for one in alone])  # type: ignore[arg-type]
    steps = {step.name: step for strengths in alone for step in strengths}
    choices = [
        [None, *(strengths[-1] for strengths in alone if strengths[-1].kind == str(kind))]
        for kind in range(5)
    ]
    enough = [
        max(c.cost for c in some)
        for picked in product(*choices)
        if (some := [c for c in picked if c]) and trials.try_changes(some).fits
    ]
    assert (cheapest is None) == (not enough)
    if cheapest is None:
        return
    assert cheapest.fits
    assert combined is None
    assert cheapest.cost == min(enough).name.lower()
    taken = [steps[name] for name in cheapest.parts]
    assert len({one.kind for one in taken}) == len(taken)
    for one in taken:
        others = [other for other in taken if other is not one]
        assert not others or not trials.try_changes(others).fits
