"""The package and the kind of semaphore that a test is run with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import RedisServer

from .support import THEIRS, Subject


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url


@pytest.fixture
def subject(package: str, kind: str, request: pytest.FixtureRequest) -> Iterator[Subject]:
    """The package and kind that the test is run with. The original is skipped if it is not installed."""
    if package == THEIRS:
        pytest.importorskip(THEIRS)
    url = request.getfixturevalue("redis_url") if kind == "redis" else ""
    subject = Subject(package, kind, url)
    yield subject
    if subject.redis:
        subject.redis.close()
