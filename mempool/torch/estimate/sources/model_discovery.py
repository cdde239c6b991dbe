"""Models by name with their inputs: of transformers, or a class or function of a module or script."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from mempool.errors import UsageError
from mempool.torch.estimate.failures import explain_failures
from mempool.torch.estimate.fake.copies import EAGER, is_compiled
from mempool.torch.estimate.inputs import (
    Arguments,
    batch_doubt,
    batch_of,
    call_arguments,
    is_function,
    resizable,
    sequence_first,
)
from mempool.torch.estimate.job import Job
from mempool.torch.estimate.sources import transformers_models
from mempool.torch.estimate.sources.optimizers_and_losses import resolve_names
from mempool.torch.estimate.sources.scripts import fake_execution, load_module, load_script, without_training
from mempool.torch.estimate.sources.targets import Sizes, Target, fresh_tensor
from mempool.torch.estimate.sources.transformers_models import (
    TransformersModel,
    task_of,
    transformers_model,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from mempool.torch.model_spec import ModelSpec

_NOT_LIGHTNING = (
    "{0}'s own training_step and configure_optimizers are not used: its forward is tried, with --loss and "
    "--optimizer, or AdamW"
)
#: Names of function parameters that receive the batch or the sequence length.
_SIZES = {
    "batch": ("batch", "batch_size", "bs"),
    "seq": ("seq", "seq_len", "seqlen", "seq_length", "sequence_length", "block_size"),
}


def find_target(spec: ModelSpec, sizes: Sizes, scripts: dict[str, ModuleType] | None = None) -> Target:
    """Return the target of a name.

    Args:
        spec: the model.
        sizes: of the model's inputs.
        scripts: scripts imported before in the same fake mode, by path, so that a sweep imports a script
            once; added to.

    Raises:
        UsageError: the name is unknown or not usable; the message lists similar names.
        OSError: a file cannot be read.
    """
    if spec.kind == "transformers":
        target = transformers_target(transformers_model(spec.name, spec.arguments, sizes.task), sizes)
    else:
        target = _module_target(_loaded(spec, {} if scripts is None else scripts), spec, sizes)
    if sizes.inputs is not None:
        shapes = [size for tensor in sizes.inputs for size in tensor.shape]
        takes_seq = any("S" in size for size in shapes)
        target = replace(target, inputs=_specified(sizes), seq=sizes.seq, takes_seq=takes_seq)
    if target.inputs is None:
        raise UsageError(
            f"what goes into {target.title}? Give --inputs, such as 'float32[B,3,224,224]', or name a "
            "function that returns (model, inputs)"
        )
    if sizes.seq is not None and not target.takes_seq:
        raise UsageError(f"--seq would change nothing: the inputs of {target.title} do not depend on it")
    return target


def transformers_target(found: TransformersModel, sizes: Sizes) -> Target:
    """Return a target for a model of transformers, with inputs by the model's configuration.

    Raises:
        UsageError: the inputs are not known, or the sequence is longer than the model's positions.
    """
    seq = transformers_models.sequence_length(found, sizes.seq)
    return Target(
        f"{found.kind.__name__} of {found.config.model_type} ({found.task})",
        found.model,
        lambda batch: ((), transformers_models.model_inputs(found, batch, seq, labels=sizes.labels)),
        seq=seq,
        takes_seq=seq is not None,
    )


def _loaded(spec: ModelSpec, scripts: dict[str, ModuleType]) -> ModuleType:
    if spec.kind == "script":
        if not spec.name:
            raise UsageError(f"which model? Give {spec.where}:NAME; --main runs {spec.where} as a program")
        if spec.where not in scripts:
            scripts[spec.where] = load_script(spec.where)
        return scripts[spec.where]
    if not spec.name:
        raise UsageError(f"which model? Give {spec.where}:NAME")
    return load_module(spec.where)


def _module_target(module: ModuleType, spec: ModelSpec, sizes: Sizes) -> Target:
    """Return the target of a model, class or function in a module."""
    name, value = spec.name, _attribute(module, spec)
    if isinstance(value, nn.Module):
        if spec.arguments:
            raise UsageError(f"{name} is a model already: it takes no arguments")
        title = f"{name}, a {type(value).__name__}"
        target = _with_own_inputs(Target(title, lambda: value, notes=_notes(value, name)), value, sizes)
    elif callable(value):
        target = _function_target(value, name, spec.arguments, sizes)
    else:
        raise UsageError(f"{name} is a {type(value).__name__}, neither a model nor what makes one")
    return target


def _attribute(module: Any, spec: ModelSpec) -> Any:
    found = module
    for part in spec.name.split("."):
        if not hasattr(found, part):
            public_names = [name for name in vars(module) if not name.startswith("_")]
            near = difflib.get_close_matches(spec.name, public_names, n=4, cutoff=0.5) or public_names[-8:]
            raise UsageError(f"{spec.where} has no {spec.name!r}; it has {', '.join(near) or 'nothing'}")
        found = getattr(found, part)
    return found


def _notes(model: nn.Module, name: str) -> tuple[str, ...]:
    """Return notes on parts of a model that an estimate leaves out."""
    compiled = f"the model is compiled by torch.compile: {EAGER}"
    trains_itself = any(hasattr(model, method) for method in ("configure_optimizers", "training_step"))
    notes = {compiled: is_compiled(model), _NOT_LIGHTNING.format(name): trains_itself}
    return tuple(note for note, applies in notes.items() if applies)


def _function_target(function: Callable[..., Any], name: str, given: dict[str, Any], sizes: Sizes) -> Target:
    """Return a target of a class or function that makes a model, (model, inputs) or a dictionary."""
    if missing := [key for key in _required(function) if key not in given]:
        raise UsageError(f"{name} needs {', '.join(missing)}: say {name}({missing[0]}=...)")
    taken = _sizes_of(function, given)
    defaults = _defaults(function, taken, sizes, name)

    def called(batch: int) -> tuple[nn.Module, Any, dict[str, Any]]:
        requested = {"batch": batch, "seq": sizes.seq}
        more = {key: requested[size] for key, size in taken.items() if requested[size] is not None}
        return _parts(function(**(more | given)), name)

    with fake_execution(), without_training(), explain_failures(f"making {name}"):
        model, inputs, attributes = called(usual := defaults.get("batch", 1))
    target = Target(
        name if isinstance(function, type) else f"{type(model).__name__} of {name}",
        lambda: called(usual)[0],
        batch=attributes.pop("batch", defaults.get("batch")),
        attributes=attributes,
        notes=_notes(model, name),
    )
    if inputs is None:
        return _with_own_inputs(target, model, sizes)
    target = replace(target, seq=sizes.seq or defaults.get("seq"), takes_seq="seq" in taken.values())
    if "batch" in taken.values():
        return replace(target, inputs=_examples(lambda batch: _arguments_of(called(batch)[1], batch)))
    if is_function(inputs):
        return replace(target, inputs=_examples(lambda batch: _arguments_of(inputs, batch)))
    example = call_arguments(inputs)
    batch = batch_of(example)
    doubt = None if batch is None else batch_doubt(sequence_first(model), example, batch)
    return replace(target, inputs=resizable(example, batch), batch=batch, doubt=doubt)


def _required(function: Any) -> list[str]:
    """Return the names of parameters that have no default and receive no size."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    sizes = {name for names in _SIZES.values() for name in names}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.default is p.empty and p.kind in kinds and p.name not in sizes]


def _sizes_of(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, str]:
    """Map names of a function's parameters to the size that each receives."""
    if isinstance(function, type):
        return {}  # parameters of a class with such names describe its architecture
    parameters = inspect.signature(function).parameters
    return {
        key: size_name
        for size_name, keys in _SIZES.items()
        for key in keys
        if key in parameters and key not in given
    }


def _defaults(function: Callable[..., Any], taken: dict[str, str], sizes: Sizes, name: str) -> dict[str, int]:
    """Return the default values of a function's size parameters."""
    found = {}
    for key, size_name in taken.items():
        default = inspect.signature(function).parameters[key].default
        if isinstance(default, int):
            found[size_name] = default
        elif default is inspect.Parameter.empty and size_name == "seq" and sizes.seq is None:
            raise UsageError(f"{name} takes {key}: give --{size_name}")
    return found


def _parts(made: Any, name: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Return the model, its inputs, and attributes of a `Job` that a function returns."""
    if isinstance(made, nn.Module):
        return made, None, {}
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made[0], made[1], {}
    if isinstance(made, dict) and isinstance(made.get("model"), nn.Module):
        attributes = {key: value for key, value in made.items() if key not in ("model", "inputs")}
        for key in attributes:
            if key not in Job.__dataclass_fields__:
                raise UsageError(f"{name} returns {key!r}, which a Job has not")
        return made["model"], made.get("inputs"), resolve_names(attributes)
    raise UsageError(
        f"{name} returns a {type(made).__name__}: neither a model, nor (model, inputs), nor a dictionary"
    )


def _examples(make: Callable[[int], Arguments]) -> Callable[[int], Arguments]:
    """Cache the inputs of a function that also makes a model, which is discarded: one call per batch size."""
    made: dict[int, Arguments] = {}

    def of(batch: int) -> Arguments:
        if batch not in made:
            with _disable_current_modes(), fake_execution():
                made[batch] = make(batch)
        new: Arguments = pytree.tree_map_only(torch.Tensor, fresh_tensor, made[batch])
        return new

    return of


def _arguments_of(inputs: Any, batch: int) -> Arguments:
    """Return a call's arguments from example inputs or from a function of the batch's size."""
    return call_arguments(inputs(batch) if is_function(inputs) else inputs)


def _with_own_inputs(target: Target, model: nn.Module, sizes: Sizes) -> Target:
    """Return the target with the inputs that the configuration of a model of transformers describes."""
    config = getattr(model, "config", None)
    if sizes.inputs is None and getattr(model, "main_input_name", None) and hasattr(config, "model_type"):
        own = transformers_target(TransformersModel(config, task_of(type(model)), type(model)), sizes)
        return replace(target, inputs=own.inputs, seq=own.seq, takes_seq=own.takes_seq)
    return target


def _specified(sizes: Sizes) -> Callable[[int], Arguments]:
    """Return a function that makes the inputs of ``--inputs`` for a batch."""

    def made(batch: int) -> Arguments:
        args, kwargs = [], {}
        for tensor in sizes.inputs or ():
            zeros = torch.zeros(tensor.sizes(batch, sizes.seq), dtype=getattr(torch, tensor.type))
            if tensor.name:
                kwargs[tensor.name] = zeros
            else:
                args.append(zeros)
        return tuple(args), kwargs

    return made
