"""Training loops of sizes that fill a GPU, with data and parameters determined by a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DEVICE = "cuda"


class Network(nn.Module):
    """A network of six blocks of convolution, batch norm and ReLU."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 64, 64, 128, 128, 256, 256)
        self.features = nn.Sequential(
            *(
                layer
                for before, after in itertools.pairwise(widths)
                for layer in (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
            )
        )
        self.classes = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.classes(self.features(images).mean((2, 3)))
        return result


class Layer(nn.Module):
    """A transformer layer: attention and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.attention(self.before(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.perceptron(self.between(x))
        return result


class Transformer(nn.Module):
    """A transformer with a given number of layers of GPT-2's width."""

    def __init__(self, layers: int, width: int = 768, words: int = 50304, length: int = 1024) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, width // 64) for _ in range(layers))
        self.end = nn.LayerNorm(width)

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.end(x), self.words.weight)


def _random(number: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(number)


def cnn() -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
    """Return a small convolutional network and its loss on large batches."""

    def loss(model: nn.Module, number: int) -> Tensor:
        images = torch.randn(512, 3, 64, 64, device=DEVICE, generator=_random(number))
        labels = torch.randint(0, 10, (512,), device=DEVICE, generator=_random(number))
        return F.cross_entropy(model(images), labels)

    return Network(), loss


def _text_loss(model: nn.Module, number: int, batch: int, length: int) -> Tensor:
    text = torch.randint(0, 50000, (batch, length + 1), device=DEVICE, generator=_random(number))
    with torch.autocast(DEVICE, torch.bfloat16):
        guess = model(text[:, :-1])
    return F.cross_entropy(guess.float().flatten(0, 1), text[:, 1:].flatten())


def gpt() -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
    """Return a model of GPT-2's size and its loss on large batches."""
    return Transformer(12), lambda model, number: _text_loss(model, number, 16, 1024)


def lengths() -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
    """Return a transformer and its loss on batches of 13 lengths in turn, which fragment memory."""

    def loss(model: nn.Module, number: int) -> Tensor:
        length = 128 + 64 * ((number * 7) % 13)
        return _text_loss(model, number, 24, length)

    return Transformer(8), loss


def any_length() -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
    """Return a transformer and its loss on batches of 113 lengths in random order."""

    def loss(model: nn.Module, number: int) -> Tensor:
        length = 128 + 8 * random.Random(number).randrange(113)
        return _text_loss(model, number, 12, length)

    return Transformer(12), loss


#: Number of steps of each workload, and number of timed steps, which are the last.
PERIODS = {"cnn": (40, 20), "gpt": (24, 12), "lengths": (6 * 13, 13), "any length": (120, 40)}
WORKLOADS = {"cnn": cnn, "gpt": gpt, "lengths": lengths, "any length": any_length}
