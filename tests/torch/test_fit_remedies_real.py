"""The printed code of remedies saves the predicted bytes on real tensors."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from fit_programs import PROGRAMS, Written, fit_of, job_of
from torch import nn

from mempool.torch.estimate.remedies.changes import Change, applied, changes_of

if TYPE_CHECKING:
    from mempool.torch.estimate import Job

#: Use one thread: the networks are small.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.usefixtures("one_thread", "shared_isolation"),
]


#: Names in `PROGRAMS`; all but one run with ``-m full`` only.
SOME = [name if name == "dropping" else pytest.param(name, marks=pytest.mark.full) for name in PROGRAMS]


def change_named(job: Job, part: str) -> Change:
    """Return the only change whose name starts with a text."""
    (found,) = [step for steps in changes_of(job) for step in steps if step.name.startswith(part)]
    return found


def fake_peak(job: Job, change: Change) -> int:
    """Return the peak load of a job with a change, on fake tensors."""
    return fit_of(applied(job, [change])).peak_bytes


def model_change(code: str) -> Any:
    """Return the code of a remedy as a function of the model."""

    def change(model: nn.Module) -> None:
        known = {"model": model, "torch": torch, "functools": functools, "make": torch.optim.AdamW}
        exec(code, known)

    return change


@pytest.mark.parametrize("program", SOME)
def test_the_programs_themselves_have_the_same_peak(program: str) -> None:
    assert fit_of(job_of(program)).peak_bytes == Written(program).run()


@pytest.mark.parametrize("program", ["llama", "dropping", pytest.param("resnet", marks=pytest.mark.full)])
def test_checkpointed_blocks_as_written(program: str) -> None:
    """The real peak equals the predicted peak, and losses equal those without checkpoints."""
    job = job_of(program)
    change = change_named(job, "checkpointing")
    plain, real = Written(program), Written(program, change=model_change(change.code))
    plain.run(3)
    assert fake_peak(job, change) == real.run(3)
    assert real.losses == plain.losses
    before = {name: p.detach() for name, p in plain.model.named_parameters()}
    assert all(torch.equal(p, before[name]) for name, p in real.model.named_parameters())


@pytest.mark.parametrize(
    ("part", "optimizer"),
    [
        ("fused", functools.partial(torch.optim.AdamW, fused=True)),
        ("SGD", functools.partial(torch.optim.SGD, lr=0.01)),
    ],
)
@pytest.mark.parametrize("program", ["dropping", pytest.param("resnet", marks=pytest.mark.full)])
def test_other_optimizers(program: str, part: str, optimizer: Any) -> None:
    job = job_of(program)
    assert fake_peak(job, change_named(job, part)) == Written(program, optimizer=optimizer).run()


@pytest.mark.parametrize("program", SOME)
def test_autocast(program: str) -> None:
    job = job_of(program)
    around = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    # The CPU's batch norm keeps its statistics in float32, which its shape function takes for bfloat16.
    off = 4 * sum(m.num_features for m in PROGRAMS[program][0]().modules() if isinstance(m, nn.BatchNorm2d))
    real = Written(program, around=around).run()
    assert real - off <= fake_peak(job, change_named(job, "autocast")) <= real


@pytest.mark.parametrize("program", SOME)
def test_weights_of_lower_precision(program: str) -> None:
    job = job_of(program)
    real = Written(program, change=lambda model: model.to(torch.bfloat16), cast=torch.bfloat16)
    assert fake_peak(job, change_named(job, "bfloat16 weights")) == real.run()


@pytest.mark.parametrize(
    ("program", "parts"),
    [("resnet", 4), *(pytest.param("llama", parts, marks=pytest.mark.full) for parts in (2, 4, 8))],
)
def test_smaller_batches_whose_gradients_add_up(program: str, parts: int) -> None:
    job = job_of(program)
    assert fake_peak(job, change_named(job, f"{parts} batches")) == Written(program, parts=parts).run()


def test_outputs_dropped() -> None:
    job = job_of("llama")
    assert fake_peak(job, change_named(job, "drop outputs")) == Written("llama", drop=True).run()


@pytest.mark.parametrize("program", SOME)
def test_activations_on_the_host(program: str) -> None:
    """With hooks that save NumPy arrays, unseen by the recorder, peaks and losses are as predicted."""

    def on_host(model: nn.Module) -> None:
        forward = model.forward

        def hooked(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(_away, _back):
                return forward(*args, **kwargs)

        model.forward = hooked

    job = job_of(program)
    plain, real = Written(program), Written(program, change=on_host)
    plain.run()
    assert fit_of(job.replace(save_on_cpu=True)).peak_bytes == real.run()
    assert real.losses == plain.losses


def _away(tensor: torch.Tensor) -> Any:
    return tensor.detach().numpy().copy()


def _back(kept: Any) -> torch.Tensor:
    made = torch.empty(kept.shape, dtype=getattr(torch, kept.dtype.name))
    made.numpy()[...] = kept
    return made
