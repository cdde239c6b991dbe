"""Train a small convolutional network on synthetic digits: momentum, minibatches, shuffled in place."""

from __future__ import annotations

import hashlib
import sys

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

CLASSES = 10
SIDE = 20


def make_digits(count, rng):
    """Noisy blobs: each class has its own centres."""
    labels = rng.integers(0, CLASSES, count)
    y, x = np.mgrid[0:SIDE, 0:SIDE]
    images = np.empty((count, SIDE, SIDE), np.float32)
    for k in range(CLASSES):
        cy, cx = 4 + 3 * (k // 3), 4 + 5 * (k % 3)
        blob = np.exp(-((y - cy) ** 2 + (x - cx) ** 2) / 12.0)
        images[labels == k] = blob
    images += rng.normal(0, 0.6, images.shape).astype(np.float32)
    return images, labels


class Convolution:
    """Valid convolution of one channel with `filters` 5x5 kernels."""

    def __init__(self, filters, rng):
        self.w = (rng.standard_normal((25, filters)) / 5).astype(np.float32)
        self.b = np.zeros(filters, np.float32)

    def forward(self, x):
        windows = sliding_window_view(x, (5, 5), axis=(1, 2))
        self.columns = np.ascontiguousarray(windows).reshape(-1, 25)
        out = self.columns @ self.w + self.b
        return out.reshape(len(x), SIDE - 4, SIDE - 4, -1)

    def backward(self, grad):
        flat = grad.reshape(-1, grad.shape[-1])
        return [self.columns.T @ flat, flat.sum(axis=0)]

    def parameters(self):
        return [self.w, self.b]


class Dense:
    def __init__(self, inputs, outputs, rng):
        self.w = (rng.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs)).astype(np.float32)
        self.b = np.zeros(outputs, np.float32)

    def forward(self, x):
        self.x = x
        return x @ self.w + self.b

    def backward(self, grad):
        self.grad_x = grad @ self.w.T
        return [self.x.T @ grad, grad.sum(axis=0)]

    def parameters(self):
        return [self.w, self.b]


class Network:
    def __init__(self, rng):
        self.convolution = Convolution(8, rng)
        pooled = ((SIDE - 4) // 2) ** 2 * 8
        self.hidden = Dense(pooled, 128, rng)
        self.output = Dense(128, CLASSES, rng)

    def parameters(self):
        return self.convolution.parameters() + self.hidden.parameters() + self.output.parameters()

    def forward(self, x):
        a = np.maximum(self.convolution.forward(x), 0)
        n, h, w, c = a.shape
        self.active = a > 0
        pooled = a.reshape(n, h // 2, 2, w // 2, 2, c).mean(axis=(2, 4))
        self.h = np.maximum(self.hidden.forward(pooled.reshape(n, -1)), 0)
        return self.output.forward(self.h)

    def loss_and_gradients(self, x, labels):
        scores = self.forward(x)
        scores = scores - scores.max(axis=1, keepdims=True)
        p = np.exp(scores)
        p /= p.sum(axis=1, keepdims=True)
        rows = np.arange(len(x))
        loss = -np.log(p[rows, labels]).mean()
        p[rows, labels] -= 1
        p /= len(x)
        last = self.output.backward(p)
        grad = self.output.grad_x * (self.h > 0)
        middle = self.hidden.backward(grad)
        n = len(x)
        half = (SIDE - 4) // 2
        grad = self.hidden.grad_x.reshape(n, half, 1, half, 1, 8) / 4
        grad = np.broadcast_to(grad, (n, half, 2, half, 2, 8)).reshape(self.active.shape) * self.active
        return loss, self.convolution.backward(grad) + middle + last


def main(epochs):
    rng = np.random.default_rng(7)
    images, labels = make_digits(2560, rng)
    held_out, held_out_labels = make_digits(256, rng)
    network = Network(rng)
    velocity = [np.zeros_like(p) for p in network.parameters()]
    order = np.arange(len(images))
    losses = []
    for epoch in range(epochs):
        rng.shuffle(order)
        for start in range(0, len(order), 64):
            batch = order[start : start + 64]
            loss, gradients = network.loss_and_gradients(images[batch], labels[batch])
            for p, v, g in zip(network.parameters(), velocity, gradients, strict=True):
                v *= 0.9
                v -= 0.05 * g
                p += v
            losses.append(loss)
        guess = network.forward(held_out).argmax(axis=1)
        accuracy = (guess == held_out_labels).mean()
        print(f"epoch {epoch}: loss {np.mean(losses[-20:]):.4f}, accuracy {accuracy:.3f}")
    for loss in losses[::7]:
        print(float(loss).hex())
    digest = hashlib.sha256()
    for p in network.parameters():
        digest.update(p.tobytes())
    print("parameters", digest.hexdigest())


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
