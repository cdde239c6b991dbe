"""Presets of transformers models named by size: a family, and differences from its defaults.

The numbers are from the models' published ``config.json``; a test compares parameter counts with the
published ones. Other models: ``transformers:LlamaConfig(hidden_size=...)``, or a folder with a config.json.
"""

from __future__ import annotations

from typing import Any


def _bert(hidden: int, layers: int, **more: Any) -> dict[str, Any]:
    heads = {"num_attention_heads": hidden // 64, "intermediate_size": 4 * hidden}
    return {"hidden_size": hidden, "num_hidden_layers": layers} | heads | more


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {"n_embd": width, "n_layer": layers, "n_head": heads}


def _t5(width: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"d_model": width, "d_ff": inner, "num_layers": layers, "num_heads": heads} | more


def _llama(
    hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, **more: Any
) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return sizes | {"num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab} | more


_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
_LLAMA3 = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
_TIED = {"tie_word_embeddings": True}

#: The family's ``model_type`` and the arguments of its configuration, by name of the model.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-base": ("bert", {}),
    "bert-large": ("bert", _bert(1024, 24)),
    "roberta-base": ("roberta", _bert(768, 12, **_ROBERTA)),
    "roberta-large": ("roberta", _bert(1024, 24, **_ROBERTA)),
    "gpt2-medium": ("gpt2", _gpt2(1024, 24, 16)),
    "gpt2-large": ("gpt2", _gpt2(1280, 36, 20)),
    "gpt2-xl": ("gpt2", _gpt2(1600, 48, 25)),
    "t5-small": ("t5", {}),
    "t5-base": ("t5", _t5(768, 3072, 12, 12)),
    "t5-large": ("t5", _t5(1024, 4096, 24, 16)),
    "t5-3b": ("t5", _t5(1024, 16384, 24, 32, d_kv=128)),
    "vit-base": ("vit", {}),
    "vit-large": ("vit", _bert(1024, 24)),
    "llama-2-7b": ("llama", _llama(4096, 11008, 32, 32, 32, 32000, max_position_embeddings=4096)),
    "llama-2-13b": ("llama", _llama(5120, 13824, 40, 40, 40, 32000, max_position_embeddings=4096)),
    "llama-2-70b": ("llama", _llama(8192, 28672, 80, 64, 8, 32000, max_position_embeddings=4096)),
    "llama-3-8b": ("llama", _llama(4096, 14336, 32, 32, 8, 128256, **_LLAMA3)),
    "llama-3-70b": ("llama", _llama(8192, 28672, 80, 64, 8, 128256, **_LLAMA3)),
    "llama-3.2-1b": ("llama", _llama(2048, 8192, 16, 32, 8, 128256, head_dim=64, **_TIED, **_LLAMA3)),
    "llama-3.2-3b": ("llama", _llama(3072, 8192, 28, 24, 8, 128256, head_dim=128, **_TIED, **_LLAMA3)),
    "tinyllama-1.1b": ("llama", _llama(2048, 5632, 22, 32, 4, 32000)),
    "mistral-7b": ("mistral", _llama(4096, 14336, 32, 32, 8, 32000)),
    "mixtral-8x7b": ("mixtral", {}),
    "qwen2.5-0.5b": ("qwen2", _llama(896, 4864, 24, 14, 2, 151936, **_TIED)),
    "qwen2.5-1.5b": ("qwen2", _llama(1536, 8960, 28, 12, 2, 151936, **_TIED)),
    "qwen2.5-7b": ("qwen2", _llama(3584, 18944, 28, 28, 4, 152064)),
}
