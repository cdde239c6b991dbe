"""Foreign packages of the same name are recognised before their import."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mempool
from mempool import settings


def test_sources_without_the_native_module_explain_the_failure(tmp_path: Path) -> None:
    """The current folder hides the installed package, for example in a clone."""
    ours = Path(mempool.__file__).parent
    shutil.copytree(ours, tmp_path / "mempool", ignore=shutil.ignore_patterns("_core*", "__pycache__"))
    # An editable install has a finder that knows where the native module is.
    code = (
        "import sys\n"
        "plain = ('BuiltinImporter', 'FrozenImporter', 'PathFinder')\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, '__name__', '') in plain]\n"
        "import mempool"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {tmp_path / 'mempool'} holds the sources")


@pytest.mark.parametrize("name", ["traces", "solvers"])
@pytest.mark.parametrize("package", [True, False], ids=["package", "module"])
def test_foreign_package_hiding_ours_is_named(tmp_path: Path, name: str, package: bool) -> None:
    if package:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    else:
        (tmp_path / f"{name}.py").write_text("")
    # An editable install has a finder that comes before the folders of sys.path; here they come first.
    code = (
        "import sys\n"
        "sys.meta_path.sort(key=lambda f: getattr(f, '__name__', '') != 'PathFinder')\n"
        "import mempool"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError")
    assert name in last
    assert str(tmp_path) in last


def test_untested_version_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_warned", set())
    monkeypatch.setitem(settings.TESTED, "numpy", ((1, 0), (1, 1)))
    with pytest.warns(RuntimeWarning, match=r"tested with numpy 1.0 to 1.1, not with"):
        settings.warn_if_untested("numpy")
    settings.warn_if_untested("numpy")


def test_oldest_pytorch_version_is_consistent() -> None:
    root, oldest = Path(__file__).parents[2], ".".join(map(str, settings.TESTED["torch"][0]))
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["torch"] == [f"torch>={oldest}"]
    assert f"| PyTorch | {oldest} |" in (root / "docs" / "versions.md").read_text()
