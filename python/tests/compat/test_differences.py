"""What the module's docstring says of itself, where the two packages differ."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
import pickle
import subprocess
import sys
from typing import Any

import pytest
import redis.exceptions

import leasehold
from leasehold.compat.asyncio_advanced_semaphores import MemorySemaphore, RedisConfig, RedisSemaphore

from .support import OURS, Subject, in_loop, until


@pytest.fixture
def ours(redis_url: str) -> Subject:
    return Subject(OURS, "redis", redis_url)


@in_loop
async def test_slot_numbers_of_live_holders_differ(ours: Subject) -> None:
    for semaphore in (ours.make(3), MemorySemaphore(name=ours.name, value=3)):
        first, second = await semaphore.acquire(), await semaphore.acquire()
        await semaphore.release(first.acquisition_id)
        third = await semaphore.acquire()
        assert (second.slot_number, third.slot_number) == (2, 1)


@in_loop
async def test_a_cancelled_release_goes_on(ours: Subject) -> None:
    semaphore = ours.make(1)
    result = await semaphore.acquire()
    release = asyncio.ensure_future(semaphore.release(result.acquisition_id))
    # One turn of the loop: the request is on its way. It may be answered already.
    await asyncio.sleep(0)
    release.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await release

    async def is_free() -> bool:
        return await ours.held() == 0

    await until(is_free)


@in_loop
async def test_the_value_that_was_declared_last_counts(ours: Subject) -> None:
    small, large = ours.make(1), ours.make(2)
    held = [await small.acquire(), await large.acquire()]
    stats = (await ours.stats(names=[ours.name]))[ours.name]
    assert (stats.acquired_slots, stats.max_slots) == (2, 2)
    for result in held:
        await small.release(result.acquisition_id)


@in_loop
async def test_names_of_earlier_versions(ours: Subject) -> None:
    for semaphore in (ours.make(3), MemorySemaphore(name=ours.name, value=3)):
        kind = type(semaphore)
        query = {"config": ours.config()} if kind is RedisSemaphore else {}

        async def held(kind: Any = kind, query: Any = query) -> int:
            stats = await kind.get_acquisition_statistics(names=[ours.name], **query)
            return int(stats[ours.name].acquired_slots)

        same = dataclasses.replace(semaphore)
        async with semaphore as outer, same as inner:
            async with semaphore:
                assert await held() == 3
            assert await held() == 2
            assert (outer.slot_number, inner.slot_number) == (1, 2)
        assert await held() == 0

        inside = asyncio.Event()

        async def block(semaphore: Any = semaphore, inside: asyncio.Event = inside) -> None:
            async with semaphore:
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(block())
        await inside.wait()
        with pytest.raises(Exception, match="MISUSE"):
            await semaphore.__aexit__(None, None, None)
        assert await held() == 1
        task.cancel()
        await asyncio.wait([task])
        assert await held() == 0


HOLDER = """
import asyncio, sys
from leasehold.compat.asyncio_advanced_semaphores import RedisConfig, RedisSemaphore

semaphore = RedisSemaphore(name=sys.argv[1], value=1, config=RedisConfig(url=sys.argv[2]))
result = asyncio.run(semaphore.acquire())
print(result.acquisition_id, flush=True)
sys.stdin.read()
"""


def holder(ours: Subject) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, ours.name, ours.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_process_that_ends_releases_its_slots(ours: Subject) -> None:
    with holder(ours) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        # Its event loop has ended.
        assert asyncio.run(ours.held()) == 1
        process.communicate("")
    assert process.returncode == 0
    assert asyncio.run(ours.held()) == 0


def test_another_process_can_release_by_id(ours: Subject) -> None:
    with holder(ours) as process:
        assert process.stdout is not None
        acquisition_id = process.stdout.readline().strip()
        asyncio.run(ours.make(1).release(acquisition_id))
        assert asyncio.run(ours.held()) == 0
        process.communicate("")
    assert process.returncode == 0


@in_loop
async def test_parameters_of_the_url(ours: Subject, tmp_path: pathlib.Path) -> None:
    semaphore = RedisSemaphore(
        name=ours.name, value=1, config=RedisConfig(url=f"{ours.url}?db=3&health_check_interval=5")
    )
    async with semaphore.cm():
        with redis.Redis.from_url(f"{ours.url}/3") as third:
            assert third.zcard(f"adv-sem:semaphore_main:{ours.name}") == 1
    with pytest.raises(ValueError, match="ssl_cert_reqs"):
        await ours.make(1, config=RedisConfig(url="rediss://localhost:1?ssl_cert_reqs=none")).acquire()
    missing = tmp_path / "authority.pem"
    with pytest.raises(FileNotFoundError):
        await ours.make(1, config=RedisConfig(url=f"rediss://localhost:1?ssl_ca_certs={missing}")).acquire()


def test_without_the_package_redis_the_error_is_ours_alone() -> None:
    program = """
import asyncio, socket, sys
import leasehold
from leasehold.compat.asyncio_advanced_semaphores import RedisConfig, RedisSemaphore

with socket.socket() as nobody:
    nobody.bind(("127.0.0.1", 0))
    config = RedisConfig(url=f"redis://127.0.0.1:{nobody.getsockname()[1]}", number_of_attempts=1)
    try:
        asyncio.run(RedisSemaphore(name="name", value=1, config=config).acquire())
    except ConnectionError as error:
        assert type(error) is leasehold.Unavailable, type(error)
        assert "redis" not in sys.modules
        print("unavailable")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("unavailable\n", "")


@in_loop
async def test_a_refusal_is_also_one_of_the_package_redis(ours: Subject) -> None:
    with redis.Redis.from_url(ours.url) as server:
        server.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "allkeys", "+@read", "+@connection")
    url = ours.url.replace("redis://", "redis://reader:wrong@")
    expected: Any = redis.exceptions.AuthenticationError
    with pytest.raises(expected) as raised:
        await ours.make(1, config=RedisConfig(url=url)).acquire()
    assert isinstance(raised.value, leasehold.Denied)
    assert isinstance(raised.value, PermissionError)
    # A worker process can send it to its parent.
    sent = pickle.loads(pickle.dumps(raised.value))
    assert (type(sent), str(sent)) == (leasehold.Denied, str(raised.value))


@in_loop
async def test_a_lost_lease_is_logged_by_leasehold(ours: Subject, caplog: pytest.LogCaptureFixture) -> None:
    semaphore = ours.make(1, heartbeat_max_interval=1)
    result = await semaphore.acquire()
    assert ours.redis is not None
    ours.redis.zrem(f"adv-sem:semaphore_main:{ours.name}", result.acquisition_id)
    await until(
        lambda: any(
            record.name.startswith("leasehold") and record.levelname == "WARNING" and "lost" in record.message
            for record in caplog.records
        )
    )
