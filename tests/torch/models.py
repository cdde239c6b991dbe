"""Small versions of common networks with their data and losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Batch = tuple[Tensor, ...]


class Model(nn.Module):
    """A network with its data and its loss."""

    #: True if checkpoints recompute activations.
    checkpointing = False

    def batch(self, number: int, size: int) -> Batch:
        """Return the data of one step, determined by its number."""
        raise NotImplementedError

    def loss(self, *batch: Tensor) -> Tensor:
        """Return the loss of a batch."""
        raise NotImplementedError

    def again(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """Call a function, through a checkpoint if `checkpointing` is set."""
        if self.checkpointing:
            return checkpoint(function, *inputs, use_reentrant=False)
        return function(*inputs)


def _random(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + number)


class Images(Model):
    classes = 10
    side = 32

    def batch(self, number: int, size: int) -> Batch:
        random = _random(number)
        return (
            torch.randn(size, 3, self.side, self.side, generator=random),
            torch.randint(0, self.classes, (size,), generator=random),
        )

    def loss(self, *batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[0]).float(), batch[1])


class CNN(Images):
    """A chain of convolutions."""

    def __init__(self, width: int = 32, layers: int = 6) -> None:
        super().__init__()
        widths = [3] + [width] * layers
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths))
        self.head = nn.Linear(width, self.classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x.mean((2, 3)))


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        plain = stride == 1 and before == after
        self.skip = (
            nn.Identity()
            if plain
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


class ResNet(Images):
    """A small ResNet-18: four stages of two residual blocks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        stages, before = [], width
        for stage in range(4):
            after = width << stage
            first = _Residual(before, after, 1 if stage == 0 else 2)
            stages += [first, _Residual(after, after, 1)]
            before = after
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(before, self.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = self.again(stage, x)
        return self.head(x.mean((2, 3)))


class UNet(Images):
    """A small U-Net, whose skip connections keep activations alive for long."""

    classes = 5

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(self._block(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.middle = self._block(widths[-1], 2 * widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths))
        self.join = nn.ModuleList(self._block(2 * w, w) for w in reversed(widths))
        self.head = nn.Conv2d(width, self.classes, 1)

    @staticmethod
    def _block(before: int, after: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, 1, 1),
            nn.GroupNorm(2, after),
            nn.SiLU(),
            nn.Conv2d(after, after, 3, 1, 1),
        )

    def batch(self, number: int, size: int) -> Batch:
        random = _random(number)
        picture = torch.randn(size, 3, self.side, self.side, generator=random)
        return picture, torch.randint(0, self.classes, (size, self.side, self.side), generator=random)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = self.again(block, x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = self.again(join, torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


class Seq2Seq(Model):
    """A model of two LSTMs with additive attention, which reads one word at a time."""

    words, length = 200, 12

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.words, width)
        self.encoder = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.LSTMCell(2 * width, width)
        self.key, self.query = nn.Linear(width, width), nn.Linear(width, width)
        self.score = nn.Linear(width, 1)
        self.head = nn.Linear(width, self.words)

    def batch(self, number: int, size: int) -> Batch:
        random = _random(number)
        return tuple(torch.randint(0, self.words, (size, self.length), generator=random) for _ in range(2))

    def loss(self, *batch: Tensor) -> Tensor:
        source, target = batch
        memory, (hidden, cell) = self.encoder(self.embed(source))
        hidden, cell, keys = hidden[0], cell[0], self.key(memory)
        total = torch.zeros(())
        for step in range(self.length - 1):
            weight = self.score(torch.tanh(keys + self.query(hidden)[:, None])).softmax(1)
            context = (weight * memory).sum(1)
            hidden, cell = self.decoder(torch.cat([self.embed(target[:, step]), context], 1), (hidden, cell))
            total = total + F.cross_entropy(self.head(hidden).float(), target[:, step + 1])
        return total / (self.length - 1)


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.all, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.all(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.between(x))


class GPT(Model):
    """A decoder with scaled dot-product attention."""

    words, length = 300, 48

    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(self.words, width), nn.Embedding(self.length, width)
        self.layers = nn.ModuleList(_Layer(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.words, bias=False)

    def batch(self, number: int, size: int) -> Batch:
        return (torch.randint(0, self.words, (size, self.length + 1), generator=_random(number)),)

    def loss(self, *batch: Tensor) -> Tensor:
        words = batch[0]
        x = self.embed(words[:, :-1]) + self.place.weight
        for layer in self.layers:
            x = self.again(layer, x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), words[:, 1:].flatten())


class _Transformers(Model):
    """A model of the package transformers, from a configuration, with random weights."""

    words, length = 300, 40

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def batch(self, number: int, size: int) -> Batch:
        return (torch.randint(0, self.words, (size, self.length), generator=_random(number)),)

    def loss(self, *batch: Tensor) -> Tensor:
        if self.checkpointing:
            self.model.gradient_checkpointing_enable()
        return self.model(input_ids=batch[0], labels=batch[0]).loss


def bert() -> Model:
    """Return BERT with a head for masked words."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    return _Transformers(BertForMaskedLM(config))


def llama() -> Model:
    """Return Llama with grouped keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        use_cache=False,
    )
    return _Transformers(LlamaForCausalLM(config))


MODELS: dict[str, Callable[[], Model]] = {
    "resnet": ResNet,
    "unet": UNet,
    "seq2seq": Seq2Seq,
    "gpt": GPT,
    "bert": bert,
    "llama": llama,
}
