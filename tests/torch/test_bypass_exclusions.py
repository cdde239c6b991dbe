"""Operations that never bypass the mode: other modes need them, or their memory is unknown."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from bypassed import MIB, bypass_of, bypassed_count, mode_of, open_bypass, small_loop
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import mempool.torch

pytestmark = pytest.mark.usefixtures("nothing_is_held")


class Other(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Doubled(torch.Tensor):
    """A wrapper tensor whose value is twice that of the inner tensor."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [2 * one.inner if isinstance(one, Doubled) else one for one in args]
        return func(*plain, **(kwargs or {}))


class TestBypassExclusions:
    def test_tensor_subclass(self, open_pool: Any) -> None:
        x = torch.ones(100)
        assert bypassed_count(open_pool, lambda: x + 1) == 1
        y = Doubled(x)
        assert all(torch.equal(y + 1, torch.full((100,), 3.0)) for _ in range(3))

    def test_mode_entered_later(self, open_pool: Any) -> None:
        x = torch.ones(100)
        assert bypassed_count(open_pool, lambda: x + 1) == 1
        with Other() as other:
            assert bypassed_count(open_pool, lambda: x + 1) == 0
        assert other.seen == [torch.ops.aten.add.Tensor] * 3

    def test_mode_that_replaces_ours(self, open_pool: Any) -> None:
        x = torch.ones(100)
        assert bypassed_count(open_pool, lambda: x + 1) == 1
        with _disable_current_modes(), Other() as other:
            assert bypassed_count(open_pool, lambda: x + 1) == 0
        assert other.seen == [torch.ops.aten.add.Tensor] * 3

    @pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
    @pytest.mark.usefixtures("open_pool")
    def test_kernel_in_python_without_autograd(self) -> None:
        with torch.library._scoped_library("mempool_tests", "FRAGMENT") as library:
            library.define("tripled(Tensor x) -> Tensor")
            library.impl("tripled", lambda x: x * 3, "CPU")
            x = torch.ones(100, requires_grad=True)
            for _ in range(3):
                torch.ops.mempool_tests.tripled(x).sum().backward()
        assert torch.equal(x.grad, torch.full((100,), 9.0))

    def test_fake_tensor(self, open_pool: Any) -> None:
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        assert bypassed_count(open_pool, lambda: torch.ones(100)) == 1
        with FakeTensorMode():
            assert all(isinstance(torch.ones(100), FakeTensor) for _ in range(3))

    def test_data_dependent_size(self, open_pool: Any) -> None:
        x = torch.ones(1000)
        assert bypassed_count(open_pool, lambda: x.nonzero()) == 0
        assert bypassed_count(open_pool, lambda: x[x > 0]) == 1  # the comparison

    def test_size_from_a_float(self, open_pool: Any) -> None:
        ends = iter((10.0, 20.0, 1e5))
        assert bypassed_count(open_pool, lambda: torch.arange(0.0, next(ends))) == 0
        assert bypassed_count(open_pool, lambda: torch.full((10,), random.random())) == 1

    def test_size_from_present_memory(self, open_pool: Any) -> None:
        source, out = torch.ones(100), torch.empty(100)
        assert bypassed_count(open_pool, lambda: torch.add(source, source, out=out)) == 0
        assert bypassed_count(open_pool, lambda: torch.arange(0.0, 100.0, out=out)) == 0
        assert bypassed_count(open_pool, lambda: out.resize_(50)) == 0

    def test_memory_shared_by_results(self, open_pool: Any) -> None:
        x = torch.eye(10)
        assert bypassed_count(open_pool, x.to_sparse) == 0
        assert bypassed_count(open_pool, lambda: torch._lazy_clone(x)) == 0  # both tensors use the memory

    def test_first_call_of_each_shape_stride_and_type(self, open_pool: Any) -> None:
        base = torch.ones(20, 1536)
        thin = base[:, 0]  # its stride equals the number of columns of the base
        assert bypassed_count(open_pool, lambda: thin + 1) == 1
        for other in (
            base,
            thin[:10],
            torch.ones(20, 7)[:, 0],
            thin.clone(),
            thin.double(),
            torch.ones(20, 1),
        ):
            seen = bypass_of(open_pool).skipped_operations
            _ = other + 1
            assert bypass_of(open_pool).skipped_operations == seen
        numbers = torch.ones(100, dtype=torch.int32)
        assert bypassed_count(open_pool, lambda: numbers / 2) == 1
        torch.set_default_dtype(torch.float64)
        try:
            seen = bypass_of(open_pool).skipped_operations
            _ = numbers / 2
            assert bypass_of(open_pool).skipped_operations == seen
        finally:
            torch.set_default_dtype(torch.float32)

    def test_library_operator_on_numbers(self, open_pool: Any) -> None:
        with torch.library._scoped_library("mempool_bypass_test", "FRAGMENT") as library:
            library.define("number(int x) -> int")
            library.impl("number", lambda x: x, "CompositeExplicitAutograd")
            assert bypassed_count(open_pool, lambda: torch.ops.mempool_bypass_test.number(1)) == 0

    def test_redefined_operator(self, open_pool: Any) -> None:
        """The schema of the new operator may have the address of the old schema."""
        name, operators = "mempool_bypass_test", torch.ops.mempool_bypass_test
        for schema, value in (("(int x) -> int", 1), ("(Tensor x) -> Tensor", torch.ones(1000))) * 3:
            before = bypass_of(open_pool).skipped_operations
            with torch.library._scoped_library(name, "FRAGMENT") as library:
                for i in range(20):
                    library.define(f"one{i}{schema}")
                    library.impl(f"one{i}", lambda x: x, "CompositeExplicitAutograd")
                    getattr(operators, f"one{i}")(value)
            gc.collect()
            assert bypass_of(open_pool).skipped_operations == before

    def test_foreign_memory(self) -> None:
        with mempool.torch.install(device="cpu", limit="64MiB", background=False) as pool:
            open_bypass(pool, small_loop())
            x = torch.ones(MIB)
            kept, others = [x + 1], []
            for _ in range(8):
                others.append(torch.from_numpy(np.ones(MIB, np.float32)))
                others[-1].add_(1)
                kept.append(x + 1)
            kept += [x + 1 for _ in range(8)]
            stats = pool.client.pool.stats()
            assert stats["reserved"]["peak"] + 32 * MIB <= 64 * MIB * 1.02
            assert all(one.sum().item() == 2 * MIB for one in (*kept, *others))
            del x, kept, others

    def test_foreign_memory_met_by_an_unknown_view(self, open_pool: Any) -> None:
        x, mode = torch.ones(MIB), mode_of(open_pool)
        assert bypassed_count(open_pool, lambda: x.add_(1)) == 1
        before, foreign = mode.storages.foreign_bytes, torch.from_numpy(np.ones(MIB, np.float32))
        torch._neg_view(foreign)
        foreign.add_(1)
        assert mode.storages.foreign_bytes - before == 4 * MIB

    def test_library_kernel_in_python(self, open_pool: Any) -> None:
        with torch.library._scoped_library("mempool_bypass_test", "FRAGMENT") as library:
            library.define("twice(Tensor x) -> Tensor")
            library.impl("twice", lambda x: x + x, "CPU")
            x = torch.ones(10)
            assert bypassed_count(open_pool, lambda: torch.ops.mempool_bypass_test.twice(x)) == 0

    def test_saved_tensor_hooks(self, open_pool: Any) -> None:
        packed: list[Any] = []

        def pack(x: Any) -> Any:
            packed.append(x + 0)
            return packed[-1]

        x = torch.ones(2048, requires_grad=True)
        for _ in range(3):
            x.exp()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            x.exp()
        assert mode_of(open_pool).storages.find(packed[0].untyped_storage()) is not None

    def test_vmap_and_grad(self, open_pool: Any) -> None:
        x = torch.arange(12.0).view(3, 4)
        for _ in range(3):
            got = torch.vmap(torch.func.grad(lambda row: row.square().sum()))(x)
            assert torch.equal(got, 2 * x)

    def test_higher_order_operator(self, open_pool: Any) -> None:
        from torch._higher_order_ops.cond import cond_op

        x = torch.arange(4.0)
        for _ in range(3):
            assert torch.equal(cond_op(True, torch.sin, torch.cos, (x,)), x.sin())
