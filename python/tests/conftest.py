"""Stores, and the two ways of using them: asyncio and threads."""

from __future__ import annotations

import os
import pathlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

import leasehold
from tests.drivers import DRIVERS, Driver

STORES = ["memory", "sqlite", "redis"]


class RedisServer:
    """A redis-server of this test run."""

    def __init__(self, directory: pathlib.Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.directory = directory
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        program = shutil.which("redis-server")
        assert program is not None, "redis-server is not installed: apt-get install redis-server"
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            [program, *arguments],
            cwd=self.directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "redis-server has ended"
            try:
                if self.command("PING") == b"+PONG\r\n":
                    return
            except OSError:
                time.sleep(0.01)
        raise AssertionError("redis-server does not answer")

    def command(self, *words: str) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall((" ".join(words) + "\r\n").encode())
            return connection.recv(65536)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that is shared by all tests of this worker. Each test has names of its own."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def own_redis(tmp_path: pathlib.Path) -> Iterator[RedisServer]:
    """A server that the test may stop."""
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest) -> str:
    """The URL of each store in turn. Those on Redis and in a file are empty."""
    return url_of(request.param, request)


def url_of(store: str, request: pytest.FixtureRequest) -> str:
    if store == "memory":
        return "memory:"
    if store == "sqlite":
        path: pathlib.Path = request.getfixturevalue("tmp_path")
        return f"sqlite:{path / 'store'}"
    server: RedisServer = request.getfixturevalue("redis_server")
    server.command("FLUSHALL")
    return server.url


@pytest.fixture(params=["sqlite", "redis"])
def shared_url(request: pytest.FixtureRequest) -> str:
    """The URL of each store that several processes share."""
    return url_of(request.param, request)


@pytest.fixture
def client(url: str) -> Iterator[leasehold.Client]:
    client = leasehold.Client(url)
    yield client
    client.close().wait()


@pytest.fixture(params=sorted(DRIVERS))
def driver(request: pytest.FixtureRequest) -> Driver:
    return DRIVERS[request.param]()


@pytest.fixture(autouse=True)
def _no_store_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEASEHOLD_STORE", raising=False)
    assert os.environ.get("LEASEHOLD_STORE") is None
