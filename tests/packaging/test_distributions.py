"""Contents of the source distribution and of the wheel built from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("mempool", "solvers", "traces")
#: Tracked files that are not part of the source distribution.
NOT_IN_SDIST = (".ci", ".github", ".pre-commit-config.yaml", ".gitignore")

pytestmark = pytest.mark.packaging


def run(*command: str, cwd: Path, **environment: str) -> str:
    everything = os.environ | environment
    done = subprocess.run(
        command, cwd=cwd, env=everything, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """Return the tracked files of the repository."""
    names = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    return {name for name in names if name and (ROOT / name).exists()}


@pytest.fixture(scope="module")
def built(tracked: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the source distribution and the wheel, built here unless given."""
    if given := os.environ.get("MEMPOOL_DISTRIBUTIONS"):
        return Path(given)
    folder = tmp_path_factory.mktemp("distributions")
    for name in tracked:
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "source" / name)
    run(sys.executable, "-m", "build", "--outdir", str(folder), cwd=folder / "source")
    return folder


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def test_the_source_distribution_holds_the_repository(built: Path, tracked: set[str]) -> None:
    """The archive has native sources, tests and docs, and no other files."""
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    wanted = {name for name in tracked if name.split("/")[0] not in NOT_IN_SDIST} | {"PKG-INFO"}
    assert names == wanted


def test_the_wheel_holds_the_packages_and_nothing_else(built: Path, tracked: set[str]) -> None:
    """The wheel has Python files, stubs, markers, native modules, two libraries and the licence only."""
    with zipfile.ZipFile(only(built, "*.whl")) as archive:
        names = set(archive.namelist())
    ours = {name for name in tracked if name.split("/")[0] in PACKAGES}
    inside = {name for name in ours if "native" not in PurePosixPath(name).parts}
    inside |= {f"{package}/_core{sysconfig.get_config_var('EXT_SUFFIX')}" for package in PACKAGES}
    inside |= {f"mempool/rehearsal/libmempool_{name}.so" for name in ("standin", "files")}
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - info == inside
    files = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert {name.split("/", 1)[1] for name in info} == files


def test_the_wheel_from_the_source_distribution_works(built: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target))
    run(*pip, str(only(built, "*.whl")), cwd=tmp_path)
    code = (
        "import mempool, solvers, traces\n"
        "from traces import workload\n"
        "buffers = workload.buffers(100)\n"
        "solvers.check(solvers.solve(buffers), buffers)\n"
        "with mempool.Pool() as pool:\n"
        "    pool.free(pool.allocate(4096))\n"
        "print(mempool.__file__)\n"
    )
    # Without `site`, an editable install of this checkout does not come first.
    path = os.pathsep.join([str(target), sysconfig.get_path("purelib")])
    where = run(sys.executable, "-S", "-W", "error", "-c", code, cwd=tmp_path, PYTHONPATH=path)
    assert Path(where.strip()).is_relative_to(target)
    assert (target / "bin" / "mempool").exists()
