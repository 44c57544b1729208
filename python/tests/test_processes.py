"""Signals, the end of the interpreter, garbage collection, and processes that are killed."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import pytest

import leasehold
from tests import scripts
from tests.drivers import TIME_LIMIT, Asyncio, Threads

HOLDER = """
    import sys, time, leasehold
    client = leasehold.Client(sys.argv[1])
    permit = client.semaphore("api", 1, lease=1).acquire().wait()
    print("held", flush=True)
    time.sleep(60)
"""


def test_ctrl_c_while_a_thread_waits(url: str) -> None:
    code = """
        import sys, leasehold
        client = leasehold.Client(sys.argv[1])
        api = client.semaphore("api", 1)
        held = api.acquire().wait()
        print("waiting", flush=True)
        try:
            api.acquire().wait()
        except KeyboardInterrupt:
            print("interrupted", api.stats().wait().waiting, flush=True)
        held.release().wait()
        with api.guard():
            print("works", flush=True)
    """
    with scripts.started(code, url) as process:
        assert scripts.line(process) == "waiting"
        time.sleep(0.2)  # it may or may not wait yet: Ctrl-C works in either case
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert scripts.line(process).startswith("interrupted")
        assert time.monotonic() - begun < 5
        assert scripts.line(process) == "works"
        assert process.wait(20) == 0


def test_ctrl_c_leaves_the_queue(shared_url: str) -> None:
    code = """
        import sys, leasehold
        client = leasehold.Client(sys.argv[1])
        try:
            client.semaphore("api", 1).acquire().wait()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            sys.stdin.readline()
    """
    client = leasehold.Client(shared_url)
    api = client.semaphore("api", 1)
    held = api.acquire().wait()
    do = Threads()
    with scripts.started(code, shared_url) as process:
        do.run(lambda do: do.until_waiting(api, 1))
        process.send_signal(signal.SIGINT)
        assert scripts.line(process) == "interrupted"
        # The process still runs, but does not wait.
        do.run(lambda do: do.until_waiting(api, 0))
    held.release().wait()
    client.close().wait()


def test_other_threads_run_while_one_waits(url: str) -> None:
    client = leasehold.Client(url)
    api = client.semaphore("api", 1)
    held = api.acquire().wait()
    waiting = Threads().start(api.acquire())
    counted = 0
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        counted += 1
    assert counted > 1000
    held.release().wait()
    waiting.result(TIME_LIMIT).release().wait()
    client.close().wait()


def test_a_wait_in_an_event_loop_is_refused() -> None:
    async def main() -> None:
        api = leasehold.Client.memory().semaphore("api", 1)
        with pytest.raises(leasehold.WrongThread, match="await it instead"):
            api.acquire().wait()
        with pytest.raises(leasehold.WrongThread, match="use `async with` instead"), api.guard():
            pass
        assert (await api.stats()).held == 0

    asyncio.run(main())


def test_an_await_without_an_event_loop_is_refused() -> None:
    api = leasehold.Client.memory().semaphore("api", 1)
    held = api.acquire().wait()
    with pytest.raises(RuntimeError, match=r"call \.wait\(\)"):
        next(api.acquire().__await__())
    assert api.stats().wait().waiting == 0
    held.release().wait()


@pytest.mark.parametrize("way", ["global", "block", "detached", "raise", "exit"])
def test_the_end_of_the_interpreter_releases(shared_url: str, way: str) -> None:
    code = """
        import sys, leasehold
        client = leasehold.Client(sys.argv[1])
        way = sys.argv[2]
        # On Redis, a detached permit ends with its lease.
        api = client.semaphore("api", 1, lease=1 if way == "detached" else 60)
        if way == "block":
            block = api.guard()
            block.__enter__()
        else:
            permit = api.acquire().wait()
        if way == "detached":
            permit.detach()
        if way == "raise":
            sys.excepthook = lambda *error: None
            raise KeyError("the program's own")
        if way == "exit":
            sys.exit(1)
    """
    begun = time.monotonic()
    done = scripts.run(code, shared_url, way)
    assert (done.returncode, done.stderr) == (1 if way in ("raise", "exit") else 0, "")
    client = leasehold.Client(shared_url)
    client.semaphore("api", 1).acquire(within=5).wait().release().wait()
    assert time.monotonic() - begun < 30, "long before the lease has ended"
    client.close().wait()


def test_the_end_of_the_interpreter_with_waiters(url: str) -> None:
    """Daemon threads and tasks that wait, a loop that was never closed, and permits in cycles: no noise, no hang."""
    code = """
        import asyncio, gc, sys, threading, leasehold
        client = leasehold.Client(sys.argv[1])
        api = client.semaphore("api", 1)
        held = api.acquire().wait()
        def wait():
            api.acquire().wait()
        for _ in range(5):
            threading.Thread(target=wait, daemon=True).start()
        def loop():
            async def main():
                await asyncio.gather(*(api.acquire() for _ in range(3)))
            asyncio.run(main())
        threading.Thread(target=loop, daemon=True).start()
        while api.stats().wait().waiting < 8:
            pass
        class Cycle: pass
        cycle = Cycle()
        cycle.self, cycle.permit = cycle, held
        del held, cycle
        print("ends", flush=True)
    """
    begun = time.monotonic()
    assert scripts.succeed(code, url) == "ends\n"
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("work", ["permits", "stats", "tasks"])
def test_the_end_of_the_interpreter_while_a_daemon_thread_works(url: str, work: str) -> None:
    """The thread declares semaphores and reads statistics, for which Python code runs below the frames of the extension."""
    code = """
        import asyncio, sys, threading, leasehold
        client = leasehold.Client(sys.argv[1])
        begun = threading.Event()
        async def block():
            async with client.semaphore("api", 2).guard():
                begun.set()
        async def blocks():
            while True:
                await asyncio.gather(*(block() for _ in range(3)))
        def permits():
            while True:
                with client.semaphore("api", 2).guard():
                    begun.set()
        def stats():
            while True:
                client.stats(unused=True).wait()
                begun.set()
        work = {"tasks": lambda: asyncio.run(blocks()), "permits": permits, "stats": stats}[sys.argv[2]]
        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        begun.wait()
    """
    for _ in range(5):
        assert scripts.succeed(code, url, work) == ""


def test_the_end_of_asyncio_run_with_waiters(url: str) -> None:
    code = """
        import asyncio, sys, leasehold
        client = leasehold.Client(sys.argv[1])
        api = client.semaphore("api", 1)
        async def main():
            held = await api.acquire()
            tasks = [asyncio.ensure_future(api.acquire()) for _ in range(5)]
            async def block():
                async with api.guard():
                    pass
            tasks.append(asyncio.ensure_future(block()))
            while (await api.stats()).waiting < 6:
                await asyncio.sleep(0)
            await held.release()
        asyncio.run(main())
        while True:
            stats = api.stats().wait()
            if (stats.held, stats.waiting) == (0, 0):
                break
        print("free")
    """
    assert scripts.succeed(code, url) == "free\n"


def test_the_end_of_the_interpreter_while_the_store_is_unreachable(own_redis: object) -> None:
    code = """
        import sys, time, leasehold
        client = leasehold.Client(sys.argv[1])
        permit = client.semaphore("api", 1).acquire().wait()
        print("held", flush=True)
        sys.stdin.readline()
    """
    from tests.conftest import RedisServer

    assert isinstance(own_redis, RedisServer)
    with scripts.started(code, own_redis.url) as process:
        assert scripts.line(process) == "held"
        own_redis.stop()
        begun = time.monotonic()
        out, err = process.communicate("\n", timeout=30)
        assert (process.returncode, out, err) == (0, "", "")
        assert time.monotonic() - begun < 15


def test_a_permit_that_is_collected_is_released(client: leasehold.Client) -> None:
    api = client.semaphore("api", 3)
    do = Threads()
    permit = api.acquire().wait()
    reference = weakref.ref(permit)
    del permit
    assert reference() is None
    do.run(lambda do: do.until_free(api))
    cycle: list[object] = [api.acquire().wait()]
    cycle.append(cycle)
    del cycle
    gc.collect()
    do.run(lambda do: do.until_free(api))
    context = api.guard()
    context.__enter__()
    del context
    do.run(lambda do: do.until_free(api))


def test_a_task_that_only_the_loop_knows_is_not_collected(client: leasehold.Client) -> None:
    """As with asyncio's own semaphore, a task may be started and forgotten."""

    async def main() -> None:
        do = Asyncio()
        api = client.semaphore("api", 1)
        done = asyncio.Event()

        async def block() -> None:
            async with api.guard():
                done.set()

        held = await api.acquire()
        asyncio.ensure_future(block())  # noqa: RUF006
        await do.until_waiting(api, 1)
        gc.collect()
        assert (await api.stats()).waiting == 1
        await held.release()
        await asyncio.wait_for(done.wait(), TIME_LIMIT)

    asyncio.run(main())


def test_a_task_that_is_forgotten_while_it_waits_is_collected(client: leasehold.Client) -> None:
    """A loop that was closed with tasks that wait: the garbage collector finds the cycle, and they leave the queue."""
    api = client.semaphore("api", 1)
    held = api.acquire().wait()
    loop = asyncio.new_event_loop()

    async def block() -> None:
        async with api.guard():
            pass

    # Nothing logs that the task was destroyed, because nothing is wrong with the package.
    loop.set_exception_handler(lambda _loop, _context: None)
    task = loop.create_task(block())
    loop.run_until_complete(asyncio.sleep(0.05))
    Threads().run(lambda do: do.until_waiting(api, 1))
    loop.close()
    del task, loop
    gc.collect()
    Threads().run(lambda do: do.until_waiting(api, 0))
    held.release().wait()


def test_a_client_that_is_collected_ends_its_thread() -> None:
    code = """
        import os, time, leasehold
        def threads():
            return len(os.listdir("/proc/self/task"))
        before = threads()
        client = leasehold.Client.memory()
        client.semaphore("api", 1, ttl=60).acquire().wait()
        assert threads() == before + 1, threads()
        del client
        deadline = time.monotonic() + 20
        while threads() != before:
            assert time.monotonic() < deadline
        print("ended")
    """
    assert scripts.succeed(code) == "ended\n"


def test_a_holder_that_is_killed(shared_url: str) -> None:
    client = leasehold.Client(shared_url)
    api = client.semaphore("api", 1, lease=1)
    with scripts.started(HOLDER, shared_url) as process:
        assert scripts.line(process) == "held"
        assert api.try_acquire().wait() is None
        waiting = Threads().start(api.acquire())
        Threads().run(lambda do: do.until_waiting(api, 1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed = time.monotonic()
        waiting.result(TIME_LIMIT).release().wait()
        assert time.monotonic() - killed < 5, "its lease is a second"
    client.close().wait()


def test_a_holder_that_is_killed_while_asyncio_waits(shared_url: str) -> None:
    async def main(process: subprocess.Popen[str]) -> None:
        do = Asyncio()
        async with leasehold.Client(shared_url) as client:
            api = client.semaphore("api", 1, lease=1)
            waiting = asyncio.ensure_future(api.acquire())
            await do.until_waiting(api, 1)
            process.send_signal(signal.SIGKILL)
            await (await asyncio.wait_for(waiting, 5)).release()

    with scripts.started(HOLDER, shared_url) as process:
        assert scripts.line(process) == "held"
        asyncio.run(main(process))


def test_a_client_outlives_its_loop(client: leasehold.Client) -> None:
    """One client in several runs of asyncio, with permits that are held from one to the next."""
    api = client.semaphore("api", 1)
    held: list[leasehold.Permit] = []

    async def acquire() -> None:
        held.append(await api.acquire())

    async def hand_over() -> None:
        waiting = asyncio.ensure_future(api.acquire())
        await Asyncio().until_waiting(api, 1)
        await held.pop().release()
        held.append(await waiting)

    asyncio.run(acquire())
    for _ in range(5):
        asyncio.run(hand_over())
    held.pop().release().wait()
    Threads().run(lambda do: do.until_free(api))


def _loops() -> list[str]:
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return ["asyncio"]
    return ["asyncio", "uvloop"]


@pytest.mark.parametrize("kind", _loops())
def test_ten_threads_and_three_loops_at_once(client: leasehold.Client, kind: str) -> None:
    capacity, rounds = 3, 20
    api = client.semaphore("api", capacity)
    inside = most = 0
    lock = threading.Lock()
    failed: list[BaseException] = []

    def enter() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)

    def leave() -> None:
        nonlocal inside
        with lock:
            inside -= 1

    def in_thread() -> None:
        for _ in range(rounds):
            with api.guard():
                enter()
                time.sleep(0)
                leave()

    async def task() -> None:
        for _ in range(rounds):
            async with api.guard():
                enter()
                await asyncio.sleep(0)
                leave()

    async def in_loop() -> None:
        await asyncio.gather(*(task() for _ in range(4)))

    def run_loop() -> None:
        if kind == "uvloop":
            import uvloop

            loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        else:
            loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(in_loop())
        finally:
            loop.close()

    def guarded(work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in [in_thread] * 10 + [run_loop] * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed, failed
    assert not any(thread.is_alive() for thread in threads)
    assert inside == 0
    assert 1 <= most <= capacity
    Threads().run(lambda do: do.until_free(api))


@pytest.mark.skipif("uvloop" not in _loops(), reason="uvloop is not installed")
def test_uvloop(client: leasehold.Client) -> None:
    import uvloop

    async def main() -> None:
        do = Asyncio()
        api = client.semaphore("api", 1, ttl=0.3)
        with pytest.raises(leasehold.Lost):
            async with api.guard():
                await asyncio.Event().wait()
        held = await api.acquire()
        waiting = asyncio.ensure_future(api.acquire())
        await do.until_waiting(api, 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        waiting = asyncio.ensure_future(api.acquire())
        await held.release()
        await (await waiting).release()
        await do.until_free(api)

    loop = uvloop.new_event_loop()
    loop.run_until_complete(main())
    loop.close()


def test_a_wake_up_after_the_loop_was_closed() -> None:
    code = """
        import asyncio, gc, sys, leasehold
        client = leasehold.Client.memory()
        api = client.semaphore("api", 1)
        held = api.acquire().wait()
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda loop, context: None)
        task = loop.create_task(api.acquire())
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        assert api.stats().wait().waiting == 1
        held.release().wait()                      # grants it to a task of a closed loop
        assert api.stats().wait().held == 1
        task._log_destroy_pending = False
        del task, loop
        gc.collect()
        assert api.stats().wait().held == 0
        print("free")
    """
    assert scripts.succeed(code) == "free\n"


class InterruptibleLoop(asyncio.SelectorEventLoop):
    """A loop in which Ctrl-C comes while a future is resolved."""

    interrupt = False

    def create_future(self) -> asyncio.Future[Any]:
        loop = self

        class Future(asyncio.Future[Any]):
            def set_result(self, result: object) -> None:
                super().set_result(result)
                if loop.interrupt:
                    loop.interrupt = False
                    raise KeyboardInterrupt

        return Future(loop=self)


def test_ctrl_c_while_tasks_are_resumed() -> None:
    """All tasks that were granted a permit are resumed, although the first raises."""
    api = leasehold.Client.memory().semaphore("api", 2)
    held = [api.acquire().wait() for _ in range(2)]
    loop = InterruptibleLoop()
    tasks = [loop.create_task(api.acquire()) for _ in range(2)]
    loop.run_until_complete(asyncio.sleep(0))
    assert api.stats().wait().waiting == 2
    for permit in held:
        permit.release().wait()
    loop.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(asyncio.sleep(TIME_LIMIT))
    for task in tasks:
        loop.run_until_complete(asyncio.wait_for(task, TIME_LIMIT)).release().wait()
    loop.close()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks are new in 3.12")
def test_eager_tasks(client: leasehold.Client) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
        api = client.semaphore("api", 1)

        async def block() -> None:
            async with api.guard():
                await asyncio.sleep(0)

        await asyncio.gather(*(block() for _ in range(10)))
        await Asyncio().until_free(api)

    asyncio.run(main())
