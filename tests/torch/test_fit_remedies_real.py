"""Remedies save on real tensors, with the code that they print, as predicted on fake tensors."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from fit_programs import PROGRAMS, Written, fit_of, job_of
from torch import nn

from mempool.torch.estimate.fake.mode import InPlaceAccumulation
from mempool.torch.estimate.remedies.changes import Change, applied, ladders
from mempool.torch.estimate.remedies.job_traits import inspect_job
from mempool.torch.estimate.remedies.model_changes import chunk_loss, chunked_cross_entropy, save_on_host
from mempool.torch.estimate.remedies.optimizers import InBackward

if TYPE_CHECKING:
    from mempool.torch.estimate import Job

#: These networks are too small for more threads.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.usefixtures("one_thread", "shared_isolation"),
]


#: Names in `PROGRAMS`; all but one run in the long lane only.
SOME = [name if name == "dropping" else pytest.param(name, marks=pytest.mark.full) for name in PROGRAMS]


def changes_of(job: Job) -> dict[str, Change]:
    """All steps of all ladders, by name."""
    return {step.name: step for ladder in ladders(job, inspect_job(job)) for step in ladder.steps}


def named(job: Job, part: str) -> Change:
    """The one change whose name begins so; of several the last, strongest one."""
    return [change for name, change in changes_of(job).items() if name.startswith(part)][-1]


def tried(job: Job, change: Change) -> int:
    """Peak load of a job with a change, without memory."""
    return fit_of(applied(job, [change])).peak_bytes


def written(code: str) -> Any:
    """The lines that a remedy gives, as a function of the model."""

    def change(model: nn.Module) -> None:
        known = {"model": model, "torch": torch, "functools": functools, "make": torch.optim.AdamW}
        exec(code, known)

    return change


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add gradients out of place, as in a recorded real run (docs/predicted.md)."""
    monkeypatch.setattr(InPlaceAccumulation, "in_place", lambda *_: False)


@pytest.mark.parametrize("program", SOME)
def test_the_programs_themselves_have_the_same_peak(program: str) -> None:
    assert fit_of(job_of(program)).peak_bytes == Written(program).run()


@pytest.mark.parametrize(
    ("program", "part"),
    [
        ("llama", "checkpointing 2 of"),
        ("resnet", "checkpointing all"),
        ("dropping", "checkpointing 1 of"),
        *(
            pytest.param(program, f"checkpointing {some}", marks=pytest.mark.full)
            for program in PROGRAMS
            for some in ("1 of", "2 of", "all")
        ),
    ],
)
def test_checkpointed_blocks_as_written(program: str, part: str) -> None:
    """Peak without memory and on real tensors are one; losses are those without checkpoints, to the bit."""
    job = job_of(program)
    change = next(c for name, c in changes_of(job).items() if name.startswith(part))
    plain, real = Written(program), Written(program, change=written(change.code))
    plain.run(3)
    assert tried(job, change) == real.run(3)
    assert real.losses == plain.losses
    before = {name: p.detach() for name, p in plain.model.named_parameters()}
    assert all(torch.equal(p, before[name]) for name, p in real.model.named_parameters())


@pytest.mark.parametrize(
    ("part", "optimizer"),
    [
        ("fused", functools.partial(torch.optim.AdamW, fused=True)),
        ("SGD with", functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)),
        ("SGD", functools.partial(torch.optim.SGD, lr=0.01)),
        ("Adafactor", functools.partial(torch.optim.Adafactor, foreach=False)),
        ("optimizer in backward", functools.partial(InBackward, make=torch.optim.AdamW)),
    ],
)
@pytest.mark.parametrize("program", ["dropping", pytest.param("resnet", marks=pytest.mark.full)])
def test_other_optimizers(program: str, part: str, optimizer: Any) -> None:
    job = job_of(program)
    change = changes_of(job).get(part) or named(job, part)
    assert tried(job, change) == Written(program, optimizer=optimizer).run()


def test_the_optimizer_in_the_backward_as_written() -> None:
    """The two lines give the same peak, and the same losses to the bit as the optimizer after it."""
    job = job_of("dropping")
    plain = Written("dropping")
    plain.run(3)
    lines = named(job, "optimizer in backward").code
    real = Written("dropping", change=written(lines), optimizer=functools.partial(torch.optim.SGD, lr=0.0))
    assert real.run(3) == tried(job, named(job, "optimizer in backward"))
    assert real.losses == plain.losses


@pytest.mark.parametrize("program", SOME)
def test_autocast(program: str) -> None:
    job = job_of(program)
    around = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    # The CPU's batch norm keeps its statistics in float32, which its shape function takes for bfloat16.
    off = 4 * sum(m.num_features for m in PROGRAMS[program][0]().modules() if isinstance(m, nn.BatchNorm2d))
    real = Written(program, around=around).run()
    assert real - off <= tried(job, named(job, "autocast")) <= real


@pytest.mark.parametrize("program", SOME)
def test_weights_of_lower_precision(program: str) -> None:
    job = job_of(program)
    real = Written(program, change=lambda model: model.to(torch.bfloat16), cast=torch.bfloat16)
    assert tried(job, changes_of(job)["bfloat16 weights"]) == real.run()


@pytest.mark.parametrize(
    ("program", "parts"),
    [("resnet", 4), *(pytest.param("llama", parts, marks=pytest.mark.full) for parts in (2, 4, 8))],
)
def test_smaller_batches_whose_gradients_add_up(program: str, parts: int) -> None:
    job = job_of(program)
    assert tried(job, named(job, f"{parts} batches")) == Written(program, parts=parts).run()


def test_outputs_dropped_and_no_cache() -> None:
    job = job_of("llama")
    assert tried(job, named(job, "drop outputs")) == Written("llama", drop=True).run()
    change = named(job, "no key-value cache")
    assert tried(job, change) == Written("llama", change=written(change.code)).run()


def test_the_loss_in_pieces_is_the_models_own() -> None:
    """Value and gradients are the same but for rounding; the peak is that without memory."""
    job = job_of("llama")
    change = named(job, "loss in pieces")
    plain, real = Written("llama"), Written("llama", change=written(change.code))
    plain.run(1), real.run(1)
    assert real.losses == pytest.approx(plain.losses, rel=1e-5)
    assert tried(job, change) == Written("llama", change=chunk_loss).run()


@pytest.mark.parametrize("chunks", [1, 3, 8, 100])
def test_cross_entropy_in_pieces_is_cross_entropy(chunks: int) -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(3, 7, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    labels = torch.randint(0, 50, (3, 7))
    labels[0, :3] = -100
    whole = nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())
    expected = torch.autograd.grad(whole, (hidden, weight))
    pieces = chunked_cross_entropy(hidden, weight, labels, chunks=chunks)
    found = torch.autograd.grad(pieces, (hidden, weight))
    torch.testing.assert_close(pieces, whole)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("program", SOME)
def test_activations_on_the_host(program: str) -> None:
    """Real hooks that keep arrays which the recorder does not see: the same peak, and the same losses."""

    def on_host(model: nn.Module) -> None:
        forward = model.forward

        def hooked(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(_away, _back):
                return forward(*args, **kwargs)

        model.forward = hooked

    job = job_of(program)
    plain, real = Written(program), Written(program, change=on_host)
    plain.run()
    without = job.replace(model=lambda: save_on_host(PROGRAMS[program][0]()))
    assert fit_of(without).peak_bytes == real.run()
    assert real.losses == plain.losses


def _away(tensor: torch.Tensor) -> Any:
    return tensor.detach().numpy().copy()


def _back(kept: Any) -> torch.Tensor:
    made = torch.empty(kept.shape, dtype=getattr(torch, kept.dtype.name))
    made.numpy()[...] = kept
    return made


def test_optimizer_in_backward_applies_to_the_chosen_optimizer() -> None:
    """The order in which changes are named has no effect."""
    job = job_of("dropping")
    momentum, within = changes_of(job)["SGD with momentum"], changes_of(job)["optimizer in backward"]
    chosen = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    real = Written("dropping", optimizer=functools.partial(InBackward, make=chosen)).run()
    assert fit_of(applied(job, [within, momentum])).peak_bytes == real
    assert fit_of(applied(job, [momentum, within])).peak_bytes == real


def test_optimizer_in_backward_may_read_values() -> None:
    job = job_of("dropping")
    both = [changes_of(job)[name] for name in ("optimizer in backward", "Adafactor")]
    assert 0 < fit_of(applied(job, both)).peak_bytes < fit_of(applied(job, both[:1])).peak_bytes
