"""Real training loops with the pool and without: the same to the bit, every allocation as planned."""

from __future__ import annotations

import importlib.util
import itertools
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

if TYPE_CHECKING:
    from collections.abc import Callable

    Trained = Callable[..., dict[str, Any]]

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
    """Few setups in which every two choices occur together once at least; the same ones each time."""
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
        for name in names:  # the value that covers most of what is left
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


def check(trained: Trained, observer: str, **setup: Any) -> dict[str, Any]:
    """Train with and without; everything that must hold of it."""
    if setup["model"] in ("bert", "llama") and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    plain, pooled = trained("plain", **setup), trained("pool", observer=observer, **setup)
    assert pooled["losses"] == plain["losses"]
    assert pooled["parameters"] == plain["parameters"]
    assert pooled["overlaps"] == 0
    assert pooled["observed"] > 0
    report: dict[str, Any] = pooled["report"]
    assert report["state"] == "replaying"
    assert report["coverage"] >= 0.99
    assert report["planned_arena_bytes"] <= 1.02 * report["peak_load_bytes"]
    assert report["misses"] == 0, report["misses_by_reason"]
    assert report["hits"] > 0
    return report


@pytest.mark.parametrize("model", CHOICES["model"])
def test_it_is_the_same_training_and_everything_hits(trained: Trained, observer: str, model: str) -> None:
    check(trained, observer, model=model, marks="watch")


@pytest.mark.parametrize("model", CHOICES["model"])
def test_the_default_allocator_agrees_with_itself(trained: Trained, model: str) -> None:
    """Without which bit-identity with it would mean nothing."""
    if model in ("bert", "llama") and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    assert trained("plain", model=model) == trained("plain", model=model)


@pytest.mark.full
@pytest.mark.parametrize("setup", pairwise(CHOICES), ids=lambda s: "-".join(map(str, s.values())))
def test_any_two_choices_together(trained: Trained, observer: str, setup: dict[str, Any]) -> None:
    check(trained, observer, **setup)


@pytest.mark.full
@pytest.mark.parametrize("model", ["resnet", "gpt"])
def test_compiled_training_is_that_of_the_compiler_without_the_pool(
    trained: Trained, observer: str, model: str
) -> None:
    check(trained, observer, model=model, marks="watch", compiled=True)


def test_a_saved_plan_serves_a_later_process_from_its_first_iteration(
    trained: Trained, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plan = str(tmp_path_factory.mktemp("plans") / "gpt.plan")
    trained("pool", model="gpt", marks="watch", save=plan)
    report = trained("pool", model="gpt", marks="watch", plan=plan, steps=3)["report"]
    assert report["hits"] >= 0.95 * (report["hits"] + report["misses"])
