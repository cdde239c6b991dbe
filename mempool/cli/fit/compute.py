"""Work of ``mempool fit``: fit a job of each requested size, one after the other. Needs PyTorch."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mempool.cli.output import ExitCode, Stop
from mempool.errors import UsageError
from mempool.hardware.gpu_throughput import DEFAULT, rates_of
from mempool.hardware.roofline import Roofline
from mempool.torch.estimate import Job
from mempool.torch.estimate.estimator import estimate
from mempool.torch.estimate.fake.fake_run import run
from mempool.torch.estimate.inputs import doubt, sequence_first, unscalable
from mempool.torch.estimate.margins import parse_margins
from mempool.torch.estimate.model_outputs import SUMMED
from mempool.torch.estimate.remedies.advise import what_would_help
from mempool.torch.estimate.result import WITHOUT_LOSS
from mempool.torch.estimate.sources.optimizers_and_losses import loss_of_name, optimizer_of
from mempool.torch.estimate.sources.scripts import BrokenScriptError, unreal
from mempool.torch.estimate.sources.targets_by_name import Scripts, Sizes, find

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mempool.cli.fit.arguments import Asked
    from mempool.torch.estimate import Fit
    from mempool.torch.estimate.inputs import Arguments
    from mempool.torch.estimate.result import Caveat
    from mempool.torch.estimate.sources.targets_by_name import Target
    from traces import Trace


_SAY = "name a function that takes batch, if it is another"


@dataclass(frozen=True)
class Tried:
    """A fitted job.

    Attributes:
        fit: the result.
        job: the job.
        target: the source of the model.
        image: requested height and width.
    """

    fit: Fit
    job: Job
    target: Target
    image: int | None


def tried(asked: Asked, told: Callable[[str], object]) -> Iterator[Tried]:
    """Fit each size in turn: all batches of one sequence length, then of the next length.

    Raises:
        Stop: a size cannot be tried; the message gives the reason in a line.
    """
    scripts: Scripts = {}
    with _quiet(), unreal(asked.job.get("device")):
        for image in asked.images:
            for seq in asked.seqs:
                for batch in asked.batches:
                    with _stopping(asked):
                        sizes = _sizes(asked, seq, image)
                        told(f"making {asked.target}")
                        yield _one(asked, find(asked.target, sizes, scripts), batch, image, told)


def _sizes(asked: Asked, seq: int | None, image: int | None) -> Sizes:
    return Sizes(
        seq=seq,
        image=image,
        task=asked.task,
        inputs=asked.inputs,
        labels=asked.job.get("mode", "train") == "train",
        arguments=asked.arguments,
        main=asked.main,
    )


def _one(
    asked: Asked, target: Target, batch: int | None, image: int | None, told: Callable[[str], object]
) -> Tried:
    job = _job(asked, target, batch)
    what = f"{asked.target}" + (f", seq {target.seq:,}" if target.seq else "")
    options: dict[str, Any] = {"allocators": asked.allocators} if asked.allocators else {}
    doubts = _Doubts(asked, target, job.batch)
    fitted = estimate(
        job.but(model=doubts.making(job.model)),
        asked.limit_bytes,
        largest=False if doubts.unscalable else asked.largest,
        told=lambda now: told(f"{what}: {now}"),
        **options,
    )
    if asked.remedies or (asked.remedies is None and fitted.fits is False):
        helps = what_would_help(
            job,
            fitted,
            most_seconds=asked.most_seconds,
            told=lambda now: told(f"{what}: what if {now}"),
        )
        fitted = replace(fitted, helps=helps)
    if asked.traced:
        fitted = replace(fitted, trace=_timed(job))
    caveats = _caveats(asked, target, job)
    without = any(caveat.label == WITHOUT_LOSS for caveat in caveats)
    said = [text for text in fitted.warnings if text != SUMMED or not without]
    fitted = replace(fitted, warnings=[*target.warnings, *asked.notes, *target.notes, *said, *doubts.told()])
    return Tried(fitted.restricted(caveats), job, target, image)


def _caveats(asked: Asked, target: Target, job: Job) -> list[Caveat]:
    """Return the target's caveats that apply to the requested loss and mode."""
    lost = job.mode == "train" and asked.loss is None
    return [caveat for caveat in target.caveats if lost or caveat.label != WITHOUT_LOSS]


class _Doubts:
    """Check that dimension 0 of a target's own inputs is the batch, needed for other batch sizes."""

    def __init__(self, asked: Asked, target: Target, batch: int) -> None:
        search = asked.limit_bytes is not None and asked.largest is not False
        self._modules: list[str] = []
        self._batch, self._examples = target.batch or 0, None
        if target.batch and (search or batch != target.batch):
            self._examples = target.examples
        there = search and self._examples is not None
        self.unscalable = unscalable(self._examples, self._batch, 0) if there else None

    def making(self, make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """Wrap the model's factory so that the model is inspected when made."""

        def made() -> nn.Module:
            model = make()
            if isinstance(model, nn.Module) and not self._modules:
                self._modules += sequence_first(model)
            return model

        return made

    def told(self) -> list[str]:
        """Return the lines for the user; call this after the model was made."""
        if self._examples is None:
            return []
        line = doubt(self._modules, self._examples, self._batch, 0, _SAY)
        return [text for text in (self.unscalable, line) if text]


def _timed(job: Job) -> Trace:
    """Trace three steps timed by a roofline: the second is complete; the third shows what outlives it."""
    rates = rates_of(job.card or DEFAULT, job.capability)
    trace = run(job, 3, clock=Roofline(rates).nanoseconds)
    return replace(trace, metadata=dict(trace.metadata) | {"rates": str(rates)})


def _job(asked: Asked, target: Target, batch: int | None) -> Job:
    assert target.inputs is not None
    said: dict[str, Any] = {"optimizer": torch.optim.AdamW, "batch": target.batch or 1}
    said |= target.own | asked.job
    if asked.optimizer is not None:
        said["optimizer"] = optimizer_of(asked.optimizer)
    if asked.loss is not None:
        said |= {"loss": loss_of_name(asked.loss), "labels": None}
    for name in ("dtype", "autocast"):
        if (kind := getattr(asked, name)) is not None:
            said[name] = getattr(torch, kind)
    if asked.capability is not None and "capability" in Job.__dataclass_fields__:
        said["capability"] = asked.capability
    said |= {name: getattr(asked, name) for name in ("card", "link") if getattr(asked, name) is not None}
    if asked.margins:
        said["margin"] = dict(said.get("margin", {})) | parse_margins(list(asked.margins))
    if batch is not None:
        said["batch"] = batch
    inputs = target.inputs
    if said.get("dtype") is not None and said.get("autocast") is None:
        inputs = _converted(inputs, said["dtype"])
    return Job(model=target.model, inputs=inputs, **said)


def _converted(inputs: Callable[[int], Arguments], dtype: torch.dtype) -> Callable[[int], Arguments]:
    """Convert floating-point inputs to the type of the parameters, as the model requires."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def made(batch: int) -> Arguments:
        found: Arguments = pytree.tree_map_only(torch.Tensor, convert, inputs(batch))
        return found

    return made


@contextlib.contextmanager
def _stopping(asked: Asked) -> Iterator[None]:
    """Convert errors into the end of the verb with one line."""
    try:
        yield
    except BrokenScriptError as error:
        raise Stop(ExitCode.FILE, str(error)) from error
    except UsageError as error:
        raise Stop(ExitCode.USAGE, str(error)) from error
    except OSError as error:
        if error.filename is None or os.environ.get("MEMPOOL_TRACEBACK"):
            raise
        raise Stop(ExitCode.FILE, f"{error.filename}: {error.strerror or error}") from error
    except (KeyboardInterrupt, Stop, MemoryError):
        raise
    except Exception as error:
        if os.environ.get("MEMPOOL_TRACEBACK"):
            raise
        where = "; ".join(note.removeprefix("mempool: ") for note in getattr(error, "__notes__", ()))
        text = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        if "BF16" in text:
            text += " (try --dtype bfloat16)"
        raise Stop(ExitCode.USAGE, f"{asked.target} fails {where or 'when it is made'}: {text}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and logs of libraries about matters outside the user's control."""
    said = logging.getLogger("torch._subclasses.fake_tensor")
    before = said.level
    said.setLevel(logging.CRITICAL + 1)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        said.setLevel(before)
