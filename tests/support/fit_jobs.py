"""Models of the package transformers, of many families, small and from configurations; and jobs of models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mempool.torch.fitting import Job

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch"))
from models import MODELS

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def _text(batch: int) -> dict[str, Any]:
    words = torch.zeros(batch, 40, dtype=torch.long)
    return {"input_ids": words, "labels": words}


def _pictures(batch: int) -> dict[str, Any]:
    return {"pixel_values": torch.zeros(batch, 3, 32, 32), "labels": torch.zeros(batch, dtype=torch.long)}


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SMALL))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=64))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=300,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    small = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    return ViTForImageClassification(ViTConfig(**small, image_size=32, patch_size=8, num_labels=10))


def _qwen() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**SMALL, num_key_value_heads=2))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]]]] = {
    "bert": (_bert, _text),
    "gpt2": (_gpt2, _text),
    "llama": (_llama, _text),
    "t5": (_t5, _text),
    "vit": (_vit, _pictures),
    "qwen2": (_qwen, _text),
}


class Whole(nn.Module):
    """A model of `models` with its loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model.loss(*batch)
        return result


def job_of(name: str, **changes: Any) -> Job:
    """A job of a model of `models.MODELS`, or "hf-" and one of `FAMILIES`; a batch of 4."""
    given: dict[str, Any] = {"optimizer": torch.optim.AdamW, "batch": 4, **changes}
    if name.startswith("hf-"):
        make, inputs = FAMILIES[name.removeprefix("hf-")]
        return Job(make, lambda batch: ((), inputs(batch)), **given)
    source = MODELS[name]()
    return Job(
        lambda: Whole(MODELS[name]()),
        lambda batch: (source.batch(0, batch), {}),
        loss=lambda loss: loss,
        **given,
    )


NAMES = (*MODELS, *(f"hf-{name}" for name in FAMILIES))
