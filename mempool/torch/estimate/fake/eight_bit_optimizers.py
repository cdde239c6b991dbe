"""Optimizers of bitsandbytes by the memory of their state: no step is computed, no CUDA kernel needed.

The layout, except for two tables of 1 KiB, is that of bitsandbytes 0.44 and later (`init_state` in its
optim/optimizer.py and ademamix.py). If the package is installed, the package's optimizers are patched while
tensors have no memory; if not, a stand-in with the same names is imported instead.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
import types
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

PACKAGE = "bitsandbytes"
#: Elements of an 8-bit state that share one float32.
BLOCK = 256
#: Smallest numbers of elements that are kept in 8 bits, and whose state is paged.
LEAST_8BIT, LEAST_PAGED = 4096, 100_000
#: Values of state for each element of a parameter, by name of the family.
MOMENTS = {
    "Adam": 2, "AdamW": 2, "LAMB": 2, "AdEMAMix": 3, "Lion": 1, "SGD": 1, "RMSprop": 1, "Adagrad": 1,
    "LARS": 1,
}  # fmt: skip
#: Group setting for the bits of the state, for groups that differ from the optimizer.
STATE_BITS = "state_bits"
_PAGED, _NORMS = ("Adam", "AdamW", "AdEMAMix", "Lion"), ("LAMB", "LARS")


@dataclass(frozen=True)
class Layout:
    """Layout of an optimizer's state.

    Attributes:
        moments: values for each element of a parameter.
        bits: of a value, 8 or 32.
        paged: whether large states are in unified memory, which moves to the host if the GPU is full.
        least_8bit: number of elements below which a parameter's state is in 32 bits.
        norms: whether the state has a norm for each parameter.
    """

    moments: int
    bits: int
    paged: bool = False
    least_8bit: int = LEAST_8BIT
    norms: bool = False

    @classmethod
    def of(cls, optimizer: Any) -> Layout:
        """Return the layout of an optimizer of bitsandbytes, or of a stand-in."""
        if isinstance(optimizer, Blockwise):
            return optimizer.layout
        class_names = [dtype.__name__ for dtype in type(optimizer).__mro__]
        moments = (
            3 if any("AdEMAMix" in dtype for dtype in class_names) else 1 + ("Optimizer2State" in class_names)
        )
        own = optimizer.args
        return cls(moments, own.optim_bits, optimizer.is_paged, own.min_8bit_size, own.max_unorm > 0)

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state of one parameter, without values."""
        eight = self.bits == 8 and parameter.numel() >= self.least_8bit
        dtype = torch.uint8 if eight else torch.float32
        blocks = -(-parameter.numel() // BLOCK)
        sizes = [2, 1] if self.moments == 3 else [1] * self.moments
        made: dict[str, Any] = {}
        for number, size in enumerate(sizes, 1):
            shape = (2, *parameter.shape) if size == 2 else parameter.shape
            made[f"state{number}"] = state = parameter.new_empty(shape, dtype=dtype)
            state.of_host = self.paged and parameter.numel() >= LEAST_PAGED
            if eight:
                made[f"absmax{number}"] = parameter.new_empty(size * blocks, dtype=torch.float32)
        return made | ({"unorm_vec": parameter.new_empty(1, dtype=torch.float32)} if self.norms else {})


def take_step(optimizer: Any) -> None:
    """Make missing state, and touch all tensors that an update touches."""
    layout, bits = Layout.of(optimizer), overridden_bits(optimizer)
    pairs = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    with torch.no_grad():
        for group, parameter in pairs:
            if parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            if not state:
                own = bits.get(id(parameter), group.get(STATE_BITS, layout.bits))
                state.update(replace(layout, bits=own).state_of(parameter))
            for tensor in (*state.values(), parameter):
                tensor.mul_(1)


def overridden_bits(optimizer: Any) -> dict[int, int]:
    """Return the bits of state that a program requested for single parameters, by their identities.

    Trainer of transformers requests 32 bits for embeddings.
    """
    manager = getattr(optimizer, "mng", None)
    if manager is None or not (isinstance(optimizer, Blockwise) or is_of_package(optimizer)):
        return {}
    configs = {id(getattr(module, name)): own for module, name, own in manager.module_weight_config_triple}
    configs |= manager.pid2config
    return {key: own["optim_bits"] for key, own in configs.items() if "optim_bits" in own}


class GlobalOptimManager:
    """Stand-in for the settings of single parameters that bitsandbytes keeps for the process."""

    _instance: GlobalOptimManager | None = None

    def __init__(self) -> None:
        self.pid2config: dict[int, dict[str, Any]] = {}
        self.module_weight_config_triple: list[tuple[Any, str, dict[str, Any]]] = []

    @classmethod
    def get_instance(cls) -> GlobalOptimManager:
        """Return the only instance."""
        cls._instance = cls._instance or cls()
        return cls._instance

    def register_parameters(self, params: Any) -> None:
        """Do nothing: parameters are known by their identities."""

    def override_config(
        self, parameters: Any, key: str | None = None, value: Any = None, key_value_dict: Any = None
    ) -> None:
        """Set one or several settings of a parameter or a list of them."""
        for parameter in parameters if isinstance(parameters, (list, tuple)) else [parameters]:
            own = self.pid2config.setdefault(id(parameter), {})
            own |= ({} if key is None else {key: value}) | (key_value_dict or {})

    def register_module_override(self, module: Any, param_name: str, config: dict[str, Any]) -> None:
        """Store the settings of a module's parameter, which may be replaced later."""
        self.module_weight_config_triple.append((module, param_name, config))


class Blockwise(torch.optim.Optimizer):
    """Stand-in for an optimizer of bitsandbytes: its memory, without its steps."""

    family = "AdamW"
    usual_bits, usual_paged = 8, False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Any = (0.9, 0.999),
        *_: Any,
        optim_bits: int = 32,
        min_8bit_size: int = LEAST_8BIT,
        is_paged: bool = False,
        **settings: Any,
    ) -> None:
        kept = {"optim_bits": optim_bits, "min_8bit_size": min_8bit_size, "is_paged": is_paged}
        super().__init__(params, {"lr": lr, "betas": betas} | settings | kept)
        bits = self.usual_bits or optim_bits
        paged = self.usual_paged or is_paged
        self.mng = GlobalOptimManager.get_instance()
        self.layout = Layout(MOMENTS[self.family], bits, paged, min_8bit_size, self.family in _NORMS)

    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - as of the base
        """Make missing state, and touch all tensors that an update touches."""
        take_step(self)


def _stand_ins() -> dict[str, type[Blockwise]]:
    """Make the classes of `bitsandbytes.optim`, by name."""
    made = {}
    for family in MOMENTS:
        for paged in (False, True)[: 1 + (family in _PAGED)]:
            for bits in (0, 8, 32):
                name = f"{'Paged' * paged}{family}{f'{bits}bit' if bits else ''}"
                own = {
                    "family": family,
                    "usual_bits": bits,
                    "usual_paged": paged,
                    "__module__": f"{PACKAGE}.optim",
                }
                made[name] = type(name, (Blockwise,), own)
    return made


#: Stand-ins by the names of `bitsandbytes.optim`: "AdamW8bit", "PagedLion", ...
STAND_INS = _stand_ins()


def is_of_package(optimizer: Any) -> bool:
    """Return whether an optimizer is one of bitsandbytes itself."""
    return any(kind.__module__ == f"{PACKAGE}.optim.optimizer" for kind in type(optimizer).__mro__)


def settings_of(optimizer: Any) -> dict[str, Any]:
    """Return settings of an optimizer of bitsandbytes that are not in the groups; empty for others."""
    if not is_of_package(optimizer):
        return {}
    own = optimizer.args
    generic = not type(optimizer).__name__.endswith(
        "bit"
    )  # other classes take 32 bits only, for compatibility
    bits = {"optim_bits": own.optim_bits} if generic else {}
    return bits | {"min_8bit_size": own.min_8bit_size, "is_paged": optimizer.is_paged}


@contextlib.contextmanager
def patch_bitsandbytes() -> Iterator[None]:
    """Let optimizers of bitsandbytes be made and stepped on fake tensors while the block runs."""
    before = torch.optim.Optimizer.__init__
    with contextlib.ExitStack() as stack:

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            before(self, *args, **kwargs)
            if is_of_package(self):
                _patch(type(self), stack)

        torch.optim.Optimizer.__init__ = init
        stack.callback(setattr, torch.optim.Optimizer, "__init__", before)
        finder = _Finder()
        sys.meta_path.append(finder)
        stack.callback(finder.forget)
        yield


def _patch(kind: Any, stack: contextlib.ExitStack) -> None:
    """Replace methods that need values or CUDA in a class of optimizers of bitsandbytes."""

    def step(self: Any, closure: Any = None) -> None:  # noqa: ARG001 - as of the base
        take_step(self)

    base = next(class_ for class_ in kind.__mro__ if class_.__name__ == "Optimizer8bit")
    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = hooked.of_mempool = True  # the class's own step is hooked, too, before this
    if not hasattr(kind.step, "of_mempool"):
        stack.callback(setattr, kind, "step", kind.step)
        kind.step = hooked
    if base.fill_qmap is not _no_tables:
        stack.callback(setattr, base, "fill_qmap", base.fill_qmap)
        base.fill_qmap = _no_tables


def _no_tables(optimizer: Any) -> None:
    """Fill no tables of quantized values, which needs values."""


class _Finder:
    """Import finder of a stand-in for bitsandbytes, after all others: used if the package is missing."""

    _NAMES = (PACKAGE, f"{PACKAGE}.optim", f"{PACKAGE}.nn", f"{PACKAGE}.functional")

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:  # noqa: ARG002
        """Return the spec of a stand-in module, or None for any other."""
        if name not in self._NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name == PACKAGE)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        """Make an empty module."""
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill a module with stand-ins."""
        module.of_mempool = True  # type: ignore[attr-defined]
        if module.__name__ == PACKAGE:
            module.__version__ = "0.50.2"  # type: ignore[attr-defined]  # the version whose layout was read
            for name in self._NAMES[1:]:
                __import__(name)
        elif module.__name__ == f"{PACKAGE}.optim":
            vars(module).update(STAND_INS, GlobalOptimManager=GlobalOptimManager)

    def forget(self) -> None:
        """Remove this finder and the modules made by this finder."""
        sys.meta_path.remove(self)
        GlobalOptimManager._instance = None
        for name in self._NAMES:
            if hasattr(sys.modules.get(name), "of_mempool"):
                del sys.modules[name]
