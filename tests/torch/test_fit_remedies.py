"""Remedies: savings add up, equal a run of the changed job, and leave the model unchanged; offloading too."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from fit_programs import PROGRAMS, Dropping, fit_of, rows
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mempool.hardware.gpu_memory import CARDS
from mempool.hardware.gpu_throughput import rates_of
from mempool.hardware.roofline import Roofline
from mempool.torch.estimate import Fit, Job
from mempool.torch.estimate.checkpointing import (
    block_list,
    block_selections,
    recomputed_shares,
    repeated_blocks,
)
from mempool.torch.estimate.fake.fake_run import run
from mempool.torch.estimate.fake.mode import fake_mode
from mempool.torch.estimate.options import OPTIONS
from mempool.torch.estimate.remedies.advise import advise
from mempool.torch.estimate.remedies.changes import Change, Cost, Ladder, applied, ladders
from mempool.torch.estimate.remedies.job_traits import inspect_job
from mempool.torch.estimate.remedies.offloading import plan_offload
from mempool.torch.estimate.remedies.trials import cheapest_of
from mempool.torch.estimate.result import TriedRemedy
from mempool.units import parse_bytes
from solvers.swap import PRESETS, step_of

pytestmark = pytest.mark.usefixtures("shared_isolation")


class Squares(nn.Module):
    """Three blocks whose activations are most of all."""

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
    """A job that lacks a quarter of what it needs, and what would help."""
    job = squares()
    limit = int(fit_of(job).needed_bytes - 0.25 * fit_of(job).peak_bytes)
    fit, names = fit_of(job, limit), []
    return job, fit, advise(job, fit, progress=names.append), names


def test_savings_are_differences_in_descending_order(tried: Any) -> None:
    _, fit, advice, _ = tried
    assert advice.remedies
    for one in [*advice.remedies, advice.cheapest]:
        assert one.saves_bytes == fit.needed_bytes - one.needed_bytes > 0
        assert one.saves_peak_bytes == fit.peak_bytes - one.peak_bytes
        assert one.saves_reserved_bytes == fit.reserved_bytes[fit.allocator] - one.reserved_bytes
        assert one.fits == (one.needed_bytes <= fit.limit_bytes)
        assert one.code
        assert one.how
    saved = [one.saves_bytes for one in advice.remedies]
    assert saved == sorted(saved, reverse=True)


def test_saving_equals_a_run_of_the_changed_job(tried: Any) -> None:
    """The runs are made again, by themselves."""
    job, fit, advice, _ = tried
    changes = {step.name: step for ladder in ladders(job, inspect_job(job)) for step in ladder.steps}
    for one in [*advice.remedies, advice.cheapest]:
        if one.name == "swapping":  # which is planned: below
            continue
        parts = [changes[name] for name in one.parts]
        assert fit_of(applied(job, parts), fit.limit_bytes).peak_bytes == one.peak_bytes


def test_checkpointing_a_block_fewer_does_not_fit(tried: Any) -> None:
    job, fit, advice, _ = tried
    (found,) = (one for one in advice.remedies if one.name.startswith("checkpointing"))
    (steps,) = (
        ladder.steps for ladder in ladders(job, inspect_job(job)) if ladder.steps[0].kind == "checkpointing"
    )
    at = [step.name for step in steps].index(found.name)
    assert found.fits
    assert at == 0 or not fit_of(applied(job, [steps[at - 1]]), fit.limit_bytes).fits


def test_advice_reports_progress_and_is_ready_for_json(tried: Any) -> None:
    *_, advice, names = tried
    assert {"loss in pieces", "no key-value cache"}.isdisjoint(names)  # of language models alone
    assert len(names) == len(set(names)) > 5
    assert json.loads(json.dumps(advice.to_dict()))["cheapest"]["fits"] is True


def test_fitting_jobs_get_no_combination() -> None:
    job = squares(mode="inference", optimizer=None)  # of which no swaps are planned
    for limit in (None, 1 << 40):
        advice = advise(job, fit_of(job, limit), most_runs=1)
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
    assert "checkpointing all 3 blocks" not in told
    job = squares(mode="inference", optimizer=None)
    none = advise(job, fit_of(job), most_runs=0)
    assert {why for _, why in none.not_tried} == {"no runs are left"}
    runs: list[str] = []
    advise(job, fit_of(job), most_runs=2, progress=runs.append)
    assert len(runs) == 2
    late = advise(job, fit_of(job), most_seconds=-1)
    assert {why for _, why in late.not_tried} == {"no time is left"}
    assert {one.name for one in late.remedies} <= {"planned pool", "expandable segments"}  # which need no run


@pytest.mark.parametrize("fake", [False, pytest.param(True, marks=pytest.mark.full)])
def test_model_of_the_user_stays_unchanged(fake: bool) -> None:
    """One that has memory, and one that was made without and is used by all runs."""
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
    kinds = {step.kind for ladder in ladders(job, inspect_job(job)) for step in ladder.steps}
    assert kinds == {"allocator", "output", "precision", "batch"}
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


@pytest.mark.parametrize("program", PROGRAMS)
def test_block_list_evaluates_to_the_blocks(program: str) -> None:
    model = PROGRAMS[program][0]()
    for way in block_selections(model):
        listed = eval(f"[{block_list(way)}]", {"model": model})
        assert [id(one) for one in listed] == [id(model.get_submodule(name)) for name in way.blocks]


def test_a_stage_of_stages_can_be_taken_coarse_or_fine() -> None:
    model = nn.Sequential(*(nn.Sequential(block(), block()) for _ in range(2)))
    assert [way.blocks for way in block_selections(model)] == [("0", "1"), ("0.0", "0.1", "1.0", "1.1")]


def test_shares_of_blocks_are_of_all_operations_of_the_forward() -> None:
    model, (args, kwargs) = Dropping(), rows(4)
    [way] = block_selections(model)
    shares = recomputed_shares(model, way, args, kwargs)
    assert shares == [0.25] * 4
    assert not any(b._forward_hooks or b._forward_pre_hooks for b in model.blocks)


# -- the cheapest of many ---------------------------------------------------------------------------------
class Additive:
    """Stands for trials: each change saves what its name says, in bytes, alone and with others."""

    def __init__(self, needed: int, limit: int) -> None:
        self.needed, self.limit = needed, limit

    def try_changes(self, changes: Any) -> TriedRemedy:
        saved = sum(int(change.code) for change in changes)
        parts = tuple(change.name for change in changes)
        cost = max(change.cost for change in changes).name.lower()
        left = self.needed - saved
        return TriedRemedy(
            "", saved, "", "", left, left, saved, left, saved, "", "", left <= self.limit, cost, parts=parts
        )

    def weakest_that_fits(self, ladder: Ladder, others: Any) -> Ladder:
        for count in range(1, len(ladder.steps) + 1):
            if self.try_changes([ladder.steps[count - 1], *others]).fits:
                return Ladder(ladder.steps[:count])
        return ladder


def change(name: str, kind: int, saves: int, cost: Cost) -> Change:
    return Change(name, str(kind), lambda job: job, str(saves), "", cost)


found = st.tuples(
    st.integers(0, 4), st.lists(st.integers(1, 20), min_size=1, max_size=3), st.sampled_from(Cost)
)


@given(st.lists(found, min_size=1, max_size=7), st.integers(1, 60))
def test_cheapest_combination_is_minimal_in_cost_and_size(given_: Any, missing: int) -> None:
    """Against all choices of one change, or none, of each kind."""
    alone = []
    for at, (kind, saves, cost) in enumerate(given_):
        steps = tuple(change(f"{at}.{s}", kind, size, cost) for s, size in enumerate(sorted(saves)))
        alone.append(Ladder(steps))
    trials = Additive(1000, 1000 - missing)
    cheapest, combined = cheapest_of(trials, [(one, trials.try_changes([one.strongest])) for one in alone])  # type: ignore[arg-type]
    steps = {step.name: step for ladder in alone for step in ladder.steps}
    choices = [
        [None, *(ladder.strongest for ladder in alone if ladder.strongest.kind == str(kind))]
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
        assert not others or one.cost == Cost.NOTHING or not trials.try_changes(others).fits


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
