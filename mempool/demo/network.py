"""Multilayer perceptron with Adam, as a user would write one over an array module such as NumPy."""

from __future__ import annotations

import itertools
import mmap
from typing import Any

LAYERS = (784, 1024, 1024, 10)
BATCH = 64
TITLE = f"a {'-'.join(map(str, LAYERS))} network with Adam, batch {BATCH}"
_RATE, _BETA1, _BETA2, _EPSILON = 1e-3, 0.9, 0.999, 1e-8


class Network:
    """Layers of weights and biases, and the optimizer's state."""

    def __init__(self, xp: Any, seed: int = 0, layers: tuple[int, ...] = LAYERS) -> None:
        """Make the parameters; the optimizer's state is made in the first step.

        Args:
            xp: the array module.
            seed: seed of the parameters.
            layers: number of values of the input, of each hidden layer, and of the output.
        """
        self.xp = xp
        random = xp.random.default_rng(seed)
        self.parameters: list[Any] = []
        for inputs, outputs in itertools.pairwise(layers):
            scale = (2 / inputs) ** 0.5
            weights = random.standard_normal((inputs, outputs), dtype=xp.float32)
            self.parameters += [weights * xp.float32(scale), xp.zeros(outputs, xp.float32)]
        self.mean: list[Any] = []
        self.square: list[Any] = []
        self.steps = 0

    def step(self, images: Any, labels: Any) -> float:
        """Train on one batch.

        Args:
            images: float32[batch, 784].
            labels: int64[batch], 0 to 9.

        Returns:
            The mean cross entropy before the step.
        """
        layers, loss, slope = self.forward(images, labels)
        gradients = self.backward(layers, slope)
        self.update(gradients)
        return loss

    def forward(self, images: Any, labels: Any) -> tuple[list[Any], float, Any]:
        """Return the input of each layer, the loss, and the loss's gradient for the last layer's output."""
        xp = self.xp
        layers = [images]
        for at in range(0, len(self.parameters), 2):
            output = layers[-1] @ self.parameters[at] + self.parameters[at + 1]
            layers.append(xp.maximum(output, 0))
        # `output` has the logits, without a rectifier.
        shifted = output - output.max(axis=1, keepdims=True)
        exponent = xp.exp(shifted)
        total = exponent.sum(axis=1, keepdims=True)
        row = xp.arange(len(labels))
        loss = float((xp.log(total[:, 0]) - shifted[row, labels]).mean())
        slope = exponent / total
        slope[row, labels] -= 1
        return layers[:-1], loss, slope / xp.float32(len(labels))

    def backward(self, layers: list[Any], slope: Any) -> list[Any]:
        """Return the gradients, in the order of the parameters."""
        gradients: list[Any] = []
        for at in reversed(range(len(layers))):
            gradients = [layers[at].T @ slope, slope.sum(axis=0), *gradients]
            if at:
                slope = (slope @ self.parameters[2 * at].T) * (layers[at] > 0)
        return gradients

    def update(self, gradients: list[Any]) -> None:
        """Apply Adam (Kingma and Ba 2014), whose state is made on first use."""
        xp = self.xp
        if not self.steps:
            self.mean = [xp.zeros_like(values) for values in self.parameters]
            self.square = [xp.zeros_like(values) for values in self.parameters]
        self.steps += 1
        # Python's floats keep arrays float32.
        bias1, bias2 = 1 - _BETA1**self.steps, 1 - _BETA2**self.steps
        for at, gradient in enumerate(gradients):
            self.mean[at] *= _BETA1
            self.mean[at] += (1 - _BETA1) * gradient
            self.square[at] *= _BETA2
            self.square[at] += (1 - _BETA2) * gradient * gradient
            step = (self.mean[at] / bias1) / (xp.sqrt(self.square[at] / bias2) + _EPSILON)
            self.parameters[at] -= _RATE * step


class Data:
    """Ten classes of noisy images, made batch by batch."""

    def __init__(self, xp: Any, seed: int = 0) -> None:
        self._xp, self._random = xp, xp.random.default_rng(seed + 1)
        self._centres = self._random.standard_normal((LAYERS[-1], LAYERS[0]), dtype=xp.float32)

    def batch(self) -> tuple[Any, Any]:
        """Return the next images, float32[batch, 784], and labels, int64[batch]."""
        labels = self._random.integers(0, LAYERS[-1], BATCH)
        noise = self._random.standard_normal((BATCH, LAYERS[0]), dtype=self._xp.float32)
        return self._centres[labels] + 9 * noise, labels


def warm_up(xp: Any) -> None:
    """Load and touch all memory of training as a baseline, without changing malloc's thresholds."""
    small, data = Network(xp, layers=(LAYERS[0], 16, LAYERS[-1])), Data(xp)
    for _ in range(3):
        small.step(*data.batch())
    # The linear algebra library keeps memory for the largest product so far.
    side = max(LAYERS)
    if xp.__name__ != "numpy":  # the arrays are not in host memory
        xp.matmul(*xp.zeros((2, side, side), xp.float32))
        return
    left, right, out = (xp.frombuffer(mmap.mmap(-1, 4 * side * side), xp.float32) for _ in range(3))
    xp.matmul(left.reshape(side, side), right.reshape(side, side), out=out.reshape(side, side))
