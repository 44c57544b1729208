"""A task that is cancelled at any point leaves nothing held, and no waiter in the queue."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import leasehold
from tests.conftest import RedisServer
from tests.drivers import TIME_LIMIT, Asyncio, Threads

do = Asyncio()


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[leasehold.Client]:
    client = await leasehold.Client(url).open()
    yield client
    await client.close()


async def cancelled(task: asyncio.Task[object]) -> None:
    """Cancels a task, and waits until it has ended by that."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, TIME_LIMIT)


async def hold_forever(context: leasehold.HeldContext[leasehold.Permit], inside: asyncio.Event) -> None:
    async with context:
        inside.set()
        await asyncio.Event().wait()


# Queued.


@pytest.mark.parametrize("way", ["acquire", "block"])
def test_a_waiter_leaves_the_queue(url: str, way: str) -> None:
    async def main() -> None:
        async with opened(url) as client:
            api = client.semaphore("api", 1)
            held = await api.acquire()
            waiting: asyncio.Task[object]
            if way == "acquire":
                waiting = asyncio.ensure_future(api.acquire())
            else:
                waiting = asyncio.ensure_future(hold_forever(api.guard(), asyncio.Event()))
            await do.until_waiting(api, 1)
            await cancelled(waiting)
            await do.until_waiting(api, 0)
            await held.release()
            await do.until_free(api)

    asyncio.run(main())


def test_a_waiter_that_was_cancelled_is_not_granted(url: str) -> None:
    async def main() -> None:
        async with opened(url) as client:
            api = client.semaphore("api", 1)
            held = await api.acquire()
            first = asyncio.ensure_future(api.acquire())
            await do.until_waiting(api, 1)
            second = asyncio.ensure_future(api.acquire())
            await do.until_waiting(api, 2)
            await cancelled(first)
            await held.release()
            await (await asyncio.wait_for(second, TIME_LIMIT)).release()
            await do.until_free(api)

    asyncio.run(main())


def test_a_wait_with_a_limit_that_is_cancelled(url: str) -> None:
    async def main() -> None:
        async with opened(url) as client:
            api = client.semaphore("api", 1)
            held = await api.acquire()
            waiting = asyncio.ensure_future(api.acquire(within=60))
            await do.until_waiting(api, 1)
            await cancelled(waiting)
            await do.until_waiting(api, 0)
            await held.release()
            await do.until_free(api)

    asyncio.run(main())


# Granted, but not resumed.


def block_until(client: leasehold.Client, name: str, held: int) -> None:
    """Blocks the event loop until the store has granted what was queued."""

    def wait_until_granted() -> None:
        deadline = time.monotonic() + TIME_LIMIT
        while time.monotonic() < deadline:
            stats = client.stats([name]).wait()
            if stats and (stats[0].held, stats[0].waiting) == (held, 0):
                return
            time.sleep(0.002)
        raise AssertionError("it was not granted")

    failed: list[BaseException] = []

    def run() -> None:
        try:
            wait_until_granted()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed, failed


@pytest.mark.parametrize("way", ["acquire", "block", "lock"])
def test_granted_but_not_resumed(url: str, way: str) -> None:
    """The permit is granted while the event loop is blocked. The task is cancelled before it runs."""

    async def main() -> None:
        async with opened(url) as client:
            if way == "lock":
                lock = client.lock("key")
                guard = await lock.acquire()
                locking = asyncio.ensure_future(lock.acquire())
                await asyncio.sleep(0.1)
                thread = threading.Thread(target=guard.release().wait)
                thread.start()
                thread.join()
                time.sleep(0.3)  # the engine acquires it for the waiter, or not yet
                await cancelled(locking)

                async def unlocked() -> bool:
                    return not await client.locks.is_locked("key")

                await do.until(unlocked)
                return
            api = client.semaphore("api", 1)
            held = await api.acquire()
            waiting: asyncio.Task[object]
            inside = asyncio.Event()
            begun = api.acquire() if way == "acquire" else hold_forever(api.guard(), inside)
            waiting = asyncio.ensure_future(begun)
            await do.until_waiting(api, 1)
            # From here on the loop does not run: the release comes from another thread.
            thread = threading.Thread(target=held.release().wait)
            thread.start()
            thread.join()
            block_until(client, "api", held=1)
            assert not waiting.done()
            assert not inside.is_set()
            await cancelled(waiting)
            assert not inside.is_set()
            await do.until_free(api)

    asyncio.run(main())


def test_granted_and_resumed_but_cancelled_in_the_same_turn(url: str) -> None:
    """The asyncio future is done, and the task is scheduled, when it is cancelled."""

    async def main() -> None:
        async with opened(url) as client:
            api = client.semaphore("api", 1)
            for turns in range(20):
                held = await api.acquire()
                waiting = asyncio.ensure_future(api.acquire())
                await do.until_waiting(api, 1)
                await held.release()
                # Each number of turns of the loop is another moment on the way.
                for _ in range(turns % 5):
                    await asyncio.sleep(0)
                waiting.cancel()
                try:
                    permit = await waiting
                except asyncio.CancelledError:
                    pass
                else:
                    await permit.release()
                del waiting
                await do.until_free(api)

    asyncio.run(main())


def test_a_time_out_of_asyncio(url: str) -> None:
    async def main() -> None:
        async with opened(url) as client:
            api = client.semaphore("api", 1)
            held = await api.acquire()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(api.acquire(), 0.05)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(hold_forever(api.guard(), asyncio.Event()), 0.05)
            if sys.version_info >= (3, 11):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await api.acquire()
            await do.until_waiting(api, 0)
            await held.release()
            await do.until_free(api)

    asyncio.run(main())


# Outcomes that are not a grant.


@pytest.mark.parametrize("outcome", ["time-out", "close"])
def test_cancelled_just_after_it_failed(url: str, outcome: str) -> None:
    async def main() -> None:
        client = await leasehold.Client(url).open()
        api = client.semaphore("api", 1)
        held = await api.acquire()
        waiting = asyncio.ensure_future(api.acquire(within=1 if outcome == "time-out" else None))
        await do.until_waiting(api, 1)
        if outcome == "time-out":
            time.sleep(1.5)  # the loop does not run when the time is up
        else:
            thread = threading.Thread(target=client.close().wait)
            thread.start()
            thread.join()
        await cancelled(waiting)
        if outcome == "time-out":
            await held.release()
            await do.until_free(api)
            await client.close()
        elif url != "memory:":
            async with opened(url) as other:
                await do.until_free(other.semaphore("api", 1))

    asyncio.run(main())


@pytest.mark.parametrize("point", ["queued", "body", "exit", "enter"])
def test_cancelled_while_the_store_is_unreachable(own_redis: RedisServer, point: str) -> None:
    async def main() -> None:
        client = await leasehold.Client(own_redis.url, answer_timeout=0.5).open()
        api = client.semaphore("api", 1)
        inside = asyncio.Event()
        leave = asyncio.Event()

        async def block() -> None:
            async with api.guard():
                inside.set()
                await leave.wait()

        task = asyncio.ensure_future(block())
        await inside.wait()
        other: asyncio.Task[None] | None = None
        if point in ("queued", "enter"):
            other = asyncio.ensure_future(hold_forever(api.guard(), asyncio.Event()))
            if point == "queued":
                await do.until_waiting(api, 1)
        own_redis.stop()

        async def noticed() -> bool:
            return client.outage() is not None

        await do.until(noticed)
        if point == "enter":
            await asyncio.sleep(0)
        if other is not None:
            await cancelled(other)
        if point == "exit":
            leave.set()
            for _ in range(3):
                await asyncio.sleep(0)
            assert not task.done(), "it waits for the release"
        await cancelled(task)
        own_redis.start()
        async with opened(own_redis.url) as again:
            await do.until_free(again.semaphore("api", 1))
        await client.close()

    asyncio.run(main())


def test_a_release_that_fails_is_logged(own_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        client = await leasehold.Client(own_redis.url, answer_timeout=0.3).open()
        api = client.semaphore("api", 1)
        with pytest.raises(KeyError, match="own"):
            async with api.guard():
                own_redis.stop()
                raise KeyError("the body's own")
        # An unreachable store never looks like contention.
        with pytest.raises(leasehold.Unavailable, match="unreachable for") as raised:
            await client.semaphore("other", 1).acquire(within=0.2)
        assert isinstance(raised.value, ConnectionError)
        assert raised.value.silent_for is not None

    asyncio.run(main())
    assert any("release failed after the block was left" in record.message for record in caplog.records)


# Inside of a block, and when it is left.


def test_cancelled_in_the_body(url: str) -> None:
    async def main() -> None:
        async with opened(url) as client:
            api = client.semaphore("api", 1)
            inside = asyncio.Event()
            task = asyncio.ensure_future(hold_forever(api.guard(), inside))
            await inside.wait()
            assert (await api.stats()).held == 1
            await cancelled(task)
            await do.until_free(api)

    asyncio.run(main())


def test_cancelled_while_it_releases(url: str) -> None:
    """The release goes on in the background."""

    async def main() -> None:
        async with opened(url) as client:
            api = client.semaphore("api", 1)
            leave = asyncio.Event()

            async def block() -> None:
                async with api.guard():
                    await leave.wait()

            for turns in range(6):
                leave.clear()
                task = asyncio.ensure_future(block())

                async def inside() -> bool:
                    return (await api.stats()).held == 1

                await do.until(inside)
                leave.set()
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                await do.until_free(api)

    asyncio.run(main())


def test_a_release_that_is_cancelled_goes_on(url: str) -> None:
    async def main() -> None:
        async with opened(url) as client:
            api = client.semaphore("api", 1)
            permit = await api.acquire()
            release = asyncio.ensure_future(permit.release())
            await asyncio.sleep(0)
            release.cancel()
            await asyncio.wait([release])
            await do.until_free(api)
            # Even if it was never awaited.
            permit = await api.acquire()
            with pytest.warns(RuntimeWarning, match="Permit.release was never awaited"):
                permit.release()
            await do.until_free(api)

    asyncio.run(main())


def test_a_coroutine_that_is_closed(url: str) -> None:
    async def main() -> None:
        async with opened(url) as client:
            api = client.semaphore("api", 1)
            entered = asyncio.Event()
            inside = hold_forever(api.guard(), entered)
            # As a task that is destroyed while it waits.
            step = inside.__await__()
            while True:
                resumed = next(step)
                if entered.is_set():
                    break
                await asyncio.wait_for(asyncio.wait([resumed]), TIME_LIMIT)
            assert (await api.stats()).held == 1
            inside.close()
            await do.until_free(api)
            held_one = await api.acquire()
            queued = hold_forever(api.guard(), asyncio.Event())
            queued.__await__().send(None)
            await do.until_waiting(api, 1)
            queued.close()
            await do.until_waiting(api, 0)
            await held_one.release()

    asyncio.run(main())


def test_gather_and_groups(url: str) -> None:
    async def main() -> None:
        async with opened(url) as client:
            api = client.semaphore("api", 2)
            first, second = await asyncio.gather(api.acquire(), api.acquire())
            waiting = asyncio.gather(api.acquire(), api.acquire())
            await do.until_waiting(api, 2)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await do.until_waiting(api, 0)
            shielded = asyncio.ensure_future(api.acquire())
            await do.until_waiting(api, 1)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(shielded), 0.02)
            await first.release()
            await (await asyncio.wait_for(shielded, TIME_LIMIT)).release()
            if sys.version_info >= (3, 11):
                async with asyncio.TaskGroup() as group:
                    task = group.create_task(api.acquire())
                await task.result().release()
                with pytest.raises(BaseExceptionGroup):  # noqa: F821
                    async with asyncio.TaskGroup() as group:
                        group.create_task(hold_forever(api.guard(), asyncio.Event()))
                        group.create_task(hold_forever(api.guard(), asyncio.Event()))
                        await do.until_waiting(api, 1)
                        raise KeyError("the body's own")
            await second.release()
            await do.until_free(api)

    asyncio.run(main())


def test_while_the_store_is_being_opened(shared_url: str) -> None:
    async def main() -> None:
        for turns in range(8):
            client = leasehold.Client(shared_url)
            api = client.semaphore("api", 1)
            first = asyncio.ensure_future(api.acquire())
            second = asyncio.ensure_future(api.acquire())
            for _ in range(turns):
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first])
            if not first.cancelled():
                await first.result().release()
            # The task that opened the store was cancelled: the other one still gets its permit.
            await (await asyncio.wait_for(second, TIME_LIMIT)).release()
            del first
            await do.until_free(api)
            await client.close()

    asyncio.run(main())


def test_a_blocked_loop_while_it_opens_the_store(shared_url: str) -> None:
    """Another thread that needs the store drives the attempt."""

    async def main() -> None:
        client = leasehold.Client(shared_url)
        opening = asyncio.ensure_future(client.semaphore("api", 1).acquire())
        await asyncio.sleep(0)
        # From here on the loop does not run.
        stats = Threads().start(client.stats(["api"], unused=True))
        stats.result(TIME_LIMIT)
        await (await opening).release()
        await client.close()

    asyncio.run(main())


def test_a_loop_that_is_closed_while_it_opens_the_store(shared_url: str) -> None:
    client = leasehold.Client(shared_url)
    api = client.semaphore("api", 1)
    loop = asyncio.new_event_loop()
    opening = loop.create_task(api.acquire())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert not opening.done()
    Threads().start(client.open()).result(TIME_LIMIT)
    opening._log_destroy_pending = False  # type: ignore[attr-defined]
    del opening, loop
    gc.collect()
    Threads().run(lambda do: do.until_free(api))
    client.close().wait()


def test_a_client_that_is_closed_while_it_opens_the_store() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()

        async def main() -> None:
            client = leasehold.Client(f"redis://127.0.0.1:{silent.getsockname()[1]}", connect_timeout=60)
            waiting = [asyncio.ensure_future(client.semaphore("api", 1).acquire()) for _ in range(3)]
            await asyncio.sleep(0)
            await client.close()
            results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), TIME_LIMIT)
            assert [type(result) for result in results] == [leasehold.Closed] * 3
            with pytest.raises(leasehold.Closed):
                await client.open()

        asyncio.run(main())
