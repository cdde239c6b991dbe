"""Public programs have the same results under the pool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_tests_of_public_programs_come_out_as_without_a_pool(tmp_path: Path) -> None:
    """Parts of three packages' own suites, each test alike; what it costs is printed."""
    download = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path))
    if subprocess.run([*download, "iniconfig"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no package index can be reached")
    script = Path(__file__).with_name("public.py")
    done = subprocess.run([sys.executable, script, "--rounds", "1"], check=False, stdout=subprocess.PIPE)
    print(done.stdout.decode())
    assert done.returncode == 0
