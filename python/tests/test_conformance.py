"""What holds on every store, in asyncio and in threads. Each case is written once."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import pytest

import leasehold
from leasehold.compat.lua_pool import LuaPool
from tests.drivers import Driver


def test_permits_up_to_the_capacity(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        api = client.semaphore("api", 2)
        first = await do.do(api.acquire())
        second = await do.do(api.acquire())
        assert await do.do(api.try_acquire()) is None
        assert await do.do(api.locked())
        assert await do.do(first.release())
        assert not await do.do(first.release()), "it was released before"
        third = await do.do(api.try_acquire())
        assert third is not None
        assert first.fence < second.fence < third.fence
        assert len({first.id, second.id, third.id}) == 3
        await do.do(second.release())
        await do.do(third.release())
        assert not await do.do(api.locked())

    driver.run(body)


def test_first_come_first_served(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        api = client.semaphore("api", 1)
        held = await do.do(api.acquire())
        waiting = []
        for place in range(5):
            waiting.append(do.start(api.acquire()))
            await do.until_waiting(api, place + 1)
        for place, started in enumerate(waiting):
            await do.do(held.release())
            held = await do.result(started)
            assert held.waited > 0
            later = [other.done() for other in waiting[place + 1 :]]
            assert not any(later), "a later waiter was served first"
        await do.do(held.release())
        await do.until_free(api)

    driver.run(body)


def test_weights_take_all_or_nothing(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        memory = client.semaphore("memory", 4)
        large = await do.do(memory.acquire(weight=3))
        assert large.weight == 3
        assert await do.do(memory.try_acquire(weight=2)) is None
        small = await do.do(memory.try_acquire(weight=1))
        assert small is not None
        stats = await do.do(memory.stats())
        assert (stats.held, stats.held_units, stats.percent) == (2, 4, 100.0)
        assert [holder.weight for holder in stats.holders] == [3, 1]
        await do.do(large.release())
        async with do.hold(memory.guard(weight=3)):
            assert (await do.do(memory.stats())).held_units == 4
        await do.do(small.release())
        with pytest.raises(leasehold.TooHeavy, match="weight") as heavy:
            await do.do(memory.acquire(weight=5))
        assert (heavy.value.name, heavy.value.weight, heavy.value.capacity) == ("memory", 5, 4)
        with pytest.raises(leasehold.InvalidArgument, match="weight"):
            await do.do(memory.acquire(weight=0))

    driver.run(body)


@pytest.mark.parametrize("within", [0.4, timedelta(milliseconds=400)])
def test_a_wait_that_is_too_long(client: leasehold.Client, driver: Driver, within: Any) -> None:
    async def body(do: Driver) -> None:
        api = client.semaphore("api", 1)
        held = await do.do(api.acquire())
        begun = time.monotonic()
        with pytest.raises(leasehold.TimedOut, match="within 400ms") as raised:
            await do.do(api.acquire(within=within))
        assert time.monotonic() - begun >= 0.4
        assert (raised.value.primitive, raised.value.name, raised.value.limit) == ("semaphore", "api", 0.4)
        assert isinstance(raised.value, TimeoutError)
        assert isinstance(raised.value, asyncio.TimeoutError)
        with pytest.raises(leasehold.TimedOut):
            async with do.hold(api.guard(within=within)):
                raise AssertionError("it is held")
        hasty = client.semaphore("api", 1, within=0.4)
        with pytest.raises(leasehold.TimedOut):
            await do.do(hasty.acquire())
        await do.do(held.release())
        await do.until_free(api)

    driver.run(body)


def test_a_block_releases_however_it_ends(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        api = client.semaphore("api", 1)
        async with do.hold(api.guard()) as permit:
            permit.check()
            assert (await do.do(api.stats())).held == 1
        assert (await do.do(api.stats())).held == 0
        with pytest.raises(leasehold.Lost):
            permit.check()
        with pytest.raises(KeyError):
            async with do.hold(api.guard()):
                raise KeyError("the body's own")
        assert (await do.do(api.stats())).held == 0
        async with do.hold(api.guard()) as permit:
            assert await do.do(permit.release())
            assert (await do.do(api.stats())).held == 0
        context = api.guard()
        for _ in range(3):
            async with do.hold(context):
                assert (await do.do(api.stats())).held == 1
        assert (await do.do(api.stats())).held == 0

    driver.run(body)


def test_a_block_can_be_nested(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        api = client.semaphore("api", 3)
        context = api.guard()
        async with do.hold(context) as outer:
            async with do.hold(context) as inner:
                assert outer.id != inner.id
            outer.check()
            with pytest.raises(leasehold.Lost):
                inner.check()
        assert (await do.do(api.stats())).held == 0

    driver.run(body)


def test_a_lock_that_is_being_extended_is_not_detached(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        guard = await do.do(client.lock("key", lease=10).acquire())
        extension = guard.extend(20)
        with pytest.raises(RuntimeError, match="being extended"):
            guard.detach()
        guard.check()
        await do.do(extension)
        del extension
        lock_id = guard.detach()
        assert await do.do(client.locks.release(lock_id))

    driver.run(body)


def test_release_by_id(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        api = client.semaphore("api", 1)
        permit = await do.do(api.acquire())
        name = permit.detach()
        assert name == permit.id
        with pytest.raises(leasehold.Lost):
            permit.check()
        del permit
        assert (await do.do(api.stats())).held == 1
        assert await do.do(api.extend(name))
        assert await do.do(api.release(name))
        assert not await do.do(api.release(name))
        assert not await do.do(api.extend(name))
        held = await do.do(api.acquire())
        lost = do.start(held.lost())
        assert await do.do(api.release_member(held.id))
        assert await do.result(lost) == "released"
        with pytest.raises(leasehold.Lost) as raised:
            held.check()
        assert raised.value.reason == "released"
        assert not await do.do(held.release())
        with pytest.raises(leasehold.InvalidArgument):
            await do.do(api.release("not an id"))

    driver.run(body)


def test_the_position_in_the_queue(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        await do.do(client.open())
        api = client.semaphore("api", 1, label="tests")
        held = await do.do(api.acquire())
        pending = [api.acquire() for _ in range(3)]
        ids = [acquire.id for acquire in pending]
        started = []
        for place, acquire in enumerate(pending):
            started.append(do.start(acquire))
            await do.until_waiting(api, place + 1)
        assert None not in ids
        assert [await do.do(api.position(str(name))) for name in ids] == [0, 1, 2]
        stats = await do.do(client.stats(["api"], waiters=2))
        assert [waiter.id for waiter in stats[0].waiters] == ids[:2]
        assert (stats[0].waiting, stats[0].waits_for, stats[0].holders[0].label) == (3, "room", "tests")
        for waiter in started:
            await do.do(held.release())
            held = await do.result(waiter)
        assert await do.do(api.position(str(ids[0]))) is None
        await do.do(held.release())

    driver.run(body)


def test_statistics(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        full, empty = client.semaphore("full", 1), client.semaphore("empty", 7)
        held = await do.do(full.acquire())
        assert (await do.do(empty.stats())).capacity == 7
        names = [one.name for one in await do.do(client.stats())]
        assert names == ["full"]
        async with do.hold(empty.guard()):
            names = [one.name for one in await do.do(client.stats(limit=1))]
            assert names == ["full"], "the most used first"
        all_names = {one.name for one in await do.do(client.stats(unused=True))}
        assert all_names == {"full", "empty"}
        clients = await do.do(client.clients())
        assert client.id in [one.id for one in clients]
        assert client.outage() is None
        await do.do(held.release())

    driver.run(body)


def test_slot_numbers(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        gpus = client.semaphore("gpus", 4, numbered=True)
        permits = [await do.do(gpus.acquire()) for _ in range(3)]
        assert [permit.slot_number for permit in permits] == [1, 2, 3]
        await do.do(permits[1].release())
        again = await do.do(gpus.acquire())
        assert again.slot_number == 2
        plain = await do.do(client.semaphore("plain", 1).acquire())
        assert plain.slot_number is None
        for permit in [permits[0], permits[2], again, plain]:
            await do.do(permit.release())

    driver.run(body)


def test_a_rate(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        mails = client.rate("mails", 10, timedelta(seconds=1), burst=2)
        begun = time.monotonic()
        for _ in range(4):
            await do.do((await do.do(mails.acquire())).release())
        assert time.monotonic() - begun >= 0.22, "two at once, and then one each 111 ms"
        stats = await do.do(mails.stats())
        assert stats.rate == leasehold.RateLimit(starts=10, period=1.0, burst=2, interval=0.111112)
        assert str(stats.rate) == "10 per second, burst 2"
        with pytest.raises(leasehold.InvalidArgument, match="limits only a rate"):
            await do.do(mails.acquire(weight=2))
        await do.do(mails.clear_rate())
        assert (await do.do(mails.stats())).rate is None
        with pytest.raises(leasehold.InvalidArgument, match="burst: it is 3"):
            await do.do(mails.set_rate(1, 60, burst=3))
        await do.do(mails.set_rate(5, 300, burst=3))
        rate = (await do.do(mails.stats())).rate
        assert rate is not None
        assert str(rate) == "5 per 5 minutes, burst 3"

    driver.run(body)


def test_an_acquire_that_times_out_names_the_rate(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        rated = client.semaphore("rated", 5, rate=(1, 3600))
        await do.do((await do.do(rated.acquire())).release())
        # A program that declares no rate is held to the one that stays.
        late = client.semaphore("rated", 5)
        with pytest.raises(leasehold.TimedOut, match=r"rate allows the next start in 359.*clear_rate"):
            await do.do(late.acquire(within=0.2))
        await do.do(late.clear_rate())
        await do.do((await do.do(late.acquire(within=5))).release())

    driver.run(body)


def test_a_permit_that_is_held_for_too_long_is_lost(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        api = client.semaphore("api", 1, ttl=0.2)
        permit = await do.do(api.acquire())
        assert permit.valid_for is not None
        assert 0 < permit.valid_for <= 0.2
        next_one = do.start(api.acquire())
        assert await do.do(permit.lost()) == "ttl-ended"
        with pytest.raises(leasehold.Lost, match="TTL ended") as raised:
            permit.check()
        assert (raised.value.primitive, raised.value.name, raised.value.reason) == ("semaphore", "api", "ttl-ended")
        assert raised.value.id == permit.id
        assert not await do.do(permit.release())
        await do.do((await do.result(next_one)).release())

    driver.run(body)


def test_a_block_that_ends_under_a_lost_permit(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        api = client.semaphore("api", 1, ttl=0.2)
        ended = False
        with pytest.raises(leasehold.Lost):
            async with do.hold(api.guard()) as permit:
                while permit.valid_for:
                    time.sleep(0.01)  # it never lets the event loop run
                ended = True
        assert ended
        async with do.hold(api.guard(cancel_on_loss=False)) as permit:
            assert await do.do(permit.lost()) == "ttl-ended"
        with pytest.raises(KeyError):
            async with do.hold(api.guard()) as permit:
                while permit.valid_for:
                    time.sleep(0.01)
                raise KeyError("the body's own")
        await do.until_free(api)

    driver.run(body)


def test_limits_can_be_changed(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        api = client.semaphore("api", 1)
        held = await do.do(api.acquire())
        waiting = do.start(api.acquire())
        await do.until_waiting(api, 1)
        await do.do(api.set_capacity(2))
        second = await do.result(waiting)
        assert api.capacity == 2
        await do.do(api.pin(1))
        stats = await do.do(api.stats())
        assert (stats.capacity, stats.declared, stats.pinned) == (1, 2, 1)
        with pytest.raises(leasehold.Pinned, match="pinned") as pinned:
            await do.do(api.set_capacity(3))
        assert (pinned.value.name, pinned.value.capacity) == ("api", 1)
        await do.do(api.unpin())
        assert (await do.do(api.stats())).pinned is None
        await do.do(held.release())
        await do.do(second.release())

    driver.run(body)


def test_pause_resume_drain_and_forget(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        api = client.semaphore("api", 2)
        held = await do.do(api.acquire())
        await do.do(api.pause(by="operator", reason="release freeze"))
        assert await do.do(api.try_acquire()) is None
        paused = (await do.do(api.stats())).paused
        assert paused is not None
        assert (paused.by, paused.reason) == ("operator", "release freeze")
        waiting = do.start(api.acquire())
        await do.until_waiting(api, 1)
        await do.do(api.resume())
        second = await do.result(waiting)
        with pytest.raises(leasehold.NotDrained) as late:
            await do.do(api.drain(within=0.05))
        assert (late.value.name, late.value.limit) == ("api", 0.05)
        with pytest.raises(leasehold.InUse) as used:
            await do.do(api.forget())
        assert (used.value.name, used.value.held, used.value.waiting) == ("api", 2, 0)
        drain = do.start(api.drain(within=20, reason="the end"))
        await do.do(held.release())
        await do.do(second.release())
        assert await do.result(drain) is None
        with pytest.raises(leasehold.Unknown):
            await do.do(client.semaphore("never used").forget())
        await do.do(api.forget())
        assert (await do.do(api.stats())).paused is None, "the pause was forgotten, too"

    driver.run(body)


def test_locks(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        lock = client.lock("invoice:42", lease=10, label="nightly")
        guard = await do.do(lock.acquire())
        assert (lock.name, guard.name) == ("invoice:42", "invoice:42")
        assert guard.valid_for is not None
        assert 0 < guard.valid_for <= 10
        assert abs(guard.expires_at - time.time() - 10) < 5
        assert await do.do(lock.try_acquire()) is None
        with pytest.raises(leasehold.TimedOut) as raised:
            await do.do(lock.acquire(within=0.05))
        assert raised.value.primitive == "lock"
        await do.do(guard.extend(60))
        assert 50 < guard.valid_for <= 60
        waiting = do.start(lock.acquire())
        assert await do.do(guard.release())
        with pytest.raises(leasehold.Lost):
            guard.check()
        second = await do.result(waiting)
        assert second.fence > guard.fence
        assert 0 < second.waited < 60
        await do.do(second.release())
        async with do.hold(lock.guard(within=5)) as third:
            third.check()
            info = await do.do(client.locks.lookup("invoice:42"))
            assert info is not None
            assert (info.key, info.id, info.label) == ("invoice:42", third.id, "nightly")
            assert info.fence == third.fence > second.fence
        assert not await do.do(client.locks.is_locked("invoice:42"))

    driver.run(body)


def test_locks_by_id(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        locks = client.locks
        held = await do.do(locks.try_acquire("key", 30))
        assert held is not None
        assert await do.do(locks.try_acquire("key", 30)) is None
        assert await do.do(locks.is_locked("key"))
        assert await do.do(locks.owns(held.id))
        found = await do.do(locks.lookup(id=held.id))
        assert found is not None
        assert found.key == "key"
        assert held.id not in repr(held) + repr(found)
        assert [info.key for info in await do.do(locks.list())] == ["key"]
        assert await do.do(locks.extend(held.id, 60))
        assert await do.do(locks.release(held.id))
        assert not await do.do(locks.release(held.id))
        assert not await do.do(locks.extend(held.id, 60))
        assert await do.do(locks.lookup("key")) is None
        assert await do.do(locks.lookup(id=held.id)) is None
        with pytest.raises(TypeError):
            locks.lookup("key", id=held.id)
        lock = client.lock("key", lease=30, label="cron")
        assert await do.do(lock.lookup()) is None
        detached = (await do.do(lock.acquire())).detach()
        info = await do.do(lock.lookup())
        assert info is not None
        assert (info.id, info.label) == (detached, "cron")
        assert await do.do(lock.extend(detached))
        assert await do.do(lock.release(detached))
        assert not await do.do(lock.release(detached))
        assert not await do.do(lock.extend(detached))
        detached = (await do.do(lock.acquire())).detach()
        assert await do.do(locks.release(detached))
        with pytest.raises(leasehold.InvalidArgument, match="lock id") as raised:
            await do.do(locks.release(held.id + "\n"))
        assert held.id not in str(raised.value)

    driver.run(body)


def test_a_lock_whose_ttl_ends_is_lost(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        lock = client.lock("key", ttl=0.3)
        guard = await do.do(lock.acquire())
        assert await do.do(guard.lost()) == "ttl-ended"
        with pytest.raises(leasehold.Lost, match="lock"):
            await do.do(guard.extend(1))
        renewed = await do.do(client.lock("key", lease=0.3).acquire())
        time.sleep(0.6)  # twice as long as its lease
        renewed.check()
        await do.do(renewed.release())

    driver.run(body)


def test_pools(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        pool = client.pool("encoders", 1, lease=5)
        assert (pool.name, pool.capacity) == ("encoders", 1)
        first = (await do.do(pool.acquire("worker-1"))).detach()
        assert await do.do(pool.extend(first))
        assert not await do.do(pool.extend("worker-2"))
        assert await do.do(pool.try_acquire("worker-2")) is None
        with pytest.raises(leasehold.TimedOut, match="1 of 1 are held"):
            await do.do(pool.acquire("worker-2", within=0.05))
        with pytest.raises(leasehold.TimedOut, match="1 of 1 are held"):
            async with do.hold(pool.guard("worker-2", within=0.05)):
                pass
        assert await do.do(pool.release(first))
        assert not await do.do(pool.release(first))
        async with do.hold(pool.guard("worker-2")) as lease:
            lease.check()
            assert (lease.name, lease.id) == ("encoders", "worker-2")
            assert lease.valid_for is not None
            assert 0 < lease.valid_for <= 5
            assert lease.waited < 60
            stats = await do.do(pool.stats())
            assert (stats.name, [member.id for member in stats.members]) == ("encoders", ["worker-2"])
            pools = await do.do(client.pools())
            assert [(one.name, [member.id for member in one.members]) for one in pools] == [("encoders", ["worker-2"])]
        assert await do.do(client.pools()) == []
        assert (await do.do(pool.stats())).members == []
        tried = await do.do(pool.try_acquire("worker-3"))
        assert tried is not None
        assert await do.do(tried.release())
        limited = await do.do(client.pool("encoders", 1, ttl=0.3).acquire("worker-4"))
        assert await do.do(limited.lost()) == "ttl-ended"

    driver.run(body)


def test_pools_in_the_words_of_the_lua_scripts(client: leasehold.Client, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        pool = LuaPool(client.pool("encoders", 1, lease=5))
        answer = await do.do(pool.acquire("worker-1"))
        assert (answer.status, answer.current_count) == ("acquired", 1)
        assert (await do.do(pool.acquire("worker-2"))).status == "capacity_full"
        assert (await do.do(pool.renew("worker-1"))).status == "renewed"
        assert (await do.do(pool.renew("worker-2"))).status == "not_held"
        assert (await do.do(pool.count())).current_count == 1
        assert (await do.do(pool.release("worker-1"))).status == "released"

    driver.run(body)


def test_close_ends_everything(url: str, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        client = leasehold.Client(url)
        api = client.semaphore("api", 1)
        held = await do.do(api.acquire())
        waiting = do.start(api.acquire())
        await do.until_waiting(api, 1)
        await do.do(client.close())
        with pytest.raises(leasehold.Closed):
            await do.result(waiting)
        with pytest.raises(leasehold.Lost) as raised:
            held.check()
        assert raised.value.reason == "closed"
        with pytest.raises(leasehold.Closed):
            await do.do(api.acquire())
        with pytest.raises(leasehold.Closed):
            client.semaphore("other", 1)
        await do.do(client.close())
        if url != "memory:":
            other = leasehold.Client(url)
            await do.do((await do.do(other.semaphore("api", 1).acquire(within=5))).release())
            await do.do(other.close())

    driver.run(body)


def test_a_client_as_a_block(url: str, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        client = leasehold.Client(url)
        if do.name == "asyncio":
            async with client as entered:
                assert entered is client
                assert client.id is not None
                await client.semaphore("api", 1).acquire()
        else:
            with client as entered:
                assert entered is client
                assert client.id is not None
                client.semaphore("api", 1).acquire().wait()
        with pytest.raises(leasehold.Closed):
            client.semaphore("api", 1)

    driver.run(body)


def test_many_at_once_open_the_store_once(url: str, driver: Driver) -> None:
    async def body(do: Driver) -> None:
        client = leasehold.Client(url)
        api = client.semaphore("api", 100)
        started = [do.start(api.acquire()) for _ in range(20)]
        permits = [await do.result(one) for one in started]
        assert len({permit.id for permit in permits}) == 20
        assert len({permit.id.rsplit("-", 1)[0] for permit in permits}) == 1, "there is one client id"
        await do.do(client.close())

    driver.run(body)
