"""Jobs of models, and small models of many families of transformers, made from configurations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mempool.torch.estimate import Job

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch"))
from fit_programs import WithLoss
from models import MODELS

Size = dict[str, int]
#: Sizes of configurations; ``length`` is the number of tokens of a text.
SIZES: dict[str, Size] = {
    "small": {"vocab": 300, "hidden": 64, "layers": 2, "heads": 4, "inner": 128, "length": 40},
    "medium": {"vocab": 8000, "hidden": 256, "layers": 4, "heads": 4, "inner": 1024, "length": 128},
}


def _named(size: Size, *, text: bool = True) -> dict[str, int]:
    named = {
        "hidden_size": size["hidden"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "intermediate_size": size["inner"],
    }
    return {**named, "vocab_size": size["vocab"]} if text else named


def _text(batch: int, size: Size) -> dict[str, Any]:
    words = torch.zeros(batch, size["length"], dtype=torch.long)
    return {"input_ids": words, "labels": words}


def _pictures(batch: int, size: Size) -> dict[str, Any]:
    side = size["hidden"] // 2
    return {"pixel_values": torch.zeros(batch, 3, side, side), "labels": torch.zeros(batch, dtype=torch.long)}


def _bert(size: Size) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_named(size)))


def _gpt2(size: Size) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    vocab, hidden, layers, heads = (size[key] for key in ("vocab", "hidden", "layers", "heads"))
    places = size["length"]
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=vocab, n_embd=hidden, n_layer=layers, n_head=heads, n_positions=places, **ends)
    )


def _llama(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_named(size), num_key_value_heads=2))


def _t5(size: Size) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    vocab, hidden, layers, heads = (size[key] for key in ("vocab", "hidden", "layers", "heads"))
    each = {"d_model": hidden, "d_kv": hidden // heads, "d_ff": size["inner"]}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=vocab, num_layers=layers, num_heads=heads, **each, **ends)
    )


def _vit(size: Size) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    side = size["hidden"] // 2
    return ViTForImageClassification(
        ViTConfig(**_named(size, text=False), image_size=side, patch_size=8, num_labels=10)
    )


def _qwen(size: Size) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_named(size), num_key_value_heads=2, use_cache=False))


FAMILIES: dict[str, tuple[Callable[[Size], nn.Module], Callable[[int, Size], dict[str, Any]]]] = {
    "bert": (_bert, _text),
    "gpt2": (_gpt2, _text),
    "llama": (_llama, _text),
    "t5": (_t5, _text),
    "vit": (_vit, _pictures),
    "qwen2": (_qwen, _text),
}


def _converted(batch: tuple[torch.Tensor, ...], dtype: torch.dtype | None) -> tuple[torch.Tensor, ...]:
    """Convert floating-point inputs to the type of the parameters, as convolutions require."""
    return tuple(t.to(dtype) if dtype is not None and t.is_floating_point() else t for t in batch)


def job_of(name: str, size: str = "small", **changes: Any) -> Job:
    """Return the job of a model with a batch of 4.

    Args:
        name: a key of `models.MODELS`, or "hf-" and a key of `FAMILIES`.
        size: a key of `SIZES`, for families.
        changes: changed attributes of the job.
    """
    given: dict[str, Any] = {"optimizer": torch.optim.AdamW, "batch": 4, **changes}
    if name.startswith("hf-"):
        make, inputs = FAMILIES[name.removeprefix("hf-")]
        return Job(lambda: make(SIZES[size]), lambda batch: ((), inputs(batch, SIZES[size])), **given)
    source = MODELS[name]()
    return Job(
        lambda: WithLoss(MODELS[name]()),
        lambda batch: (_converted(source.batch(0, batch), given.get("dtype")), {}),
        loss=lambda loss: loss,
        **given,
    )


NAMES = (*MODELS, *(f"hf-{name}" for name in FAMILIES))
