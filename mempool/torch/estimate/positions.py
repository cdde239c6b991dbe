"""Number of positions that a model of transformers supports, and a warning about longer sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_FIELDS = ("max_position_embeddings", "max_target_positions", "n_positions", "max_seq_len")
#: Types of rotary positions that a factor stretches, without a count of the original positions.
_STRETCHED = ("linear", "dynamic")


def most_positions(config: Any) -> int | None:
    """Return the largest number of tokens that a configuration has positions for; None: not known."""
    text = config.get_text_config()
    found = next((n for name in _FIELDS if isinstance(n := getattr(text, name, None), int) and n > 0), None)
    if found is not None and getattr(text, "pad_token_id", None) == 1 and "oberta" in type(text).__name__:
        return found - 2  # positions begin after the padding's
    return None if found is None else int(found * _stretch(text))


def _stretch(text: Any) -> float:
    """Return the factor by which rotary positions extend the configuration's count."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) not in _STRETCHED:
        return 1
    factor = rope.get("factor")
    return factor if isinstance(factor, (int, float)) and factor > 1 else 1


def beyond_positions(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return a warning if the model gets more tokens than positions, else None."""
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or (most := most_positions(config)) is None:
        return None
    tokens = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(tokens, torch.Tensor) or tokens.is_floating_point() or tokens.dim() != 2:
        return None
    if (length := tokens.size(1)) <= most:
        return None
    return (
        f"sequences of {length:,} tokens are longer than the {most:,} positions that the "
        f"{type(model).__name__} was made for: the memory is counted, what it would answer is another matter"
    )
