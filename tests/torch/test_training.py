"""Training with the pool is bit-identical, also with irregular steps and shared memory."""

from __future__ import annotations

import importlib.util
import itertools
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import functools
import gc
import statistics
from pathlib import Path

import numpy as np
from processes import alone, json_output_of, run_each_alone

from mempool.demo.race import race

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import mempool.numpy
import mempool.torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Trained = Callable[..., dict[str, Any]]
    TrainedAll = Callable[[str, list[dict[str, Any]]], list[dict[str, Any]]]
    from collections.abc import Iterable

pytestmark = pytest.mark.timeout(900)


CHOICES: dict[str, tuple[Any, ...]] = {
    "model": ("resnet", "unet", "seq2seq", "gpt", "bert", "llama"),
    "optimizer": ("adamw", "sgd"),
    "autocast": (False, True),
    "checkpointing": (False, True),
    "accumulate": (1, 3),
    "workers": (0, 2),
    "threads": (1, 2),
    "marks": ("none", "watch", "step", "iteration"),
}


def pairwise(choices: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Return few setups that contain each pair of choices, always the same ones."""
    names = list(choices)
    todo = {
        frozenset([(a, x), (b, y)])
        for a, b in itertools.combinations(names, 2)
        for x in choices[a]
        for y in choices[b]
    }
    setups = []
    while todo:
        setup: dict[str, Any] = {}
        for name in names:  # the value that covers most of the remaining pairs
            setup[name] = max(
                choices[name],
                key=lambda value, name=name, setup=setup: (
                    sum(  # type: ignore[misc]
                        1
                        for pair in todo
                        if (name, value) in pair and pair <= {*setup.items(), (name, value)}
                    )
                    + 0.01 * sum(1 for pair in todo if (name, value) in pair)
                ),
            )
        todo -= {pair for pair in todo if pair <= set(setup.items())}
        setups.append(setup)
    return setups


def needs(setup: dict[str, Any]) -> None:
    """Skip a setup whose packages are not installed."""
    if setup["model"] in ("bert", "llama") and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")


def check(plain: dict[str, Any], pooled: dict[str, Any], *, threads: int = 1) -> None:
    """Check a training with the pool against the same training without.

    Of two threads that nobody synchronises, one may have come after the other in all iterations that were
    recorded, and come beside it later, as on a busy machine. Such a miss or two is learned from.
    """
    assert pooled["losses"] == plain["losses"]
    assert pooled["parameters"] == plain["parameters"]
    assert pooled["overlaps"] == 0
    assert pooled["observed"] > 0
    report: dict[str, Any] = pooled["report"]
    assert report["state"] == "replaying"
    assert report["coverage"] >= 0.99
    assert report["planned_arena_bytes"] <= 1.02 * report["peak_load_bytes"]
    by_chance = 0.01 * report["hits"] if threads > 1 else 0
    assert report["misses"] <= by_chance, report["misses_by_reason"]
    assert report["misses"] == report["misses_by_reason"]["slot_occupied"]
    assert report["plan_active_at_iteration"] <= 8
    whole = report["iterations"] + 1 - report["plan_active_at_iteration"]  # iterations under the plan
    assert report["hits"] + report["misses"] >= whole * report["planned_buffers"] > 0


def train_and_check(trained: Trained, observer: str, **setup: Any) -> None:
    """Train with and without the pool, and check."""
    needs(setup)
    pooled = trained("pool", observer=observer, **setup)
    check(trained("plain", **setup), pooled, threads=setup.get("threads", 1))


#: Number of first setups, which contain every value of each choice and most pairs.
PAIRS = pairwise(CHOICES)
FIRST = 8


# --- all pairs of choices: a few steps of each, in one process for each allocator
@pytest.fixture(
    scope="module", params=[PAIRS[:FIRST], pytest.param(PAIRS[FIRST:], marks=pytest.mark.full)], ids=len
)
def setups(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    there = importlib.util.find_spec("transformers") is not None
    brief = [{**setup, "steps": 10, "size": 2} for setup in request.param]
    return [setup for setup in brief if there or setup["model"] not in ("bert", "llama")]


@pytest.fixture(scope="module")
def plain(trained_all: TrainedAll, setups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return trained_all("plain", setups)


@pytest.fixture(scope="module")
def pooled(trained_all: TrainedAll, setups: list[dict[str, Any]], observer: str) -> list[dict[str, Any]]:
    return trained_all("pool", [{**setup, "observer": observer} for setup in setups])


def test_default_allocator_agrees_across_processes(
    trained_all: TrainedAll, setups: list[dict[str, Any]], plain: list[dict[str, Any]]
) -> None:
    """Otherwise, bit-identical results of the pool would prove nothing."""
    assert trained_all("plain", setups[:1]) == plain[:1]


def test_training_is_bit_identical_and_hits(
    setups: list[dict[str, Any]], plain: list[dict[str, Any]], pooled: list[dict[str, Any]]
) -> None:
    for setup, expected, result in zip(setups, plain, pooled, strict=True):
        print(setup)
        check(expected, result, threads=setup["threads"])


@pytest.mark.full
@pytest.mark.parametrize("model", ["resnet", "gpt"])
def test_compiled_training_is_bit_identical(trained: Trained, observer: str, model: str) -> None:
    train_and_check(trained, observer, model=model, marks="watch", compiled=True)


def test_saved_plan_serves_a_later_process(
    trained: Trained, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plan = str(tmp_path_factory.mktemp("plans") / "gpt.plan")
    trained("pool", model="gpt", marks="watch", save=plan)
    report = trained("pool", model="gpt", marks="watch", plan=plan, steps=3)["report"]
    assert report["hits"] >= 0.95 * (report["hits"] + report["misses"])


HERE = Path(__file__).resolve().parent
#: Irregular steps of each scenario; for lasting or periodic changes, the steps until a new plan.
DEPARTURES: dict[str, Iterable[int]] = {
    "extra_tensor": (9, 25),
    "logged_clones": (5, 13, 21, 29),
    "evaluation": (7, 19, 31),
    "last_batch": (11, 23),
    "lengths": (),
    "random_lengths": range(56),
    "any_lengths": range(56),
    "gathered": range(56),
    "exception": (9, 25),
    "out_of_memory": (9, 25),
    "second_model": range(20, 26),
    "saved": (9, 25),
    "frozen": (16,),
    "scheduled": (),
}
#: Number of recurring patterns of each scenario, each of which has a plan.
PATTERNS = {
    "evaluation": 2,
    "last_batch": 2,
    "lengths": 2,
    "random_lengths": 4,
    "any_lengths": 2,
    "scheduled": 1,
}


@functools.cache
def runs(way: str, scenarios: tuple[str, ...], observer: str = "") -> dict[str, dict[str, Any]]:
    """Run scenarios one after the other in a separate process."""
    return json_output_of(HERE / "diverging.py", way, observer, *scenarios)


@pytest.mark.parametrize(
    ("way", "scenario"), [*(("marked", scenario) for scenario in DEPARTURES), ("unmarked", "evaluation")]
)
def test_results_are_identical_and_the_plan_is_resumed_at_once(
    observer: str, way: str, scenario: str
) -> None:
    """With and without marks, only the irregular iteration and the next one have misses."""
    every = tuple(DEPARTURES)
    plain = runs("plain", every)[scenario]
    pooled = runs(way, every if way == "marked" else (scenario,), observer)[scenario]
    assert pooled["losses"] == plain["losses"]
    assert pooled["parameters"] == plain["parameters"]
    assert pooled["kept"] == plain["kept"]
    assert pooled["overlaps"] == 0
    report = pooled["report"]
    assert report["state"] == "replaying"
    assert report["plan_active_at_iteration"] <= 8
    misses = [after - before for before, after in itertools.pairwise([0, *pooled["misses"]])]
    apart = {step + later for step in DEPARTURES[scenario] for later in (0, 1)}
    assert [(step, count) for step, count in enumerate(misses) if count and step not in apart] == []
    assert sum(misses) == report["misses"]
    if way == "marked" and scenario in PATTERNS:
        assert pooled["known"] == PATTERNS[scenario]
        assert report["plans"] <= 5 * PATTERNS[scenario]  # at most five plans of each pattern


@pytest.mark.parametrize(
    "marks", [pytest.param(True, marks=pytest.mark.full), False], ids=["marks", "no-marks"]
)
def test_training_is_identical_with_all_hits_in_less_memory(marks: bool) -> None:
    done = race("torch", marks=marks, steps=5, turns=6, show=lambda _: None)
    answer = done.answer()
    assert done.identical
    assert (answer["state"], answer["misses"]) == ("replaying", 0)
    assert answer["coverage"] >= 0.99
    assert answer["planned_arena_bytes"] <= 1.02 * answer["peak_load_bytes"]
    # Page faults of a step; glibc mostly has thousands, but sometimes keeps the program's freed memory.
    assert statistics.median(done.pool.page_faults) <= 16


MIB = 1 << 20


@alone
def test_arrays_and_tensors_share_memory() -> None:
    with (
        mempool.numpy.install(background=False) as arrays,
        mempool.torch.install(device="cpu", share=arrays, background=False) as tensors,
    ):
        tensor = torch.ones(1 << 20)
        where = tensor.data_ptr()
        reserved = arrays.core.stats()["reserved"]["current"]
        arrays.client.set_retained_limit(64 * MIB)
        del tensor
        gc.collect()
        array = np.empty(1 << 20, np.float32)
        assert array.ctypes.data == where
        assert arrays.core.stats()["reserved"]["current"] == reserved
        assert tensors.report().to_dict()["shared_with"] == ["numpy"]
        del array


@alone
def test_mixed_loop_is_identical_without_sharing() -> None:
    def work(step: int) -> float:
        batch = np.arange(1 << 16, dtype=np.float32) * step
        weights = torch.linspace(0, 1, 1 << 16, requires_grad=True)
        loss = (torch.from_numpy(batch) * weights).square().mean()
        loss.backward()
        assert weights.grad is not None
        return float(loss.detach()) + float(np.sum(np.sqrt(weights.grad.numpy())))

    plain = [work(step) for step in range(20)]
    with (
        mempool.numpy.install(background=False) as arrays,
        mempool.torch.install(device="cpu", share=arrays, background=False) as tensors,
    ):
        pooled = []
        for step in range(20):
            arrays.step()
            tensors.step()
            pooled.append(work(step))
            arrays.plan_now()
            tensors.plan_now()
        assert tensors.report().to_dict()["hits"] > 0
    assert pooled == plain


if __name__ == "__main__":
    run_each_alone(globals())
