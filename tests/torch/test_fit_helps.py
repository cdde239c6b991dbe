"""What would help a job: what is told adds up, is tried, and leaves all as it was."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent))
from fitted import PROGRAMS, Dropping, fit_of, rows

from mempool.torch.estimate import Job
from mempool.torch.estimate.checkpointing import Operations, Way, _listed, repeated, ways
from mempool.torch.estimate.fake.mode import fake_mode
from mempool.torch.estimate.remedies.advise import what_would_help
from mempool.torch.estimate.remedies.applicability import look
from mempool.torch.estimate.remedies.changes import Change, Cost, Ladder, applied, ladders
from mempool.torch.estimate.remedies.trials import cheapest_of
from mempool.torch.estimate.result import Help


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
    return job, fit, what_would_help(job, fit, told=names.append), names


def test_what_is_saved_is_a_difference_and_comes_in_order(tried: Any) -> None:
    _, fit, helps, _ = tried
    assert helps.remedies
    for one in [*helps.remedies, helps.cheapest]:
        assert one.saves_bytes == fit.needed_bytes - one.needed_bytes > 0
        assert one.saves_peak_bytes == fit.peak_bytes - one.peak_bytes
        assert one.saves_reserved_bytes == fit.reserved_bytes[fit.allocator] - one.reserved_bytes
        assert one.fits == (one.needed_bytes <= fit.limit_bytes)
        assert one.code
        assert one.how
    saved = [one.saves_bytes for one in helps.remedies]
    assert saved == sorted(saved, reverse=True)


def test_each_saving_is_that_of_the_changed_job(tried: Any) -> None:
    """The runs are made again, by themselves."""
    job, fit, helps, _ = tried
    changes = {step.name: step for ladder in ladders(job, look(job)) for step in ladder.steps}
    for one in [*helps.remedies, helps.cheapest]:
        if one.name == "swapping":  # which is planned: test_fit_swapping.py
            continue
        parts = [changes[name] for name in one.parts]
        assert fit_of(applied(job, parts), fit.limit_bytes).peak_bytes == one.peak_bytes


def test_one_block_fewer_does_not_fit(tried: Any) -> None:
    job, fit, helps, _ = tried
    (found,) = (one for one in helps.remedies if one.name.startswith("checkpointing"))
    (steps,) = (ladder.steps for ladder in ladders(job, look(job)) if ladder.steps[0].kind == "checkpointing")
    at = [step.name for step in steps].index(found.name)
    assert found.fits
    assert at == 0 or not fit_of(applied(job, [steps[at - 1]]), fit.limit_bytes).fits


def test_it_tells_what_it_tries_and_is_ready_for_json(tried: Any) -> None:
    *_, helps, names = tried
    assert {"loss in pieces", "no key-value cache"}.isdisjoint(names)  # of language models alone
    assert len(names) == len(set(names)) > 5
    assert json.loads(json.dumps(helps.to_dict()))["cheapest"]["fits"] is True


def test_nothing_is_combined_where_it_fits() -> None:
    job = squares(mode="inference", optimizer=None)  # of which no swaps are planned
    for limit in (None, 1 << 40):
        helps = what_would_help(job, fit_of(job, limit), most_runs=1)
        assert helps.cheapest is None
        assert helps.together is None


def test_where_nothing_is_enough_it_says_how_far_all_of_it_goes() -> None:
    job = squares(batch=1)
    helps = what_would_help(job, fit_of(job, 1000))
    assert helps.cheapest is None
    assert helps.together is not None
    assert helps.together.fits is False
    assert helps.together.saves_bytes >= max(
        one.saves_bytes for one in helps.remedies if one.cost != Cost.TRAINING.name.lower()
    )


def test_what_is_not_tried_is_told_with_the_reason() -> None:
    class Picky(Squares):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype is not torch.float32:
                raise TypeError("only float32 here")
            return super().forward(x)

    job = squares(model=Picky)
    told = dict(what_would_help(job, fit_of(job)).not_tried)
    assert "only float32 here" in told["bfloat16 weights"]
    assert "checkpointing all 3 blocks" not in told
    job = squares(mode="inference", optimizer=None)
    none = what_would_help(job, fit_of(job), most_runs=0)
    assert {why for _, why in none.not_tried} == {"no runs are left"}
    runs: list[str] = []
    what_would_help(job, fit_of(job), most_runs=2, told=runs.append)
    assert len(runs) == 2
    late = what_would_help(job, fit_of(job), most_seconds=-1)
    assert {why for _, why in late.not_tried} == {"no time is left"}
    assert {one.name for one in late.remedies} <= {"planned pool", "expandable segments"}  # which need no run


@pytest.mark.parametrize("fake", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_users_model_stays_as_it_is(fake: bool) -> None:
    """One that has memory, and one that was made without and is used by all runs."""
    with fake_mode() if fake else torch.no_grad():
        model = Squares()
        before = [(name, p, p.dtype, p.grad, p._version) for name, p in model.named_parameters()]
        job = squares(model=lambda: model)
        with torch.enable_grad():
            what_would_help(job, fit_of(job))
        after = [(name, p, p.dtype, p.grad, p._version) for name, p in model.named_parameters()]
        assert all(a[1] is b[1] and a[2:] == b[2:] for a, b in zip(before, after, strict=True))
        assert all("forward" not in vars(module) for module in model.modules())
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_of_a_forward_alone_only_what_has_to_do_with_it() -> None:
    job = squares(mode="inference", optimizer=None)
    kinds = {step.kind for ladder in ladders(job, look(job)) for step in ladder.steps}
    assert kinds == {"allocator", "output", "precision", "batch"}
    assert what_would_help(job, fit_of(job)).hints == []


@pytest.mark.full
def test_with_a_remedy_at_least_as_large_a_batch_fits() -> None:
    job = squares(batch=4)
    fit = fit_of(job, fit_of(job).needed_bytes)
    helps = what_would_help(job, fit, largest=True, most_runs=12)
    larger = [one.largest_batch for one in helps.remedies if one.largest_batch is not None]
    assert larger
    assert min(larger) >= 4 < max(larger)


# -- blocks -----------------------------------------------------------------------------------------------


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2))


def test_blocks_of_one_parent_and_class_are_found_outermost_first() -> None:
    inner = nn.ModuleList(nn.ModuleDict({"a": block(), "b": block()}) for _ in range(2))
    model = nn.ModuleDict(
        {
            "listed": nn.ModuleList(block() for _ in range(3)),
            "deep": inner,
            "one": nn.ModuleDict({"only": block()}),
            "leaves": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        }
    )
    assert repeated(model) == [
        "listed.0", "listed.1", "listed.2", "deep.0.a", "deep.0.b", "deep.1.a", "deep.1.b",
    ]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_list_that_is_told_is_the_blocks(program: str) -> None:
    model = PROGRAMS[program][0]()
    for way in ways(model):
        listed = eval(f"[{_listed(way)}]", {"model": model})
        assert [id(one) for one in listed] == [id(model.get_submodule(name)) for name in way.blocks]


def test_a_stage_of_stages_can_be_taken_coarse_or_fine() -> None:
    model = nn.Sequential(*(nn.Sequential(block(), block()) for _ in range(2)))
    assert [way.blocks for way in ways(model)] == [("0", "1"), ("0.0", "0.1", "1.0", "1.1")]


def test_operations_are_pytorchs_count_and_shares_are_of_the_blocks() -> None:
    model, (args, kwargs) = Dropping(), rows(4)
    with FlopCounterMode(display=False) as counted:
        model(*args, **kwargs)
    with Operations(list(model.blocks)) as operations:
        model(*args, **kwargs)
    assert operations.total == counted.get_total_flops() == sum(operations.inside)
    assert len(set(operations.inside)) == 1
    assert not any(b._forward_hooks or b._forward_pre_hooks for b in model.blocks)


# -- the cheapest of many ---------------------------------------------------------------------------------


class Additive:
    """Stands for trials: each change saves what its name says, in bytes, alone and with others."""

    def __init__(self, needed: int, limit: int) -> None:
        self.needed, self.limit = needed, limit

    def tried(self, changes: Any) -> Help:
        saved = sum(int(change.code) for change in changes)
        parts = tuple(change.name for change in changes)
        cost = max(change.cost for change in changes).name.lower()
        left = self.needed - saved
        return Help(
            "", saved, "", "", left, left, saved, left, saved, "", "", left <= self.limit, cost, parts=parts
        )

    def weakest(self, ladder: Ladder, others: Any) -> Ladder:
        for count in range(1, len(ladder.steps) + 1):
            if self.tried([ladder.steps[count - 1], *others]).fits:
                return Ladder(ladder.steps[:count])
        return ladder


def change(name: str, kind: int, saves: int, cost: Cost) -> Change:
    return Change(name, str(kind), lambda job: job, str(saves), "", cost)


found = st.tuples(
    st.integers(0, 4), st.lists(st.integers(1, 20), min_size=1, max_size=3), st.sampled_from(Cost)
)


@given(st.lists(found, min_size=1, max_size=7), st.integers(1, 60))
def test_no_dearer_change_is_taken_than_must_be_and_none_can_be_left_out(given_: Any, missing: int) -> None:
    """Against all choices of one change, or none, of each kind."""
    alone = []
    for at, (kind, saves, cost) in enumerate(given_):
        steps = tuple(change(f"{at}.{s}", kind, size, cost) for s, size in enumerate(sorted(saves)))
        alone.append(Ladder(steps))
    trials = Additive(1000, 1000 - missing)
    cheapest, together = cheapest_of(trials, [(one, trials.tried([one.strongest])) for one in alone])  # type: ignore[arg-type]
    steps = {step.name: step for ladder in alone for step in ladder.steps}
    choices = [
        [None, *(ladder.strongest for ladder in alone if ladder.strongest.kind == str(kind))]
        for kind in range(5)
    ]
    enough = [
        max(c.cost for c in some)
        for picked in product(*choices)
        if (some := [c for c in picked if c]) and trials.tried(some).fits
    ]
    assert (cheapest is None) == (not enough)
    if cheapest is None:
        return
    assert cheapest.fits
    assert together is None
    assert cheapest.cost == min(enough).name.lower()
    taken = [steps[name] for name in cheapest.parts]
    assert len({one.kind for one in taken}) == len(taken)
    for one in taken:
        others = [other for other in taken if other is not one]
        assert not others or one.cost == Cost.NOTHING or not trials.tried(others).fits


# -- offloading, estimated --------------------------------------------------------------------------------


def test_a_way_without_blocks_has_no_list() -> None:
    assert _listed(Way(())) == ""
