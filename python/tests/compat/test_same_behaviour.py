"""The same test bodies, run with asyncio-advanced-semaphores and with leasehold's module in its place."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import redis.exceptions

from .support import TIME_LIMIT, Subject, each_kind, in_loop, in_memory, on_redis, until

COMMON = {"name": None, "value": None, "max_acquire_time": None, "ttl": None}
FIELDS = {
    "MemorySemaphore": {**COMMON, "cancel_task_after_ttl": False},
    "RedisSemaphore": {
        **COMMON,
        "config": None,
        "heartbeat_max_interval": 180,
        "ping_interval": None,
        "use_polling_after_delay": 100.0,
        "poll_delay": 1.0,
    },
    "RedisConfig": {
        "namespace": "adv-sem",
        "url": "redis://localhost:6379",
        "max_connections": 300,
        "socket_timeout": 30,
        "socket_connect_timeout": 10,
        "number_of_attempts": 3,
        "retry_multiplier": 2,
        "retry_min_delay": 1,
        "retry_max_delay": 60,
    },
    "AcquisitionResult": {"acquisition_id": None, "slot_number": None},
    "SemaphoreStats": {"acquired_slots": None, "max_slots": None},
}


@in_memory
def test_the_public_names_fields_and_defaults(subject: Subject) -> None:
    assert sorted(subject.module.__all__) == [
        "AcquisitionResult",
        "MemorySemaphore",
        "RedisConfig",
        "RedisSemaphore",
        "Semaphore",
        "SemaphoreStats",
    ]
    for name, expected in FIELDS.items():
        found = {
            field.name: None if field.default is dataclasses.MISSING else field.default
            for field in dataclasses.fields(getattr(subject.module, name))
            if not field.name.startswith("_")
        }
        assert found == expected, name
    for semaphore in (subject.module.MemorySemaphore, subject.module.RedisSemaphore):
        assert issubclass(semaphore, subject.module.Semaphore)
        parameters = inspect.signature(semaphore).parameters.values()
        assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}


@each_kind
def test_invalid_arguments(subject: Subject) -> None:
    for value in (0, -1):
        with pytest.raises(Exception, match=r"(?i)semaphore"):
            subject.make(value)
    with pytest.raises(TypeError):
        subject.type("name", 1)
    with pytest.raises(TypeError):
        subject.module.Semaphore(name="abstract", value=1)
    if subject.redis:
        with pytest.raises(ValueError, match="ping_interval"):
            subject.make(heartbeat_max_interval=20, ping_interval=20)
        with pytest.raises(ValueError, match="max_connections"):
            subject.module.RedisConfig(max_connections=10)


@on_redis
def test_settings(subject: Subject) -> None:
    config = subject.module.RedisConfig(url="redis://localhost:1", namespace="ns")
    assert config == subject.module.RedisConfig(url="redis://localhost:1", namespace="ns")
    assert hash(config) == hash(dataclasses.replace(config, namespace="ns"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.url = "redis://localhost:2"
    assert subject.make(ttl=60).heartbeat_max_interval == 60
    assert subject.make(ttl=600).heartbeat_max_interval == 180
    assert subject.make(heartbeat_max_interval=30, ttl=60).heartbeat_max_interval == 30


@each_kind
@in_loop
async def test_a_pair(subject: Subject) -> None:
    semaphore = subject.make(2)
    first = await semaphore.acquire()
    second = await semaphore.acquire()
    assert isinstance(first, subject.module.AcquisitionResult)
    assert (first.slot_number, second.slot_number) == (1, 2)
    assert isinstance(first.acquisition_id, str)
    assert first.acquisition_id != second.acquisition_id
    assert await subject.held() == 2
    assert await semaphore.release(first.acquisition_id) is None
    assert await subject.held() == 1
    await semaphore.release(second.acquisition_id)
    assert await subject.held() == 0


@each_kind
@in_loop
async def test_releasing_an_unknown_slot_does_nothing(subject: Subject) -> None:
    semaphore = subject.make(1)
    result = await semaphore.acquire()
    await semaphore.release("0123456789abcdef0123456789abcdef")
    assert await subject.held() == 1
    await semaphore.release(result.acquisition_id)
    await semaphore.release(result.acquisition_id)
    assert await subject.held() == 0
    await asyncio.wait_for(semaphore.acquire(), TIME_LIMIT)
    assert await semaphore.locked()


@each_kind
@in_loop
async def test_the_limit_holds(subject: Subject) -> None:
    semaphore, active, most, done = subject.make(3), 0, 0, 0

    async def work() -> None:
        nonlocal active, most, done
        async with semaphore.cm() as result:
            assert 1 <= result.slot_number <= 3
            active += 1
            most = max(most, active)
            await asyncio.sleep(0.005)
            active -= 1
        done += 1

    await asyncio.gather(*(work() for _ in range(12)))
    assert (most, done) == (3, 12)
    assert await subject.held() == 0


@each_kind
@in_loop
async def test_waiters_are_served_in_order(subject: Subject) -> None:
    semaphore, served = subject.make(1), []
    first = await semaphore.acquire()

    async def wait(number: int) -> None:
        async with semaphore.cm():
            served.append(number)

    tasks = [await subject.start_waiting(semaphore, wait(number)) for number in range(4)]
    assert served == []
    await semaphore.release(first.acquisition_id)
    await asyncio.gather(*tasks)
    assert served == [0, 1, 2, 3]


@each_kind
@in_loop
async def test_objects_of_one_name_share(subject: Subject) -> None:
    one, other, stranger = subject.make(1), subject.make(1), subject.make(1, name=f"{subject.name}-2")
    result = await one.acquire()
    assert await one.locked()
    assert await other.locked()
    assert not await stranger.locked()
    await other.release(result.acquisition_id)
    assert not await one.locked()
    assert not await other.locked()


@each_kind
@in_loop
async def test_max_acquire_time(subject: Subject) -> None:
    result = await subject.make(1).acquire()
    impatient = subject.make(1, max_acquire_time=0.2)
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        await impatient.acquire()
    assert 0.15 < time.monotonic() - begun < TIME_LIMIT
    with pytest.raises(TimeoutError):
        async with impatient.cm():
            pytest.fail("the slot is held by another")
    if subject.redis:
        assert subject.queued(impatient) == 0
    await impatient.release(result.acquisition_id)
    async with impatient.cm():
        assert await impatient.locked()


@each_kind
@in_loop
async def test_the_slot_is_free_after_its_ttl(subject: Subject) -> None:
    semaphore = subject.make(1, ttl=1)
    begun = time.monotonic()
    result = await semaphore.acquire()
    async with semaphore.cm():
        assert time.monotonic() - begun > 0.9
        # Late, and of no effect.
        await semaphore.release(result.acquisition_id)
        assert await subject.held() == 1


@each_kind
@in_loop
async def test_a_task_is_not_cancelled_by_default_when_its_ttl_ends(subject: Subject) -> None:
    semaphore = subject.make(1, ttl=1)

    async def work() -> str:
        async with semaphore.cm():

            async def is_free() -> bool:
                return await subject.held() == 0

            await until(is_free)
            return "went on"

    assert await work() == "went on"


@in_memory
@in_loop
async def test_cancel_task_after_ttl(subject: Subject) -> None:
    semaphore = subject.make(1, ttl=1, cancel_task_after_ttl=True)

    async def work() -> None:
        async with semaphore.cm():
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(task), TIME_LIMIT)
    assert task.cancelled()
    assert not await semaphore.locked()

    # The end of the TTL cancels no task if the slot was released before.
    async def in_time() -> str:
        async with semaphore.cm():
            pass
        await asyncio.sleep(1.2)
        return "lived"

    assert await asyncio.create_task(in_time()) == "lived"


@each_kind
@in_loop
async def test_cm_releases_however_the_block_ends(subject: Subject) -> None:
    semaphore = subject.make(1)
    with pytest.raises(KeyError):
        async with semaphore.cm():
            raise KeyError("from the body")
    assert await subject.held() == 0

    entered = asyncio.Event()

    async def work() -> None:
        async with semaphore.cm():
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await subject.held() == 0


@each_kind
@in_loop
async def test_cm_is_for_one_block(subject: Subject) -> None:
    semaphore = subject.make(3)
    manager = semaphore.cm()
    async with manager as result:
        assert isinstance(result.acquisition_id, str)
        with pytest.raises(Exception, match="MISUSE"):
            async with manager:
                pass
        assert await subject.held() == 1
    with pytest.raises(Exception, match="MISUSE"):
        async with manager:
            pass
    with pytest.raises(Exception, match="MISUSE"):
        await semaphore.cm().__aexit__(None, None, None)
    assert await subject.held() == 0


@each_kind
@in_loop
async def test_a_cancelled_waiter_leaves_nothing(subject: Subject) -> None:
    semaphore = subject.make(1)
    result = await semaphore.acquire()
    waiter = await subject.start_waiting(semaphore, semaphore.acquire())
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    if subject.redis:
        await until(lambda: subject.queued(semaphore) == 0)
    await semaphore.release(result.acquisition_id)
    assert await subject.held() == 0
    await asyncio.wait_for(semaphore.acquire(), TIME_LIMIT)


@each_kind
@in_loop
async def test_statistics(subject: Subject) -> None:
    names = [f"{subject.name}-{part}" for part in ("half", "full", "unused", "unknown")]
    half, full, unused, unknown = names
    semaphores = {half: subject.make(2, name=half), full: subject.make(1, name=full)}
    results = {name: await semaphore.acquire() for name, semaphore in semaphores.items()}
    idle = subject.make(1, name=unused)
    await idle.release((await idle.acquire()).acquisition_id)

    stats = await subject.stats(names=names)
    assert unknown not in stats
    assert list(stats)[:2] == [full, half]
    assert stats[half] == subject.module.SemaphoreStats(acquired_slots=1, max_slots=2)
    assert (stats[full].acquired_percent, stats[half].acquired_percent) == (100.0, 50.0)
    assert stats[unused].acquired_slots == 0
    assert stats[unused].acquired_percent == 0.0

    everything = await subject.stats()
    assert [name for name in everything if name in names] == [full, half]
    assert list(everything.values()) == sorted(everything.values(), key=lambda one: -one.acquired_percent)
    assert len(await subject.stats(limit=1)) == 1
    for name, result in results.items():
        await semaphores[name].release(result.acquisition_id)
    everything = await subject.stats()
    assert half not in everything
    assert full not in everything


@in_memory
@in_loop
async def test_another_value_while_the_name_is_in_use(subject: Subject) -> None:
    small, large = subject.make(1), subject.make(2)
    result = await small.acquire()
    for use in (large.acquire, large.locked):
        with pytest.raises(Exception, match=r"in use|mismatch"):
            await use()
    await small.release(result.acquisition_id)

    held = [await large.acquire(), await large.acquire()]
    assert await large.locked()
    with pytest.raises(Exception, match=r"in use|mismatch"):
        await small.acquire()
    for result in held:
        await large.release(result.acquisition_id)
    result = await small.acquire()
    assert await small.locked()
    await small.release(result.acquisition_id)


@in_memory
@in_loop
async def test_an_attribute_can_be_changed(subject: Subject) -> None:
    semaphore = subject.make(1)
    await semaphore.release((await semaphore.acquire()).acquisition_id)
    semaphore.value = 2
    await semaphore.acquire()
    assert not await semaphore.locked()
    await semaphore.acquire()
    assert await semaphore.locked()


@each_kind
def test_threads_with_loops_of_their_own(subject: Subject) -> None:
    guard, active, most, errors = threading.Lock(), 0, 0, []
    semaphore = subject.make(2)

    async def work() -> None:
        nonlocal active, most
        async with semaphore.cm():
            with guard:
                active += 1
                most = max(most, active)
            await asyncio.sleep(0.005)
            with guard:
                active -= 1

    async def works() -> None:
        await asyncio.wait_for(asyncio.gather(*(work() for _ in range(3))), 2 * TIME_LIMIT)

    def thread() -> None:
        try:
            asyncio.run(works())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=thread) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not errors
    assert most == 2


@each_kind
def test_one_object_in_several_loops_one_after_the_other(subject: Subject) -> None:
    semaphore = subject.make(1)

    async def pair() -> None:
        async with semaphore.cm():
            assert await semaphore.locked()

    for _ in range(3):
        asyncio.run(pair())
    assert asyncio.run(subject.held()) == 0


@each_kind
@in_loop
async def test_log_lines(subject: Subject, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="asyncio_advanced_semaphores")
    semaphore = subject.make(2)
    result = await semaphore.acquire()
    await semaphore.release(result.acquisition_id)
    lines: dict[str, Any] = {
        record.message: record for record in caplog.records if record.name == "asyncio_advanced_semaphores"
    }
    kind = "redis" if subject.redis else "in-memory"
    for event, level in (
        ("Acquiring semaphore...", logging.DEBUG),
        ("Acquisition successful", logging.INFO),
        ("Releasing semaphore...", logging.DEBUG),
        ("Release successful", logging.INFO),
    ):
        record = lines[event]
        assert (record.levelno, record.semaphore_name, record.type) == (level, semaphore.name, kind)
    assert lines["Acquisition successful"].acquire_time >= 0
    assert lines["Acquisition successful"].slot_number == result.slot_number
    assert lines["Acquisition successful"].max_slots == 2
    assert lines["Releasing semaphore..."].acquisition_id == result.acquisition_id


@in_memory
@in_loop
async def test_the_end_of_a_ttl_is_logged(subject: Subject, caplog: pytest.LogCaptureFixture) -> None:
    semaphore = subject.make(1, ttl=1)
    await semaphore.acquire()
    await until(lambda: any(record.levelno == logging.WARNING and "TTL" in record.message for record in caplog.records))


@on_redis
@in_loop
async def test_an_unreachable_server(subject: Subject) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{nobody.getsockname()[1]}"
        config = subject.module.RedisConfig(
            url=url, number_of_attempts=2, retry_multiplier=0.1, retry_min_delay=0.1, retry_max_delay=0.2
        )
        semaphore = subject.make(1, config=config)
        begun = time.monotonic()
        for use in (semaphore.acquire, semaphore.locked):
            with pytest.raises(redis.exceptions.ConnectionError):
                await use()
        assert time.monotonic() - begun >= 0.2, "it was tried twice each time"
        patient = subject.module.RedisConfig(url=url, number_of_attempts=100)
        with pytest.raises(TimeoutError):
            await subject.make(1, config=patient, max_acquire_time=0.5).acquire()


HOLDER = """
import asyncio, sys
from {package} import RedisConfig, RedisSemaphore

async def main():
    semaphore = RedisSemaphore(
        name=sys.argv[1], value=1, heartbeat_max_interval=2, config=RedisConfig(url=sys.argv[2])
    )
    await semaphore.acquire()
    print("held", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@on_redis
@in_loop
async def test_a_slot_of_a_killed_process_comes_free_after_its_heartbeat(subject: Subject) -> None:
    program = HOLDER.format(package=subject.package)
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, subject.name, subject.url, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"held\n"
    semaphore = subject.make(1, heartbeat_max_interval=2)
    waiter = await subject.start_waiting(semaphore, semaphore.acquire())
    holder.kill()
    killed = time.monotonic()
    await asyncio.wait_for(waiter, TIME_LIMIT)
    assert time.monotonic() - killed < 5
    await holder.wait()


@each_kind
@in_loop
async def test_a_slot_is_kept_for_longer_than_the_heartbeat(subject: Subject) -> None:
    settings = {"heartbeat_max_interval": 1} if subject.redis else {}
    semaphore = subject.make(1, **settings)
    async with semaphore.cm():
        await asyncio.sleep(1.6)
        assert await semaphore.locked()


@each_kind
@in_loop
async def test_a_dataclass_can_extend_it(subject: Subject) -> None:
    own_field = ("team", str, dataclasses.field(default="nobody"))
    Named: Any = dataclasses.make_dataclass("Named", [own_field], bases=(subject.type,))
    settings = {"config": subject.config()} if subject.redis else {}
    semaphore = Named(name=subject.name, value=1, team="billing", **settings)
    assert semaphore.team == "billing"
    async with semaphore.cm():
        assert await semaphore.locked()
    with pytest.raises(Exception, match=r"(?i)semaphore"):
        Named(name=subject.name, value=0, **settings)
