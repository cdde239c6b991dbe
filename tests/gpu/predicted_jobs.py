"""What is predicted and then trained: models of PyTorch alone, and some of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.torch.estimate import Job


def _pictures(side: int) -> Callable[[int], Any]:
    import torch

    return lambda batch: ((torch.zeros(batch, 3, side, side),), {})


def _labels(*shape: int) -> Callable[[int], Any]:
    import torch

    return lambda batch: torch.zeros(batch, *shape, dtype=torch.long)


def _entropy(output: Any, labels: Any) -> Any:
    from torch.nn.functional import cross_entropy

    return cross_entropy(output.float().flatten(0, -2), labels.flatten())


def _job(model: Callable[[], Any], inputs: Callable[[int], Any], batch: int, **more: Any) -> Job:
    import torch

    from mempool.torch.estimate import Job

    return Job(model, inputs, batch, **{"optimizer": torch.optim.AdamW, **more})


def _cnn() -> Job:
    from workloads import Network

    return _job(Network, _pictures(64), 256, loss=_entropy, labels=_labels())


def _mlp() -> Job:
    import torch
    from torch import nn

    def model() -> nn.Module:
        inner = [layer for _ in range(8) for layer in (nn.Linear(4096, 4096), nn.GELU(), nn.Dropout(0.1))]
        return nn.Sequential(*inner, nn.Linear(4096, 1000))

    inputs = lambda batch: ((torch.zeros(batch, 4096),), {})  # noqa: E731
    return _job(model, inputs, 4096, loss=_entropy, labels=_labels())


def _gpt(batch: int = 8, **more: Any) -> Job:
    import torch
    from workloads import Transformer

    inputs = lambda batch: ((torch.zeros(batch, 1024, dtype=torch.long),), {})  # noqa: E731
    given = {"loss": _entropy, "labels": _labels(1024), **more}
    return _job(lambda: Transformer(12), inputs, batch, **given)


def _lstm() -> Job:
    import torch
    from torch import nn

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(512, 1024, 3, batch_first=True, dropout=0.1)
            self.classes = nn.Linear(1024, 1000)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.classes(self.layers(x)[0])
            return result

    inputs = lambda batch: ((torch.zeros(batch, 128, 512),), {})  # noqa: E731
    return _job(Last, inputs, 64, loss=_entropy, labels=_labels(128))


def _encoder() -> Job:
    import torch
    from torch import nn

    def model() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True), 6)

    inputs = lambda batch: ((torch.zeros(batch, 512, 1024),), {})  # noqa: E731
    return _job(model, inputs, 16, loss=lambda output: output.float().sum(), autocast=torch.float16)


def _family(name: str, batch: int, **more: Any) -> Job:
    from mempool.torch.estimate import Job

    found = {"gpt2": _gpt2, "llama": _llama, "vit": _vit}[name]()
    import torch

    given: dict[str, Any] = {"optimizer": torch.optim.AdamW, **more}
    return Job(*found, batch, **given)


def _words(length: int) -> Callable[[int], Any]:
    import torch

    def inputs(batch: int) -> Any:
        words = torch.zeros(batch, length, dtype=torch.long)
        return (), {"input_ids": words, "labels": words}

    return inputs


def _gpt2() -> tuple[Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return lambda: GPT2LMHeadModel(GPT2Config()), _words(1024)


def _llama() -> tuple[Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "intermediate_size": 5504,
    }
    return lambda: LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, use_cache=False)), _words(
        2048
    )


def _vit() -> tuple[Any, Any]:
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    def inputs(batch: int) -> Any:
        labels = torch.zeros(batch, dtype=torch.long)
        return (), {"pixel_values": torch.zeros(batch, 3, 224, 224), "labels": labels}

    return lambda: ViTForImageClassification(ViTConfig()), inputs


def _lower(name: str) -> Any:
    import torch

    return getattr(torch, name)


JOBS: dict[str, Callable[[], Job]] = {
    "cnn": _cnn,
    "mlp": _mlp,
    "lstm": _lstm,
    "gpt": _gpt,
    "gpt-autocast": lambda: _gpt(16, autocast=_lower("bfloat16")),
    "gpt-bfloat16": lambda: _gpt(16, dtype=_lower("bfloat16")),
    "encoder-float16": _encoder,
    "gpt-inference": lambda: _gpt(16, mode="inference", optimizer=None, loss=None, labels=None),
    "hf-gpt2": lambda: _family("gpt2", 4),
    "hf-llama-bfloat16": lambda: _family("llama", 2, dtype=_lower("bfloat16")),
    "hf-vit": lambda: _family("vit", 32, autocast=_lower("bfloat16")),
}
#: Batches with which the CPU takes seconds, to see that the programs run.
SMALL = {"cnn": 2, "mlp": 4, "lstm": 2, "encoder-float16": 1}
