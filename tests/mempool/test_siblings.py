"""Foreign packages of the same name are recognised before they are imported."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from mempool import versions

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["traces", "solvers"])
@pytest.mark.parametrize("package", [True, False], ids=["package", "module"])
def test_a_foreign_package_that_hides_ours_is_named(tmp_path: Path, name: str, package: bool) -> None:
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


def test_an_untested_version_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_warned", set())
    monkeypatch.setitem(versions.TESTED, "numpy", ((1, 0), (1, 1)))
    with pytest.warns(RuntimeWarning, match=r"tested with numpy 1.0 to 1.1, not with"):
        versions.warn_if_untested("numpy")
    versions.warn_if_untested("numpy")
