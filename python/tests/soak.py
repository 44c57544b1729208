"""A soak test: `python -m tests.soak MINUTES`, in the directory of the package.

Tasks in two event loops and threads acquire, lose, time out, and are cancelled at random: on a Redis server, in a file and in memory.
At the same time the connections of the server are killed, and the server is restarted. In the end memory must not have grown, no thread may
be left over, and nothing may be held.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pathlib
import random
import sys
import tempfile
import threading
import time
from collections import Counter

import leasehold
from tests.conftest import RedisServer

#: Of one second, while the server is away.
AWAY = 0.3
#: How much memory may grow after the first quarter, in megabytes.
GROWTH = 12.0

counted: Counter[str] = Counter()


def resident() -> float:
    """The memory of this process, in megabytes."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def threads() -> list[str]:
    """The names of the threads of this process."""
    names = []
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            names.append((task / "comm").read_text().strip())
    return sorted(names)


async def one_task(client: leasehold.Client, until: float) -> None:
    lossy = client.semaphore("lossy", 2, ttl=0.15, lease=2)
    steady = client.semaphore("steady", 3, lease=2)
    lock = client.lock("key", lease=2)
    pool = client.pool("pool", 2, lease=2)
    while time.monotonic() < until:
        kind = random.choice(["steady", "weight", "lossy", "within", "cancel", "lock", "pool", "try", "lost"])
        try:
            if kind == "steady":
                async with steady.guard():
                    await asyncio.sleep(random.random() / 500)
            elif kind == "weight":
                async with steady.guard(weight=2, within=2):
                    await asyncio.sleep(0)
            elif kind == "lossy":
                async with lossy.guard(within=2):
                    await asyncio.sleep(random.random() / 3)
            elif kind == "within":
                await (await steady.acquire(within=0.005)).release()
            elif kind == "cancel":
                await cancelled_somewhere(random.choice([steady, lossy]))
            elif kind == "lock":
                async with lock.guard(within=1):
                    await asyncio.sleep(0)
            elif kind == "pool":
                async with pool.guard(f"worker-{random.randrange(4)}", within=0.3):
                    await asyncio.sleep(0)
            elif kind == "try":
                permit = await steady.try_acquire()
                del permit
            else:
                permit = await lossy.acquire(within=1)
                await asyncio.wait_for(permit.lost(), 5)
            counted[kind] += 1
        except (leasehold.TimedOut, leasehold.Lost, leasehold.Unavailable, asyncio.TimeoutError) as error:
            counted[f"{kind}: {type(error).__name__}"] += 1


async def cancelled_somewhere(semaphore: leasehold.Semaphore) -> None:
    async def block() -> None:
        async with semaphore.guard():
            await asyncio.sleep(random.random() / 200)

    task = asyncio.ensure_future(block())
    await asyncio.sleep(random.random() / 100)
    for _ in range(random.randrange(4)):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, leasehold.Lost, leasehold.Unavailable):
        await task


def in_loop(clients: list[leasehold.Client], until: float) -> None:
    async def main(end: float) -> None:
        await asyncio.gather(*(one_task(client, end) for client in clients for _ in range(6)))

    # Many loops, one after the other, on the same clients.
    while time.monotonic() < until:
        asyncio.run(main(min(until, time.monotonic() + 5)))


def in_thread(client: leasehold.Client, until: float) -> None:
    steady = client.semaphore("steady", 3, lease=2)
    while time.monotonic() < until:
        try:
            with steady.guard(within=1):
                time.sleep(random.random() / 500)
            counted["thread"] += 1
        except (leasehold.TimedOut, leasehold.Lost, leasehold.Unavailable) as error:
            counted[f"thread: {type(error).__name__}"] += 1


def trouble(server: RedisServer, until: float) -> None:
    while time.monotonic() < until:
        time.sleep(1 + random.random())
        if random.random() < 0.7:
            server.command("CLIENT", "KILL", "TYPE", "normal")
            server.command("CLIENT", "KILL", "TYPE", "pubsub")
            counted["connections killed"] += 1
        elif time.monotonic() < until - 3:
            server.stop()
            time.sleep(AWAY)
            server.start()
            counted["server restarted"] += 1


def until_free(client: leasehold.Client) -> None:
    deadline = time.monotonic() + 20
    while stats := client.stats().wait():
        assert time.monotonic() < deadline, stats
        time.sleep(0.05)
    while client.locks.is_locked("key").wait() or client.pools().wait():
        assert time.monotonic() < deadline, "a lock or a pool lease is still held"
        time.sleep(0.05)


def main(minutes: float) -> None:
    before = threads()
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(pathlib.Path(directory))
        urls = [server.url, f"sqlite:{directory}/store", "memory:"]
        clients = [
            leasehold.Client(url, answer_timeout=2) if url != "memory:" else leasehold.Client(url) for url in urls
        ]
        begun = time.monotonic()
        until = begun + minutes * 60
        workers = [threading.Thread(target=in_loop, args=(clients, until)) for _ in range(2)]
        workers += [threading.Thread(target=in_thread, args=(client, until)) for client in clients for _ in range(2)]
        workers.append(threading.Thread(target=trouble, args=(server, until)))
        for worker in workers:
            worker.start()
        base = None
        while any(worker.is_alive() for worker in workers):
            time.sleep(5)
            gc.collect()
            now = resident()
            elapsed = time.monotonic() - begun
            if base is None and elapsed > minutes * 60 / 4:
                base = now
            print(f"{elapsed:6.0f} s  {now:7.1f} MB  {sum(counted.values())} operations", flush=True)
            assert elapsed < minutes * 60 + 60, "a worker does not end"
        for worker in workers:
            worker.join()
        for client in clients:
            until_free(client)
            client.close().wait()
        del clients, client, workers, worker
        server.stop()
    gc.collect()
    deadline = time.monotonic() + 20
    while threads() != before:
        assert time.monotonic() < deadline, f"threads are left over: {threads()}"
        time.sleep(0.05)
    for name, count in sorted(counted.items()):
        print(f"{count:8} {name}")
    assert base is not None
    grown = resident() - base
    print(f"memory has grown by {grown:.1f} MB since the first quarter")
    assert grown < GROWTH
    for kind in ["steady", "lossy", "lossy: Lost", "cancel", "lock", "pool", "thread", "connections killed"]:
        assert counted[kind] > 0, f"{kind} never happened"
    print("nothing is held, and no thread is left over")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
