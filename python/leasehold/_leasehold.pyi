import os
from collections.abc import Awaitable, Generator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar, final

from ._types import (
    ClientInfo,
    HeldLock,
    LockInfo,
    Outage,
    PoolAnswer,
    PoolCount,
    PoolStats,
    Retry,
    SemaphoreStats,
)

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)
_Seconds = float | timedelta

__version__: str

def _after_fork_in_child() -> list[int]: ...
def _at_exit() -> None: ...
def _begin(main_thread: int, /) -> None: ...

@final
class Pending(Generator[Any, Any, _T_co], Awaitable[_T_co], Generic[_T_co]):
    """An operation that may wait. Await it in asyncio, or call `wait()` to block the thread.

    Nothing is sent before that. `asyncio.create_task` takes it as it is. It can be awaited once.
    """

    def __await__(self) -> Generator[Any, Any, _T_co]: ...
    def __iter__(self) -> Pending[_T_co]: ...
    def __next__(self) -> Any: ...
    def send(self, value: Any, /) -> Any: ...
    def throw(self, kind: Any, value: Any = None, traceback: Any = None, /) -> Any: ...
    def close(self) -> None: ...
    def wait(self) -> _T_co:
        """Blocks this thread until the operation is done, and returns its result.

        Other threads run meanwhile. Ctrl-C raises KeyboardInterrupt and cancels the operation.
        """
    @property
    def id(self) -> str | None:
        """The id of the permit to come; None for other operations, and while the client is not open."""

@final
class HeldContext(Generic[_T]):
    """A block during which a permit, a lock or a lease is held. Use it with `async with` or `with`.

    It may be entered many times, also by several tasks or threads at once.
    """

    async def __aenter__(self) -> _T: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def __enter__(self) -> _T: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

@final
class Client:
    """A client of a store.

    The store is `memory:`, `sqlite:PATH`, `redis://…`, `rediss://…`, `unix://…`, `redis-sentinel://…` or `redis-cluster://…`. Without
    a URL it is `$LEASEHOLD_STORE`, or else `memory:`. Nothing is connected before the first operation. Use a client from any number
    of threads and event loops. After a fork, the child opens the store again when it first uses the client.
    """

    def __new__(
        cls,
        url: str | None = None,
        *,
        namespace: str | None = None,
        lock_prefix: str | None = None,
        ca_certificate: bytes | str | os.PathLike[str] | None = None,
        connect_timeout: _Seconds | None = None,
        answer_timeout: _Seconds | None = None,
        confirm_within: _Seconds | None = None,
        read_only: bool = False,
    ) -> Client: ...
    @staticmethod
    def memory() -> Client:
        """A client whose permits are shared by those who use this object. Another one shares nothing with it."""
    def open(self) -> Pending[Client]:
        """Opens the store now, so that a store that cannot be reached is noticed early. Returns this client."""
    @property
    def id(self) -> str | None:
        """The client id, with which the ids of its permits begin; None while the store is not open."""
    @property
    def url(self) -> str:
        """The URL of the store, without passwords."""
    def semaphore(
        self,
        name: str,
        capacity: int | None = None,
        *,
        ttl: _Seconds | None = None,
        lease: _Seconds | None = None,
        max_acquire_time: _Seconds | None = None,
        label: str | None = None,
        numbered: bool = False,
        rate: tuple[int, _Seconds] | None = None,
        burst: int | None = None,
        unless_declared: bool = False,
    ) -> Semaphore:
        """Declares a fair semaphore. All durations are in seconds.

        Without a capacity it has the one that others have declared, or else 1. `ttl` is the longest time that a permit may be held,
        `lease` how long its holder may be silent (30 s), and `max_acquire_time` the longest wait of an acquire. `rate=(100, 60)` grants
        at most 100 permits per minute.
        """
    def rate(
        self,
        name: str,
        starts: int,
        period: _Seconds,
        *,
        burst: int | None = None,
        label: str | None = None,
    ) -> Semaphore:
        """Declares a rate without a limit of how many hold a permit at once: `starts` in any `period` of so many seconds."""
    def lock(
        self,
        key: str,
        *,
        lease: _Seconds | None = None,
        auto_extend: bool = True,
        label: str | None = None,
        within: _Seconds | None = None,
        retry: Retry | None = None,
    ) -> Lock:
        """Declares a fenced lock.

        `lease` is how long its holder may be silent, in seconds (30). With `auto_extend` the client extends it in the background.
        `within` is the longest wait of an acquire, in seconds; by default there is no limit.
        """
    @property
    def locks(self) -> Locks:
        """All locks of the store, by key and by lock id."""
    def pool(
        self,
        name: str,
        capacity: int,
        *,
        lease: _Seconds | None = None,
        within: _Seconds | None = None,
        retry: Retry | None = None,
    ) -> Pool:
        """Declares a pool of leases. `lease` is how long an instance may be silent, in seconds (30)."""
    def pools(self, limit: int = 100) -> Pending[list[PoolStats]]:
        """The pools that have members, by name; at most `limit`."""
    def stats(
        self,
        names: Sequence[str] | None = None,
        *,
        limit: int = 100,
        unused: bool = False,
        waiters: int = 0,
    ) -> Pending[list[SemaphoreStats]]:
        """What is held and who waits, the most used name first.

        `unused` includes names that nobody holds or waits for. `waiters` is how many waiters of each name are listed.
        """
    def clients(self, limit: int = 100) -> Pending[list[ClientInfo]]:
        """The clients that use the store, by id; at most `limit`."""
    def outage(self) -> Outage | None:
        """The outage of the store, if it cannot be reached now; None otherwise, and while the store is not open."""
    def close(self) -> Pending[None]:
        """Ends the client: those who wait get Closed, and what is held is released."""
    async def __aenter__(self) -> Client: ...
    async def __aexit__(self, *exception: object) -> None: ...
    def __enter__(self) -> Client: ...
    def __exit__(self, *exception: object) -> None: ...

@final
class Semaphore:
    """A fair counting semaphore: first come, first served.

    Semaphores with the same name share their permits, in all programs that use the same store.
    """

    @property
    def name(self) -> str: ...
    @property
    def capacity(self) -> int:
        """The capacity by the newest declaration in this client."""
    def permit(
        self, *, within: _Seconds | None = None, weight: int = 1, cancel_on_loss: bool = True
    ) -> HeldContext[Permit]:
        """A block during which a permit is held: `async with semaphore.permit() as permit`, or `with` in a thread.

        `within` is the longest wait in seconds, and `weight` the number of units. When the permit is lost, the body of an
        `async with` is cancelled, and the block raises Lost. A body that cannot be cancelled, as that of a `with`, runs to its end,
        and then the block raises Lost. With `cancel_on_loss=False` neither happens.
        """
    async def __aenter__(self) -> Permit: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def __enter__(self) -> Permit: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def acquire(self, *, within: _Seconds | None = None, weight: int = 1) -> Pending[Permit]:
        """Waits for a permit. `within` is the longest wait in seconds, and `weight` the number of units."""
    def try_acquire(self, *, weight: int = 1) -> Pending[Permit | None]:
        """A permit if one is free and nobody waits for it; None otherwise."""
    def release(self, id: str) -> Pending[bool]:
        """Releases a permit by its id. True if it was held until now."""
    def release_member(self, id: str) -> Pending[bool]:
        """Releases a holder or waiter by the id that the statistics show, also one of another program. True if it was there."""
    def position(self, id: str) -> Pending[int | None]:
        """How many waiters come before this one; None if it does not wait. The id is that of an acquire."""
    def locked(self) -> Pending[bool]:
        """Whether an acquire would have to wait now."""
    def stats(self) -> Pending[SemaphoreStats]:
        """What is held, and how many wait."""
    def set_capacity(self, capacity: int) -> Pending[None]:
        """Declares another capacity, for everybody."""
    def pin(self, capacity: int) -> Pending[None]:
        """Sets the capacity, for everybody, until `unpin`, whatever programs declare."""
    def unpin(self) -> Pending[None]:
        """Ends a `pin`: the newest declaration counts again."""
    def set_rate(self, starts: int, period: _Seconds, burst: int = 1) -> Pending[None]:
        """Sets the rate, for everybody: so many starts in a period of so many seconds."""
    def clear_rate(self) -> Pending[None]:
        """Removes the rate, for everybody."""
    def pause(self, *, by: str | None = None, reason: str | None = None) -> Pending[None]:
        """Grants no more permits until `resume`. Holders keep theirs, and waiters their places."""
    def resume(self) -> Pending[None]:
        """Ends a `pause`."""
    def drain(
        self, *, within: _Seconds | None = None, by: str | None = None, reason: str | None = None
    ) -> Pending[None]:
        """Pauses the semaphore, and waits until nobody holds a permit, for at most `within` seconds. It stays paused."""
    def forget(self) -> Pending[None]:
        """Removes all that the store knows of the semaphore, if nobody holds a permit or waits for one."""

@final
class Permit:
    """A permit of a semaphore. It is held until it is released or garbage-collected."""

    @property
    def id(self) -> str:
        """The id of the permit in the store. `Semaphore.release` takes it."""
    @property
    def name(self) -> str:
        """The name of the semaphore."""
    @property
    def fence(self) -> int:
        """A number that is larger than the fence of every permit of this name that was granted before."""
    @property
    def slot_number(self) -> int | None:
        """The lowest number from 1 to the capacity that no other live permit has; None unless the semaphore is numbered."""
    @property
    def waited(self) -> float:
        """How long the acquire waited, in seconds."""
    @property
    def valid_for(self) -> float | None:
        """For how many seconds the permit is valid without another renewal; None if it does not expire by itself."""
    def check(self) -> None:
        """Raises Lost if the permit was lost or released."""
    def lost(self) -> Pending[Literal["ttl-ended", "not-renewed", "gone", "released", "closed"]]:
        """Resolves with the reason when the permit is lost."""
    def release(self) -> Pending[bool]:
        """Releases the permit, and resolves when the store has done so. False if it had been lost or released."""
    def detach(self) -> str:
        """Keeps the permit held, and renewed, after this object is gone, and returns its id."""

@final
class Lock:
    """An exclusive lock with a key. Every holder has a fence that is larger than those before.

    It is not fair: for order use a semaphore with a capacity of 1.
    """

    @property
    def key(self) -> str: ...
    def guard(self, *, within: _Seconds | None = None, cancel_on_loss: bool = True) -> HeldContext[LockGuard]:
        """A block during which the lock is held: `async with lock.guard() as guard`, or `with` in a thread.

        `within` is the longest wait in seconds. For `cancel_on_loss` see `Semaphore.permit`.
        """
    async def __aenter__(self) -> LockGuard: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def __enter__(self) -> LockGuard: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def acquire(self, *, within: _Seconds | None = None) -> Pending[LockGuard]:
        """Waits for the lock, for at most `within` seconds."""
    def try_acquire(self) -> Pending[LockGuard | None]:
        """The lock if it is free; None otherwise."""

@final
class LockGuard:
    """A lock that is held until it is released or garbage-collected, or until its lease ends."""

    @property
    def key(self) -> str: ...
    @property
    def id(self) -> str:
        """The lock id. Whoever has it can extend and release the lock: do not log it."""
    @property
    def fence(self) -> int:
        """A number that is larger than the fence of every earlier holder of this key."""
    @property
    def expires_at(self) -> float:
        """When the lock ends unless it is extended, in seconds since 1970 by the clock of the store."""
    @property
    def valid_for(self) -> float:
        """For how many seconds the lock is held without another extension."""
    def check(self) -> None:
        """Raises Lost if the lock was lost or released."""
    def lost(self) -> Pending[Literal["ttl-ended", "not-renewed", "gone", "released", "closed"]]:
        """Resolves with the reason when the lock is lost."""
    def extend(self, ttl: _Seconds) -> Pending[None]:
        """Lets the lock end so many seconds from now, whatever was left of its lease. Raises Lost if it was lost."""
    def auto_extend(self) -> None:
        """Extends the lock in the background from now on, at a third of its lease."""
    def release(self) -> Pending[bool]:
        """Releases the lock, and resolves when the store has done so. False if it had been lost or released."""
    def detach(self) -> str:
        """Keeps the lock after this object is gone, until its lease ends, and returns its lock id."""

@final
class Locks:
    """All locks of a store, by key and by lock id. Each call is a single attempt."""

    def acquire(self, key: str, ttl: _Seconds) -> Pending[HeldLock | None]:
        """The lock for so many seconds if it is free; None otherwise. Only its lock id extends or releases it."""
    def release(self, lock_id: str) -> Pending[bool]:
        """Releases a lock by its lock id. True if it was held until now."""
    def extend(self, lock_id: str, ttl: _Seconds) -> Pending[bool]:
        """Lets a lock end so many seconds from now. False if it is not held any more."""
    def is_locked(self, key: str) -> Pending[bool]:
        """Whether somebody holds the lock."""
    def owns(self, lock_id: str) -> Pending[bool]:
        """Whether this lock id holds its lock."""
    def lookup(self, key: str) -> Pending[LockInfo | None]:
        """What is known of the lock with this key; None if nobody holds it."""
    def lookup_id(self, lock_id: str) -> Pending[LockInfo | None]:
        """What is known of the lock with this lock id; None if it is not held."""
    def list(self, limit: int = 100) -> Pending[list[LockInfo]]:
        """The locks that are held, by key; at most `limit`."""

@final
class Pool:
    """A fixed number of leases, each held by an instance id. There is no queue."""

    @property
    def name(self) -> str: ...
    @property
    def capacity(self) -> int: ...
    def acquire(self, instance_id: str) -> Pending[PoolAnswer]:
        """Takes a lease if there is one, or renews the lease that the instance has. Only `renew` renews it."""
    def renew(self, instance_id: str) -> Pending[PoolAnswer]:
        """Renews the lease of an instance."""
    def release(self, instance_id: str) -> Pending[PoolAnswer]:
        """Releases the lease of an instance."""
    def count(self) -> Pending[PoolCount]:
        """How many leases are held, and how many were found to have expired."""
    def lease(
        self, instance_id: str, *, within: _Seconds | None = None, cancel_on_loss: bool = True
    ) -> HeldContext[PoolLease]:
        """A block during which the instance holds a lease that renews itself.

        `within` is the longest wait in seconds. For `cancel_on_loss` see `Semaphore.permit`.
        """
    def try_lease(self, instance_id: str) -> Pending[PoolLease | None]:
        """A lease that renews itself, if there is one now; None otherwise."""

@final
class PoolLease:
    """A lease of a pool, which renews itself. It is held until it is released or garbage-collected."""

    @property
    def pool(self) -> str: ...
    @property
    def instance_id(self) -> str: ...
    @property
    def valid_for(self) -> float:
        """For how many seconds the lease is valid without another renewal."""
    def check(self) -> None:
        """Raises Lost if the lease was lost or released."""
    def lost(self) -> Pending[Literal["ttl-ended", "not-renewed", "gone", "released", "closed"]]:
        """Resolves with the reason when the lease is lost."""
    def release(self) -> Pending[bool]:
        """Releases the lease, and resolves when the store has done so. False if it had been lost or released."""
