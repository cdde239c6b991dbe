"""Decisions of a program by values of tensors: found at their line, and no others."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

from mempool.torch.estimate.program.value_decisions import FiniteNumbers, ValueReads
from mempool.torch.estimate.sources.scripts import fake_execution, keep_source

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("shared_isolation")

#: Lines with a decision at the one that ends with a comment "here".
DECIDES = {
    "if": "if x.any():  # here\n    y = 1",
    "compared": "if x.sum() > 3:  # here\n    y = 1",
    "truth of a number": "if x.sum():  # here\n    y = 1",
    "negated": "for k in range(3):\n    if not (x < 0).all():  # here\n        break",
    "while": "k = 0\nwhile x.sum() > 0 and k < 3:  # here\n    k += 1",
    "item": "if x.sum().item() < 0.5:  # here\n    y = 1",
    "several lines": "if (  # above\n    k == 0\n    and x.sum().item() < 0.5  # not here\n):\n    y = 1",
    "variable": "v = x.mean().item()\nw = 2 * v\nif w > 1:  # here\n    y = 1",
    "float": "v = float(x.mean())\nprint(v)\nif v > 1:  # here\n    y = 1",
    "unpacked": "v, w = float(x.mean()), 3\nif v > 1:  # here\n    y = 1",
    "list": "vs = []\nvs.append(x.mean().item())\nif sum(vs) / len(vs) > 1:  # here\n    y = 1",
    "object": "early = Early()\nearly(x.mean().item())\nif early.stop:  # here\n    y = 1",
    "method": "early = Early()\nearly.update(x.mean().item())\nif early.stop:  # here\n    y = 1",
    "attribute": "early = Early()\nearly.best = x.mean().item()\nif early.best > 1:  # here\n    y = 1",
    "function": "def mean():\n    v = x.mean().item()\n    return v\nif mean() > 1:  # here\n    y = 1",
    "two functions": "def mean():\n    return x.mean().item()\ndef half():\n    return mean() / 2\n"
    "h = half()\nif h > 1:  # here\n    y = 1",
    "condition of a function": "def done():\n    return bool((x > 0).all())\n"
    "for k in range(3):\n    if done():  # here\n        break",
    "inner function": "def run():\n    if x.any():  # here\n        return 1\nrun()",
    "conditional": "y = 1 if x.any() else 2  # here",
    "comprehension": "y = [v for v in x if v > 0]  # here",
    "generator": "if any(v > 0 for v in x):  # here\n    y = 1",
    "range": "for k in range(round(x.mean().item())):  # here\n    pass",
    "whole number": "n = int(x.mean().item() * 10)  # here",
    "maximum": "best = max(0.5, x.mean().item())\nif best > 0.6:  # here\n    y = 1",
    "list of values": "if x.tolist()[0] > 0.5:  # here\n    y = 1",
    "folder": "import os\nos.chdir('/')\nif x.any():  # here\n    y = 1",
    "match": "match x.mean().item():  # here\n    case 0.5:\n        y = 1",
    "walrus": "if (v := x.mean().item()) > 1:  # here\n    y = 1",
}
DECIDES_NOT = {
    "printed": "print(x.mean().item(), float(x.sum()), bool(x.any()))",
    "formatted": "y = f'{x.mean().item():.3f}'",
    "added up": "total = 0.0\nfor k in range(3):\n    total += x.mean().item()\nprint(total / 3)",
    "asserted": "assert (x == x).all()\nassert x.sum().item() < 1, 'no'",
    "beside": "v = x.mean().item()\nif k == 0:\n    y = v",
    "conditional": "v = x.mean().item() if k == 0 else 0.0",
    "is None": "v = x.mean().item()\nif v is not None:\n    print(v)",
    "known": "if torch.tensor(0.5).item() < 1:\n    y = 1",
    "shape": "if x.shape[0] > 3 and x.dim() == 1:\n    y = 1",
    "nan": "if torch.isnan(x).any():\n    raise ValueError",
    "infinity": "if not torch.isfinite(x).all():\n    raise ValueError",
    "nan or infinity": "if (x.isnan() | x.isinf()).any() or torch.logical_not(x.isfinite()).any():\n"
    "    raise ValueError",
    "finite number": "import math\nif not math.isfinite(x.mean().item()):\n    raise ValueError",
    "distribution": "torch.distributions.Normal(x, 1 + x.abs()).log_prob(x)",
    "returned": "def mean():\n    return x.mean().item()\nprint(mean())",
    "logged": "def log(v):\n    print(v)\nlog(x.mean().item())\nif log is None or k == 1:\n    y = 1",
}
HEAD = """
import torch
class Early:
    stop, best = False, 0.0
    def __call__(self, v):
        self.best = v
    update = __call__
k, x = 0, torch.rand(4)
"""


def recorded() -> list[str]:
    """Return the decisions by values of train.py."""
    found: list[str] = []
    code = compile(keep_source("train.py"), "train.py", "exec")
    with fake_execution(), ValueReads(found), FiniteNumbers():
        torch.distributions.Distribution.set_default_validate_args(False)
        exec(code, {"__name__": "__main__"})
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def decisions(tmp_path: Path, lines: str, *, inside: bool) -> tuple[list[str], list[str]]:
    """Return the lines that were found, and those that say so, at module level or inside a function."""
    text = HEAD + lines + "\n"
    if inside:
        text = HEAD + "def main():\n    global k, x\n" + textwrap.indent(lines, "    ") + "\nmain()\n"
    (tmp_path / "train.py").write_text(text)
    said = [
        f"train.py:{k}" for k, line in enumerate(text.splitlines(), 1) if line.endswith(("# here", "# above"))
    ]
    above = {
        f"train.py:{k}": f"train.py:{k + 1}"
        for k, line in enumerate(text.splitlines(), 1)
        if line.endswith("# above")
    }
    return recorded(), [above.get(one, one) for one in said]


@pytest.mark.parametrize("inside", [False, True], ids=["module", "function"])
@pytest.mark.parametrize("lines", DECIDES.values(), ids=DECIDES)
def test_decision_by_a_value_is_found_at_its_line(tmp_path: Path, lines: str, inside: bool) -> None:
    found, said = decisions(tmp_path, lines, inside=inside)
    assert found == said != []


@pytest.mark.parametrize("inside", [False, True], ids=["module", "function"])
@pytest.mark.parametrize("lines", DECIDES_NOT.values(), ids=DECIDES_NOT)
def test_value_without_effect_on_the_course_is_no_decision(tmp_path: Path, lines: str, inside: bool) -> None:
    assert decisions(tmp_path, lines, inside=inside)[0] == []


def test_decision_in_a_library_names_the_calling_line(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "deciding.py"
    library.parent.mkdir()
    library.write_text(
        "def f(x):\n    if x.any():\n        return 1\n    while x.all(): return 2\n    return 3\n"
    )
    path = f"sys.path.insert(0, {str(library.parent)!r})"  # absolute: Python caches finders by name
    lines = f"import sys\n{path}\nsys.modules.pop('deciding', 0)\nimport deciding"
    (tmp_path / "train.py").write_text(f"{HEAD}{lines}\ndeciding.f(x)\ndeciding.f(-x)\n")
    assert recorded() == ["train.py:13 (in deciding.py:2)"]
