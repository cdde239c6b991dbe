"""Small random programs of tensors, whose results must not depend on the place of storages."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

SIDE = 12
REGISTERS = 5


class Cube(torch.autograd.Function):
    """A custom autograd function that saves its input and an intermediate result."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = x * x
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, y = ctx.saved_tensors
        return grad * (2 * y + x * x)


class Machine:
    """Registers of square matrices, and the observed bytes."""

    def __init__(self) -> None:
        self.x = [torch.arange(i, i + SIDE * SIDE).float().sin().view(SIDE, SIDE) for i in range(REGISTERS)]
        self.seen: list[Any] = []
        self.arrays: list[Any] = []
        self.leaf = torch.ones(SIDE, SIDE, requires_grad=True)

    def see(self, value: Any) -> None:
        """Record the bytes of a tensor, by operations and `tolist` alone."""
        plain = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        self.seen.append(bytes(plain.clone().contiguous().view(-1).view(torch.uint8).tolist()))

    def run(self, program: Sequence[tuple[int, int, int]]) -> None:
        """Run instructions; record errors too."""
        for which, i, j in program:
            function = INSTRUCTIONS[which % len(INSTRUCTIONS)]
            try:
                function(self, i % REGISTERS, j)
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                self.seen.append((function.__name__, type(error).__name__))


INSTRUCTIONS: list[Callable[[Machine, int, int], None]] = []


def instruction(function: Callable[[Machine, int, int], None]) -> Callable[[Machine, int, int], None]:
    """Register an instruction."""
    INSTRUCTIONS.append(function)
    return function


def _other(m: Machine, j: int) -> torch.Tensor:
    return m.x[j % REGISTERS]


@instruction
def makes(m: Machine, i: int, j: int) -> None:
    m.x[i] = torch.full((SIDE, SIDE), float(j)).add_(torch.eye(SIDE))


@instruction
def combines(m: Machine, i: int, j: int) -> None:
    m.x[i] = (m.x[i] @ _other(m, j)).tanh_() + _other(m, j + 1)


@instruction
def writes(m: Machine, i: int, j: int) -> None:
    m.x[i].mul_(0.5).add_(_other(m, j))


@instruction
def writes_out(m: Machine, i: int, j: int) -> None:
    torch.add(_other(m, j), 1, out=m.x[i])


@instruction
def writes_views(m: Machine, i: int, j: int) -> None:
    view = m.x[i].view(-1)[j % SIDE : j % SIDE + SIDE]
    view.copy_(_other(m, j)[0])
    m.x[i].t()[j % SIDE] = 3.0


@instruction
def shares(m: Machine, i: int, j: int) -> None:
    m.x[i] = _other(m, j).t().view_as(m.x[i]) if j % 2 else _other(m, j).detach()


@instruction
def overlaps(m: Machine, i: int, j: int) -> None:
    strided = m.x[i].as_strided((SIDE, SIDE), (1, 1), j % SIDE)
    m.see(strided.sum(0))


@instruction
def bits(m: Machine, i: int, j: int) -> None:
    m.x[i].view(torch.int32).bitwise_xor_(j % 2)
    m.see(torch.view_as_complex(m.x[i].view(SIDE, SIDE // 2, 2)).conj().real)


@instruction
def lists(m: Machine, i: int, j: int) -> None:
    torch._foreach_mul_([m.x[i], _other(m, j).clone()], 0.75)
    m.x[i] = torch.stack(torch.split(m.x[i], 3)[::-1]).view(SIDE, SIDE)


@instruction
def picks(m: Machine, i: int, j: int) -> None:
    m.see(m.x[i][m.x[i] > 0.1])
    m.see(torch.nonzero(_other(m, j) > 0))
    m.x[i] = m.x[i].index_put((torch.tensor([0, 1]), torch.tensor([j % SIDE, 2])), m.x[i][0, :2])


@instruction
def orders(m: Machine, i: int, j: int) -> None:
    values, order = m.x[i].sort(dim=j % 2)
    m.x[i] = values + order


@instruction
def normalizes(m: Machine, i: int, j: int) -> None:
    mean, var = m.x[i][0].clone(), m.x[i][1].clone().abs()
    m.x[i] = torch.nn.functional.batch_norm(_other(m, j), mean, var, training=True)
    m.see(mean)
    m.see(var)


@instruction
def differentiates(m: Machine, i: int, j: int) -> None:
    out = Cube.apply(m.leaf * m.x[i])
    out.register_hook(lambda grad: grad * 0.5)
    (out * _other(m, j)).sum().backward()
    m.see(m.leaf.grad)


@instruction
def checkpoints(m: Machine, i: int, j: int) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return (x @ m.x[i]).sigmoid() * x

    out = checkpoint(block, m.leaf + _other(m, j), use_reentrant=bool(j % 2))
    (m.x[i],) = torch.autograd.grad(out.sum(), m.leaf, allow_unused=True) if not j % 2 else (out.detach(),)
    if j % 2:
        out.sum().backward()


@instruction
def saves_on_cpu(m: Machine, i: int, j: int) -> None:
    with torch.autograd.graph.save_on_cpu():
        out = (m.leaf * m.x[i]).exp().sum()
    out.backward()
    m.leaf.grad.clamp_(-j, j)


@instruction
def transforms(m: Machine, i: int, j: int) -> None:
    m.x[i] = torch.func.vmap(torch.func.grad(lambda row: (row * row).sum()))(m.x[i])
    m.see(torch.func.jvp(torch.sin, (m.x[i],), (_other(m, j),))[1])


@instruction
def infers(m: Machine, i: int, j: int) -> None:
    with torch.inference_mode():
        made = m.x[i] + _other(m, j)
        made.mul_(2)
        m.see(made)
        m.arrays.append(made[0])


@instruction
def sparse(m: Machine, i: int, j: int) -> None:
    kept = (m.x[i] * (m.x[i] > 0)).to_sparse()
    m.see(torch.sparse.mm(kept, _other(m, j)))
    m.see(kept.coalesce().to_sparse_csr() if j % 2 else kept * 2)


@instruction
def reads_numbers(m: Machine, i: int, j: int) -> None:
    m.seen.append((m.x[i][0, 0].item(), bool(m.x[i].any()), repr(_other(m, j)), f"{m.x[i].sum():.3f}"))
    m.seen.append(torch.tensor([m.x[i][0, 0], m.x[i][1, 1], 2.0]).tolist())


@instruction
def array(m: Machine, i: int, j: int) -> None:
    m.x[i].numpy()[0, j % SIDE] = j
    m.seen.append(np.asarray(_other(m, j)).tobytes())


@instruction
def keeps_array(m: Machine, i: int, j: int) -> None:
    x = m.x[i].detach()  # an array keeps the tensor alive, but `.data =` would replace the tensor's memory
    m.arrays.append(torch.from_dlpack(x) if j % 2 else x.numpy())


@instruction
def from_array(m: Machine, i: int, j: int) -> None:
    m.x[i] = torch.from_numpy(np.full((SIDE, SIDE), j, np.float32))


@instruction
def copies(m: Machine, i: int, j: int) -> None:
    m.x[i] = copy.deepcopy(_other(m, j)) if j % 2 else pickle.loads(pickle.dumps(_other(m, j)))


@instruction
def saves(m: Machine, i: int, j: int) -> None:
    file = io.BytesIO()
    torch.save({"a": m.x[i], "b": m.x[i].view(-1)[1:], "c": _other(m, j)}, file)
    file.seek(0)
    read = torch.load(file)
    m.see(read["b"])
    m.x[i] = read["c"]


@instruction
def storages(m: Machine, i: int, j: int) -> None:
    storage = m.x[i].untyped_storage()
    m.seen.append((storage.nbytes(), len(storage), storage[j % 4]))
    storage[j % 4] = j % 256
    m.x[i] = m.x[i].clone()
    m.x[i].untyped_storage().copy_(storage)


@instruction
def resizes(m: Machine, i: int, j: int) -> None:
    grown = m.x[i].clone().resize_(SIDE + j % 3, SIDE)
    grown[SIDE:] = 0
    m.x[i] = grown[:SIDE]


@instruction
def sets(m: Machine, i: int, j: int) -> None:
    if j % 3 == 0:
        m.x[i] = torch.empty(0).set_(_other(m, j).untyped_storage(), 0, (SIDE, SIDE))
    elif j % 3 == 1:
        m.x[i].data = _other(m, j).clone()
    else:
        m.x[i] = torch.empty(0).set_(_other(m, j))


@instruction
def raises(m: Machine, i: int, j: int) -> None:
    torch._foreach_add_([m.x[i], torch.zeros(3)], [_other(m, j), torch.zeros(4)])


@instruction
def loses(m: Machine, i: int, j: int) -> None:
    m.arrays.clear()
    m.x[i] = torch.zeros(SIDE, SIDE)
    if j % 4 == 0:
        gc.collect()


@instruction
def sees(m: Machine, i: int, j: int) -> None:
    m.see(m.x[i])
    m.see(_other(m, j).double())


def run_program(
    program: Sequence[tuple[int, int, int]],
    rounds: int,
    disturb: Callable[[], None],
    step: Callable[[], None],
) -> list[Any]:
    """Run a program for some rounds; return all observed bytes, the final ones included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        machine = Machine()
        for _ in range(rounds):
            for one in program:
                disturb()
                machine.run([one])
            step()
        for x in [*machine.x, machine.leaf, *machine.arrays]:
            machine.see(torch.as_tensor(x))
    return machine.seen
