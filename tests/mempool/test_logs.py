"""Log output of the pool while a program runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

SAYS = """
import logging, sys
from mempool.logs import log
{setup}
log.info("no news")
log.warning("so many: %d", 3)
try:
    1 / 0
except ZeroDivisionError:
    log.error("failed", exc_info=True)
"""


def said(setup: str) -> list[str]:
    command = [sys.executable, "-c", SAYS.format(setup=setup)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def test_warnings_without_logging_setup_name_mempool() -> None:
    lines = said("")
    assert lines[:3] == ["mempool: so many: 3", "mempool: failed", "Traceback (most recent call last):"]
    assert lines[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("logger", ["", "mempool"])
def test_program_with_logging_setup_gets_each_record_once_in_its_format(logger: str) -> None:
    handler = "handler = logging.StreamHandler(); handler.setFormatter(logging.Formatter('<%(message)s>'))\n"
    lines = said(f"{handler}logging.getLogger('{logger}').addHandler(handler)")
    assert lines[:2] == ["<so many: 3>", "<failed>"]
    assert not any(line.startswith("mempool:") for line in lines)


@pytest.mark.parametrize(
    "setup", ["logging.getLogger('mempool').setLevel(logging.CRITICAL)", "sys.stderr = None"]
)
def test_silenced_logger_prints_nothing(setup: str) -> None:
    assert said(setup) == []
