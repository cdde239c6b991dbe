"""Models of transformers from a built-in configuration or a local config.json, and their inputs.

This module downloads nothing.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mempool.errors import UsageError
from mempool.torch.estimate.options import OPTIONS
from mempool.torch.model_presets import SHAPES
from mempool.torch.model_spec import suggestion

if TYPE_CHECKING:
    from torch import nn


#: Auto classes of transformers by task; the default is the first task that a family supports.
TASKS = {
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
    "base": "AutoModel",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
}


@dataclass(frozen=True)
class TransformersModel:
    """A configuration with the task and class of the model.

    Attributes:
        config: configuration of the model.
        task: a key of `TASKS`.
        kind: the model's class.
    """

    config: Any
    task: str
    kind: Any

    def model(self) -> nn.Module:
        """Return a new model with the parameter type of the configuration."""
        made: nn.Module = self.kind._from_config(self.config)
        return made

    @property
    def takes(self) -> list[str]:
        """Return the names of the forward's arguments."""
        return list(inspect.signature(self.kind.forward).parameters)


def transformers_model(name: str, arguments: dict[str, Any], task: str | None = None) -> TransformersModel:
    """Return the model of a name.

    Args:
        name: name of a family ("gpt2"), a size of a family ("gpt2-xl"), or a class ("LlamaConfig"); or a
            config.json or its folder.
        arguments: arguments of the configuration.
        task: a key of `TASKS`; None: the task of the configuration, or the usual task of the family.

    Raises:
        UsageError: name, argument or task is unknown, or transformers is not installed.
        OSError: a file cannot be read.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise UsageError("transformers: is not installed: pip install transformers") from None
    config = _config(transformers, name, arguments)
    two = getattr(config, "is_encoder_decoder", False)
    if two and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # required; any token gives the same sizes
    if task is not None and task not in TASKS:
        raise UsageError(f"no task {task!r}; there are {', '.join(TASKS)}")
    for architecture in getattr(config, "architectures", None) or ():
        if task is None and (kind := getattr(transformers, architecture, None)) is not None:
            return TransformersModel(config, task_of(kind), kind)
    classes = {each: getattr(transformers, auto)._model_mapping for each, auto in TASKS.items()}
    supported = [each for each, mapping in classes.items() if type(config) in mapping]
    chosen = task or next(iter(supported), "any task")
    if chosen not in supported:
        raise UsageError(f"{name} has no head for {chosen}; it has {', '.join(supported) or 'none'}")
    found = classes[chosen][type(config)]
    return TransformersModel(config, chosen, found[0] if isinstance(found, (tuple, list)) else found)


def known_names() -> list[str]:
    """Return names of families and sizes; without transformers, only sizes."""
    try:
        auto = importlib.import_module("transformers.models.auto.configuration_auto")
    except ImportError:
        return list(SHAPES)
    return [*SHAPES, *auto.CONFIG_MAPPING_NAMES]


def _config(transformers: Any, name: str, arguments: dict[str, Any]) -> Any:
    if name.endswith(".json") or "\\" in name or Path(name).exists() or name.startswith((".", "/", "~")):
        path = Path(name).expanduser()
        file = path / "config.json" if path.is_dir() else path
        file.open("rb").close()  # raises an error for a wrong name
        load = functools.partial(transformers.AutoConfig.from_pretrained, str(file))
        return _made(str(file), load, arguments)
    family, own = _family(transformers, name)
    if family is None:
        hint = suggestion(plain_name(name), known_names()) or "such as gpt2, llama-2-7b, LlamaConfig(...)"
        raise UsageError(f"transformers knows no model {name!r}: {hint}")
    make = functools.partial(family, **own)
    _check_arguments(name, make(), arguments)
    return _made(name, make, arguments)


def _family(transformers: Any, name: str) -> tuple[Any, dict[str, Any]]:
    """Return the class of a configuration and the arguments of a size; (None, {}) for an unknown name."""
    if name.endswith("Config") and hasattr(transformers, name):
        return getattr(transformers, name), {}
    for key in (plain_name(name), name.lower()):
        if key in SHAPES:
            kind, own = SHAPES[key]
            return transformers.CONFIG_MAPPING[kind], own
        for spelling in (key, key.replace("-", "_"), key.replace("_", "-")):
            if spelling in transformers.CONFIG_MAPPING:
                return transformers.CONFIG_MAPPING[spelling], {}
    return None, {}


def plain_name(name: str) -> str:
    """Return a model's name in the spelling of `SHAPES`: "meta-llama/Llama-2-7b-hf" is "llama-2-7b"."""
    key = name.lower().rpartition("/")[2].replace("_", "-").replace("meta-llama-", "llama-")
    for end in ("-hf", "-instruct", "-chat", "-v0.1", "-v0.3", "-v1.0", "-uncased", "-cased", "-patch16-224"):
        key = key.removesuffix(end)
    return key.replace("llama-3.1-", "llama-3-")


def _check_arguments(name: str, config: Any, arguments: dict[str, Any]) -> None:
    """Refuse unknown arguments, which a configuration would accept without effect."""
    known = {key for key in dir(config) if not key.startswith("_")} | {"attn_implementation", "dtype"}
    for key in arguments:
        if key not in known:
            hint = suggestion(key, known)
            raise UsageError(f"{name} has no {key!r}{hint and f'; {hint}'}")


def _made(name: str, make: Any, arguments: dict[str, Any]) -> Any:
    try:
        return make(**arguments)
    except Exception as error:  # transformers raises many classes of errors
        raise UsageError(f"{name}: {type(error).__name__}: {error}") from None


def task_of(kind: Any) -> str:
    """Return the task of a class from its name, since mappings of tasks list only one of several classes."""
    name = kind.__name__
    for task, auto in TASKS.items():
        if name.endswith(auto.removeprefix("AutoModel")) and task != "base":
            return task
    if name.endswith("LMHeadModel"):
        return "causal-lm"
    return "seq2seq-lm" if name.endswith("ForConditionalGeneration") else "base"


def sequence_length(model: TransformersModel, requested: int | None) -> int | None:
    """Return the sequence length in tokens; None for a model of images.

    Raises:
        UsageError: the length exceeds the model's positions.
    """
    if model.kind.main_input_name == "pixel_values" and "input_ids" not in model.takes:
        return None
    text = model.config.get_text_config()
    fields = (getattr(text, name, None) for name in ("max_position_embeddings", "n_positions"))
    most = next((size for size in fields if isinstance(size, int) and size > 0), None)
    if requested is None:
        return min(most or OPTIONS.tokens, OPTIONS.tokens)
    computed = getattr(text, "rope_parameters", None) is not None or hasattr(text, "rope_theta")
    if most is not None and requested > most and not computed:
        raise UsageError(f"--seq {requested:,}: {model.kind.__name__} has positions for {most:,} only")
    return requested


def model_inputs(model: TransformersModel, batch: int, seq: int | None, *, labels: bool) -> dict[str, Any]:
    """Return the named arguments of the model's forward.

    Args:
        model: the model.
        batch: samples.
        seq: length returned by `sequence_length`.
        labels: whether to include the arguments of the loss.

    Raises:
        UsageError: the shape of the model's main input is unknown.
    """
    main, takes = model.kind.main_input_name, model.takes
    given = {}
    if main == "pixel_values" or "pixel_values" in takes:
        given["pixel_values"] = torch.zeros(batch, *_image(model))
    if main == "input_ids" or ("input_ids" in takes and model.task == "base"):
        given["input_ids"] = _tokens(batch, seq)
    if main not in given:
        raise UsageError(f"{model.kind.__name__} takes {main}, whose shape is not known: fit it in Python")
    return given | (_labels(model, batch, seq) if labels else _decoder(model, batch, seq))


def _tokens(batch: int, seq: int | None) -> torch.Tensor:
    return torch.zeros(batch, seq or 1, dtype=torch.int64)


def _labels(model: TransformersModel, batch: int, seq: int | None) -> dict[str, Any]:
    if "labels" not in model.takes:
        return _decoder(model, batch, seq)
    whole = model.task in ("sequence-classification", "image-classification")
    return {"labels": torch.zeros(batch, dtype=torch.int64) if whole else _tokens(batch, seq)}


def _decoder(model: TransformersModel, batch: int, seq: int | None) -> dict[str, Any]:
    """Return tokens for a decoder without labels."""
    needs = getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in model.takes
    return {"decoder_input_ids": _tokens(batch, seq)} if needs else {}


def _image(model: TransformersModel) -> tuple[int, int, int]:
    vision = getattr(model.config, "vision_config", model.config)
    size = getattr(vision, "image_size", None) or 224
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return int(getattr(vision, "num_channels", 3) or 3), int(height), int(width)
