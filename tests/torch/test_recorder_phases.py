"""Phases, iterations and categories, found without anybody's help in loops of many kinds."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from around import Around
from recorded import made, marks, told
from torch import nn

from mempool.recording.torch import AccessRecorder

F, B, OPT, S = "forward", "backward", "optimizer", "step"


def x() -> Any:
    return torch.ones(2, 4)


def test_modules_and_optimizers_made_inside_are_found() -> None:
    with AccessRecorder() as recorder:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(x()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = recorder.trace()
    kinds = made(trace)
    assert (kinds["parameters"], kinds["module_buffers"], kinds["gradients"]) == (4, 3, 8)
    assert (kinds["optimizer_state"], kinds["inputs"]) == (12, 2)
    assert marks(trace) == 2 * [F, B, OPT, S]
    assert {"Sequential.0", "Sequential.1"} <= set(made(trace, "module"))


def test_gradients_that_are_kept_and_accumulated_are_made_once() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with AccessRecorder([model], [optimizer]) as recorder:
        for _ in range(2):
            for _ in range(2):
                model(x()).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    trace = recorder.trace()
    assert made(trace)["gradients"] == 2
    assert marks(trace)[:6] == [F, B, F, B, OPT, S]


def test_a_closure_is_forward_and_backward_inside_of_the_optimizer() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(x()).sum()
        loss.backward()
        return loss

    with AccessRecorder([model], [optimizer]) as recorder:
        optimizer.step(closure)
    trace = recorder.trace()
    assert {F, B, OPT} <= set(marks(trace))
    assert marks(trace)[-1] == S


def test_optimizer_inside_the_backward_has_the_optimizer_phase() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}

    def update(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with AccessRecorder() as recorder:
        for _ in range(3):
            model(x()).sum().backward()
    trace = recorder.trace()
    assert marks(trace).count(S) == 3
    assert made(trace)["optimizer_state"] == 3 * 4
    assert made(trace)["gradients"] == 3 * 4


@pytest.mark.parametrize("given", [False, True])
def test_single_optimizer_of_two_ends_iterations(given: bool) -> None:
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    one, other = (torch.optim.SGD(model.parameters(), 0.1) for model in (critic, generator))
    with AccessRecorder([generator, critic], [one, other] if given else []) as recorder:
        for _ in range(2):
            fake = generator(x())
            critic(fake.detach()).sum().backward()
            one.step()
            critic(fake).sum().backward()
            other.step()
    found = marks(recorder.trace())
    assert found == 2 * ([F, B, OPT, F, B, OPT, S] if given else [F, B, OPT, S, F, B, OPT])


def test_of_an_optimizer_around_another_real_steps_end_iterations() -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = Around(torch.optim.SGD(model.parameters(), 0.1))
    with AccessRecorder([model], [optimizer]) as recorder:
        for _ in range(4):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    assert marks(recorder.trace()).count("step") == 2


def test_declared_steps_replace_detected_steps() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with AccessRecorder([model], [optimizer]) as recorder:
        for _ in range(2):
            for _ in range(2):
                model(x()).sum().backward()
                optimizer.step()
            recorder.step()
    assert marks(recorder.trace()).count(S) == 2


def test_phases_that_nobody_can_find_are_told() -> None:
    weight = torch.ones(4, requires_grad=True)
    with AccessRecorder() as recorder:
        (weight * 2).sum().backward()
        recorder.mark("optimizer")
        with torch.no_grad():
            weight -= 0.1
        recorder.step()
        (weight * 2).sum()
        recorder.mark("validation")
    assert marks(recorder.trace()) == [F, B, OPT, S, F, "validation"]


def test_inputs_are_arguments_of_the_outermost_module() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, a: Any, *, b: Any) -> Any:
            return self.inner(a.exp() + b)

    model = Two()
    with AccessRecorder([model]) as recorder, torch.no_grad():
        for _ in range(2):
            model(torch.ones(2, 4), b=torch.zeros(2, 4))
    kinds = [(operation, kind) for kind_, _, _, operation, kind in told(recorder.trace()) if kind_ == "ALLOC"]
    assert kinds.count(("aten::zeros", "inputs")) == kinds.count(("aten::ones", "inputs")) == 2
    assert ("aten::exp", "inputs") not in kinds


@pytest.mark.filterwarnings("ignore:Using .torch.compile.module:UserWarning")
def test_compiled_module_is_recorded_as_the_uncompiled_module() -> None:
    model = nn.Linear(4, 4)
    with AccessRecorder([model]) as recorder:
        torch.compile(model, backend="eager")(x()).sum().backward()
    assert made(recorder.trace())["gradients"] == 2
    assert "aten::addmm" in made(recorder.trace(), "operation")


def test_autocast_copies_are_seen() -> None:
    model = nn.Linear(4, 4)
    with AccessRecorder([model]) as recorder, torch.autocast("cpu", dtype=torch.bfloat16):
        model(x()).sum().backward()
    assert made(recorder.trace(), "operation")["aten::_to_copy"] >= 3


class Refusing(torch.optim.Optimizer):
    """An optimizer whose first step raises, in its middle."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad)
            if self.steps == 1:
                raise RuntimeError("no")


def test_exception_ends_the_step() -> None:
    model = nn.Linear(4, 4)
    optimizer = Refusing(model.parameters())
    with AccessRecorder([model], [optimizer]) as recorder:
        for number in range(3):
            loss = (model(x()) * 2).sum()  # by operations outside of the module, too
            loss.backward()
            if number == 0:
                with pytest.raises(RuntimeError, match="no"):
                    optimizer.step()
            else:
                optimizer.step()
    assert marks(recorder.trace()) == [F, B, OPT, F, B, OPT, S, F, B, OPT, S]


def test_bounds_of_modules_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from mempool.recording.torch import context

    modules = []
    for most in (context.MOST_BOUNDS, 20):
        monkeypatch.setattr(context, "MOST_BOUNDS", most)
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        with AccessRecorder([model]) as recorder:
            for _ in range(10):
                model(x()).sum().backward()
        assert len(recorder._context._bounds) <= most
        trace = recorder.trace()
        modules.append([trace.names[i] if i >= 0 else "" for i in trace.module.tolist()])
    assert modules[0] == modules[1]
