"""Modelled times of PyTorch's operations in PyTorch's CUDA build on the stand-in."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from processes import alone, run_each_alone

if TYPE_CHECKING:
    from collections.abc import Callable

if __name__ == "__main__":  # pytest's own process has no stand-in, without which PyTorch cannot be imported
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.nn import functional

    from mempool.hardware.gpu_throughput import Rates
    from mempool.rehearsal import clock
    from mempool.torch.compiled.costs import MeasuredCosts, copy_calls
    from solvers.rewriting.copy_overhead import CopyOverhead
    from solvers.swap import Link

#: Floating-point operations of 32, rounded 32 and 16 bits in a nanosecond; nanoseconds a byte of the device,
#: and of the link.
SINGLE, ROUNDED, HALF, BYTE, LINK = 1000, 2000, 4000, 0.01, 0.1
SIDE = 512
MATRIX = 4 * SIDE * SIDE  #: bytes in 32 bits
PRODUCTS = 2 * SIDE**3


def start() -> None:
    rates = Rates("a card", 1e9 / BYTE, 1e9 * SINGLE, 1e9 * ROUNDED, 1e9 * HALF, "")
    clock.start(rates, Link(0, LINK / 1e9, 0, LINK / 1e9), clock.Reached(1, 1, 1, 0.5))


def nanoseconds(operation: Callable[[], object]) -> float:
    """Return the time of an operation as a program measures it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    operation()
    end.record()
    end.synchronize()
    return round(1e6 * begin.elapsed_time(end))


@alone
def test_operations_take_the_longer_of_their_products_and_their_bytes() -> None:
    start()
    one, two, out = (torch.randn(SIDE, SIDE, device="cuda") for _ in range(3))
    half, words = one.half(), torch.zeros(256, dtype=torch.long, device="cuda")
    image, weight = torch.randn(8, 32, 32, 32, device="cuda"), torch.randn(64, 32, 3, 3, device="cuda")
    image_products = 2 * 8 * 64 * 32 * 32 * 32 * 9
    expected: dict[str, tuple[Callable[[], object], float]] = {
        "mm": (lambda: one @ two, PRODUCTS / SINGLE),
        "addmm": (lambda: torch.addmm(one[0], one, two), PRODUCTS / SINGLE),
        "batched": (lambda: torch.bmm(one.view(4, 128, SIDE), two.view(4, SIDE, 128)), PRODUCTS / 4 / SINGLE),
        "16 bits": (lambda: half @ half, PRODUCTS / HALF),
        "convolution": (lambda: functional.conv2d(image, weight, padding=1), image_products / ROUNDED),
        "add": (lambda: one + two, 3 * MATRIX * BYTE),
        "in place": (lambda: one.add_(two), 3 * MATRIX * BYTE),
        "out": (lambda: torch.add(one, two, out=out), 3 * MATRIX * BYTE),
        "one argument twice": (lambda: one + one, 2 * MATRIX * BYTE),
        "list": (lambda: torch._foreach_add_([one, two], 1.0), 4 * MATRIX * BYTE),
        "expanded": (lambda: one[:1].expand(SIDE, SIDE) + two, (2 + 1 / SIDE) * MATRIX * BYTE),
        "copy": (lambda: one.t().copy_(two), 2 * MATRIX * BYTE),
        "copy to the host": (lambda: one.cpu(), MATRIX * LINK * 2),
        "fill": (lambda: one.fill_(1.0), MATRIX * BYTE),
        "embedding": (lambda: functional.embedding(words, one), (MATRIX + 256 * 8) * BYTE),
        "view": (lambda: one.view(-1)[3:].unsqueeze(0), 0),
        "small": (lambda: one[0, :4] + 1, 2000),
    }
    times = {name: nanoseconds(operation) for name, (operation, _) in expected.items()}
    for name, (_, time) in expected.items():
        assert abs(times[name] - time) <= 1, name


@alone
def test_causal_attention_takes_half_the_time_and_its_gradients_two_and_a_half_times_as_long() -> None:
    start()
    query, key, value = (torch.randn(4, 2, 512, 64, device="cuda", requires_grad=True) for _ in range(3))
    products = 2 * 2 * 4 * 2 * 512 * 512 * 64
    for causal in (False, True):
        made: list[torch.Tensor] = []

        def attend(made: list[torch.Tensor] = made, causal: bool = causal) -> None:
            made.append(functional.scaled_dot_product_attention(query, key, value, is_causal=causal))

        took = nanoseconds(attend) - round(products / SINGLE / (1 + causal))
        assert took in (0, 4000), took  # PyTorch 2.14 fills the seed and its offset first
        gradient = torch.empty_like(made[0])
        backward = nanoseconds(lambda made=made, gradient=gradient: made[0].backward(gradient))  # type: ignore[misc]
        least = 2.5 * products / SINGLE / (1 + causal)
        assert least <= backward <= least + 2e5  # and sums of gradients


@alone
def test_backward_pass_in_another_thread_takes_time_and_copies_of_other_streams_overlap() -> None:
    start()
    weight = torch.randn(SIDE, SIDE, device="cuda", requires_grad=True)
    given = torch.randn(SIDE, SIDE, device="cuda", requires_grad=True)
    result, gradient = given @ weight, torch.ones(SIDE, SIDE, device="cuda")
    copies, host = torch.cuda.Stream(), torch.empty(SIDE, SIDE, pin_memory=True)

    def backward_beside_a_copy() -> None:
        with torch.cuda.stream(copies):
            host.copy_(gradient, non_blocking=True)
        result.backward(gradient)
        torch.cuda.current_stream().wait_stream(copies)

    torch.cuda.synchronize()
    before = clock.now()
    assert nanoseconds(backward_beside_a_copy) == 2 * round(PRODUCTS / SINGLE)
    assert round(1e9 * (clock.now() - before)) == 2 * round(PRODUCTS / SINGLE)


@alone
def test_compiled_kernels_take_the_time_of_the_bytes_of_their_tensors() -> None:
    warnings.simplefilter("ignore")  # of the compiler's own modules
    start()
    one, two = torch.randn(2, 4 * SIDE, SIDE, device="cuda")
    add, change = (torch.compile(lambda x, y: (x.sin() + y).cos()), torch.compile(lambda x: x.sin_().mul_(2)))
    for moved, operation in ((3, lambda: add(one, two)), (2, lambda: change(one))):
        operation()
        assert abs(nanoseconds(operation) - moved * 4 * MATRIX * BYTE) <= 1


@alone
def test_costs_for_compiled_graphs_are_times_of_the_device_without_the_host() -> None:
    start()
    matrix = torch.randn(SIDE, SIDE, device="cuda")
    module = make_fx(torch.mm, tracing_mode="fake")(matrix, matrix)
    (product,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert round(1e9 * MeasuredCosts("cuda", runs=1)(product)) == round(PRODUCTS / SINGLE)
    assert copy_calls(torch.device("cuda")) == CopyOverhead()


if __name__ == "__main__":
    run_each_alone(globals())
