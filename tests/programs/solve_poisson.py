"""Solve the Poisson equation on a square by matrix-free conjugate gradients."""

from __future__ import annotations

import hashlib
import sys

import numpy as np


def laplacian(u):
    """Apply the five-point stencil, with zeros outside the square."""
    padded = np.pad(u, 1)
    return 4 * u - padded[:-2, 1:-1] - padded[2:, 1:-1] - padded[1:-1, :-2] - padded[1:-1, 2:]


def charges(n):
    """Return two smooth charges of opposite sign."""
    t = np.linspace(0, 1, n)
    x, y = np.meshgrid(t, t)
    return np.exp(-80 * ((x - 0.3) ** 2 + (y - 0.4) ** 2)) - np.exp(-120 * ((x - 0.7) ** 2 + (y - 0.6) ** 2))


def conjugate_gradients(apply, b, tolerance, most):
    """Solve apply(x) = b; return x and the norm of the residual after each iteration."""
    x = np.zeros_like(b)
    r = b - apply(x)
    p = r.copy()
    square = np.vdot(r, r)
    history = []
    while np.sqrt(square) > tolerance and len(history) < most:
        ap = apply(p)
        alpha = square / np.vdot(p, ap)
        x = x + alpha * p
        r = r - alpha * ap
        before, square = square, np.vdot(r, r)
        p = r + (square / before) * p
        history.append(np.sqrt(square))
    return x, history


def main(n, most):
    b = charges(n)
    x, history = conjugate_gradients(laplacian, b, 1e-6 * np.linalg.norm(b), most)
    print(len(history), "iterations, residual", float(history[-1]).hex())
    for value in history[::20]:
        print(float(value).hex())
    print("error", float(np.abs(laplacian(x) - b).max()).hex())
    print("solution", hashlib.sha256(x.tobytes()).hexdigest())


if __name__ == "__main__":
    size, iterations = map(int, sys.argv[1:] or (512, 260))
    main(size, iterations)
