"""Semaphores for asyncio, driven by a line protocol on stdin and stdout (see ../PROTOCOL.md).

Usage: tasks.py PEER URL, where PEER is a key of PEERS below. There is one event loop, and each task is an asyncio task.
"""

import asyncio
import gc
import sys
import time

LEASE = 10.0  # seconds; longer than anything is held, so that no lease ends


class Leasehold:
    """leasehold's Python package on Redis."""

    def __init__(self, url):
        import leasehold

        self.client = leasehold.Client(url)

    async def connect(self):
        await self.client.open()

    def open(self, name, capacity, lease):
        return self.client.semaphore(name, capacity, lease=lease)

    @staticmethod
    def held(semaphore):
        return semaphore.permit()


class LeaseholdMemory(Leasehold):
    """leasehold's Python package in memory."""

    def __init__(self, _url):
        import leasehold

        self.client = leasehold.Client.memory()

    def open(self, name, capacity, _lease):
        return self.client.semaphore(name, capacity)


class AdvancedSemaphores:
    """asyncio-advanced-semaphores on Redis: waits in BLPOP for a second at a time, then asks on its own."""

    def __init__(self, url):
        from asyncio_advanced_semaphores import RedisConfig

        # A task that waits keeps a connection; the default of 300 would make the others wait for one.
        self.config = RedisConfig(url=url, max_connections=5000)

    async def connect(self):
        await self.open("connect", 1, LEASE).locked()

    def open(self, name, capacity, lease):
        from asyncio_advanced_semaphores import RedisSemaphore

        return RedisSemaphore(
            name=name, value=capacity, heartbeat_max_interval=int(lease), config=self.config
        )

    @staticmethod
    def held(semaphore):
        return semaphore.cm()


class AdvancedSemaphoresMemory(AdvancedSemaphores):
    """asyncio-advanced-semaphores in memory."""

    def __init__(self, _url):
        pass

    async def connect(self):
        pass

    def open(self, name, capacity, _lease):
        from asyncio_advanced_semaphores import MemorySemaphore

        return MemorySemaphore(name=name, value=capacity)


class Standard:
    """asyncio's own semaphore. Each name has one."""

    def __init__(self, _url):
        self.semaphores = {}

    async def connect(self):
        pass

    def open(self, name, capacity, _lease):
        return self.semaphores.setdefault(name, asyncio.Semaphore(capacity))

    @staticmethod
    def held(semaphore):
        return semaphore


PEERS = {
    "leasehold for Python": Leasehold,
    "leasehold for Python in memory": LeaseholdMemory,
    "asyncio-advanced-semaphores": AdvancedSemaphores,
    "asyncio-advanced-semaphores in memory": AdvancedSemaphoresMemory,
    "asyncio.Semaphore": Standard,
}


class Driver:
    def __init__(self, peer):
        self.peer = peer
        self.tasks = set()
        self.may_release = asyncio.Semaphore(0)
        self.may_rejoin = asyncio.Semaphore(0)
        self.granted_at = asyncio.get_running_loop().create_future()

    def start(self, coroutine):
        """Runs the coroutine in the background. If it fails, its error is printed as the answer."""

        async def run():
            try:
                await coroutine
            except Exception as error:
                say(describe(error))

        task = asyncio.create_task(run())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def pairs(self, prefix, tasks, names, capacity, window_ms):
        tasks, names, window = int(tasks), int(names), int(window_ms) / 1000
        counts = [0] * tasks
        ends = False
        connected = asyncio.Semaphore(0)

        async def work(task):
            held = self.peer.held
            numbers = range(task % names, names, tasks)
            semaphores = [self.peer.open(f"{prefix}-{n}", int(capacity), LEASE) for n in numbers]
            # Opens the connections that the task needs.
            async with held(semaphores[0]):
                pass
            connected.release()
            while not ends:
                for semaphore in semaphores:
                    # In memory nothing suspends the task, but others must run sometimes.
                    for _ in range(50):
                        async with held(semaphore):
                            pass
                        counts[task] += 1
                        if ends:
                            break
                await asyncio.sleep(0)

        running = [asyncio.create_task(work(task)) for task in range(tasks)]
        for _ in running:
            await asyncio.wait_for(connected.acquire(), LEASE)
        await asyncio.sleep(window / 5)
        before, begun = sum(counts), time.monotonic_ns()
        await asyncio.sleep(window)
        done, took = sum(counts) - before, time.monotonic_ns() - begun
        ends = True
        await asyncio.gather(*running)
        return f"ok {done} {took} {sum(counts)}"

    async def repeat(self, name, count):
        semaphore = self.peer.open(name, 1, LEASE)
        for _ in range(int(count)):
            async with self.peer.held(semaphore):
                pass
        return "ok"

    async def contend(self, name, waiters, starts_at, step, hold, ends_at):
        waiters, starts_at, step = int(waiters), int(starts_at), int(step)
        hold, ends_at = int(hold), int(ends_at)
        records = []

        async def work(index):
            await sleep_until(starts_at + index * step)
            semaphore = self.peer.open(name, 1, LEASE)
            while (asked := time.monotonic_ns()) < ends_at:
                held = self.peer.held(semaphore)
                try:
                    await asyncio.wait_for(held.__aenter__(), (ends_at - asked) / 1e9)
                except TimeoutError:
                    records.append((index, asked, 0, 0))
                    break
                granted = time.monotonic_ns()
                if hold:
                    await asyncio.sleep(hold / 1e9)
                released = time.monotonic_ns()
                await held.__aexit__(None, None, None)
                records.append((index, asked, granted, released))

        await asyncio.gather(*(work(index) for index in range(waiters)))
        lines = [f"ok {len(records)}"] + [" ".join(map(str, record)) for record in records]
        return "\n".join(lines)

    async def ring(self, name, waiters, starts_at, step):
        async def work(index):
            await sleep_until(int(starts_at) + index * int(step))
            semaphore = self.peer.open(name, 1, LEASE)
            while True:
                async with self.peer.held(semaphore):
                    say(f"granted {time.monotonic_ns()}")
                    await self.may_release.acquire()
                    released = time.monotonic_ns()
                say(f"released {released}")
                await self.may_rejoin.acquire()

        for index in range(int(waiters)):
            self.start(work(index))

    async def release(self):
        self.may_release.release()

    async def rejoin(self):
        self.may_rejoin.release()

    async def hold(self, name, lease_ms):
        entered = asyncio.get_running_loop().create_future()

        async def work():
            async with self.peer.held(self.peer.open(name, 1, int(lease_ms) / 1000)):
                entered.set_result(None)
                await asyncio.Event().wait()

        self.start(work())
        await entered
        return "ok"

    async def wait(self, name, count, lease_ms, _time_limit_ms):
        # Otherwise memory that the collector frees later would be counted as well.
        gc.collect()
        semaphore = self.peer.open(name, 1, int(lease_ms) / 1000)

        async def work():
            async with self.peer.held(semaphore):
                if not self.granted_at.done():
                    self.granted_at.set_result(time.monotonic_ns())

        for _ in range(int(count)):
            self.start(work())
        # Lets every task run until it waits.
        await asyncio.sleep(0)
        return "ok"

    async def granted(self):
        return f"ok {await self.granted_at}"


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def describe(error):
    return f"error {type(error).__name__}: {' '.join(str(error).split())}"


async def sleep_until(moment):
    await asyncio.sleep(max(0, moment - time.monotonic_ns()) / 1e9)


async def main():
    try:
        peer = PEERS[sys.argv[1]](sys.argv[2])
        await peer.connect()
    except Exception as error:
        say(describe(error))
        return
    driver = Driver(peer)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    say("ok")
    while line := await lines.readline():
        command, *arguments = line.decode().split()
        try:
            answer = await getattr(driver, command)(*arguments)
        except Exception as error:
            answer = describe(error)
        if answer:
            say(answer)


asyncio.run(main())
