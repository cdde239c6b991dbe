"""Targets found in modules and scripts: models, classes, functions, and calls that a script makes."""

from __future__ import annotations

import copy
import difflib
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from mempool.errors import UsageError
from mempool.torch.estimate.failures import told
from mempool.torch.estimate.fake.copies import EAGER, is_compiled
from mempool.torch.estimate.inputs import Arguments, arguments, batch_of, resizable
from mempool.torch.estimate.job import Job
from mempool.torch.estimate.model_outputs import own_loss
from mempool.torch.estimate.result import AS_FAR_AS_RAN, WITHOUT_LOSS, Caveat
from mempool.torch.estimate.sources import transformers_models
from mempool.torch.estimate.sources.call_spy import bytes_of
from mempool.torch.estimate.sources.loss_replay import UntakenLossError, taped_loss
from mempool.torch.estimate.sources.optimizers_and_losses import resolved
from mempool.torch.estimate.sources.scripts import GUESSES, unreal
from mempool.torch.estimate.sources.targets import Sizes, Target
from mempool.torch.estimate.sources.transformers_models import Hub, task_of
from mempool.units import binary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mempool.torch.estimate.sources.call_spy import Call, Seen
    from mempool.torch.estimate.sources.scripts import Loaded
    from mempool.torch.model_spec import Named

_FACTORIES = ("model", "make_model", "build_model", "get_model", "create_model", "make", "build", "job")
_NOT_LIGHTNING = (
    "{0}'s own training_step and configure_optimizers are not used: its forward is tried, with --loss and "
    "--optimizer, or AdamW"
)
#: Largest number of lines named in a message.
_MOST_LINES = 3
#: Names of function parameters that receive the batch, the sequence length or the image size.
_SIZES = {
    "batch": ("batch", "batch_size", "bs"),
    "seq": ("seq", "seq_len", "seqlen", "seq_length", "sequence_length", "block_size"),
    "image": ("image", "image_size", "img_size"),
}


def of_hub(found: Hub, sizes: Sizes) -> Target:
    """Return a target for a model of transformers, with inputs by the model's configuration.

    Raises:
        UsageError: the inputs are not known, or the sequence is longer than the model's positions.
    """
    seq = transformers_models.sequence(found, sizes.seq)
    takes_images = "pixel_values" in found.takes
    vision = getattr(found.config, "vision_config", found.config)
    if sizes.image is not None and hasattr(vision, "image_size"):
        vision.image_size = sizes.image  # as many positions as the images have patches
    uses = [name for name, is_so in (("seq", seq is not None), ("image", takes_images)) if is_so]
    return Target(
        f"{found.kind.__name__} of {found.config.model_type} ({found.task})",
        found.model,
        lambda batch: ((), transformers_models.inputs(found, batch, seq, sizes.image, labels=sizes.labels)),
        seq=seq,
        uses=frozenset(uses),
    )


def of_loaded(loaded: Loaded, named: Named, sizes: Sizes) -> Target:
    """Return the target named in a module; without a name, the called or only model.

    Raises:
        UsageError: the name is missing, not usable, or several models qualify.
    """
    target = _of_loaded(loaded, named, sizes)
    saved = (
        f"{named.where}'s {name}(...) was passed over" for name in dict.fromkeys(loaded.seen.passed_over)
    )
    if "optimizer" not in target.own and _trains_itself(loaded.module, named):
        target = replace(target, notes=(*target.notes, _NOT_LIGHTNING.format(named.name)))
    eager = [f"{compiler} is left out: {EAGER}" for compiler in loaded.seen.eager]
    caught = [f"{named.where} catches all exceptions, and was ended behind its first backward all the same"]
    return replace(target, notes=(*target.notes, *eager, *saved, *(caught * loaded.seen.swallowed)))


def _trains_itself(module: Any, named: Named) -> bool:
    thing = _attribute(module, named) if named.name else None
    return any(hasattr(thing, name) for name in ("configure_optimizers", "training_step"))


def _of_loaded(loaded: Loaded, named: Named, sizes: Sizes) -> Target:
    if named.name:
        return _of_thing(_attribute(loaded.module, named), named.name, named.arguments, sizes, loaded.seen)
    seen = loaded.seen
    if seen.call is not None and (seen.trains or sizes.inputs is None):
        return _of_seen(seen, named)
    name, thing = _only(loaded.module, named)
    return _of_thing(thing, name, {}, sizes, seen)


def _attribute(module: Any, named: Named) -> Any:
    found = module
    for part in named.name.split("."):
        if not hasattr(found, part):
            there = [name for name in vars(module) if not name.startswith("_")]
            near = difflib.get_close_matches(named.name, there, n=4, cutoff=0.5) or there[-8:]
            raise UsageError(f"{named.where} has no {named.name!r}; it has {', '.join(near) or 'nothing'}")
        found = getattr(found, part)
    return found


def _of_seen(seen: Seen, named: Named) -> Target:
    """Return a target from the model that the script itself called last, with the inputs of that call."""
    call, given = seen.call, seen.batch
    assert call is not None
    own: dict[str, Any] = {"autocast": call.autocast}
    outputs = [leaf for leaf in pytree.tree_leaves(call.output) if isinstance(leaf, torch.Tensor)]
    if not seen.trains and not any(leaf.requires_grad for leaf in outputs):
        own |= {"mode": "inference", "hold_output": call.held}
    if (optimizer := seen.optimizer()) is not None:
        own["optimizer"] = optimizer
    make, caveats = _copies(call.module), []
    try:
        loss = taped_loss(seen.tape, call.module, call.output, given, call.autocast, make)
        if own_loss(call.output) is None or not loss.only_scales:
            own |= {"loss": loss, "labels": loss.labels}
            make = loss.making(make)
    except UntakenLossError as error:
        if seen.trains:
            stands = "the sum of the output" if own_loss(call.output) is None else "the model's own loss"
            reason = f"the loss of {named.where} {error}; {stands} stands for it, --loss names another"
            caveats.append(Caveat(WITHOUT_LOSS, reason))
    caveats += _caveats(seen, call, named)
    if seen.idle:
        own["margin"] = {"other_models": sum(size for _, size in seen.idle)}
    if seen.adds_up is not None:
        own["accumulate"] = 2  # two batches show the peak; more need no more memory
    if seen.trains:
        own |= {"clears_late": seen.clears_late, "set_to_none": seen.set_to_none}
    examples = _cut((call.args, call.kwargs))
    return Target(
        f"{type(call.module).__name__} of {named.where}",
        make,
        resizable(examples, given),
        batch=given,
        own=own,
        notes=tuple(_notes(seen, named)),
        warnings=_left_out(seen, call, named),
        caveats=tuple(caveats),
        examples=examples,
    )


def _caveats(seen: Seen, call: Call, named: Named) -> Iterator[Caveat]:
    """Yield the restrictions of a step that was seen in part."""
    if seen.trains and call.times > 1:
        kind = type(call.module).__name__
        reason = (
            f"{named.where} calls the {kind} {call.times} times before its backward, and the activations of "
            "all calls are alive then: name a function that returns one module which makes these calls, and "
            "its inputs"
        )
        yield Caveat(f"one of {call.times} calls", reason)
    if seen.decisions:
        reason = f"{_lines(seen.decisions)} by values of tensors, unknown before the run: {GUESSES}"
        yield Caveat(AS_FAR_AS_RAN, reason)


def _notes(seen: Seen, named: Named) -> Iterator[str]:
    """Yield lines on settings taken over from a script, and on assumptions."""
    yield f"model and inputs are those that {named.where} calls itself"
    yield from seen.several()
    if seen.later:
        yield f"{_lines(seen.later)} by values behind the first backward: what follows is not counted"
    if seen.idle:
        names = ", ".join(f"{name}, {binary(size)}" for name, size in seen.idle)
        yield f"{named.where} holds models that it has not called before its backward: {names}; counted"
    if seen.trains and seen.clears_late and seen.set_to_none:
        yield (
            f"{named.where} clears gradients between forward and backward, so the gradients of the former "
            "step are alive during the forward: call `zero_grad()` right after `step()` to free them earlier"
        )
    if seen.adds_up is not None:
        where, batches = seen.adds_up.where, seen.adds_up.batches
        yield f"{where} lets gradients of {batches:,} batches add up: tried with two"


def _lines(lines: list[str]) -> str:
    """Format lines that decide on the course of a program, at most `_MOST_LINES` by name."""
    more = f" and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    return f"{', '.join(lines[:_MOST_LINES])}{more} {'decides' if len(lines) == 1 else 'decide'}"


def _left_out(seen: Seen, call: Call, named: Named) -> tuple[str, ...]:
    """Return warnings on parts of a script's step that are not tried.

    Raises:
        UsageError: the script uses other models, with more than a tenth of the parameters.
    """
    others = seen.others()
    names = ", ".join(f"{name}, {binary(size)} of parameters" for name, size in others)
    kind = type(call.module).__name__
    if 10 * sum(size for _, size in others) > bytes_of(call.module.parameters()):
        raise UsageError(
            f"{named.where} uses more models than the {kind} that could be tried: {names}; name a function "
            f"that returns one module that calls them all, with its inputs: {named.where}:function"
        )
    said = [f"not counted: {names}, and what trains it"] if others else []
    return tuple(said)


def _cut(given: Any) -> Any:
    """Detach inputs from the operations that made them, which each run's backward would otherwise repeat."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t if t.grad_fn is None else t.detach(), given)


def _only(module: Any, named: Named) -> tuple[str, Any]:
    """Return name and value of the only model, factory or class that a script without a name can mean."""
    there = {name: thing for name, thing in vars(module).items() if not name.startswith("_")}
    models = {
        n: m for n, m in there.items() if isinstance(m, nn.Module) and any(True for _ in m.parameters())
    }
    inner = {id(child) for m in models.values() for child in m.modules() if child is not m}
    own = {n: t for n, t in there.items() if getattr(t, "__module__", None) == module.__name__}
    classes = {n: c for n, c in own.items() if isinstance(c, type) and issubclass(c, nn.Module)}
    for choice in (
        {n: m for n, m in models.items() if id(m) not in inner},
        {n: f for n, f in own.items() if inspect.isfunction(f) and n in _FACTORIES and not _required(f)},
        {n: c for n, c in classes.items() if not _required(c)},
    ):
        distinct = {id(thing): name for name, thing in choice.items()}
        if len(distinct) == 1:
            name = next(iter(distinct.values()))
            return name, choice[name]
        if distinct:
            names = ", ".join(f"{named.where}:{name}" for name in distinct.values())
            raise UsageError(f"{named.where} has several models: say which, {names}")
    hint = f"; say {named.where}:{next(iter(classes))}(...) with its arguments" if classes else ""
    program = "; --main runs it as a program, to its first backward" if named.kind == "script" else ""
    raise UsageError(
        f"{named.where} has no model at its top level, nor a class without arguments{hint}{program}"
    )


def _required(thing: Any) -> list[str]:
    try:
        parameters = inspect.signature(thing).parameters.values()
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


def _of_thing(thing: Any, name: str, given: dict[str, Any], sizes: Sizes, seen: Seen) -> Target:
    if isinstance(thing, nn.Module):
        if given:
            raise UsageError(f"{name} is a model already: it takes no arguments")
        title, make, notes = f"{name}, a {type(thing).__name__}", _copies(thing), _compiled(thing)
    elif callable(thing):
        return _of_function(thing, name, given, sizes)
    else:
        raise UsageError(f"{name} is a {type(thing).__name__}, neither a model nor what makes one")
    call = seen.call
    if call is not None and call.module is thing:
        own = {"autocast": call.autocast}
        return replace(_of_example((call.args, call.kwargs), title, make), own=own, notes=notes)
    return replace(_with_own_inputs(thing, title, make, sizes), notes=notes)


def _copies(model: nn.Module) -> Callable[[], nn.Module]:
    """Return a function that copies a fake model for each run; the run itself copies a real model."""
    held = [leaf for module in model.modules() for leaf in pytree.tree_leaves(list(vars(module).values()))]
    tensors = [leaf for leaf in held if isinstance(leaf, FakeTensor)]

    def copied() -> nn.Module:
        memo: dict[int, Any] = {id(tensor): _fresh(tensor) for tensor in tensors}
        return copy.deepcopy(model, memo)

    return copied if tensors else lambda: model


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same form without a recorded operation that reads the original."""
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _of_function(function: Callable[..., Any], name: str, given: dict[str, Any], sizes: Sizes) -> Target:
    """Return a target of a class or function that makes a model, (model, inputs), a dict or a `Job`."""
    if missing := [key for key in _required(function) if key not in given]:
        raise UsageError(f"{name} needs {', '.join(missing)}: say {name}({missing[0]}=...)")
    taken = _sizes_of(function, given)
    defaults = _defaults(function, taken, sizes, name)
    usual = defaults.get("batch", 1)

    def called(batch: int) -> Any:
        asked = {"batch": batch, "seq": sizes.seq, "image": sizes.image}
        more = {key: asked[what] for key, what in taken.items() if asked[what] is not None}
        return function(**(more | given))

    with unreal(), told(f"making {name}"):
        made = called(usual)
    if isinstance(made, Job):
        rest = {key: getattr(made, key) for key in Job.__dataclass_fields__ if key not in ("model", "inputs")}
        return Target(name, made.model, made.inputs, batch=rest.pop("batch"), own=rest)
    model, inputs, own = _parts(made, name)
    notes = _compiled(model)
    title = name if isinstance(function, type) else f"{type(model).__name__} of {name}"
    make = lambda: _parts(called(usual), name)[0]  # noqa: E731
    if inputs is None:
        return replace(_with_own_inputs(model, title, make, sizes), own=own, notes=notes)
    uses = frozenset(taken.values()) - {"batch"}
    seq = sizes.seq or defaults.get("seq")
    if "batch" not in taken.values():
        return replace(_of_example(arguments(inputs), title, make), own=own, seq=seq, uses=uses, notes=notes)
    examples = _examples(lambda batch: arguments(_parts(called(batch), name)[1]))
    return Target(title, make, examples, defaults.get("batch"), seq, uses, own, notes)


def _compiled(model: nn.Module) -> tuple[str, ...]:
    """Return a note if `torch.compile` has compiled the model."""
    return (f"the model is compiled by torch.compile: {EAGER}",) if is_compiled(model) else ()


def _defaults(function: Callable[..., Any], taken: dict[str, str], sizes: Sizes, name: str) -> dict[str, int]:
    """Return the default values of a function's size parameters."""
    found = {}
    for key, what in taken.items():
        default = inspect.signature(function).parameters[key].default
        if isinstance(default, int):
            found[what] = default
        elif default is inspect.Parameter.empty and what != "batch" and getattr(sizes, what) is None:
            raise UsageError(f"{name} takes {key}: give --{what}")
    return found


def _examples(make: Callable[[int], Arguments]) -> Callable[[int], Arguments]:
    """Cache the inputs of a function that also makes a model, which is discarded: one call per batch size."""
    made: dict[int, Arguments] = {}

    def of(batch: int) -> Arguments:
        if batch not in made:
            with _disable_current_modes(), unreal():
                made[batch] = make(batch)
        new: Arguments = pytree.tree_map_only(torch.Tensor, _fresh, made[batch])
        return new

    return of


def _sizes_of(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, str]:
    """Map names of a function's parameters to the size that each receives."""
    if isinstance(function, type):
        return {}  # parameters of a class with such names describe its architecture
    there = inspect.signature(function).parameters
    return {key: what for what, keys in _SIZES.items() for key in keys if key in there and key not in given}


def _parts(made: Any, name: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    if isinstance(made, nn.Module):
        return made, None, {}
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made[0], made[1], {}
    if isinstance(made, dict) and isinstance(made.get("model"), nn.Module):
        own = {key: value for key, value in made.items() if key not in ("model", "inputs")}
        for key in own:
            if key not in Job.__dataclass_fields__:
                raise UsageError(f"{name} returns {key!r}, which a Job has not")
        return made["model"], made.get("inputs"), resolved(own)
    raise UsageError(
        f"{name} returns a {type(made).__name__}: neither a model, nor (model, inputs), nor a dictionary"
    )


def _of_example(example: Arguments, title: str, make: Callable[[], nn.Module]) -> Target:
    batch = batch_of(example)
    return Target(title, make, resizable(example, batch), batch=batch, examples=example)


def _with_own_inputs(model: nn.Module, title: str, make: Callable[[], nn.Module], sizes: Sizes) -> Target:
    """Return a target with inputs described by the model, as in transformers and Lightning."""
    config = getattr(model, "config", None)
    if sizes.inputs is None and getattr(model, "main_input_name", None) and hasattr(config, "model_type"):
        target = of_hub(Hub(config, task_of(type(model)), type(model)), sizes)
        return replace(target, title=title, model=make)
    if (example := getattr(model, "example_input_array", None)) is not None:
        return _of_example(arguments(example), title, make)
    if sizes.image is not None:
        image = sizes.image

        def images(batch: int) -> Arguments:
            return (torch.zeros(batch, 3, image, image),), {}

        return Target(title, make, images, uses=frozenset({"image"}))
    return Target(title, make)
