"""The package: URLs, arguments, exceptions, warnings, logging, typing and what is refused."""

from __future__ import annotations

import asyncio
import inspect
import logging
import pathlib
import pickle
import subprocess
import sys
import time
import weakref
from datetime import timedelta
from typing import Any, Callable

import pytest

import leasehold
from leasehold import _leasehold
from tests import scripts
from tests.conftest import RedisServer
from tests.drivers import TIME_LIMIT, Threads


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("zookeeper://somewhere", 'no store "zookeeper:"'),
        ("nothing", "it is not a URL"),
        ("sqlite:", "it has no path"),
        ("sqlite://host/path", "followed by a host name"),
        ("sqlite::memory:", "memory:"),
        ("sqlite:~user/path", "only ~/ is expanded"),
        ("memory:name", "nothing may follow memory:"),
        ("redis://", "it has no host"),
        ("redis://host:port", "the port is not a number"),
        ("redis://user:sec?ret@host", "write %2F for /, %3F for \\? and %23 for #"),
    ],
)
def test_invalid_urls(url: str, problem: str) -> None:
    with pytest.raises(leasehold.InvalidArgument, match=problem) as raised:
        leasehold.Client(url)
    assert "ret@host" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("memory:", "memory:"),
        ("redis://host:6379/0", "redis://host:6379"),
        ("redis://user@host/3", "redis://host:6379/3"),
        ("redis://user:secret@host/0", "redis://host:6379"),
        ("redis://:secret@host", "redis://host:6379"),
        ("redis://user:p@ss:word@host", "redis://host:6379"),
        ("unix:///path?db=1&user=me&pass=secret", "unix:///path/1"),
        (
            "redis-sentinel://u:secret@a,b/m?sentinel_password=other",
            "redis-sentinel://a:26379,b:26379/m",
        ),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    client = leasehold.Client(url)
    assert client.url == shown
    assert repr(client) == f"<leasehold.Client {shown}>"
    assert client.id is None or url == "memory:"


def test_the_store_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(leasehold.InvalidArgument, match="LEASEHOLD_STORE is not set: pass the URL"):
        leasehold.Client()
    monkeypatch.setenv("LEASEHOLD_STORE", "redis://somewhere")
    assert leasehold.Client().url == "redis://somewhere:6379"
    monkeypatch.setenv("LEASEHOLD_STORE", "")
    with pytest.raises(leasehold.InvalidArgument, match="LEASEHOLD_STORE is empty: set it to a URL, or unset it"):
        leasehold.Client()
    monkeypatch.setenv("LEASEHOLD_STORE", "redis://\udcff")
    with pytest.raises(leasehold.InvalidArgument, match="LEASEHOLD_STORE is not UTF-8: set it to a URL, or unset it"):
        leasehold.Client()


def test_the_path_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for directory in ("first", "second"):
        (tmp_path / directory).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    in_home, relative = leasehold.Client("sqlite:~/leases"), leasehold.Client("sqlite:leases")
    # The directory of the declaration counts, not that of the first use.
    monkeypatch.chdir(tmp_path / "second")
    for client, path in ((in_home, tmp_path / "leases"), (relative, tmp_path / "first" / "leases")):
        assert client.url == f"sqlite:{path}"
        with client:
            assert path.exists()
    assert list((tmp_path / "second").iterdir()) == []


def test_a_client_that_only_reads_a_file(tmp_path: pathlib.Path) -> None:
    url = f"sqlite:{tmp_path / 'store'}"
    writer, reader = leasehold.Client(url), leasehold.Client(url, read_only=True)
    with writer, writer.semaphore("api", 1).guard():
        assert reader.stats().wait()[0].held == 1
        with pytest.raises(leasehold.Denied):
            reader.semaphore("api", 1).try_acquire().wait()


def test_a_store_that_cannot_be_reached() -> None:
    client = leasehold.Client("redis://127.0.0.1:1")
    api = client.semaphore("api", 1)
    with pytest.raises(leasehold.Unavailable, match=r"redis://127\.0\.0\.1:1"):
        client.open().wait()
    with pytest.raises(ConnectionError):
        api.acquire().wait()

    async def main() -> None:
        results = await asyncio.gather(*(api.acquire() for _ in range(5)), return_exceptions=True)
        assert [type(result) for result in results] == [leasehold.Unavailable] * 5

    asyncio.run(main())


def test_a_store_that_comes_later(own_redis: RedisServer) -> None:
    own_redis.stop()
    client = leasehold.Client(own_redis.url)
    with pytest.raises(leasehold.Unavailable):
        client.semaphore("api", 1).acquire().wait()
    own_redis.start()
    client.semaphore("api", 1).acquire(within=5).wait().release().wait()
    client.close().wait()


def test_settings(redis_server: RedisServer, tmp_path: pathlib.Path) -> None:
    redis_server.command("FLUSHALL")
    client = leasehold.Client(
        redis_server.url,
        namespace="billing",
        lock_prefix="locks",
        connect_timeout=1,
        answer_timeout=timedelta(seconds=2),
        claim_within=1.5,
    )
    held = client.semaphore("api", 1).acquire().wait()
    guard = client.lock("key").acquire().wait()
    keys = redis_server.command("KEYS", "*").decode()
    assert "billing:" in keys
    assert "locks:" in keys
    reader = leasehold.Client(redis_server.url, namespace="billing", read_only=True)
    assert reader.stats().wait()[0].held == 1
    with pytest.raises(leasehold.Denied) as refused:
        reader.semaphore("api", 1).acquire().wait()
    assert isinstance(refused.value, PermissionError)
    held.release().wait()
    guard.release().wait()
    client.close().wait()
    problem = "namespace: the store memory: has no such setting: leave it out"
    with pytest.raises(leasehold.InvalidArgument, match=problem):
        leasehold.Client("memory:", namespace="billing")
    with pytest.raises(leasehold.InvalidArgument, match="connect_timeout"):
        leasehold.Client(f"sqlite:{tmp_path / 'store'}", connect_timeout=1)
    with pytest.raises(leasehold.InvalidArgument, match="answer_timeout: it is 0; it must be longer than zero"):
        leasehold.Client(redis_server.url, answer_timeout=0)
    with pytest.raises(leasehold.InvalidArgument, match="claim_within: it is 500ms; the minimum is 1s"):
        leasehold.Client(redis_server.url, claim_within=0.5)
    certificates: list[bytes | str] = [b"no certificate", "-----BEGIN nothing"]
    for given in certificates:
        with pytest.raises(leasehold.InvalidArgument, match="ca_certificate"):
            leasehold.Client("rediss://127.0.0.1:1", ca_certificate=given).open().wait()
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(leasehold.InvalidArgument, match="ca_certificate"):
        leasehold.Client("rediss://127.0.0.1:1", ca_certificate=tmp_path / "ca.pem").open().wait()
    with pytest.raises(FileNotFoundError):
        leasehold.Client("rediss://127.0.0.1:1", ca_certificate=tmp_path / "other.pem")


@pytest.mark.parametrize("url", ["memory:", "redis://127.0.0.1:1"])
def test_arguments_are_checked_before_anything_is_opened(url: str) -> None:
    client = leasehold.Client(url)
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: client.semaphore(""), "name"),
        (lambda: client.semaphore("x" * 600, 1), "name"),
        (lambda: client.semaphore("api", 0), "capacity"),
        (lambda: client.semaphore("api", 1, ttl=0), "ttl"),
        (lambda: client.semaphore("api", 1, lease=0.1), "lease"),
        (lambda: client.semaphore("api", 1, burst=3), "burst"),
        (lambda: client.semaphore("api", 1, rate=(0, 1)), "rate"),
        (lambda: client.semaphore("api", 1, ttl=-1), "duration"),
        (lambda: client.semaphore("api", 1, ttl=float("nan")), "duration"),
        (lambda: client.semaphore("api", 1, ttl=timedelta(seconds=-1)), "negative"),
        (lambda: client.semaphore("api", 1).acquire(within=float("inf")), "duration"),
        (lambda: client.lock("fence:1"), "key"),
        (lambda: client.lock("key", retry=leasehold.Retry(jitter="some")), "jitter"),
        (lambda: client.lock("key", retry=leasehold.Retry(multiplier=0.5)), "multiplier"),
        (lambda: client.pool("pool", 0), "capacity"),
        (lambda: client.pool("pool", 1, lease=0.5), "lease"),
        (lambda: client.semaphore("api", -1), "-1 is negative"),
        (lambda: client.semaphore("api", 2**32), "4294967296 is too large; the largest is 4294967295"),
        (lambda: client.semaphore("api", 1, rate=(-1, 1)), "-1 is negative"),
        (lambda: client.semaphore("api", 1).guard(weight=-1), "-1 is negative"),
        (lambda: client.lock("key", ttl=0), "ttl"),
        (lambda: client.stats(limit=-1), "-1 is negative"),
    ]
    for call, problem in wrong:
        with pytest.raises(leasehold.InvalidArgument, match=problem) as raised:
            call()
        assert isinstance(raised.value, ValueError)
    with pytest.raises(TypeError, match="number of seconds or a timedelta, not str"):
        client.semaphore("api", 1, ttl="1s")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        client.semaphore("api", 1.5)  # type: ignore[arg-type]


def test_a_capacity_that_others_have_declared(client: leasehold.Client) -> None:
    api = client.semaphore("api", 3)
    api.acquire().wait().release().wait()
    same = client.semaphore("api")
    assert same.capacity == 3
    assert client.semaphore("new").capacity == 1
    assert client.semaphore("api", 9, unless_declared=True).capacity == 3


def test_the_tree_of_exceptions() -> None:
    expected = {
        leasehold.InvalidArgument: ValueError,
        leasehold.ForeignData: ValueError,
        leasehold.Pinned: ValueError,
        leasehold.InUse: ValueError,
        leasehold.Unknown: ValueError,
        leasehold.TooHeavy: ValueError,
        leasehold.WrongThread: RuntimeError,
        leasehold.TimedOut: TimeoutError,
        leasehold.NotDrained: TimeoutError,
        leasehold.Cancelled: Exception,
        leasehold.Lost: Exception,
        leasehold.Closed: Exception,
        leasehold.Unavailable: ConnectionError,
        leasehold.Denied: PermissionError,
        leasehold.NoRoom: OSError,
        leasehold.Unusable: OSError,
        leasehold.Stopped: RuntimeError,
        leasehold.Forked: RuntimeError,
        leasehold.Internal: Exception,
    }
    for exception, builtin in expected.items():
        assert issubclass(exception, leasehold.Error)
        assert issubclass(exception, builtin)


def test_the_store_decides_which_exception_it_is(redis_server: RedisServer, tmp_path: pathlib.Path) -> None:
    redis_server.command("FLUSHALL")
    redis_server.command("RPUSH", "adv-sem:semaphore_main:api", "theirs")
    client = leasehold.Client(redis_server.url)
    with pytest.raises(leasehold.ForeignData, match="semaphore_main:api") as foreign:
        client.semaphore("api", 1).acquire().wait()
    assert foreign.value.name == "api"
    redis_server.command("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(leasehold.NoRoom, match="out of memory"):
            client.lock("key").acquire().wait()
    finally:
        redis_server.command("CONFIG", "SET", "maxmemory", "0")
    with pytest.raises(leasehold.Unusable, match="not a cluster node"):
        leasehold.Client(redis_server.url.replace("redis://", "redis-cluster://")).stats().wait()
    letter = tmp_path / "letter"
    letter.write_text("not a database")
    with pytest.raises(leasehold.Unusable, match="is not a leasehold store") as unusable:
        leasehold.Client(f"sqlite:{letter}").stats().wait()
    error = pickle.loads(pickle.dumps(unusable.value))
    assert (type(error), str(error)) == (leasehold.Unusable, str(unusable.value))


def test_a_wait_that_is_cancelled_by_its_id() -> None:
    client = leasehold.Client.memory()
    api = client.semaphore("api", 1)
    held = api.acquire().wait()
    waiting = Threads().start(api.acquire())
    while not api.stats().wait().waiting:
        time.sleep(0.01)
    (waiter,) = client.stats(["api"], waiters=1).wait()[0].waiters
    assert api.release(waiter.id).wait()
    with pytest.raises(leasehold.Cancelled, match="was cancelled") as cancelled:
        waiting.result(TIME_LIMIT)
    assert (cancelled.value.name, cancelled.value.id) == ("api", waiter.id)
    held.release().wait()


def test_exceptions_can_be_sent_to_other_processes() -> None:
    api = leasehold.Client.memory().semaphore("api", 1)
    held = api.acquire().wait()
    with pytest.raises(leasehold.TimedOut) as raised:
        api.acquire(within=0.01).wait()
    error = pickle.loads(pickle.dumps(raised.value))
    assert type(error) is leasehold.TimedOut
    assert (str(error), error.name, error.limit) == (str(raised.value), "api", 0.01)
    held.release().wait()
    with pytest.raises(leasehold.Lost) as lost:
        held.check()
    error = pickle.loads(pickle.dumps(lost.value))
    assert (str(error), error.reason) == (str(lost.value), "released")
    stats = api.stats().wait()
    assert pickle.loads(pickle.dumps(stats)) == stats


def test_an_operation_that_is_never_awaited_warns() -> None:
    client = leasehold.Client.memory()
    api = client.semaphore("api", 1)
    calls: list[tuple[Callable[[], object], str]] = [
        (api.acquire, "Semaphore.acquire"),
        (api.try_acquire, "Semaphore.try_acquire"),
        (client.stats, "Client.stats"),
        (client.lock("key").acquire, "Lock.acquire"),
    ]
    for call, name in calls:
        with pytest.warns(RuntimeWarning, match=f"leasehold.{name} was never awaited: await it"):
            call()
    api.guard()  # a block that is not entered is no mistake
    with pytest.warns(RuntimeWarning, match="close"):
        client.close()
    api.acquire().close()
    assert api.stats().wait().held == 0


def test_an_operation_is_awaited_once() -> None:
    async def main() -> None:
        api = leasehold.Client.memory().semaphore("api", 1)
        pending = api.acquire()
        await (await pending).release()
        with pytest.raises(RuntimeError, match="already"):
            await pending
        assert pending.id is not None

    asyncio.run(main())


def test_a_second_task_cannot_take_an_operation_over() -> None:
    """The first would never be resumed."""

    async def main() -> None:
        api = leasehold.Client.memory().semaphore("api", 1)
        held = await api.acquire()
        pending = api.acquire()
        first, second = asyncio.ensure_future(pending), asyncio.ensure_future(pending)
        with pytest.raises(RuntimeError, match="already"):
            await second
        with pytest.raises(RuntimeError, match="already"):
            await asyncio.get_running_loop().run_in_executor(None, pending.wait)
        await held.release()
        await (await asyncio.wait_for(first, TIME_LIMIT)).release()

    asyncio.run(main())


def test_a_second_thread_cannot_take_an_operation_over() -> None:
    api = leasehold.Client.memory().semaphore("api", 1)
    held = api.acquire().wait()
    pending = api.acquire()
    first = Threads().start(pending)
    Threads().run(lambda do: do.until_waiting(api, 1))
    with pytest.raises(RuntimeError, match="already"):
        pending.wait()
    held.release().wait()
    first.result(TIME_LIMIT).release().wait()


def test_annotations_at_run_time() -> None:
    assert leasehold.Pending[int] is leasehold.Pending
    assert leasehold.HeldContext[int] is leasehold.HeldContext


def test_a_semaphore_and_a_lock_are_contexts() -> None:
    client = leasehold.Client.memory()
    declare: list[Callable[[], leasehold.Semaphore | leasehold.Lock]] = [
        lambda: client.semaphore("api", 1),
        lambda: client.lock("key"),
    ]
    for make in declare:
        context = make()
        assert isinstance(context, leasehold.HeldContext)
        with context as held:
            held.check()
        with pytest.raises(leasehold.Lost):
            held.check()
        reference = weakref.ref(context)
        del context
        assert reference() is None


def test_nothing_is_sent_before_it_is_awaited() -> None:
    api = leasehold.Client.memory().semaphore("api", 1)
    pending = api.acquire()
    assert api.stats().wait().held == 0
    permit = pending.wait()
    assert permit.id == pending.id
    assert api.stats().wait().held == 1


def test_events_are_logged(own_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "leasehold")
    client = leasehold.Client(own_redis.url)
    permit = client.semaphore("api", 1).acquire().wait()
    own_redis.stop()

    def logged(level: int, text: str) -> None:
        deadline = time.monotonic() + TIME_LIMIT
        while not any(record.levelno == level and text in record.getMessage() for record in caplog.records):
            assert time.monotonic() < deadline, [record.getMessage() for record in caplog.records]
            time.sleep(0.005)

    logged(logging.WARNING, "the store is unreachable; the client tries to reconnect")
    logged(logging.DEBUG, "permit acquired")
    own_redis.start()
    logged(logging.WARNING, "the store is reachable again")
    assert all(record.name.startswith("leasehold") for record in caplog.records)
    assert permit.id in caplog.text
    client.close().wait()


def test_events_below_the_level_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "leasehold")
    client = leasehold.Client.memory()
    client.semaphore("api", 1).acquire().wait().release().wait()
    client.close().wait()
    assert caplog.records == []


def test_a_handler_may_use_the_package() -> None:
    code = """
        import logging, threading, leasehold
        done = threading.Event()
        class Handler(logging.Handler):
            def emit(self, record):
                if not done.is_set() and "acquired" in record.getMessage():
                    with other.guard():
                        done.set()
        logging.getLogger("leasehold").addHandler(Handler())
        logging.getLogger("leasehold").setLevel(logging.DEBUG)
        client = leasehold.Client.memory()
        other = client.semaphore("other", 1, ttl=60)
        with client.semaphore("api", 1, ttl=60).guard():
            assert done.wait(20)
        print("done")
    """
    assert scripts.succeed(code) == "done\n"


def test_nothing_is_printed_unless_logging_is_configured() -> None:
    code = """
        import leasehold
        permit = leasehold.Client.memory().semaphore("api", 1, ttl=0.05).acquire().wait()
        print(permit.lost().wait())
    """
    assert scripts.succeed(code) == "ttl-ended\n"


def test_free_threaded_python_is_refused() -> None:
    code = """
        import sys
        sys._is_gil_enabled = lambda: False
        try:
            import leasehold
        except ImportError as error:
            print(error)
        assert "leasehold._leasehold" not in sys.modules
    """
    assert scripts.succeed(code).startswith("leasehold does not support free-threaded Python: use the ordinary build")


PUBLIC = [
    leasehold.Client,
    leasehold.HeldContext,
    leasehold.Lock,
    leasehold.LockGuard,
    leasehold.Locks,
    leasehold.Pending,
    leasehold.Permit,
    leasehold.Pool,
    leasehold.PoolLease,
    leasehold.Semaphore,
]


@pytest.mark.parametrize("of", PUBLIC, ids=lambda of: of.__name__)
def test_everything_has_a_docstring(of: Any) -> None:
    assert of.__doc__
    for name, member in vars(of).items():
        if not name.startswith("_"):
            assert member.__doc__, f"{of.__name__}.{name}"


def test_everything_public_is_listed() -> None:
    public = {
        name for name in vars(leasehold) if not name.startswith("_") and not inspect.ismodule(vars(leasehold)[name])
    }
    assert public - {"annotations"} == set(leasehold.__all__) - {"__version__"}
    classes = {name for name, value in vars(_leasehold).items() if inspect.isclass(value)}
    assert classes - {"LuaPool"} <= set(leasehold.__all__), "LuaPool is in leasehold.compat.lua_pool"


def test_the_stubs_have_what_the_module_has() -> None:
    """As `python -m mypy.stubtest` finds it, without its cost."""
    stub = pathlib.Path(leasehold.__file__).with_name("_leasehold.pyi").read_text()
    for of in PUBLIC:
        body = stub.partition(f"class {of.__name__}")[2].partition("\n@final")[0]
        for name in vars(of):
            if not name.startswith("_"):
                assert f"def {name}(" in body, f"{of.__name__}.{name} is not in the stub"


def test_the_docstring_of_the_package() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import doctest, leasehold; print(doctest.testmod(leasehold).failed)"],
        capture_output=True,
        text=True,
        env=scripts.environment(),
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done
