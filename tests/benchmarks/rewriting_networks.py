"""Additive attention, for the comparison of compiled graphs with PyTorch's own ways."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Additive(nn.Module):
    """LSTM to LSTM with attention at each word of the target to all of the source (Bahdanau et al. 2015).

    The score is v . tanh(Keys + Query), with the keys computed once.
    """

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.encoder, self.decoder = nn.LSTMCell(width, width), nn.LSTMCell(2 * width, width)
        self.key, self.query = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.score = nn.Parameter(torch.zeros(width))
        self.head = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        zero = self.score.new_zeros(len(source), len(self.score))
        state, read, tops = (zero, zero), [], []
        for word in self.source(source).unbind(1):
            state = self.encoder(word, state)
            read.append(state[0])
        memory = torch.stack(read, 1)
        keys = self.key(memory)
        for word in self.target(target).unbind(1):
            energy = torch.tanh(keys + self.query(state[0])[:, None])
            weight = energy.matmul(self.score).softmax(1)
            context = torch.bmm(weight[:, None], memory)[:, 0]
            state = self.decoder(torch.cat([word, context], 1), state)
            tops.append(state[0])
        return functional.cross_entropy(self.head(torch.stack(tops, 1)).flatten(0, 1), target.flatten())
