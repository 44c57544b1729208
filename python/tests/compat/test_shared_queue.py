"""Both packages on one Redis server, in one queue."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import pytest
import redis

from .support import OURS, THEIRS, TIME_LIMIT, Subject, in_loop

pytest.importorskip(THEIRS)

CAPACITY, TASKS, ROUNDS = 3, 6, 5

WORKER = """
import asyncio, json, sys, time
from {package} import RedisConfig, RedisSemaphore
import redis.asyncio

async def main():
    name, url, capacity, tasks, rounds = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    semaphore = RedisSemaphore(name=name, value=capacity, config=RedisConfig(url=url))
    counter = redis.asyncio.Redis.from_url(url)
    most, done = 0, [0] * tasks

    async def work(task):
        nonlocal most
        for _ in range(rounds):
            async with semaphore.cm():
                most = max(most, await counter.incr(name + "-active"))
                await asyncio.sleep(0.002)
                await counter.decr(name + "-active")
            done[task] += 1

    await asyncio.gather(*(work(task) for task in range(tasks)))
    print(json.dumps(dict(most=most, done=done)), flush=True)
    await counter.aclose()

asyncio.run(main())
"""


def test_the_limit_holds_and_both_make_progress(redis_url: str) -> None:
    name = f"shared-{time.time_ns()}"
    numbers = map(str, (CAPACITY, TASKS, ROUNDS))
    arguments = [name, redis_url, *numbers]
    # Two processes of each package.
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER.format(package=package), *arguments],
            stdout=subprocess.PIPE,
        )
        for package in (OURS, THEIRS, OURS, THEIRS)
    ]
    answers: list[Any] = []
    try:
        for worker in workers:
            output, _ = worker.communicate(timeout=120)
            assert worker.returncode == 0
            answers.append(json.loads(output))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for answer in answers:
        assert answer["done"] == [ROUNDS] * TASKS
    assert max(answer["most"] for answer in answers) <= CAPACITY
    with redis.Redis.from_url(redis_url) as client:
        assert client.zcard(f"adv-sem:semaphore_main:{name}") == 0
        assert client.zcard(f"adv-sem:semaphore_waiting:{name}") == 0


@in_loop
async def test_waiters_of_both_are_served_in_arrival_order(redis_url: str) -> None:
    ours, theirs = (Subject(package, "redis", redis_url) for package in (OURS, THEIRS))
    theirs.name = ours.name
    served: list[str] = []
    holder = await ours.make(1).acquire()
    semaphores = {"ours": ours.make(1), "theirs": theirs.make(1)}

    async def wait(who: str, number: int) -> None:
        async with semaphores[who].cm():
            served.append(f"{who} {number}")

    order = [("ours", 0), ("theirs", 1), ("ours", 2), ("theirs", 3), ("theirs", 4), ("ours", 5)]
    tasks = []
    for who, number in order:
        # Both packages write the time of day as the place in the queue.
        tasks.append(await ours.start_waiting(semaphores["ours"], wait(who, number)))
    await semaphores["theirs"].release(holder.acquisition_id)
    await asyncio.wait_for(asyncio.gather(*tasks), TIME_LIMIT)
    assert served == [f"{who} {number}" for who, number in order]


@in_loop
async def test_each_releases_slots_of_the_other_by_id(redis_url: str) -> None:
    ours, theirs = (Subject(package, "redis", redis_url) for package in (OURS, THEIRS))
    theirs.name = ours.name
    for holder, other in ((ours, theirs), (theirs, ours)):
        semaphore = holder.make(1)
        result = await semaphore.acquire()
        assert await other.make(1).locked()
        await other.make(1).release(result.acquisition_id)
        assert not await semaphore.locked()


@in_loop
async def test_both_count_the_same(redis_url: str) -> None:
    ours, theirs = (Subject(package, "redis", redis_url) for package in (OURS, THEIRS))
    theirs.name = ours.name
    mine, yours = ours.make(3), theirs.make(3)
    async with mine.cm(), yours.cm():
        for subject in (ours, theirs):
            stats = (await subject.stats(names=[ours.name]))[ours.name]
            assert (stats.acquired_slots, stats.max_slots) == (2, 3)
