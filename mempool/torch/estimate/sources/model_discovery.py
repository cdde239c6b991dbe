"""Discovery of the model that a name means: of transformers, or in a module or script, with its inputs."""

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
from mempool.torch.estimate.inputs import Arguments, batch_of, call_arguments, is_function, resizable
from mempool.torch.estimate.job import Job
from mempool.torch.estimate.sources import transformers_models
from mempool.torch.estimate.sources.optimizers_and_losses import resolve_names
from mempool.torch.estimate.sources.scripts import fake_execution, load_module, load_script, without_training
from mempool.torch.estimate.sources.targets import Sizes, Target, fresh_tensor, model_copies
from mempool.torch.estimate.sources.transformers_models import (
    TransformersModel,
    known_names,
    task_of,
    transformers_model,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from mempool.torch.model_spec import ModelSpec

_FACTORIES = ("model", "make_model", "build_model", "get_model", "create_model", "make", "build", "job")
_NOT_LIGHTNING = (
    "{0}'s own training_step and configure_optimizers are not used: its forward is tried, with --loss and "
    "--optimizer, or AdamW"
)
#: Names of function parameters that receive the batch, the sequence length or the image size.
_SIZES = {
    "batch": ("batch", "batch_size", "bs"),
    "seq": ("seq", "seq_len", "seqlen", "seq_length", "sequence_length", "block_size"),
    "image": ("image", "image_size", "img_size"),
}


def transformers_target(found: TransformersModel, sizes: Sizes) -> Target:
    """Return a target for a model of transformers, with inputs by the model's configuration.

    Raises:
        UsageError: the inputs are not known, or the sequence is longer than the model's positions.
    """
    seq = transformers_models.sequence_length(found, sizes.seq)
    takes_images = "pixel_values" in found.takes
    vision = getattr(found.config, "vision_config", found.config)
    if sizes.image is not None and hasattr(vision, "image_size"):
        vision.image_size = sizes.image  # as many positions as the images have patches
    uses = [name for name, is_so in (("seq", seq is not None), ("image", takes_images)) if is_so]
    return Target(
        f"{found.kind.__name__} of {found.config.model_type} ({found.task})",
        found.model,
        lambda batch: (
            (),
            transformers_models.model_inputs(found, batch, seq, sizes.image, labels=sizes.labels),
        ),
        seq=seq,
        uses=frozenset(uses),
    )


def module_target(module: ModuleType, spec: ModelSpec, sizes: Sizes) -> Target:
    """Return the target named in a module; without a name, the only model.

    Raises:
        UsageError: the name is missing, not usable, or several models qualify.
    """
    name, value = (spec.name, _attribute(module, spec)) if spec.name else _only_model(module, spec)
    target = _object_target(value, name, spec.arguments if spec.name else {}, sizes)
    trains_itself = any(hasattr(value, method) for method in ("configure_optimizers", "training_step"))
    if trains_itself and "optimizer" not in target.attributes:
        target = replace(target, notes=(*target.notes, _NOT_LIGHTNING.format(name)))
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


def _only_model(module: Any, spec: ModelSpec) -> tuple[str, Any]:
    """Return name and value of the only model, factory or class that a script without a name can mean."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    models = {
        n: m for n, m in public.items() if isinstance(m, nn.Module) and any(True for _ in m.parameters())
    }
    inner = {id(child) for m in models.values() for child in m.modules() if child is not m}
    attributes = {n: t for n, t in public.items() if getattr(t, "__module__", None) == module.__name__}
    classes = {n: c for n, c in attributes.items() if isinstance(c, type) and issubclass(c, nn.Module)}
    for choice in (
        {n: m for n, m in models.items() if id(m) not in inner},
        {
            n: f
            for n, f in attributes.items()
            if inspect.isfunction(f) and n in _FACTORIES and not _required(f)
        },
        {n: c for n, c in classes.items() if not _required(c)},
    ):
        distinct = {id(value): name for name, value in choice.items()}
        if len(distinct) == 1:
            name = next(iter(distinct.values()))
            return name, choice[name]
        if distinct:
            names = ", ".join(f"{spec.where}:{name}" for name in distinct.values())
            raise UsageError(f"{spec.where} has several models: say which, {names}")
    hint = f"; say {spec.where}:{next(iter(classes))}(...) with its arguments" if classes else ""
    program = "; --main runs it as a program" if spec.kind == "script" else ""
    raise UsageError(
        f"{spec.where} has no model at its top level, nor a class without arguments{hint}{program}"
    )


def _required(value: Any) -> list[str]:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    sizes = {name for names in _SIZES.values() for name in names}
    return [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and p.name not in sizes
    ]


def _object_target(value: Any, name: str, given: dict[str, Any], sizes: Sizes) -> Target:
    if isinstance(value, nn.Module):
        if given:
            raise UsageError(f"{name} is a model already: it takes no arguments")
        title, make, notes = f"{name}, a {type(value).__name__}", model_copies(value), _compiled(value)
    elif callable(value):
        return _function_target(value, name, given, sizes)
    else:
        raise UsageError(f"{name} is a {type(value).__name__}, neither a model nor what makes one")
    return replace(_with_own_inputs(value, title, make, sizes), notes=notes)


def _function_target(function: Callable[..., Any], name: str, given: dict[str, Any], sizes: Sizes) -> Target:
    """Return a target of a class or function that makes a model, (model, inputs), a dict or a `Job`."""
    if missing := [key for key in _required(function) if key not in given]:
        raise UsageError(f"{name} needs {', '.join(missing)}: say {name}({missing[0]}=...)")
    taken = _sizes_of(function, given)
    defaults = _defaults(function, taken, sizes, name)
    usual = defaults.get("batch", 1)

    def called(batch: int) -> Any:
        requested = {"batch": batch, "seq": sizes.seq, "image": sizes.image}
        more = {
            key: requested[size_name] for key, size_name in taken.items() if requested[size_name] is not None
        }
        return function(**(more | given))

    with fake_execution(), without_training(), explain_failures(f"making {name}"):
        made = called(usual)
    if isinstance(made, Job):
        attributes = {
            key: getattr(made, key) for key in Job.__dataclass_fields__ if key not in ("model", "inputs")
        }
        return Target(name, made.model, made.inputs, batch=attributes.pop("batch"), attributes=attributes)
    model, inputs, attributes = _parts(made, name)
    notes = _compiled(model)
    title = name if isinstance(function, type) else f"{type(model).__name__} of {name}"
    make = lambda: _parts(called(usual), name)[0]  # noqa: E731
    if inputs is None:
        return replace(_with_own_inputs(model, title, make, sizes), attributes=attributes, notes=notes)
    uses = frozenset(taken.values()) - {"batch"}
    seq = sizes.seq or defaults.get("seq")
    if "batch" not in taken.values() and is_function(inputs):
        batch = attributes.pop("batch", None)
        examples = _examples(lambda size: _arguments_of(inputs, size))
        return Target(title, make, examples, batch, seq, uses, attributes, notes)
    if "batch" not in taken.values():
        return replace(
            _example_target(call_arguments(inputs), title, make),
            attributes=attributes,
            seq=seq,
            uses=uses,
            notes=notes,
        )
    examples = _examples(lambda batch: _arguments_of(_parts(called(batch), name)[1], batch))
    return Target(title, make, examples, defaults.get("batch"), seq, uses, attributes, notes)


def _arguments_of(inputs: Any, batch: int) -> Arguments:
    """Return a call's arguments from example inputs or from a function of the batch's size."""
    return call_arguments(inputs(batch) if is_function(inputs) else inputs)


def _compiled(model: nn.Module) -> tuple[str, ...]:
    """Return a note if `torch.compile` has compiled the model."""
    return (f"the model is compiled by torch.compile: {EAGER}",) if is_compiled(model) else ()


def _defaults(function: Callable[..., Any], taken: dict[str, str], sizes: Sizes, name: str) -> dict[str, int]:
    """Return the default values of a function's size parameters."""
    found = {}
    for key, size_name in taken.items():
        default = inspect.signature(function).parameters[key].default
        if isinstance(default, int):
            found[size_name] = default
        elif (
            default is inspect.Parameter.empty and size_name != "batch" and getattr(sizes, size_name) is None
        ):
            raise UsageError(f"{name} takes {key}: give --{size_name}")
    return found


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


def _parts(made: Any, name: str) -> tuple[nn.Module, Any, dict[str, Any]]:
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


def _example_target(example: Arguments, title: str, make: Callable[[], nn.Module]) -> Target:
    batch = batch_of(example)
    return Target(title, make, resizable(example, batch), batch=batch, examples=example)


def _with_own_inputs(model: nn.Module, title: str, make: Callable[[], nn.Module], sizes: Sizes) -> Target:
    """Return a target with inputs described by the model, as in transformers and Lightning."""
    config = getattr(model, "config", None)
    if sizes.inputs is None and getattr(model, "main_input_name", None) and hasattr(config, "model_type"):
        target = transformers_target(TransformersModel(config, task_of(type(model)), type(model)), sizes)
        return replace(target, title=title, model=make)
    if (example := getattr(model, "example_input_array", None)) is not None:
        return _example_target(call_arguments(example), title, make)
    if sizes.image is not None:
        image = sizes.image

        def images(batch: int) -> Arguments:
            return (torch.zeros(batch, 3, image, image),), {}

        return Target(title, make, images, uses=frozenset({"image"}))
    return Target(title, make)


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
        target = module_target(_loaded(spec, {} if scripts is None else scripts), spec, sizes)
    if sizes.inputs is not None:
        shapes = [size for tensor in sizes.inputs for size in tensor.shape]
        uses = frozenset({"seq"} if any("S" in size for size in shapes) else ())
        target = replace(target, inputs=_specified(sizes), seq=sizes.seq, uses=uses)
    if target.inputs is None:
        raise UsageError(
            f"what goes into {target.title}? Give --inputs, such as 'float32[B,3,224,224]', or name a "
            "function that returns (model, inputs)"
        )
    for name in ("seq", "image"):
        if getattr(sizes, name) is not None and name not in target.uses:
            raise UsageError(
                f"--{name} would change nothing: the inputs of {target.title} do not depend on it"
            )
    return target


def _loaded(spec: ModelSpec, scripts: dict[str, ModuleType]) -> ModuleType:
    if spec.kind == "script":
        if spec.where not in scripts:
            scripts[spec.where] = load_script(spec.where)
        return scripts[spec.where]
    try:
        return load_module(spec.where)
    except UsageError as error:
        near = difflib.get_close_matches(spec.where, known_names(), n=3, cutoff=0.8) if not spec.name else []
        if not near:
            raise
        hint = ", ".join(f"transformers:{name}" for name in near)
        raise UsageError(f"{error}; did you mean {hint}?") from None


def _specified(sizes: Sizes) -> Callable[[int], Arguments]:
    def made(batch: int) -> Arguments:
        args, kwargs = [], {}
        for spec_ in sizes.inputs or ():
            made_tensor = torch.zeros(spec_.sizes(batch, sizes.seq), dtype=getattr(torch, spec_.type))
            if spec_.name:
                kwargs[spec_.name] = made_tensor
            else:
                args.append(made_tensor)
        return tuple(args), kwargs

    return made
