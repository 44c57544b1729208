"""The two packages, the two kinds of semaphores, and how to wait for something."""

from __future__ import annotations

import asyncio
import functools
import importlib
import itertools
import time
from collections.abc import Awaitable
from typing import Any, Callable

import pytest
import redis

OURS = "leasehold.compat.asyncio_advanced_semaphores"
THEIRS = "asyncio_advanced_semaphores"
TIME_LIMIT = 20.0  # seconds; a test that waits for longer has failed

_numbers = itertools.count(1)


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a test in an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(*arguments, **named), 2 * TIME_LIMIT)

        asyncio.run(bounded())

    return run


async def until(condition: Callable[[], Any]) -> None:
    """Waits until the condition holds. It may be a coroutine function."""
    ends_at = time.monotonic() + TIME_LIMIT
    while True:
        holds = condition()
        if asyncio.iscoroutine(holds):
            holds = await holds
        if holds:
            return
        assert time.monotonic() < ends_at, "it never came true"
        await asyncio.sleep(0.005)


class Subject:
    """One package, and one kind of semaphore in it."""

    def __init__(self, package: str, kind: str, url: str) -> None:
        self.package = package
        self.kind = kind
        self.url = url
        self.module: Any = importlib.import_module(package)
        self.name = f"compat-{next(_numbers)}-{time.time_ns()}"
        self.redis: redis.Redis | None = redis.Redis.from_url(url) if kind == "redis" else None

    @property
    def type(self) -> Any:
        return getattr(self.module, "RedisSemaphore" if self.redis else "MemorySemaphore")

    def make(self, value: int = 1, **settings: Any) -> Any:
        settings.setdefault("name", self.name)
        if self.redis:
            settings.setdefault("config", self.config())
        return self.type(value=value, **settings)

    def config(self) -> Any:
        return self.module.RedisConfig(url=self.url)

    async def stats(self, **query: Any) -> Any:
        if self.redis:
            query["config"] = self.config()
        return await self.type.get_acquired_stats(**query)

    async def held(self, name: str | None = None) -> int:
        name = name or self.name
        stats = await self.stats(names=[name])
        return int(stats[name].acquired_slots) if name in stats else 0

    def queued(self, semaphore: Any) -> int:
        """How many wait, without asking the package."""
        if self.redis:
            waiting: Any = self.redis.zcard(f"adv-sem:semaphore_waiting:{semaphore.name}")
            return int(waiting)
        raise NotImplementedError("tasks in one loop wait as soon as they have run")

    async def start_waiting(self, semaphore: Any, waiter: Awaitable[Any]) -> asyncio.Future[Any]:
        """Starts a task, and returns when it stands in the queue."""
        before = self.queued(semaphore) if self.redis else 0
        task = asyncio.ensure_future(waiter)
        if self.redis:
            await until(lambda: task.done() or self.queued(semaphore) > before)
        else:
            for _ in range(5):
                await asyncio.sleep(0)
        assert not task.done(), "it did not have to wait"
        return task


def _subjects(*kinds: str) -> pytest.MarkDecorator:
    both = [(package, kind) for kind in kinds for package in (OURS, THEIRS)]
    return pytest.mark.parametrize(
        ("package", "kind"),
        both,
        ids=[f"{'ours' if package == OURS else 'theirs'}-{kind}" for package, kind in both],
    )


each_kind = _subjects("memory", "redis")
on_redis = _subjects("redis")
in_memory = _subjects("memory")
