"""Jobs of models to predict and to train, in plain PyTorch and from transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from workloads import Network, Transformer

from mempool.torch.estimate import Job
from mempool.torch.estimate.sources.transformers_models import model_inputs, transformers_model


def _entropy(output: Any, labels: Any) -> Any:
    return cross_entropy(output.float().flatten(0, -2), labels.flatten())


def _job(model: Callable[[], Any], batch: int, shape: tuple[int, ...], **more: Any) -> Job:
    """Return the job of a model that takes one tensor; with ``classes``, of cross entropy.

    Args:
        model: constructor of the model.
        batch: number of samples.
        shape: shape of a sample.
        more: attributes of the job, ``words`` for an input of words, and the shape of the ``classes``.
    """
    dtype = torch.long if more.pop("words", False) else torch.float
    given: dict[str, Any] = {"optimizer": torch.optim.AdamW}
    if (classes := more.pop("classes", None)) is not None:
        given |= {"loss": _entropy, "labels": lambda size: torch.zeros(size, *classes, dtype=torch.long)}
    return Job(model, lambda size: ((torch.zeros(size, *shape, dtype=dtype),), {}), batch, **given | more)


def _mlp() -> nn.Module:
    inner = [layer for _ in range(8) for layer in (nn.Linear(4096, 4096), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*inner, nn.Linear(4096, 1000))


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True), 6)


def _gpt(batch: int, **more: Any) -> Job:
    return _job(lambda: Transformer(12), batch, (1024,), words=True, **more)


def _family(name: str, batch: int, seq: int | None, settings: dict[str, Any], **more: Any) -> Job:
    import transformers  # noqa: F401 - without which the job is left out

    found = transformers_model(name, settings)
    inputs = functools.partial(model_inputs, found, seq=seq, labels=True)
    return Job(found.model, lambda size: ((), inputs(size)), batch, optimizer=torch.optim.AdamW, **more)


_LLAMA = {"hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "intermediate_size": 5504}
_LLAMA |= {"num_key_value_heads": 4, "use_cache": False}

JOBS: dict[str, Callable[[], Job]] = {
    "cnn": lambda: _job(Network, 256, (3, 64, 64), classes=()),
    "mlp": lambda: _job(_mlp, 4096, (4096,), classes=()),
    "gpt": lambda: _gpt(8, classes=(1024,)),
    "gpt-autocast": lambda: _gpt(16, classes=(1024,), autocast=torch.bfloat16),
    "gpt-bfloat16": lambda: _gpt(16, classes=(1024,), dtype=torch.bfloat16),
    "encoder-float16": lambda: _job(
        _encoder, 16, (512, 1024), loss=lambda output: output.float().sum(), autocast=torch.float16
    ),
    "gpt-inference": lambda: _gpt(16, mode="inference", optimizer=None, hold_output=True),
    "hf-gpt2": lambda: _family("gpt2", 4, 1024, {}),
    "hf-llama-bfloat16": lambda: _family("llama", 2, 2048, _LLAMA, dtype=torch.bfloat16),
    "hf-vit": lambda: _family("vit", 32, None, {}, autocast=torch.bfloat16),
}
