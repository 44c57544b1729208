"""A body is cancelled when what it holds is lost, and the block raises Lost."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

import leasehold
from tests.drivers import TIME_LIMIT, Asyncio

do = Asyncio()


def cancelling() -> int:
    task = asyncio.current_task()
    assert task is not None
    if sys.version_info >= (3, 11):
        return task.cancelling()
    return 0


async def forever() -> None:
    await asyncio.Event().wait()


def test_a_body_is_cancelled_when_the_ttl_ends(client: leasehold.Client) -> None:
    async def main() -> None:
        api = client.semaphore("api", 1, ttl=0.2)
        seen = False
        with pytest.raises(leasehold.Lost, match="TTL ended") as raised:
            async with api.guard():
                try:
                    await forever()
                except asyncio.CancelledError:
                    seen = True
                    raise
        assert seen
        assert raised.value.reason == "ttl-ended"
        assert isinstance(raised.value.__cause__, asyncio.CancelledError)
        assert cancelling() == 0
        await asyncio.sleep(0)
        await do.until_free(api)
        with pytest.raises(leasehold.Lost):
            async with api:
                await forever()

    asyncio.run(main())


@pytest.mark.parametrize("way", ["release", "close", "lock", "lease"])
def test_a_body_is_cancelled_by_every_kind_of_loss(client: leasehold.Client, way: str) -> None:
    async def main() -> None:
        context: leasehold.HeldContext[Any]
        if way == "lock":
            context = client.lock("key", lease=0.6).guard()
        elif way == "lease":
            context = client.pool("pool", 1, lease=1).guard("worker")
        else:
            context = client.semaphore("api", 1).guard()
        inside: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def body() -> None:
            async with context as held:
                inside.set_result(held)
                await forever()

        task = asyncio.ensure_future(body())
        held = await inside
        if way == "release":
            assert await client.semaphore("api", 1).release(held.id)
        elif way == "lock":
            assert await client.locks.release(held.id)
        elif way == "lease":
            assert await client.pool("pool", 1, lease=1).release("worker")
        else:
            await client.close()
        with pytest.raises(leasehold.Lost) as raised:
            await asyncio.wait_for(task, TIME_LIMIT)
        expected = {"release": "released", "close": "closed", "lock": "released", "lease": "released"}
        assert raised.value.reason == expected[way]

    asyncio.run(main())


def test_a_body_is_not_cancelled_if_that_is_disabled(client: leasehold.Client) -> None:
    async def main() -> None:
        api = client.semaphore("api", 1, ttl=0.2)
        async with api.guard(cancel_on_loss=False) as permit:
            assert await permit.lost() == "ttl-ended"
            await asyncio.sleep(0.05)

    asyncio.run(main())


def test_a_foreign_cancellation_stays_one(client: leasehold.Client) -> None:
    async def main() -> None:
        api = client.semaphore("api", 1, ttl=60)
        inside = asyncio.Event()

        async def body() -> None:
            async with api.guard():
                inside.set()
                await forever()

        task = asyncio.ensure_future(body())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await do.until_free(api)

    asyncio.run(main())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before 3.11 the first cancellation wins")
def test_a_foreign_cancellation_at_the_same_time_wins(client: leasehold.Client) -> None:
    async def main() -> None:
        api = client.semaphore("api", 1)
        inside: asyncio.Future[leasehold.Permit] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()

        async def body() -> None:
            async with api.guard() as permit:
                inside.set_result(permit)
                try:
                    await forever()
                finally:
                    # The loss was delivered. The task is cancelled again before it has left the block.
                    stop.set()
                    await asyncio.sleep(60)

        task = asyncio.ensure_future(body())
        permit = await inside
        await api.release(permit.id)
        await asyncio.wait_for(stop.wait(), TIME_LIMIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, TIME_LIMIT)

    asyncio.run(main())


def test_a_time_out_around_a_block(client: leasehold.Client) -> None:
    async def main() -> None:
        api = client.semaphore("api", 1, ttl=60)

        async def body() -> None:
            async with api.guard():
                await forever()

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(body(), 0.1)
        if sys.version_info >= (3, 11):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1), api.guard():
                    await forever()
            lossy = client.semaphore("lossy", 1, ttl=0.2)
            with pytest.raises(leasehold.Lost):
                async with asyncio.timeout(60), lossy.guard():
                    await forever()
            assert cancelling() == 0
        await do.until_free(api)

    asyncio.run(main())


def test_a_body_that_swallows_the_cancellation(client: leasehold.Client) -> None:
    async def main() -> None:
        api = client.semaphore("api", 1, ttl=0.2)
        with pytest.raises(leasehold.Lost):
            async with api.guard():
                try:
                    await forever()
                except asyncio.CancelledError:
                    pass
        assert cancelling() == 0
        await asyncio.sleep(0)
        with pytest.raises(KeyError):
            async with api.guard():
                try:
                    await forever()
                except asyncio.CancelledError:
                    raise KeyError("the body's own") from None
        assert cancelling() == 0

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["permit", "lock"])
def test_a_body_that_releases_what_it_has_lost(client: leasehold.Client, kind: str) -> None:
    """The engine has no error for it any more, but the block still raises what was lost, and why."""

    async def main() -> None:
        context: leasehold.HeldContext[Any]
        if kind == "permit":
            context = client.semaphore("name", 1, ttl=0.2).guard()
            reason, message = "ttl-ended", 'the permit of "name" was lost: its TTL ended'
        else:
            context = client.lock("name", ttl=0.3).guard()
            reason, message = "ttl-ended", 'the lock "name" was lost: its TTL ended'
        with pytest.raises(leasehold.Lost, match=message) as raised:
            async with context as held:
                try:
                    await forever()
                finally:
                    await held.release()
        lost = raised.value
        primitive = "semaphore" if kind == "permit" else "lock"
        assert (lost.primitive, lost.name, lost.reason) == (primitive, "name", reason)
        # A lock id is a secret.
        assert bool(lost.id) == (kind == "permit")
        assert isinstance(lost.__cause__, asyncio.CancelledError)

    asyncio.run(main())


def test_a_loss_cancels_only_its_own_block(client: leasehold.Client) -> None:
    async def main() -> None:
        outer, inner = client.semaphore("outer", 1), client.semaphore("inner", 1)
        inside: asyncio.Future[leasehold.Permit] = asyncio.get_running_loop().create_future()
        reached = ""

        async def body() -> None:
            nonlocal reached
            async with outer.guard() as permit:
                try:
                    async with inner.guard():
                        inside.set_result(permit)
                        await forever()
                except leasehold.Lost:
                    reached = "inner"
                    raise
                except asyncio.CancelledError:
                    reached = "outer"
                    raise

        task = asyncio.ensure_future(body())
        await outer.release((await inside).id)
        with pytest.raises(leasehold.Lost) as raised:
            await asyncio.wait_for(task, TIME_LIMIT)
        assert (reached, raised.value.name) == ("outer", "outer")
        await do.until_free(outer)
        await do.until_free(inner)

    asyncio.run(main())


def test_a_loss_after_the_task_that_entered_has_ended(client: leasehold.Client) -> None:
    """As in a fixture of pytest. Nothing was cancelled for the loss, so a cancellation of the other task stays one."""

    async def main() -> None:
        context = client.semaphore("api", 1, ttl=0.2).guard()
        entering: asyncio.Task[leasehold.Permit] = asyncio.ensure_future(context.__aenter__())
        permit = await entering
        assert await permit.lost() == "ttl-ended"
        await asyncio.sleep(0.05)

        async def leave() -> None:
            try:
                await forever()
            except BaseException as error:
                await context.__aexit__(type(error), error, None)
                raise

        leaving = asyncio.ensure_future(leave())
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(leaving, TIME_LIMIT)
        # A block that ends normally raises Lost.
        await asyncio.ensure_future(context.__aenter__())
        await asyncio.sleep(0.3)
        with pytest.raises(leasehold.Lost):
            await context.__aexit__(None, None, None)

    asyncio.run(main())


def test_a_release_by_the_holder_is_not_a_loss(client: leasehold.Client) -> None:
    async def main() -> None:
        api = client.semaphore("api", 2)
        async with api.guard() as permit:
            await permit.release()
            await asyncio.sleep(0.05)
        async with api.guard() as permit:
            name = permit.detach()
            await asyncio.sleep(0.05)
        assert await api.release(name)

    asyncio.run(main())


def test_many_tasks_share_one_context(client: leasehold.Client) -> None:
    """Leaving a block releases the permit of the task that leaves it."""

    async def main() -> None:
        api = client.semaphore("api", 5)
        context = api.guard()

        async def body(turns: int) -> None:
            async with context as permit:
                for _ in range(turns):
                    await asyncio.sleep(0.001)
                    permit.check()
                async with context as inner:
                    await asyncio.sleep(0)
                    inner.check()
                    permit.check()

        # No more than two at a time wait for their second permit.
        for _ in range(5):
            await asyncio.gather(*(body(turns) for turns in (3, 1, 2)))
        await do.until_free(api)
        with pytest.raises(RuntimeError, match="more often than it was entered"):
            await context.__aexit__(None, None, None)

    asyncio.run(main())


def test_entered_in_one_task_and_left_in_another(client: leasehold.Client) -> None:
    async def main() -> None:
        api = client.semaphore("api", 1)
        context = api.guard()
        await asyncio.ensure_future(context.__aenter__())
        assert (await api.stats()).held == 1
        await asyncio.ensure_future(context.__aexit__(None, None, None))
        await do.until_free(api)

    asyncio.run(main())
