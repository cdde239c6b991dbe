"""Targets: models to try with inputs, requested sizes, and the target of the calls that a program makes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from mempool.errors import UsageError
from mempool.torch.estimate.inputs import Arguments, resizable
from mempool.torch.estimate.model_outputs import own_loss
from mempool.torch.estimate.options import OPTIONS
from mempool.torch.estimate.result import AS_FAR_AS_RAN, WITHOUT_LOSS, Caveat
from mempool.torch.estimate.sources.call_spy import bytes_of
from mempool.torch.estimate.sources.loss_replay import UnreplayableLossError, replayed_loss
from mempool.torch.estimate.sources.scripts import GUESSES
from mempool.units import binary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mempool.torch.estimate.inputs import Arguments
    from mempool.torch.estimate.sources.call_spy import Call, CallRecord
    from mempool.torch.model_spec import InputSpec, ModelSpec


@dataclass(frozen=True)
class Sizes:
    """Requested properties of inputs.

    Attributes:
        seq: length of sequences, or None for the model's own.
        image: height and width of images, or None for the model's own.
        task: task of a model of transformers, or None.
        inputs: tensors that the model gets, or None for the model's own.
        labels: whether the inputs include labels for training.
        arguments: the script's arguments in ``sys.argv``.
        main: whether a script is run as a program.
    """

    seq: int | None = None
    image: int | None = None
    task: str | None = None
    inputs: tuple[InputSpec, ...] | None = None
    labels: bool = True
    arguments: Sequence[str] = ()
    main: bool = False


#: End of the note on accumulated gradients: two batches show the peak, unless ``--accumulate`` is given.
TRIED_WITH_TWO = ": tried with two"


@dataclass(frozen=True)
class Target:
    """A model to try with inputs.

    Attributes:
        title: description of the model.
        model: makes the model; called inside a fake mode.
        inputs: makes the inputs for a batch size; None if unknown.
        batch: samples in the model's own inputs; None if these have no batch size.
        seq: length of the model's sequences, if known.
        uses: the sizes among "seq" and "image" on which the inputs depend.
        attributes: of a `Job`, as the target itself decides: optimizer, loss, labels, autocast, ...
        notes: assumptions.
        warnings: parts that are not counted.
        caveats: reasons why a result does not settle whether the whole fits.
        examples: the model's own inputs, of which the first dimension is taken for the batch; None if a
            function makes inputs for any batch.
    """

    title: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Arguments] | None = None
    batch: int | None = None
    seq: int | None = None
    uses: frozenset[str] = frozenset()
    attributes: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    caveats: tuple[Caveat, ...] = ()
    examples: Any = None


def called_target(record: CallRecord, spec: ModelSpec) -> Target:
    """Return a target from the model that the script itself called last, with the inputs of that call."""
    call, batch = record.call, record.batch
    assert call is not None
    attributes: dict[str, Any] = {"autocast": call.autocast}
    outputs = [leaf for leaf in pytree.tree_leaves(call.output) if isinstance(leaf, torch.Tensor)]
    if not record.trains and not any(leaf.requires_grad for leaf in outputs):
        attributes |= {"mode": "inference", "hold_output": call.held}
    if (optimizer := record.optimizer()) is not None:
        attributes["optimizer"] = optimizer
    make, caveats = model_copies(call.module), []
    try:
        loss = replayed_loss(record.tape, call.module, call.output, batch, call.autocast, make)
        if own_loss(call.output) is None or not loss.only_scales:
            attributes |= {"loss": loss, "labels": loss.labels}
            make = loss.making(make)
    except UnreplayableLossError as error:
        if record.trains:
            stands = "the sum of the output" if own_loss(call.output) is None else "the model's own loss"
            reason = f"the loss of {spec.where} {error}; {stands} stands for it, --loss names another"
            caveats.append(Caveat(WITHOUT_LOSS, reason))
    caveats += _record_caveats(record, call, spec)
    if record.unused:
        attributes["margin"] = {"other_models": sum(size for _, size in record.unused)}
    if record.accumulation is not None:
        attributes["accumulate"] = 2  # two batches show the peak; more need no more memory
    if record.trains:
        attributes |= {"clears_late": record.clears_late, "set_to_none": record.set_to_none}
    examples = _detached((call.args, call.kwargs))
    return Target(
        f"{type(call.module).__name__} of {spec.where}",
        make,
        resizable(examples, batch),
        batch=batch,
        attributes=attributes,
        notes=tuple(_notes(record, spec)),
        warnings=_uncounted_parts(record, call, spec),
        caveats=tuple(caveats),
        examples=examples,
    )


def _record_caveats(record: CallRecord, call: Call, spec: ModelSpec) -> Iterator[Caveat]:
    """Yield the restrictions of a step that was seen in part."""
    if record.trains and call.times > 1:
        kind = type(call.module).__name__
        reason = (
            f"{spec.where} calls the {kind} {call.times} times before its backward, and the activations of "
            "all calls are alive then: name a function that returns one module which makes these calls, and "
            "its inputs"
        )
        yield Caveat(f"one of {call.times} calls", reason)
    if record.decisions:
        reason = f"{_lines(record.decisions)} by values of tensors, unknown before the run: {GUESSES}"
        yield Caveat(AS_FAR_AS_RAN, reason)


def _notes(record: CallRecord, spec: ModelSpec) -> Iterator[str]:
    """Yield lines on settings taken over from a script, and on assumptions."""
    yield f"model and inputs are those that {spec.where} calls itself"
    yield from record.several()
    if record.later:
        yield f"{_lines(record.later)} by values behind the first backward: what follows is not counted"
    if record.unused:
        names = ", ".join(f"{name}, {binary(size)}" for name, size in record.unused)
        yield f"{spec.where} holds models that it has not called before its backward: {names}; counted"
    if record.trains and record.clears_late and record.set_to_none:
        yield (
            f"{spec.where} clears gradients between forward and backward, so the gradients of the former "
            "step are alive during the forward: call `zero_grad()` right after `step()` to free them earlier"
        )
    if record.accumulation is not None:
        where, batches = record.accumulation.where, record.accumulation.batches
        yield f"{where} lets gradients of {batches:,} batches add up{TRIED_WITH_TWO}"


def _lines(lines: list[str]) -> str:
    """Format lines that decide on the course of a program, at most `OPTIONS.message_lines` by name."""
    more = f" and {len(lines) - OPTIONS.message_lines} more" if len(lines) > OPTIONS.message_lines else ""
    return f"{', '.join(lines[: OPTIONS.message_lines])}{more} {'decides' if len(lines) == 1 else 'decide'}"


def _uncounted_parts(record: CallRecord, call: Call, spec: ModelSpec) -> tuple[str, ...]:
    """Return warnings on parts of a script's step that are not tried.

    Raises:
        UsageError: the script uses other models, with more than a tenth of the parameters.
    """
    others = record.others()
    names = ", ".join(f"{name}, {binary(size)} of parameters" for name, size in others)
    kind = type(call.module).__name__
    if 10 * sum(size for _, size in others) > bytes_of(call.module.parameters()):
        raise UsageError(
            f"{spec.where} uses more models than the {kind} that could be tried: {names}; name a function "
            f"that returns one module that calls them all, with its inputs: {spec.where}:function"
        )
    warnings = [f"not counted: {names}, and what trains it"] if others else []
    return tuple(warnings)


def _detached(given: Any) -> Any:
    """Detach inputs from the operations that made them, which each run's backward would otherwise repeat."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t if t.grad_fn is None else t.detach(), given)


def model_copies(model: nn.Module) -> Callable[[], nn.Module]:
    """Return a function that copies a fake model for each run; the run itself copies a real model."""
    held = [leaf for module in model.modules() for leaf in pytree.tree_leaves(list(vars(module).values()))]
    tensors = [leaf for leaf in held if isinstance(leaf, FakeTensor)]

    def copied() -> nn.Module:
        memo: dict[int, Any] = {id(tensor): fresh_tensor(tensor) for tensor in tensors}
        return copy.deepcopy(model, memo)

    return copied if tensors else lambda: model


def fresh_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same form without a recorded operation that reads the original."""
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
