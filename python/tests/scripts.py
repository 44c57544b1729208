"""Programs that tests run in processes of their own."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import leasehold

#: So that a program of a test finds the package that the test has.
PACKAGES = str(pathlib.Path(leasehold.__file__).parent.parent)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PACKAGES, "PYTHONUNBUFFERED": "1"}


def run(code: str, *arguments: str, timeout: float = 40) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end."""
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(),
    )


def succeed(code: str, *arguments: str, timeout: float = 40) -> str:
    """Runs a program that must succeed and print nothing to stderr. Returns what it prints."""
    done = run(code, *arguments, timeout=timeout)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


@contextlib.contextmanager
def started(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a program, and kills it in the end."""
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    """The next line that the program prints."""
    assert process.stdout is not None
    text = process.stdout.readline()
    if not text:
        assert process.stderr is not None
        raise AssertionError(f"it has ended: {process.stderr.read()}")
    return text.strip()
