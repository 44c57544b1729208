"""Forks: a child opens the store again, or raises an error that says what to do. It never touches its parent's permits."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

import leasehold
from tests import scripts
from tests.conftest import RedisServer
from tests.drivers import Threads

# A fork in a process with threads is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

#: Runs a function in a forked child, and prints what it returns. With `exit=sys.exit` the child runs the interpreter's exit.
PRELUDE = """
import asyncio, gc, os, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import leasehold

def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)

def in_child(work, exit=os._exit):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(writer, str(work()).encode())
            code = 0
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os.close(writer)
            if exit is not None:
                exit(code)
            os._exit(code)
    os.close(writer)
    text = b""
    while True:
        some = os.read(reader, 65536)
        if not some:
            break
        text += some
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    return text.decode()

client = leasehold.Client(sys.argv[1])
api = client.semaphore("api", 1)
"""


def program(code: str, *arguments: str) -> str:
    import textwrap

    return scripts.succeed(PRELUDE + textwrap.dedent(code), *arguments)


def test_the_child_has_a_client_of_its_own(redis_server: RedisServer) -> None:
    redis_server.command("FLUSHALL")
    code = """
        held = api.acquire().wait()
        def child():
            assert client.id is None, "it is not open yet"
            assert api.try_acquire().wait() is None, "the parent holds it"
            other = client.semaphore("other", 1).acquire(within=5).wait()
            assert not other.id.startswith(parent)
            with client.semaphore("other", 2).guard(within=5):
                pass
            async def main():
                async with client.semaphore("third", 1).guard(within=5):
                    return "works"
            return asyncio.run(main())
        parent = client.id
        assert in_child(child) == "works"
        held.check()
        assert api.stats().wait().held == 1
        assert held.release().wait()
        print("fine")
    """
    assert program(code, redis_server.url) == "fine\n"


def test_the_child_of_a_client_in_memory_has_an_empty_store() -> None:
    code = """
        held = api.acquire().wait()
        def child():
            with api.guard(within=5):
                return api.stats().wait().held
        assert in_child(child) == "1"
        held.check()
        held.release().wait()
        print("fine")
    """
    assert program(code, "memory:") == "fine\n"


def test_a_file_is_refused_in_the_child(tmp_path: pathlib.Path) -> None:
    code = """
        held = api.acquire().wait()
        def child():
            for new in [client, leasehold.Client(sys.argv[1]), leasehold.Client(sys.argv[1] + "-other")]:
                try:
                    new.semaphore("api", 1).acquire().wait()
                except leasehold.Forked as error:
                    message = str(error)
                else:
                    raise AssertionError("it was opened")
            # Other stores work.
            with leasehold.Client.memory().semaphore("api", 1).guard(within=5):
                return message
        assert "spawn" in in_child(child) and "first client after the fork" in in_child(child)
        # In a grandchild, too.
        assert "spawn" in in_child(lambda: in_child(child))
        held.check()
        assert held.release().wait()
        print("fine")
    """
    assert program(code, f"sqlite:{tmp_path / 'store'}") == "fine\n"


def test_a_file_that_only_children_open(tmp_path: pathlib.Path) -> None:
    """A client that was declared, but not used before the fork, works in every child."""
    code = """
        def child():
            with api.guard(within=10):
                return "works"
        assert [in_child(child) for _ in range(3)] == ["works"] * 3
        print("fine")
    """
    assert program(code, f"sqlite:{tmp_path / 'store'}") == "fine\n"


@pytest.mark.parametrize("way", ["os._exit", "sys.exit", "None"])
def test_objects_of_the_parent_are_refused(url: str, way: str) -> None:
    code = """
        permit = api.acquire().wait()
        guard = client.lock("key").acquire().wait()
        lease = client.pool("pool", 1).try_acquire("worker").wait()
        pending = api.acquire()
        lost = permit.lost()
        def child():
            uses = [
                permit.check, permit.release, permit.lost, permit.detach, lambda: permit.valid_for,
                guard.check, guard.release, guard.lost, guard.detach, lambda: guard.extend(5),
                lease.check, lease.release, lease.lost, pending.wait, lost.wait,
            ]
            for use in uses:
                try:
                    use()
                except leasehold.Forked:
                    continue
                raise AssertionError(f"{use} was not refused")
            return permit.fence == fence and permit.id == name
        fence, name = permit.fence, permit.id
        assert in_child(child, exit=%s) == "True"
        for held in [permit, guard, lease]:
            held.check()
            assert held.release().wait()
        pending.wait().release().wait()
        lost.close()
        print("fine")
    """
    assert program(code % way, url) == "fine\n"


def test_dropping_in_the_child_releases_nothing(url: str) -> None:
    code = """
        permit = api.acquire().wait()
        def child():
            global permit, client, api
            del permit, client, api
            gc.collect()
            return "dropped"
        for exit in [os._exit, sys.exit]:
            assert in_child(child, exit=exit) == "dropped"
        permit.check()
        assert api.try_acquire().wait() is None
        assert api.stats().wait().held == 1
        permit.release().wait()
        print("fine")
    """
    assert program(code, url) == "fine\n"


@pytest.mark.parametrize("end", ["sys.exit(3)", "os._exit(3)", "raise SystemExit(3)", "return"])
def test_a_block_that_the_parent_has_entered(url: str, end: str) -> None:
    """The child leaves the block, and the parent's permit stays held."""
    code = """
        def fork():
            with api.guard() as permit:
                pid = os.fork()
                if pid == 0:
                    %s
                _, status = os.waitpid(pid, 0)
                permit.check()
                assert api.try_acquire().wait() is None
                return os.WEXITSTATUS(status)
        parent = os.getpid()
        code = fork()
        if os.getpid() != parent:
            os._exit(3)
        assert code == 3, code
        assert api.stats().wait().held == 0
        print("fine")
    """
    assert program(code % end, url) == "fine\n"


def test_a_fork_inside_of_an_event_loop(redis_server: RedisServer) -> None:
    redis_server.command("FLUSHALL")
    code = """
        async def main():
            async with api.guard() as permit:
                waiting = asyncio.ensure_future(api.acquire())
                while (await api.stats()).waiting < 1:
                    await asyncio.sleep(0)
                pid = os.fork()
                if pid == 0:
                    try:
                        permit.check()
                    except leasehold.Forked:
                        os._exit(7)
                    os._exit(8)
                assert os.WEXITSTATUS(os.waitpid(pid, 0)[1]) == 7
                permit.check()
            await (await asyncio.wait_for(waiting, 20)).release()
            assert (await api.stats()).held == 0
        asyncio.run(main())
        print("fine")
    """
    assert program(code, redis_server.url) == "fine\n"


def test_forks_while_other_threads_wait_and_work(redis_server: RedisServer) -> None:
    redis_server.command("FLUSHALL")
    code = """
        busy = client.semaphore("busy", 2)
        held = api.acquire().wait()
        stop = threading.Event()
        def wait():
            api.acquire().wait().release().wait()
        def work():
            while not stop.is_set():
                with busy.guard():
                    pass
        threads = [threading.Thread(target=wait) for _ in range(4)] + [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: api.stats().wait().waiting == 4)
        def child():
            with client.semaphore("childs", 3).guard(within=20):
                gc.collect()
                return "works"
        for number in range(10):
            assert in_child(child, exit=sys.exit if number % 2 else os._exit) == "works"
        stop.set()
        held.check()
        held.release().wait()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        until(lambda: api.stats().wait().held == 0 and busy.stats().wait().held == 0)
        print("fine")
    """
    assert program(code, redis_server.url) == "fine\n"


def test_the_child_of_a_killed_parent_does_not_keep_its_permits(shared_url: str) -> None:
    """The child does not keep the descriptor by which the parent counts as alive."""
    code = """
        import os, sys, time, warnings, leasehold
        warnings.simplefilter("ignore", DeprecationWarning)
        client = leasehold.Client(sys.argv[1])
        permit = client.semaphore("api", 1, lease=1).acquire().wait()
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        print(pid, flush=True)
        time.sleep(60)
    """
    client = leasehold.Client(shared_url)
    api = client.semaphore("api", 1, lease=1)
    with scripts.started(code, shared_url) as process:
        child = int(scripts.line(process))
        try:
            assert api.try_acquire().wait() is None
            process.send_signal(signal.SIGKILL)
            process.wait()
            os.kill(child, 0)  # it lives
            killed = time.monotonic()
            api.acquire(within=10).wait().release().wait()
            assert time.monotonic() - killed < 5, "its lease is a second"
        finally:
            os.kill(child, signal.SIGKILL)
    client.close().wait()


#: A client whose threads are busy, and wait for "api", is forked. The first line that it prints is the process id of the child.
BUSY = """
import os, sys, threading, time, warnings, leasehold
warnings.simplefilter("ignore", DeprecationWarning)
client = leasehold.Client(sys.argv[1])
api, busy = client.semaphore("api", 1), client.semaphore("busy", 1)

def wait():
    api.acquire().wait()

def work():
    while True:
        with busy.guard():
            pass

for target in [wait] * 10 + [work]:
    threading.Thread(target=target, daemon=True).start()
while api.stats().wait().waiting < 10:
    time.sleep(0.002)
pid = os.fork()
if pid == 0:
    time.sleep(60)
    os._exit(0)
print(pid, flush=True)
time.sleep(60)
"""


def test_a_killed_parent_that_waits_and_works_blocks_nobody(shared_url: str) -> None:
    """The child keeps neither the store's write lock nor the connection that receives the parent's wake-ups."""
    client = leasehold.Client(shared_url)
    permit = client.semaphore("api", 1).acquire().wait()
    with scripts.started(BUSY, shared_url) as process:
        child = int(scripts.line(process))
        try:
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert permit.release().wait()
            # Each of the dead waiters would cost the claim time: 50 s in all.
            client.semaphore("api", 1).acquire(within=30).wait().release().wait()
            client.semaphore("busy", 1).acquire(within=60).wait().release().wait()
            os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)
    client.close().wait()


def locks_file(pid: int, file: pathlib.Path) -> bool:
    """Whether a process holds a lock of the kind `flock` on the file."""
    inode = f":{file.stat().st_ino} "
    with open("/proc/locks") as locks:
        return any("FLOCK" in line and f" {pid} " in line and inode in line for line in locks)


def test_a_parent_that_is_killed_while_it_writes_blocks_nobody(tmp_path: pathlib.Path) -> None:
    """The write lock ends with the parent, although the child lives."""
    url, turn = f"sqlite:{tmp_path / 'store'}", tmp_path / "store.clients" / "turn"
    client = leasehold.Client(url)
    permit = client.semaphore("api", 1).acquire().wait()
    with scripts.started(BUSY, url) as process:
        child = int(scripts.line(process))
        try:
            deadline = time.monotonic() + 20
            while True:
                process.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
                if locks_file(process.pid, turn):
                    break
                process.send_signal(signal.SIGCONT)
                assert time.monotonic() < deadline, "it does not write"
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert permit.release().wait()
            client.semaphore("busy", 1).acquire(within=10).wait().release().wait()
            os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)
    client.close().wait()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(redis_server: RedisServer, tmp_path: pathlib.Path, method: str) -> None:
    redis_server.command("FLUSHALL")
    worker = tmp_path / "worker.py"
    worker.write_text(
        """
import sys, leasehold
client = leasehold.Client(sys.argv[1])
api = client.semaphore("api", 2)

def work(number):
    with api.guard(within=20) as permit:
        return permit.id.rsplit("-", 1)[0]
"""
    )
    main = tmp_path / "main.py"
    main.write_text(
        """
import multiprocessing, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import worker

if __name__ == "__main__":
    with worker.api.guard():
        with multiprocessing.get_context(sys.argv[2]).Pool(3) as pool:
            clients = set(pool.map(worker.work, range(20), chunksize=1))
    assert worker.client.id not in clients
    print(len(clients) >= 1, worker.api.stats().wait().held)
"""
    )
    done = subprocess.run(
        [sys.executable, str(main), redis_server.url, method],
        capture_output=True,
        text=True,
        timeout=50,
        env=scripts.environment(),
        cwd=tmp_path,
    )
    assert (done.stdout, done.stderr) == ("True 0\n", "")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("imported", ["by the parent", "by the child"])
def test_a_worker_of_multiprocessing_releases_when_it_ends(
    redis_server: RedisServer, tmp_path: pathlib.Path, method: str, imported: str
) -> None:
    """It ends without running the handlers of atexit. Its threads can use their permits until they end."""
    redis_server.command("FLUSHALL")
    imports = "import leasehold" if imported == "by the parent" else ""
    main = tmp_path / "main.py"
    main.write_text(
        f"""
import multiprocessing, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
{imports}

def work(url):
    global client, permit
    import leasehold
    client = leasehold.Client(url)
    permit = client.semaphore("api", 1, lease=60).acquire(within=10).wait()
    threading.Thread(target=goes_on).start()

def goes_on():
    time.sleep(0.2)
    permit.check()
    with client.semaphore("other", 1).guard(within=10):
        print("works", flush=True)

if __name__ == "__main__":
    worker = multiprocessing.get_context(sys.argv[2]).Process(target=work, args=(sys.argv[1],))
    worker.start()
    worker.join()
    print(worker.exitcode)
"""
    )
    done = subprocess.run(
        [sys.executable, str(main), redis_server.url, method],
        capture_output=True,
        text=True,
        timeout=50,
        env=scripts.environment(),
    )
    assert (done.stdout, done.stderr) == ("works\n0\n", "")
    with leasehold.Client(redis_server.url) as client:
        assert client.semaphore("api", 1).stats().wait().held == 0


def test_multiprocessing_with_a_file_and_spawn(tmp_path: pathlib.Path) -> None:
    main = tmp_path / "main.py"
    main.write_text(
        """
import multiprocessing, sys, leasehold

def work(url):
    client = leasehold.Client(url)
    with client.semaphore("api", 1).guard(within=20):
        return client.id

if __name__ == "__main__":
    client = leasehold.Client(sys.argv[1])
    api = client.semaphore("api", 1)
    with api.guard():
        pass
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        clients = set(pool.map(work, [sys.argv[1]] * 6, chunksize=1))
    print(len(clients))
"""
    )
    url = f"sqlite:{tmp_path / 'store'}"
    done = subprocess.run(
        [sys.executable, str(main), url],
        capture_output=True,
        text=True,
        timeout=50,
        env=scripts.environment(),
        cwd=tmp_path,
    )
    assert (done.stdout, done.stderr) == ("6\n", "")


def test_a_prefork_server(redis_server: RedisServer, tmp_path: pathlib.Path) -> None:
    """gunicorn loads the application, with a permit that is held, and forks its workers."""
    pytest.importorskip("gunicorn")
    redis_server.command("FLUSHALL")
    (tmp_path / "application.py").write_text(
        f"""
import os, leasehold
client = leasehold.Client({redis_server.url!r})
api = client.semaphore("requests", 2)
master = client.semaphore("master", 1).acquire().wait()

def app(environ, start_response):
    with api.guard(within=10) as permit:
        try:
            master.check()
            refused = "no"
        except leasehold.Forked:
            refused = "yes"
        body = f"{{os.getpid()}} {{permit.id.rsplit('-', 1)[0]}} {{refused}}".encode()
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]
"""
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["-m", "gunicorn", "--preload", "--workers", "3", "--bind", f"127.0.0.1:{port}", "application:app"]
    server = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env={**scripts.environment(), "PYTHONPATH": f"{scripts.PACKAGES}{os.pathsep}{tmp_path}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    client = leasehold.Client(redis_server.url)

    def fetch() -> str:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            answer = b""
            while some := connection.recv(65536):
                answer += some
        return answer.decode().rpartition("\r\n\r\n")[2]

    try:
        answers: set[str] = set()
        deadline = time.monotonic() + 40
        # All of them: gunicorn waits for 30 s for a worker that it tells to end before it is ready.
        while len({answer.split()[0] for answer in answers}) < 3:
            assert time.monotonic() < deadline, answers
            try:
                answers.add(fetch())
            except OSError:
                assert server.poll() is None, server.communicate()
                time.sleep(0.02)
        assert all(answer.endswith(" yes") for answer in answers), answers
        processes = {answer.split()[0] for answer in answers}
        clients = {answer.split()[1] for answer in answers}
        assert len(processes) == len(clients), "each worker has a client of its own"
        master = client.semaphore("master", 1)
        assert master.try_acquire().wait() is None, "gunicorn's master still holds it"
        server.send_signal(signal.SIGTERM)
        server.wait(20)
        # The master has released it when it ended.
        master.acquire(within=10).wait().release().wait()
        Threads().run(lambda do: do.until_free(client.semaphore("requests", 2)))
    finally:
        server.kill()
        server.communicate()
        client.close().wait()
