"""Host and device of a program's tensors, all of which are on the CPU in a run without memory.

A tensor is where the program puts it: by ``.cuda()``, ``.to(device)``, or a device at its creation. Results
of operations are where an argument is. The device is where the parameters are: in a program that puts its
model on the CPU by name, as after ``"cuda" if torch.cuda.is_available() else "cpu"``, the tensors that are
put there count; in one that leaves its model where it was made, all tensors do.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mempool.recording.torch.ledger import storages_in
from mempool.torch.estimate.device.emulation import backward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from mempool.recording.torch import AccessRecorder
    from traces import Trace

#: Places by rising precedence: no place is named, the CPU, a CUDA device.
HOST, CPU, CUDA = range(3)
#: Categories of buffers that are on the device wherever the model is.
_OF_MODEL = ("parameters", "module_buffers", "gradients", "optimizer_state")
_ATTRIBUTE = "mempool_place"
_GPU = torch.device("cuda", 0)


def place_of(tensor: Tensor) -> int:
    """Return the place of a tensor's storage."""
    return max((getattr(storage, _ATTRIBUTE, HOST) for _, storage in storages_in(tensor)), default=HOST)


class Places(TorchDispatchMode):
    """Dispatch mode that notes the place of each new storage; entered after the recorder."""

    def __init__(self, recorder: AccessRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.forced: int | None = None
        self.of_buffer: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [pair for pair in storages_in(result) if not hasattr(pair[1], _ATTRIBUTE)]
        if made:
            place = self.forced
            if place is None:
                given = storages_in([*args, *(kwargs or {}).values()])
                place = max((getattr(storage, _ATTRIBUTE, HOST) for _, storage in given), default=HOST)
            for tensor, storage in made:
                setattr(storage, _ATTRIBUTE, place)
                if (buffer := self._recorder.buffer_of(tensor)) is not None:
                    self.of_buffer[buffer] = place
        return result

    @contextlib.contextmanager
    def putting(self, place: int) -> Iterator[None]:
        """Put new storages in a place while the block runs."""
        before, self.forced = self.forced, place
        try:
            yield
        finally:
            self.forced = before

    def on_host(self, trace: Trace) -> NDArray[np.bool_]:
        """Return which events are of buffers on the host, bool[n]: where no parameter is."""
        results = map(self._recorder.result_of, trace.buffer.tolist())
        place = np.array([self.of_buffer.get(buffer, HOST) for buffer in results], np.int64)
        category = trace.category[trace.births]
        held = [trace.names.index(name) for name in _OF_MODEL if name in trace.names]
        of_model = np.isin(category, held) & trace.of_buffers
        parameters = of_model & (category == held[0] if held else False)
        host: NDArray[np.bool_] = (place < place[parameters].max(initial=HOST)) & ~of_model
        return host


class DeviceNames(TorchFunctionMode):
    """Function mode that puts tensors where the program names a device; all fake tensors are on the CPU."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self._places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:  # checkpoints that recompute in the backward find the mode on
            with self:
                return backward(*args, **kwargs)
        if func in _GETTERS:
            on_gpu = place_of(args[0]) == CUDA
            return _GETTERS[func] if on_gpu else func(*args)
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.cuda:
            return self._moved(args[0], CUDA)
        if func is Tensor.cpu:
            return self._moved(args[0], HOST) if place_of(args[0]) else args[0]
        if func is Tensor.to:
            return self._to(args, kwargs)
        if (place := _named(kwargs.get("device"))) is not None:
            place = max(place, place_of(args[0]) if args and isinstance(args[0], Tensor) else place)
            with self._places.putting(place):
                return func(*args, **kwargs | {"device": "cpu"})
        return func(*args, **kwargs)

    def _to(self, args: Any, kwargs: dict[str, Any]) -> Any:
        tensor, other = args[0], args[1] if len(args) > 1 else kwargs.get("other", kwargs.get("device"))
        place = place_of(other) if isinstance(other, Tensor) else _named(other)
        if place is not None and not isinstance(other, Tensor):
            args = (tensor, *("cpu" if value is other else value for value in args[1:]))
            kwargs = {name: "cpu" if value is other else value for name, value in kwargs.items()}
        if place is None or place == place_of(tensor):
            return Tensor.to(*args, **kwargs)
        with self._places.putting(place):
            made = Tensor.to(*args, **kwargs)
        return self._moved(made, place) if made is tensor else made

    def _moved(self, tensor: Tensor, place: int) -> Tensor:
        if place_of(tensor) == place:
            return tensor
        with self._places.putting(place):
            return tensor.clone()


_GETTERS = {Tensor.device.__get__: _GPU, Tensor.is_cuda.__get__: True, Tensor.is_cpu.__get__: False}


def _named(device: Any) -> int | None:
    """Return the place that a device names; None for other values."""
    if type(device) is int:
        return CUDA
    if isinstance(device, (str, torch.device)):
        return {"cuda": CUDA, "cpu": CPU}.get(str(device).partition(":")[0])
    return None
