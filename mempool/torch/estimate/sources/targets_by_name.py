"""Targets by their names on the command line: a model of transformers, of a module, of a script."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mempool.errors import UsageError
from mempool.torch.estimate.sources.model_discovery import program_target, transformers_target
from mempool.torch.estimate.sources.scripts import load_module, load_script
from mempool.torch.estimate.sources.targets import Sizes, Target
from mempool.torch.estimate.sources.transformers_models import hub, names

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.torch.estimate.inputs import Arguments
    from mempool.torch.estimate.sources.scripts import Loaded
    from mempool.torch.model_spec import ModelSpec

__all__ = ["Sizes", "Target", "find_target"]


#: Scripts that were run, by path, arguments and mode.
Scripts = dict[tuple[Any, ...], "Loaded"]


def find_target(spec: ModelSpec, sizes: Sizes, scripts: Scripts | None = None) -> Target:
    """Return the target of a name.

    Args:
        spec: the model.
        sizes: of the model's inputs.
        scripts: scripts run before in the same fake mode, so that a sweep runs a script once; added to.

    Raises:
        UsageError: the name is unknown or not usable; the message lists similar names.
        OSError: a file cannot be read.
    """
    if spec.kind == "transformers":
        target = transformers_target(hub(spec.name, spec.arguments, sizes.task), sizes)
    else:
        target = program_target(_loaded(spec, sizes, {} if scripts is None else scripts), spec, sizes)
    if sizes.inputs is not None:
        shapes = [size for one in sizes.inputs for size in one.shape]
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


def _loaded(spec: ModelSpec, sizes: Sizes, scripts: Scripts) -> Loaded:
    if spec.kind == "script":
        key = spec.where, tuple(sizes.arguments), sizes.main
        if key not in scripts:
            scripts[key] = load_script(spec.where, sizes.arguments, main=sizes.main)
        return scripts[key]
    try:
        return load_module(spec.where)
    except UsageError as error:
        near = difflib.get_close_matches(spec.where, names(), n=3, cutoff=0.8) if not spec.name else []
        if not near:
            raise
        hint = ", ".join(f"transformers:{name}" for name in near)
        raise UsageError(f"{error}; did you mean {hint}?") from None


def _specified(sizes: Sizes) -> Callable[[int], Arguments]:
    def made(batch: int) -> Arguments:
        args, kwargs = [], {}
        for one in sizes.inputs or ():
            tensor = torch.zeros(one.sizes(batch, sizes.seq), dtype=getattr(torch, one.type))
            if one.name:
                kwargs[one.name] = tensor
            else:
                args.append(tensor)
        return tuple(args), kwargs

    return made
