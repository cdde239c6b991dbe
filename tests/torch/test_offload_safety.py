"""Results do not depend on the offloaded storages: random programs, random moves, unseen reads."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import small_programs
from adversary import Adversary, offloaded_range, resident_bytes

MANY = 1 << 40
NUMBERS = [float(i) for i in range(1, 1001)]

instructions = st.tuples(
    st.integers(0, len(small_programs.INSTRUCTIONS) - 1), st.integers(0, 4), st.integers(0, 19)
)


def same(program: Any, seed: int, share: float, limit: int) -> None:
    def nothing() -> None:
        pass

    plain = small_programs.run_program(program, 2, nothing, nothing)
    with Adversary(seed, limit_bytes=limit, share=share) as mode:
        offloaded = small_programs.run_program(program, 2, mode.disturb, mode.step)
    assert offloaded == plain


@example([(which, 1, 3) for which in range(len(small_programs.INSTRUCTIONS))], 0, 0.9, MANY)
@example([(which, 0, 2) for which in range(len(small_programs.INSTRUCTIONS))], 1, 0.3, 4000)
@example([(20, 0, 1), (26, 0, 1)], 0, 0.0, MANY)
@example([(21, 0, 0), (19, 0, 0)], 0, 0.0, MANY)  # something is met after the last operation
@given(
    st.lists(instructions, min_size=1, max_size=12),
    st.integers(0, 2**16),
    st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    st.sampled_from([MANY, 8000, 4000, 2000]),
)
@settings(max_examples=25)
def test_random_programs_are_identical_under_random_moves(
    program: Any, seed: int, share: float, limit: int
) -> None:
    same(program, seed, share, limit)


@pytest.mark.full
@given(
    st.lists(instructions, min_size=1, max_size=40),
    st.integers(0, 2**16),
    st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    st.sampled_from([MANY, 16000, 8000, 4000, 2000]),
)
@settings(max_examples=300)
def test_long_random_programs_are_identical_under_random_moves(
    program: Any, seed: int, share: float, limit: int
) -> None:
    same(program, seed, share, limit)


def _saved(tensor: Any, **how: Any) -> Any:
    file = io.BytesIO()
    torch.save([tensor, tensor[1:]], file, **how)
    file.seek(0)
    whole, part = torch.load(file)
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return whole.tolist()


def _rng(tensor: Any) -> Any:
    state = torch.get_rng_state()
    bits = state.clone()
    torch.rand(3)
    torch.set_rng_state(bits)
    assert torch.equal(torch.get_rng_state(), state)
    return tensor.tolist()


def _typed(tensor: Any) -> Any:
    with warnings.catch_warnings(action="ignore"):  # PyTorch warns once per process
        return tensor.storage().tolist()


READS: dict[str, Callable[[Any], Any]] = {
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy().tolist(),
    "asarray": lambda t: np.asarray(t).tolist(),
    "dlpack": lambda t: np.from_dlpack(t).tolist(),
    "to_dlpack": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)).tolist(),
    "deepcopy": lambda t: copy.deepcopy(t).tolist(),
    "copy": lambda t: copy.copy(t).tolist(),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)).tolist(),
    "save": _saved,
    "save, old format": lambda t: _saved(t, _use_new_zipfile_serialization=False),
    "storage": lambda t: torch.empty(0).set_(t.untyped_storage()).tolist(),
    "storage's clone": lambda t: torch.empty(0).set_(t.untyped_storage().clone()).tolist(),
    "storage's bytes": lambda t: np.frombuffer(bytes(t.untyped_storage().tolist()), np.float32).tolist(),
    "typed storage": _typed,
    "numbers": lambda t: [float(n) for n in t],
    "a list of tensors": lambda t: torch.tensor([*t]).tolist(),
    "a list of lists": lambda t: torch.tensor([[*t[:500]], [*t[500:]]]).view(-1).tolist(),
    "shared": lambda t: t.share_memory_().tolist(),
    "resize_": lambda t: t.resize_(2000)[:1000].tolist(),
    "vmap": lambda t: torch.func.vmap(lambda x: x * 1)(t).tolist(),
    "random state": _rng,
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_readers_past_the_dispatcher_get_offloaded_values(name: str, mode: Adversary) -> None:
    tensor = offloaded_range(mode)
    assert READS[name](tensor) == NUMBERS
    mode.offload_all()
    assert tensor[:1000].tolist() == NUMBERS


def test_repr_of_an_offloaded_tensor_holds_its_values(mode: Adversary) -> None:
    text = repr(offloaded_range(mode))
    assert text == repr(torch.arange(1000.0) + 1)


def test_writes_past_the_dispatcher_survive(mode: Adversary) -> None:
    tensor = offloaded_range(mode)
    tensor.untyped_storage().fill_(0)
    mode.offload_all()
    assert not tensor.any()
    tensor.untyped_storage()[0] = 255
    mode.offload_all()
    assert tensor.view(torch.uint8)[0] == 255
    mode.offload_all()
    assert tensor.apply_(lambda _: 2.0).sum() == 2000
    mode.offload_all()
    assert tensor.sum() == 2000


@pytest.mark.parametrize("how", ["numpy", "data_ptr", "__dlpack__", "storage", "slice", "shared"])
def test_exported_address_pins_the_storage(how: str, mode: Adversary) -> None:
    tensor = offloaded_range(mode)
    kept = {
        "numpy": tensor.numpy,
        "data_ptr": tensor.data_ptr,
        "__dlpack__": tensor.__dlpack__,
        "storage": tensor.untyped_storage().data_ptr,
        "slice": lambda: tensor.untyped_storage()[:8],
        "shared": tensor.share_memory_,
    }[how]()
    address = tensor.data_ptr()
    mode.offload_all()
    assert resident_bytes(mode, tensor) == 4000
    assert tensor.data_ptr() == address
    del kept


def test_size_queries_do_not_reload(mode: Adversary) -> None:
    storage = offloaded_range(mode).untyped_storage()
    assert (storage.nbytes(), storage.size(), len(storage)) == (4000, 4000, 4000)
    assert resident_bytes(mode, storage) == 0


def test_saving_reloads_a_single_storage_at_a_time(mode: Adversary) -> None:
    many = [torch.full((1000,), float(i)) for i in range(8)]
    mode.offload_all()
    most, file = 0, io.BytesIO()

    class Watched(io.BytesIO):
        def write(self, data: Any) -> int:
            nonlocal most
            most = max(most, sum(resident_bytes(mode, t) for t in many))
            return file.write(data)

    torch.save(many, Watched())
    assert most <= 4000
    assert sum(resident_bytes(mode, t) for t in many) == 0
    file.seek(0)
    assert [t[7].item() for t in torch.load(file)] == [float(i) for i in range(8)]


def test_program_resizes_survive(mode: Adversary) -> None:
    tensor = offloaded_range(mode)
    tensor.untyped_storage().resize_(8000)
    mode.offload_all()
    assert tensor.untyped_storage().nbytes() == 8000
    assert tensor.tolist() == NUMBERS
    tensor.untyped_storage().resize_(0)
    mode.offload_all()
    assert tensor.untyped_storage().nbytes() == 0


def test_patches_are_removed_at_the_end() -> None:
    def methods() -> list[Any]:
        owners = (torch.Tensor, torch.UntypedStorage, torch._C.PyTorchFileWriter, torch._tensor_str, torch)
        return [dict(vars(owner)) for owner in owners]

    before = methods()
    with Adversary(0):
        assert methods() != before
    assert methods() == before
