"""``mempool fit`` on scripts that look at values, or train where nobody sees it: they end, with a line."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

from mempool.cli.app import call
from mempool.torch.estimate.options import OPTIONS
from mempool.torch.estimate.sources import scripts

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("shared_isolation")

Script = Any


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Writes train.py: lines before a model, an optimizer and inputs are there, or behind that."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def written(*lines: str, before: str = "") -> str:
        head = ["import torch", before, "net = torch.nn.Linear(64, 64)", "x = torch.randn(8, 64)"]
        head.append("sgd = torch.optim.SGD(net.parameters(), lr=0.1)")
        (tmp_path / "train.py").write_text("\n".join([*head, *lines]) + "\n")
        return "train.py"

    return written


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 3) -> str:
    capsys.readouterr()
    assert call(["fit", *arguments]) == code
    error = capsys.readouterr().err
    assert "Traceback" not in error
    (line,) = (line for line in error.splitlines() if line.startswith("mempool:"))
    return line


STEP = "net(x).sum().backward()"


def test_weights_of_a_truncated_normal_distribution_change_nothing(script: Script, fit_json: Any) -> None:
    """In a script, run as a module and as a program, and in a function."""
    make = "def make(batch=8):\n    {}\n    return net, torch.zeros(batch, 64)"
    draw = "torch.nn.init.trunc_normal_(net.weight, std=0.02)"
    plain = fit_json(script(STEP))
    assert fit_json(script(draw, STEP)) == plain
    assert fit_json(script(draw, STEP), "--main") == plain
    named = fit_json(script(make.format("pass")) + ":make")
    assert fit_json(script(make.format(draw)) + ":make") == named


def test_endless_loop_on_a_value_is_refused_with_its_line(
    script: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = "while (x.abs() > 2).any():\n    x = torch.randn(8, 64)"
    line = refused(capsys, script(drawn, STEP), "--main")
    assert "train.py:6: a condition that was true 10,000 times is asked again" in line
    assert line.endswith("tensors have no values here: name a function, train.py:function")
    monkeypatch.setattr(scripts, "OPTIONS", replace(OPTIONS, number_reads=2_000))
    drawn = "def draw():\n    return torch.rand(()).item()\nwhile draw() < 0.5: pass"
    line = refused(capsys, script(drawn, STEP))
    assert "train.py:7: a number that was zero 2,000 times is read again" in line


def test_long_loop_may_read_a_value_in_each_step(script: Script, fit_json: Any) -> None:
    """Reads are counted by line, and known numbers are not counted."""
    lines = (
        "for step in range(2_000):",
        "    loss = (net(x) - x).square().mean()",
        "    if loss.isnan(): pass",
        "    assert loss.item() == 0",
        "    assert torch.tensor(step + 0.5).item() == step + 0.5",
    )
    assert fit_json(script(*lines, STEP))["batch"] == 8


LOOP = (
    "ids = torch.zeros(8, 64)",
    "for step in range(50):",
    "    with torch.no_grad(): ids = torch.cat([ids, net(ids[-8:])])",
    "    if (ids > 2).all():",
    "        break",
)
CAVEAT = "only of what ran"


@pytest.mark.parametrize(("lines", "more"), [(LOOP, []), ((*LOOP, STEP), ["--main"])])
def test_verdict_is_restricted_by_value_decisions(
    script: Script, capsys: pytest.CaptureFixture[str], fit_json: Any, lines: tuple[str, ...], more: list[str]
) -> None:
    """Inference and training; in the verdict, in a line below, in JSON, and in the exit code."""
    name = script(*lines)
    free = fit_json(name, *more)
    assert (free["fits"], free["caveats"][0]["label"]) == (None, CAVEAT)
    reason = (
        "train.py:9 decides by values of tensors, unknown before the run: conditions are taken to be true, "
        "and numbers zero"
    )
    assert free["caveats"] == [{"label": CAVEAT, "reason": reason}]
    assert free["warnings"][0] == f"{CAVEAT}: {reason}"
    capsys.readouterr()
    assert call(["fit", name, *more, "--limit", "1GiB", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is None
    assert call(["fit", name, *more, "--limit", "1GiB"]) == 1
    verdict, warning, *rest = capsys.readouterr().out.splitlines()
    assert verdict.startswith("not known whether it fits in 1 GiB: ")
    assert verdict.endswith(f"({CAVEAT})")
    assert warning == f"warning: {CAVEAT}: {reason}"
    assert not any("yes" in line or "it fits" in line for line in rest)
    assert any("largest batch" in line and line.rstrip().endswith(f"({CAVEAT})") for line in rest)
    assert call(["fit", name, *more, "--limit", "1MiB", "--no-remedies"]) == 1
    assert capsys.readouterr().out.splitlines()[0].endswith(f"short ({CAVEAT})")


def test_sweep_of_a_program_with_value_decisions_is_restricted(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    name = script(*LOOP)
    assert call(["fit", name, "--batch", "4,8", "--limit", "24GiB"]) == 1
    verdict, warning, *rest = capsys.readouterr().out.splitlines()
    assert verdict == f"not known whether 2 of 2 sizes fit in 24 GiB ({CAVEAT})"
    assert warning.startswith(f"warning: {CAVEAT}: train.py:9 decides")
    assert sum(" ? " in line for line in rest) == 2


def test_printed_values_leave_the_verdict_unrestricted(script: Script, fit_json: Any) -> None:
    look = "y = net(x)\nprint(y.mean().item())\nif torch.isnan(y).any(): raise ValueError"
    answer = fit_json(script(look, "y.sum().backward()"), "--limit", "24GiB")
    assert (answer["fits"], answer["caveats"]) == (True, [])


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (("if loss.item() < best:", "    kept = net.state_dict()"), "train.py:9"),
        (("total = loss.item()", "print(total)", "if total < best: kept = 1"), "train.py:11"),
        (("while best > 0.5:", "    best = loss.item()"), "train.py:9"),
        (("print(loss.item())", "if loss is None: kept = 1"), None),
    ],
)
def test_decision_after_the_first_backward_gives_a_note(
    script: Script, fit_json: Any, lines: tuple[str, ...], named: str | None
) -> None:
    """The step that was tried is as the others, so that the verdict stays."""
    name = script("best = 1.0", "loss = net(x).sum()", "loss.backward()", *lines)
    answer = fit_json(name, "--limit", "24GiB", "--no-largest-batch")
    assert (answer["fits"], answer["caveats"]) == (True, [])
    notes = [text for text in answer["warnings"] if "behind the first backward" in text]
    assert [text.partition(" ")[0] for text in notes] == [named] * bool(named)


def test_failure_after_a_value_decision_names_the_line(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, script("if (x > 3).any():", "    raise ValueError('too large')", STEP))
    assert "train.py:7: ValueError: too large (behind train.py:6, which decides by a value: " in line
    line = refused(capsys, script("import sys", "if (x > 3).any(): sys.exit('too large')", STEP))
    assert "train.py:7 ends itself (too large)" in line
    assert "(behind train.py:7, which decides by a value: conditions are taken to be true" in line


@pytest.mark.parametrize(
    "lines", ["k = (x > 2).sum().item()", "k = x.long().tolist()", "k = x[x > 2]", "k = x.numpy()"]
)
def test_values_used_as_sizes_are_refused_with_their_line(
    script: Script, capsys: pytest.CaptureFixture[str], lines: str
) -> None:
    line = refused(capsys, script(lines, STEP))
    assert line.startswith("mempool: train.py:6: ")
    assert "tensors have no values here" in line


def test_function_reading_a_value_names_the_line(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    make = "def make():\n    while (x > 2).any(): pass\n    return net, x"
    line = refused(capsys, script(make) + ":make", code=2)
    assert "a value is read (.item(), a condition) at train.py:7: what follows depends on data" in line
    make = "def make():\n    raise ValueError('no')"
    line = refused(capsys, script(make) + ":make", code=2)
    assert line == "mempool: train.py:make fails while making make at train.py:7: ValueError: no"


CLOSURE = "def loss():\n    sgd.zero_grad()\n    out = net(x).sum()\n    out.backward()\n    return out"


def test_a_step_with_a_closure_is_the_step_without(script: Script, fit_json: Any) -> None:
    plain = fit_json(script(STEP))
    assert fit_json(script(CLOSURE, "sgd.step(loss)")) == plain
    assert fit_json(script(CLOSURE, "sgd.step(closure=loss)")) == plain
    alone = "def alone():\n    return net(x).sum()\nsgd.step(alone)\nraise AssertionError('stepped')"
    assert fit_json(script(alone)) == plain


def test_closure_optimizer_is_refused_and_a_named_optimizer_used(
    script: Script, capsys: pytest.CaptureFixture[str], fit_json: Any
) -> None:
    name = script("own = torch.optim.LBFGS(net.parameters())", CLOSURE, "own.step(loss)")
    line = refused(capsys, name, code=2)
    assert "try the step with another one, such as SGD; LBFGS holds up to 2 * history_size more" in line
    assert fit_json(name, "--optimizer", "sgd")["peak_bytes"] == fit_json(script(STEP))["peak_bytes"]


POOL = "import concurrent.futures as c\nc.ThreadPoolExecutor().submit(train).{}()"


@pytest.mark.parametrize(
    ("train", "start"),
    [
        (STEP, "t = threading.Thread(target=train)\nt.start()\nt.join()"),
        (STEP, POOL.format("result")),
        (STEP, POOL.format("exception") + "\nraise ValueError('nothing came')"),
        (STEP, "t = threading.Thread(target=train)\nt.start()\nt.join()\n" + STEP),
        ("sgd.step()", "t = threading.Thread(target=train)\nt.start()\nt.join()"),
    ],
)
def test_training_in_another_thread_is_refused(
    script: Script, capsys: pytest.CaptureFixture[str], train: str, start: str
) -> None:
    """The actions of the main thread after that have no effect."""
    name = script(f"def train():\n    {train}", start, before="import threading")
    assert refused(capsys, name, "--main") == (
        "mempool: train.py:7: it trains in another thread, where it is not seen: "
        "name a function, train.py:function"
    )


def test_inference_in_another_thread_is_ignored(script: Script, fit_json: Any) -> None:
    other = "def other():\n    with torch.no_grad(): torch.nn.Identity()(net(x))"
    start = "t = threading.Thread(target=other)\nt.start()\nt.join()"
    name = script(other, start, STEP, before="import threading")
    assert fit_json(name) == fit_json(script(STEP))


def test_torchscript_is_estimated_eagerly(script: Script, fit_json: Any) -> None:
    plain = fit_json(script(STEP))
    ways = ("script(net)", "trace(net, x)", "trace(func=net, example_inputs=x)", "script(obj=net)")
    kept = torch.jit.script
    for way in ways:
        assert fit_json(script(f"net = torch.jit.{way}", STEP)) == plain
    assert torch.jit.script is kept


COMPILERS = {
    "torch.compile": "net = torch.compile(net, mode='max-autotune')",
    "Module.compile": "net.compile()",
}


@pytest.mark.parametrize("name", COMPILERS)
def test_compiled_model_of_a_script_is_tried_eagerly_with_a_note(
    script: Script, fit_json: Any, name: str
) -> None:
    plain, kept = fit_json(script("", STEP)), (torch.compile, torch.nn.Module.compile)
    found = fit_json(script(COMPILERS[name], STEP))
    [note] = set(found.pop("warnings")) - set(plain.pop("warnings"))
    assert note.startswith(f"{name} at train.py:6 is left out: the result is of the eager model")
    assert found == plain
    assert (torch.compile, torch.nn.Module.compile) == kept


@pytest.mark.parametrize("made", ["torch.compile(net)", "torch.nn.Sequential(torch.compile(net))"])
def test_compiled_model_of_a_function_is_tried_eagerly_with_a_note(
    script: Script, fit_json: Any, made: str
) -> None:
    name = script("def make():\n    return torch.nn.Sequential(torch.nn.Linear(64, 64)), x")
    plain = fit_json(f"{name}:make")
    assert not any("torch.compile" in text for text in plain["warnings"])
    name = script(f"def make():\n    net = torch.nn.Linear(64, 64)\n    return {made}, x")
    found = fit_json(f"{name}:make")
    assert "the model is compiled by torch.compile: the result is of the eager" in " ".join(found["warnings"])
    assert found["peak_bytes"] == plain["peak_bytes"]


def test_compilation_inside_a_library_gives_no_note(script: Script, fit_json: Any, tmp_path: Path) -> None:
    """But where it compiles the script's model, with the line of the script."""
    library = tmp_path / "site-packages" / "compiling.py"
    library.parent.mkdir()
    library.write_text(
        "import torch\n@torch.compile\ndef f(x): return x\ndef prepare(n): return torch.compile(n)"
    )
    path = f"sys.path.insert(0, {str(library.parent)!r})"  # absolute: Python caches finders by name
    before = f"import sys; {path}; sys.modules.pop('compiling', 0); import compiling"
    alone = fit_json(script(STEP, before=before))["warnings"]
    assert not any("left out" in text for text in alone)
    prepared = fit_json(script("net = compiling.prepare(net)", STEP, before=before))["warnings"]
    assert any("torch.compile at train.py:6 is left out" in text for text in prepared)


@pytest.mark.parametrize("made", ["torch.jit.script(net)", "torch.nn.Sequential(torch.jit.script(net))"])
def test_script_module_of_a_function_is_refused(
    script: Script, capsys: pytest.CaptureFixture[str], made: str
) -> None:
    name = script(f"def make():\n    return {made}, x")
    line = refused(capsys, f"{name}:make", code=2)
    assert line == "mempool: a ScriptModule cannot be looked into: give the module that it was made of"
