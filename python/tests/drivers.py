"""One test body for asyncio and for threads.

A body is a coroutine function that takes a driver. Under `Threads` it never suspends: `do` blocks the thread instead.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Awaitable, Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Callable, TypeVar

import leasehold

T = TypeVar("T")

#: Longer than anything takes here, also on a busy machine.
TIME_LIMIT = 20.0


class Driver:
    """How a body is run."""

    name = ""

    def run(self, body: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        raise NotImplementedError

    async def do(self, pending: leasehold.Pending[T]) -> T:
        raise NotImplementedError

    def start(self, pending: leasehold.Pending[T]) -> Any:
        raise NotImplementedError

    async def result(self, started: Any) -> Any:
        raise NotImplementedError

    def hold(self, context: leasehold.HeldContext[T]) -> AbstractAsyncContextManager[T]:
        raise NotImplementedError

    async def pause(self) -> None:
        raise NotImplementedError

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Waits until this is true."""
        deadline = time.monotonic() + TIME_LIMIT
        while not await condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            await self.pause()

    async def until_waiting(self, semaphore: leasehold.Semaphore, count: int) -> None:
        async def waiting() -> bool:
            return (await self.do(semaphore.stats())).waiting == count

        await self.until(waiting)

    async def until_free(self, semaphore: leasehold.Semaphore) -> None:
        """Waits until there are no holders and no waiters."""

        async def free() -> bool:
            stats = await self.do(semaphore.stats())
            return (stats.held, stats.waiting) == (0, 0)

        await self.until(free)


class Asyncio(Driver):
    name = "asyncio"

    def run(self, body: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run(body(self))

    async def do(self, pending: leasehold.Pending[T]) -> T:
        return await pending

    def start(self, pending: leasehold.Pending[T]) -> Any:
        return asyncio.ensure_future(pending)

    async def result(self, started: Any) -> Any:
        return await asyncio.wait_for(started, TIME_LIMIT)

    def hold(self, context: leasehold.HeldContext[T]) -> AbstractAsyncContextManager[T]:
        return context

    async def pause(self) -> None:
        await asyncio.sleep(0.002)


class _InThread(AbstractAsyncContextManager[T]):
    def __init__(self, context: leasehold.HeldContext[T]) -> None:
        self.context = context

    async def __aenter__(self) -> T:
        return self.context.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.context.__exit__(kind, exception, traceback)


class Threads(Driver):
    name = "threads"

    def run(self, body: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        try:
            body(self).send(None)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        raise AssertionError("a body that runs in threads must not suspend")

    async def do(self, pending: leasehold.Pending[T]) -> T:
        return pending.wait()

    def start(self, pending: leasehold.Pending[T]) -> Any:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(pending.wait())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    async def result(self, started: Any) -> Any:
        return started.result(TIME_LIMIT)

    def hold(self, context: leasehold.HeldContext[T]) -> AbstractAsyncContextManager[T]:
        return _InThread(context)

    async def pause(self) -> None:
        time.sleep(0.002)


DRIVERS: dict[str, type[Driver]] = {"asyncio": Asyncio, "threads": Threads}
