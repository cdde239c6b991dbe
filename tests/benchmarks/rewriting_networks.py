"""Networks of the figures of rewriting that are no image classifiers: a 3D U-Net, additive attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable


class UNet3d(nn.Module):
    """Çiçek et al. 2016, as published but for padding, so that any side that 8 divides does.

    Four resolutions; two 3x3x3 convolutions at each, with batch norm before each ReLU, the channels doubled
    before a pooling: 32, 64 | 64, 128 | 128, 256 | 256, 512; up-convolutions of 2x2x2 with as many channels,
    joined with what was there before pooling. One channel in, three classes out: 19 million parameters.
    """

    def __init__(self, width: int = 32, classes: int = 3) -> None:
        super().__init__()
        widths = [(width << level, width << level, width << level + 1) for level in range(4)]
        widths[0] = (1, width, 2 * width)
        self.down = nn.ModuleList(self._two(*one) for one in widths)
        deep = [width << level + 1 for level in range(4)]
        self.up = nn.ModuleList(nn.ConvTranspose3d(deep[k], deep[k], 2, 2) for k in (3, 2, 1))
        self.join = nn.ModuleList(
            self._two(deep[k] + deep[k - 1], deep[k - 1], deep[k - 1]) for k in (3, 2, 1)
        )
        self.head = nn.Conv3d(deep[0], classes, 1)

    @staticmethod
    def _two(before: int, between: int, after: int) -> nn.Module:
        parts: list[nn.Module] = []
        for a, b in ((before, between), (between, after)):
            parts += [nn.Conv3d(a, b, 3, 1, 1, bias=False), nn.BatchNorm3d(b), nn.ReLU(inplace=True)]
        return nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = block(functional.max_pool3d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


class Isensee(nn.Module):
    """Isensee et al. 2017, for tumours of the brain: five resolutions of 16 to 256 channels.

    Down: a convolution, of stride 2 but at the first, and a residual block of two, each after instance norm
    and leaky ReLU, with dropout between. Up: twice the side and a convolution, joined with what came down,
    one of 3x3x3 and one of 1x1x1. What three resolutions say of the classes is added. Four channels in,
    three out.
    """

    def __init__(self, width: int = 16, classes: int = 3) -> None:
        super().__init__()
        wide = [width << level for level in range(5)]
        self.enter = nn.ModuleList(
            nn.Conv3d(4 if k == 0 else wide[k - 1], wide[k], 3, 1 if k == 0 else 2, 1) for k in range(5)
        )
        self.context = nn.ModuleList(
            nn.Sequential(*_normed(w, w), nn.Dropout3d(0.3), *_normed(w, w)) for w in wide
        )
        self.up = nn.ModuleList(
            nn.Sequential(nn.Upsample(scale_factor=2), *_normed(wide[k + 1], wide[k])) for k in (3, 2, 1, 0)
        )
        self.join = nn.ModuleList(
            nn.Sequential(*_normed(2 * wide[k], wide[k]), *_normed(wide[k], wide[k], 1)) for k in (3, 2, 1, 0)
        )
        self.says = nn.ModuleList(nn.Conv3d(wide[k], classes, 1) for k in (2, 1, 0))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for enter, context in zip(self.enter, self.context, strict=True):
            x = enter(x)
            x = x + context(x)
            skips.append(x)
        skips.pop()
        said: Tensor | None = None
        for k, (up, join) in enumerate(zip(self.up, self.join, strict=True)):
            x = join(torch.cat([skips.pop(), up(x)], 1))
            if k:
                here = self.says[k - 1](x)
                said = here if said is None else functional.interpolate(said, scale_factor=2) + here
        assert said is not None
        return said


def _normed(before: int, after: int, kernel: int = 3) -> list[nn.Module]:
    norm = nn.InstanceNorm3d(before)
    return [norm, nn.LeakyReLU(0.01), nn.Conv3d(before, after, kernel, 1, kernel // 2)]


class Cell(nn.Module):
    """An LSTM's cell as PyTorch runs it on CUDA: two products and one fused operation."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.of_input = nn.Linear(before, 4 * width, bias=False)
        self.of_hidden = nn.Linear(width, 4 * width, bias=False)
        self.bias = nn.Parameter(torch.zeros(4 * width))

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        fused = torch.ops.aten._thnn_fused_lstm_cell
        hidden, cell = state
        return fused(self.of_input(x), self.of_hidden(hidden), cell, self.bias, self.bias)[:2]


class Additive(nn.Module):
    """LSTM to LSTM with attention at each word of the target to all of the source (Bahdanau et al. 2015).

    The score is v . tanh(Keys + Query), the keys made once. ``joined``: v . tanh(W [word; state]), as it is
    often written for PyTorch: the same function, but what is joined is made anew for each word of the target,
    and kept. Both languages have as many words; there is no dropout.
    """

    def __init__(
        self,
        width: int = 1024,
        words: int = 8000,
        *,
        joined: bool = False,
        cell: Callable[[int, int], nn.Module] = Cell,
    ) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.encoder, self.decoder = cell(width, width), cell(2 * width, width)
        self.key, self.query = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.both = nn.Linear(2 * width, width) if joined else None
        self.score = nn.Parameter(torch.zeros(width))
        self.head = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        zero = self.score.new_zeros(len(source), len(self.score))
        state, read, tops = (zero, zero), [], []
        for word in self.source(source).unbind(1):
            state = self.encoder(word, state)
            read.append(state[0])
        memory = torch.stack(read, 1)
        keys = None if self.both else self.key(memory)
        for word in self.target(target).unbind(1):
            energy = torch.tanh(self._sum(memory, keys, state[0]))
            weight = energy.matmul(self.score).softmax(1)
            context = torch.bmm(weight[:, None], memory)[:, 0]
            state = self.decoder(torch.cat([word, context], 1), state)
            tops.append(state[0])
        return functional.cross_entropy(self.head(torch.stack(tops, 1)).flatten(0, 1), target.flatten())

    def _sum(self, memory: Tensor, keys: Tensor | None, hidden: Tensor) -> Tensor:
        if keys is not None:
            return keys + self.query(hidden)[:, None]
        assert self.both is not None
        return self.both(torch.cat([memory, hidden[:, None].expand(-1, memory.shape[1], -1)], 2))
