"""What people do with arrays of NumPy, and all that they can see of what comes of it."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from mempool.recording.arrays.numpy_arrays import RecordedArray


def same_kind(value: Any) -> Any:
    """Everything that a program can see of a result, but that it is watched."""
    if isinstance(value, np.ma.MaskedArray):
        return ("masked", same_kind(np.ma.getdata(value)), same_kind(np.ma.getmaskarray(value)))
    if isinstance(value, np.ndarray):
        kind = np.ndarray if type(value) is RecordedArray else type(value)
        data = value.tolist() if value.dtype.char in "Og" else value.tobytes()
        return kind.__name__, value.shape, value.strides, value.dtype.str, repr(data), value.flags.writeable
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [same_kind(one) for one in value]
    if isinstance(value, dict):
        return {key: same_kind(one) for key, one in value.items()}
    return type(value), repr(value)


#: What people do with two arrays, in rows of three.
CALLS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda a, b: a + b,
    lambda a, b: b @ a.T,
    lambda a, b: a[0] - 1,
    lambda a, b: a**2,
    lambda a, b: divmod(a, 2),
    lambda a, b: -a,
    lambda a, b: a == b,
    lambda a, b: a < b,
    lambda a, b: ~a,
    lambda a, b: a.sum(axis=0),
    lambda a, b: a.mean(),
    lambda a, b: a.std(axis=1, keepdims=True),
    lambda a, b: a.max(),
    lambda a, b: a.argmin(axis=1),
    lambda a, b: a.cumprod(),
    lambda a, b: a[a > a[0, 0]],
    lambda a, b: a[[1, 0]],
    lambda a, b: a[1, 2],
    lambda a, b: a.take([0, 2], axis=1),
    lambda a, b: a.repeat(2, axis=0),
    lambda a, b: a.choose([1, 2]),
    lambda a, b: a.astype("f4"),
    lambda a, b: a.tobytes(),
    lambda a, b: a.item(3),
    lambda a, b: a.ravel("F"),
    lambda a, b: a.swapaxes(0, 1),
    lambda a, b: a.diagonal(),
    lambda a, b: a.round(1),
    lambda a, b: a.clip(0, 1),
    lambda a, b: a.nonzero(),
    lambda a, b: a.searchsorted(1),
    lambda a, b: a.dot(b.T),
    lambda a, b: a.trace(),
    lambda a, b: a.sort(axis=0),
    lambda a, b: a.fill(1),
    lambda a, b: a.partition(1),
    lambda a, b: a.put([0], 1),
    lambda a, b: a.dtype.char != "g" and a.byteswap(inplace=True),
    lambda a, b: a.__setitem__(0, b[1]),
    lambda a, b: a.__setitem__(a == b, 0),
    lambda a, b: a.__iadd__(b),
    lambda a, b: a.T.__imul__(2),
    lambda a, b: str(a),
    lambda a, b: repr(a),
    lambda a, b: f"{a[0, 0]}",
    lambda a, b: bool(a[:1, :1]),
    lambda a, b: list(a),
    lambda a, b: b in (1, 2),
    lambda a, b: 1 in a,
    lambda a, b: len(a),
    lambda a, b: copy.deepcopy(a),
    lambda a, b: pickle.loads(pickle.dumps(a)),
    lambda a, b: a.real,
    lambda a, b: a.imag,
    lambda a, b: np.concatenate([a, b]),
    lambda a, b: np.stack([a, b], axis=2),
    lambda a, b: np.vstack((a, b)),
    lambda a, b: np.where(a == b, a, b),
    lambda a, b: np.unique(a, return_counts=True),
    lambda a, b: np.sort(a),
    lambda a, b: np.argsort(a, axis=None, kind="stable"),
    lambda a, b: np.split(a, 3, axis=1),
    lambda a, b: np.tile(a, 2),
    lambda a, b: np.einsum("ij,kj->ik", a, b),
    lambda a, b: np.tensordot(a, b, ((0, 1), (0, 1))),
    lambda a, b: np.outer(a, b),
    lambda a, b: np.linalg.svd(a),
    lambda a, b: np.linalg.norm(a),
    lambda a, b: np.linalg.lstsq(a, b),
    lambda a, b: np.fft.rfft(a),
    lambda a, b: np.add.reduceat(a, [0, 1]),
    lambda a, b: np.multiply.outer(a[0], b[0]),
    lambda a, b: np.add.at(a, ([0, 0], [1, 1]), 1),
    lambda a, b: np.add(a, b, out=a),
    lambda a, b: np.sum(a, 0, None, b[0]),
    lambda a, b: np.dot(a, b.T, np.empty((2, 2), a.dtype)),
    lambda a, b: np.add(a, b, where=a == b, out=b),
    lambda a, b: np.clip(a, 0, 2, a),
    lambda a, b: np.copyto(a, b),
    lambda a, b: np.nan_to_num(a, copy=False),
    lambda a, b: np.fill_diagonal(a, 1),
    lambda a, b: np.zeros_like(a),
    lambda a, b: np.full_like(a, 3),
    lambda a, b: np.broadcast_arrays(a, b[0]),
    lambda a, b: np.pad(a, 1),
    lambda a, b: np.roll(a, 1),
    lambda a, b: np.percentile(a, 30),
    lambda a, b: np.histogram(a, 3),
    lambda a, b: np.interp([1.5], a[0], b[0]),
    lambda a, b: np.cov(a),
    lambda a, b: np.apply_along_axis(np.sum, 0, a),
    lambda a, b: np.piecewise(a, [a > 1], [1, 2]),
    lambda a, b: np.trim_zeros(a[0]),
    lambda a, b: np.asarray(a),
    lambda a, b: np.array(a),
    lambda a, b: np.array([a, b]),
    lambda a, b: np.asanyarray(a) is a,
    lambda a, b: np.ascontiguousarray(a.T),
    lambda a, b: np.require(a, requirements="F"),
    lambda a, b: np.ma.masked_less(a, 1) + b,
    lambda a, b: np.ma.array(a, mask=a == b).sum(axis=0),
    lambda a, b: np.vectorize(str)(a),
    lambda a, b: np.lib.stride_tricks.sliding_window_view(a, 2, axis=1),
    lambda a, b: np.lib.stride_tricks.as_strided(a, (2,), a.strides[:1]),
    lambda a, b: memoryview(a.view(np.ndarray)).shape,
    lambda a, b: a.dtype.char != "g" and np.frombuffer(a, "u1"),
    lambda a, b: a.flat[2],
    lambda a, b: a.view([("x", a.dtype)])["x"],
    lambda a, b: np.save(os.devnull, a),
    lambda a, b: np.array_equal(a, b),
    lambda a, b: np.set_printoptions() or a.astype("O") + b,
    lambda a, b: np.shares_memory(a, a[1:]),
    lambda a, b: np.shape(a),
    lambda a, b: np.errstate(all="raise").__enter__() or a / (b - b),
    lambda a, b: np.block([[a], [b]]),
    lambda a, b: np.meshgrid(a[0], b[0]),
)
