"""Runs every program of README.md, and the examples that it shows."""

from __future__ import annotations

import concurrent.futures
import importlib
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import leasehold
from leasehold.compat import asyncio_advanced_semaphores
from tests.conftest import RedisServer

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text()
SERVER = "redis://localhost:6379"
TIME_LIMIT = 60.0  # seconds

# A heading, then whatever is not one, then a program; with the file that it shows, if it does.
BLOCK = re.compile(r"(?:<!-- (?P<file>\S+) -->\n\n)?```python\n(?P<program>.*?)\n```", re.S)


def blocks() -> list[tuple[str, str | None, str]]:
    found = []
    for match in BLOCK.finditer(README):
        heading = re.findall(r"^## (.*)$", README[: match.start()], re.M)[-1]
        found.append((heading, match["file"], match["program"]))
    return found


PROGRAMS = [(heading, program) for heading, file, program in blocks() if file is None]
SHOWN = [(file, program) for _, file, program in blocks() if file is not None]


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url


def run(program: list[str], store: str = "memory:") -> str:
    environment = {**os.environ, "LEASEHOLD_STORE": store}
    done = subprocess.run(program, capture_output=True, text=True, timeout=TIME_LIMIT, env=environment, cwd=EXAMPLES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(("heading", "program"), PROGRAMS, ids=[heading for heading, _ in PROGRAMS])
def test_program(heading: str, program: str, redis_url: str) -> None:
    output = run([sys.executable, "-W", "error", "-c", program.replace(SERVER, redis_url)])
    # Each of them prints what it does, so that a program that did nothing is noticed.
    assert output, heading


@pytest.mark.parametrize(("file", "program"), SHOWN, ids=[file for file, _ in SHOWN])
def test_the_examples_are_shown_as_they_are(file: str, program: str) -> None:
    assert program == (ROOT / file).read_text().rstrip()


def test_every_example_is_shown() -> None:
    files = {f"examples/{path.name}" for path in EXAMPLES.glob("*.py")}
    assert {file for file, _ in SHOWN} == files


def test_the_differences_are_those_of_the_module() -> None:
    text = inspect.getdoc(asyncio_advanced_semaphores)
    assert text is not None
    items = text[text.index("\n- ") :].replace("\n  ", " ").strip()
    assert items in README


def test_the_order_of_the_first_example() -> None:
    lines = run([sys.executable, "-c", PROGRAMS[0][1]]).splitlines()
    assert [line.split()[:2] for line in lines] == [["call", str(number)] for number in range(6)]
    fences = [int(line.split()[-1]) for line in lines]
    assert fences == sorted(set(fences))


def test_the_place_in_the_queue() -> None:
    program = next(program for heading, program in PROGRAMS if heading == "Limits")
    assert "waiters ahead: 0" in run([sys.executable, "-c", program]).splitlines()


def test_llm_calls(redis_url: str) -> None:
    output = run([sys.executable, "llm_calls.py"], redis_url)
    assert output == "12 answers; PROMPT 0\n"


def test_pytest_example() -> None:
    output = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_with_memory.py"])
    assert "2 passed" in output


@contextmanager
def process(*program: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program that runs until the end of the block, and has ended then."""
    child = subprocess.Popen([sys.executable, "-m", *program], cwd=EXAMPLES, env={**os.environ, **environment})
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(TIME_LIMIT)
        finally:
            child.kill()
            child.wait()


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=TIME_LIMIT) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_fastapi(redis_url: str) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = ("uvicorn", "fastapi_app:app", "--port", str(port), "--workers", "2", "--log-level", "warning")
    with process(*server, LEASEHOLD_STORE=redis_url) as child:
        ends_at = time.monotonic() + TIME_LIMIT
        while True:
            try:
                get(f"http://127.0.0.1:{port}/openapi.json")
                break
            except urllib.error.URLError:
                assert child.poll() is None
                assert time.monotonic() < ends_at
                time.sleep(0.05)
        begun = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(6) as threads:
            urls = [f"http://127.0.0.1:{port}/reports/{number}" for number in range(6)]
            answers = list(threads.map(get, urls))
        # Six reports of 0.2 s, two at a time.
        assert time.monotonic() - begun >= 0.6
        assert [status for status, _ in answers] == [200] * 6
        assert len({answer["fence"] for _, answer in answers}) == 6

        with leasehold.Client(redis_url) as client:
            reports = client.semaphore("reports", 2)
            with reports.guard(), reports.guard():
                status, _ = get(f"http://127.0.0.1:{port}/reports/7")
                assert status == 503
            assert get(f"http://127.0.0.1:{port}/reports/8")[0] == 200


def test_celery(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("celery")
    monkeypatch.setenv("BROKER", redis_url)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    worker = ("celery", "--app", "celery_app", "worker", "--pool", "prefork", "--concurrency", "4")
    # The parent has a client of its own, with a connection, when it sends the tasks.
    celery_app: Any = importlib.import_module("celery_app")
    celery_app.client.open().wait()
    with process(*worker, "--loglevel", "WARNING", "--without-gossip", BROKER=redis_url):
        results = [celery_app.train.delay(job) for job in range(8)]
        done = [result.get(timeout=TIME_LIMIT) for result in results]
    assert {slot for slot, _, _ in done} == {1, 2}
    for slot in (1, 2):
        turns = sorted((begun, ended) for number, begun, ended in done if number == slot)
        for (_, ended), (begun, _) in zip(turns, turns[1:]):
            assert ended <= begun, "two jobs had the same GPU at once"
    celery_app.client.close().wait()
