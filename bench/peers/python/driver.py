"""Locks for Python, driven by a line protocol on stdin and stdout (see ../PROTOCOL.md).

Usage: driver.py PEER URL, where PEER is a key of PEERS below. Each task is a thread, because these libraries
block a thread while they wait.
"""

import math
import sys
import threading
import time

import redis


class RedisPy:
    """redis-py's own lock, which polls every 100 ms."""

    def __init__(self, client, name, lease, keep=False):
        self.lock = client.lock(name, timeout=lease)

    def acquire(self, within):
        return self.lock.acquire(blocking_timeout=within)

    def release(self):
        self.lock.release()


class PythonRedisLock:
    """python-redis-lock, which waits in BLPOP on a connection of its own. Its times are whole seconds."""

    def __init__(self, client, name, lease, keep=False):
        import redis_lock

        self.lock = redis_lock.Lock(client, name, expire=math.ceil(lease), auto_renewal=keep)

    def acquire(self, within):
        # Without a limit it polls again when the lease must have ended.
        return self.lock.acquire(timeout=within and max(1, math.ceil(within)))

    def release(self):
        self.lock.release()


class Pottery:
    """pottery's Redlock with one master, which polls again after a random time of up to 200 ms."""

    def __init__(self, client, name, lease, keep=False):
        from pottery import Redlock

        self.lock = Redlock(key=name, masters={client}, auto_release_time=lease)

    def acquire(self, within):
        return self.lock.acquire(timeout=-1 if within is None else within)

    def release(self):
        self.lock.release()


class Leasehold:
    """leasehold's Python package, from threads."""

    def __init__(self, client, name, lease, keep=False):
        self.semaphore = client.semaphore(name, 1, lease=lease)
        self.permit = None

    @staticmethod
    def connect(url):
        import leasehold

        return leasehold.Client(url).open().wait()

    def acquire(self, within):
        import leasehold

        try:
            self.permit = self.semaphore.acquire(within=within).wait()
        except leasehold.TimedOut:
            return False
        return True

    def release(self):
        self.permit.release().wait()


PEERS = {
    "redis-py": RedisPy,
    "python-redis-lock": PythonRedisLock,
    "pottery": Pottery,
    "leasehold for Python, threads": Leasehold,
}
LEASE = 10.0  # seconds; longer than anything is held, so that no lease ends


class Driver:
    def __init__(self, peer, url):
        self.peer = PEERS[peer]
        self.client = getattr(self.peer, "connect", connect)(url)
        self.held = []
        self.waiting = []
        self.granted_at = None
        self.granted_first = threading.Event()
        self.may_release = threading.Semaphore(0)
        self.may_rejoin = threading.Semaphore(0)

    def pairs(self, prefix, tasks, names, _capacity, window_ms):
        tasks, names, window = int(tasks), int(names), int(window_ms) / 1000
        counts = [0] * tasks
        stop = threading.Event()
        connected = threading.Semaphore(0)
        failed = []

        def work(task):
            try:
                numbers = range(task % names, names, tasks)
                locks = [self.peer(self.client, f"{prefix}-{n}", LEASE) for n in numbers]
                # Opens the connection that the thread needs.
                if locks[0].acquire(LEASE):
                    locks[0].release()
                connected.release()
                while not stop.is_set():
                    for lock in locks:
                        if not lock.acquire(LEASE):
                            raise RuntimeError("an uncontended lock was not acquired")
                        lock.release()
                        counts[task] += 1
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(task,), daemon=True) for task in range(tasks)]
        for thread in threads:
            thread.start()
        for _ in threads:
            connected.acquire(timeout=LEASE)
        time.sleep(window / 5)
        before, begun = sum(counts), time.monotonic_ns()
        time.sleep(window)
        done, took = sum(counts) - before, time.monotonic_ns() - begun
        stop.set()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return f"ok {done} {took} {sum(counts)}"

    def repeat(self, name, count):
        lock = self.peer(self.client, name, LEASE)
        for _ in range(int(count)):
            lock.acquire(None)
            lock.release()
        return "ok"

    def contend(self, name, waiters, starts_at, step, hold, ends_at):
        waiters, starts_at, step = int(waiters), int(starts_at), int(step)
        hold, ends_at = int(hold), int(ends_at)
        records, failed = [], []

        def work(index):
            try:
                sleep_until(starts_at + index * step)
                lock = self.peer(self.client, name, LEASE)
                while (asked := time.monotonic_ns()) < ends_at:
                    if not lock.acquire((ends_at - asked) / 1e9):
                        records.append((index, asked, 0, 0))
                        break
                    granted = time.monotonic_ns()
                    if hold:
                        time.sleep(hold / 1e9)
                    released = time.monotonic_ns()
                    lock.release()
                    records.append((index, asked, granted, released))
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(waiters)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        lines = [f"ok {len(records)}"] + [" ".join(map(str, record)) for record in records]
        return "\n".join(lines)

    def ring(self, name, waiters, starts_at, step):
        def work(index):
            sleep_until(int(starts_at) + index * int(step))
            lock = self.peer(self.client, name, LEASE)
            while True:
                lock.acquire(None)
                say(f"granted {time.monotonic_ns()}")
                self.may_release.acquire()
                released = time.monotonic_ns()
                lock.release()
                say(f"released {released}")
                self.may_rejoin.acquire()

        for index in range(int(waiters)):
            threading.Thread(target=work, args=(index,), daemon=True).start()

    def release(self):
        self.may_release.release()

    def rejoin(self):
        self.may_rejoin.release()

    def hold(self, name, lease_ms):
        lock = self.peer(self.client, name, int(lease_ms) / 1000, keep=True)
        if not lock.acquire(LEASE):
            raise RuntimeError("a free lock was not acquired")
        self.held.append(lock)
        return "ok"

    def wait(self, name, count, lease_ms, _time_limit_ms):
        def work():
            lock = self.peer(self.client, name, int(lease_ms) / 1000, keep=True)
            lock.acquire(None)
            self.granted_at = self.granted_at or time.monotonic_ns()
            self.granted_first.set()
            lock.release()

        for _ in range(int(count)):
            threading.Thread(target=work, daemon=True).start()
        return "ok"

    def granted(self):
        self.granted_first.wait()
        return f"ok {self.granted_at}"


def connect(url):
    # A thread that waits keeps its connection; the default of 100 would turn the others away.
    client = redis.Redis.from_url(url, max_connections=5000)
    client.ping()
    return client


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def sleep_until(moment):
    time.sleep(max(0, moment - time.monotonic_ns()) / 1e9)


def main():
    try:
        driver = Driver(sys.argv[1], sys.argv[2])
    except Exception as error:
        say(f"error {' '.join(str(error).split()) or type(error).__name__}")
        return
    say("ok")
    for line in sys.stdin:
        command, *arguments = line.split()
        try:
            answer = getattr(driver, command)(*arguments)
        except Exception as error:
            answer = f"error {type(error).__name__}: {' '.join(str(error).split())}"
        if answer:
            say(answer)


main()
