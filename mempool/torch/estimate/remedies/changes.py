"""Changes of a job that may save memory, each with the code to write and the cost."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch

from mempool.torch.estimate.checkpointing import checkpoint_code, checkpoint_first
from mempool.torch.estimate.fake.copies import fake_model
from mempool.torch.estimate.fake.eight_bit_optimizers import STAND_INS
from mempool.torch.estimate.remedies import optimizers as own
from mempool.torch.estimate.remedies.model_changes import chunk_loss, in_low_precision, save_on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from mempool.torch.estimate.job import Job
    from mempool.torch.estimate.remedies.job_traits import JobTraits

_BATCHES = "; batch normalisation sees smaller batches"
_TWICE = "; batch normalisation updates its running statistics twice a step"


class Cost(IntEnum):
    """Cost of a change, cheapest first: time, and last a change of the training itself."""

    NOTHING = 0  #: neither time nor results change
    LITTLE = 1  #: some kernel launches
    HEAD = 2  #: the product with a language model's head is computed twice
    ROUNDING = 3  #: no time, but results are rounded differently
    RECOMPUTING = 4  #: part of the forward is computed twice
    SMALLER_BATCHES = 5  #: kernels with less work each
    TRANSFERS = 6  #: copies to the host and back
    TRAINING = 7  #: a different training: to be tuned again, and may end elsewhere


@dataclass(frozen=True)
class Change:
    """A change of a job.

    Attributes:
        name: a few words.
        kind: a job can have one change of each kind; changes are applied in the order of `KINDS`.
        apply: returns the changed job.
        code: lines to write in the user's program.
        how: description and price.
        cost: class of cost.
        allocator: name of the allocator to use, if the change is another allocator.
        recomputes: share of the forward's operations that run twice.
        phase: the only phase whose load changes; None: any phase.
    """

    name: str
    kind: str
    apply: Callable[[Job], Job]
    code: str
    how: str
    cost: Cost
    allocator: str | None = None
    recomputes: float | None = None
    phase: str | None = None


#: Kinds of changes, in the order in which they are applied to a job.
KINDS = (
    "optimizer",
    "precision",
    "backward",  # wraps the optimizer made so far, once per parameter
    "checkpointing",
    "cache",
    "loss",
    "offloading",
    "output",
    "gradients",
    "batch",
    "allocator",
)


@dataclass(frozen=True)
class Ladder:
    """The same change in several strengths.

    Attributes:
        steps: weakest first; a stronger step needs less memory and more time.
        usual: index of the step that is tried if the needed saving is unknown.
    """

    steps: tuple[Change, ...]
    usual: int = -1

    @property
    def strongest(self) -> Change:
        """Return the last step."""
        return self.steps[-1]


def ladders(job: Job, traits: JobTraits) -> list[Ladder]:
    """Return all changes applicable to a job; usually largest savings first, in case time runs out."""
    single = [
        *_precisions(job, traits),
        *_losses(traits),
        *_loop(job, traits),
        *_optimizers(job, traits),
        *_offloads(job),
        *_allocators(job),
    ]
    return [*_checkpoints(job, traits), *_batches(job, traits), *(Ladder((change,)) for change in single)]


def _unchanged(job: Job) -> Job:
    return job


def _on_model(job: Job, change: Callable[[nn.Module], nn.Module]) -> Job:
    """Return the job with a changed model; the user's model stays unchanged."""
    return job.replace(model=lambda: change(fake_model(job.model, None)))


def _allocators(job: Job) -> list[Change]:
    planned = Change(
        "planned pool",
        "allocator",
        _unchanged,
        "import mempool.torch; pool = mempool.torch.install(); pool.watch(optimizer)",
        "every buffer gets its address by a plan, so that nothing is lost between buffers",
        Cost.NOTHING,
        "planned",
    )
    expandable = Change(
        "expandable segments",
        "allocator",
        _unchanged,
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "PyTorch's own allocator maps memory in pages, so that less is lost between buffers",
        Cost.NOTHING,
        "pytorch_expandable",
    )
    return [planned, expandable] if job.device == "cuda" else [planned]


def _loop(job: Job, traits: JobTraits) -> list[Change]:
    found = []
    if job.hold_output is not False:
        found.append(
            Change(
                "drop outputs",
                "output",
                lambda j: j.replace(hold_output=False),
                "del output, loss" if job.mode == "train" else "del output",
                "the last step's output is not there while the next one is made",
                Cost.NOTHING,
            )
        )
    if not job.set_to_none and job.mode == "train":
        found.append(
            Change(
                "gradients to None",
                "gradients",
                lambda j: j.replace(set_to_none=True),
                "optimizer.zero_grad(set_to_none=True)",
                "gradients are let go after a step, not filled with zeros",
                Cost.NOTHING,
            )
        )
    if job.mode == "train" and (path := traits.caching) is not None:
        found.append(
            Change(
                "no key-value cache",
                "cache",
                lambda j: _on_model(j, functools.partial(_without_cache, path=path)),
                f"model{'.' + path if path else ''}.config.use_cache = False",
                "a cache for generating text is of no use in training",
                Cost.NOTHING,
            )
        )
    return found


def _without_cache(model: nn.Module, path: str) -> nn.Module:
    import copy

    module = model.get_submodule(path)
    module.config = copy.copy(module.config)
    module.config.use_cache = False
    return model


def _optimizers(job: Job, traits: JobTraits) -> list[Change]:
    if job.mode != "train" or not traits.optimizer:
        return []
    return [*_same_optimizer(job, traits), *_other_optimizers(traits)]


def _same_optimizer(job: Job, traits: JobTraits) -> list[Change]:
    found = []
    if "fused" in traits.settings and not traits.settings["fused"]:
        found.append(
            Change(
                "fused optimizer",
                "optimizer",
                lambda j: j.replace(
                    optimizer=own.with_options(_optimizer_factory(j), foreach=False, fused=True)
                ),
                f"{traits.optimizer_path}(..., fused=True)",
                "one kernel updates parameters in place, without temporaries",
                Cost.NOTHING,
                phase="optimizer",
            )
        )
    if "foreach" in traits.settings and job.device == "cuda" and traits.settings["foreach"] is not False:
        found.append(
            Change(
                "optimizer tensor by tensor",
                "optimizer",
                lambda j: j.replace(optimizer=own.with_options(_optimizer_factory(j), foreach=False)),
                f"{traits.optimizer_path}(..., foreach=False)",
                "temporaries of one parameter at a time, not of all; more launches of kernels",
                Cost.LITTLE,
                phase="optimizer",
            )
        )
    if job.accumulate == 1:
        found.append(
            Change(
                "optimizer in backward",
                "backward",
                lambda j: j.replace(optimizer=functools.partial(own.InBackward, make=_optimizer_factory(j))),
                f"each = {{p: make([p]) for p in model.parameters()}}  # make: {traits.optimizer_path}, say\n"
                "def take(p): each[p].step(); each[p].zero_grad()\n"
                "for p in each: p.register_post_accumulate_grad_hook(take)",
                "each parameter is updated as soon as its gradient is there, and the gradient let go; no "
                "clipping by a global norm, no accumulation, no GradScaler",
                Cost.LITTLE,
            )
        )
    return found


def _optimizer_factory(job: Job) -> own.Make:
    assert job.optimizer is not None
    return job.optimizer


def _other_optimizers(traits: JobTraits) -> list[Change]:
    adam = traits.optimizer in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
    momentum = bool(traits.settings.get("momentum"))
    found: list[tuple[str, Any, str, str, Cost]] = []
    if adam:
        found += [
            (
                "8-bit optimizer state",
                STAND_INS["AdamW8bit"],
                "bitsandbytes.optim.AdamW8bit(model.parameters(), lr=...)",
                "two bytes of state a parameter, by the layout of bitsandbytes; the state is rounded",
                Cost.ROUNDING,
            ),
            (
                "Adafactor",
                functools.partial(torch.optim.Adafactor, foreach=False),
                "torch.optim.Adafactor(model.parameters(), foreach=False)",
                "second moments by rows and columns, no first ones; another training",
                Cost.TRAINING,
            ),
            (
                "SGD with momentum",
                functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
                "torch.optim.SGD(model.parameters(), lr=..., momentum=0.9)",
                "one state a parameter; another training",
                Cost.TRAINING,
            ),
        ]
    if adam or momentum:
        found.append(
            (
                "SGD",
                functools.partial(torch.optim.SGD, lr=0.01),
                "torch.optim.SGD(model.parameters(), lr=...)",
                "no state; another training",
                Cost.TRAINING,
            )
        )
    return [
        Change(name, "optimizer", functools.partial(_with_optimizer, make=make), line, how, cost)
        for name, make, line, how, cost in found
    ]


def _with_optimizer(job: Job, make: Any) -> Job:
    return job.replace(optimizer=make)


def _precisions(job: Job, traits: JobTraits) -> list[Change]:
    if torch.float32 not in traits.floats or job.dtype is not None or job.autocast is not None:
        return []
    return [
        Change(
            "autocast to bfloat16",
            "precision",
            lambda j: j.replace(autocast=torch.bfloat16),
            f'with torch.autocast("{job.device}", torch.bfloat16): output = model(...)  # and the loss',
            "products of matrices in bfloat16, weights and state in float32",
            Cost.ROUNDING,
        ),
        Change(
            "bfloat16 weights",
            "precision",
            in_low_precision,
            "model.to(torch.bfloat16)  # and floating inputs",
            "weights, gradients, activations and optimizer state in bfloat16: small updates are lost"
            if job.mode == "train"
            else "weights and activations in bfloat16",
            Cost.TRAINING if job.mode == "train" else Cost.ROUNDING,
        ),
    ]


def _losses(traits: JobTraits) -> list[Change]:
    if not traits.chunkable:
        return []
    return [
        Change(
            "loss in pieces",
            "loss",
            lambda j: _on_model(j, chunk_loss),
            "from mempool.torch.estimate.remedies.model_changes import chunk_loss; chunk_loss(model)"
            "  # or Liger Kernel's fused linear cross entropy",
            "logits of an eighth of the tokens at a time, computed again in the backward; the model then "
            "returns its loss alone",
            Cost.HEAD,
        )
    ]


def _offloads(job: Job) -> list[Change]:
    if job.mode != "train" or job.device != "cuda":
        return []
    return [
        Change(
            "activations on the host",
            "offloading",
            lambda j: _on_model(j, save_on_host),
            "with torch.autograd.graph.save_on_cpu(pin_memory=True): output = model(...)",
            "what the backward needs is copied to the host, and back when it is needed; nothing else "
            "runs meanwhile",
            Cost.TRANSFERS,
        )
    ]


def _checkpoints(job: Job, traits: JobTraits) -> list[Ladder]:
    return [
        Ladder(tuple(_checkpoint(job, traits, at, count) for count in range(1, len(way.blocks) + 1)))
        for at, way in enumerate(traits.block_selections)
    ]


def _checkpoint(job: Job, traits: JobTraits, at: int, count: int) -> Change:
    way, shares = traits.block_selections[at], traits.shares[at]
    share = None if shares is None else sum(shares[:count])
    again = "" if share is None else f": {share:.0%} of the forward's operations run twice"
    every = count == len(way.blocks)
    which = f"all {count}" if every else f"{count} of {len(way.blocks)}"
    keep = job.device == "cpu"  # on CUDA the state of random numbers is kept on the host
    return Change(
        f"checkpointing {which} blocks",
        "checkpointing",
        lambda j: _on_model(
            j, lambda model: checkpoint_first(model, way, None if every else count, preserve_rng_state=keep)
        ),
        checkpoint_code(way, count),
        f"blocks keep only their inputs and compute the rest again in the backward{again}"
        + (_TWICE if traits.normalizes else ""),
        Cost.RECOMPUTING,
        recomputes=share,
    )


def _batches(job: Job, traits: JobTraits) -> list[Ladder]:
    parts = [k for k in range(2, job.batch + 1) if job.batch % k == 0]
    make = _accumulated if job.mode == "train" else _split
    return [Ladder(tuple(make(job, traits, part) for part in parts), usual=0)] if parts else []


def _accumulated(job: Job, traits: JobTraits, parts: int) -> Change:
    small = job.batch // parts
    # Two batches suffice to show one that starts while the gradients of another are alive.
    return Change(
        f"{parts} batches of {small}",
        "batch",
        lambda j: j.replace(batch=small, accumulate=max(2, j.accumulate)),
        f"for part in batch.split({small}): (loss_of(part) / {parts}).backward()  # then step",
        "gradients of smaller batches add up" + (_BATCHES if traits.normalizes else ""),
        Cost.SMALLER_BATCHES,
    )


def _split(job: Job, _: JobTraits, parts: int) -> Change:
    small = job.batch // parts
    return Change(
        f"{parts} batches of {small}",
        "batch",
        lambda j: j.replace(batch=small),
        f"for part in batch.split({small}): output = model(part)",
        "smaller batches, one after the other",
        Cost.SMALLER_BATCHES,
    )


def applied(job: Job, changes: Sequence[Change]) -> Job:
    """Return the job with several changes of different kinds, applied in the order of `KINDS`."""
    for change in sorted(changes, key=lambda each: KINDS.index(each.kind)):
        job = change.apply(job)
    return job
