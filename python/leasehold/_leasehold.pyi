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

        Other threads run in the meantime. Ctrl-C raises KeyboardInterrupt and cancels the operation.
        """
    @property
    def id(self) -> str | None:
        """The id of the permit that an acquire waits for; None for other operations, and while the client is not open."""

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
        """Returns a client in memory. The tasks and threads that use this object share its permits; other clients do not."""
    def open(self) -> Pending[Client]:
        """Opens the store now, to learn early whether it can be reached. Returns this client."""
    @property
    def id(self) -> str | None:
        """The client id, with which the ids of its permits begin; None while the store is not open."""
    @property
    def url(self) -> str:
        """The URL of the store, without the user and the password."""
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
        """Declares a rate: at most `starts` permits in any `period` of seconds, however many are held at once."""
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
        """Returns the pools that have members, sorted by name; at most `limit`."""
    def stats(
        self,
        names: Sequence[str] | None = None,
        *,
        limit: int = 100,
        unused: bool = False,
        waiters: int = 0,
    ) -> Pending[list[SemaphoreStats]]:
        """Returns the limits, holders and waiters of semaphores, the most used name first.

        `unused` includes names without holders and waiters. `waiters` is how many waiters of each name are listed.
        """
    def clients(self, limit: int = 100) -> Pending[list[ClientInfo]]:
        """Returns the clients of the store, sorted by id; at most `limit`."""
    def outage(self) -> Outage | None:
        """Returns the current outage of the store; None if the store can be reached, or is not open yet."""
    def close(self) -> Pending[None]:
        """Closes the client: waiting acquires raise Closed, and all permits, locks and leases are released."""
    async def __aenter__(self) -> Client: ...
    async def __aexit__(self, *exception: object) -> None: ...
    def __enter__(self) -> Client: ...
    def __exit__(self, *exception: object) -> None: ...

@final
class Semaphore(HeldContext[Permit]):
    """A fair counting semaphore: first come, first served.

    Semaphores with the same name share their permits, in all programs that use the same store. `async with semaphore` and
    `with semaphore` hold one permit, as `semaphore.permit()` does.
    """

    @property
    def name(self) -> str: ...
    @property
    def capacity(self) -> int:
        """The capacity that this client declared last."""
    def permit(
        self, *, within: _Seconds | None = None, weight: int = 1, cancel_on_loss: bool = True
    ) -> HeldContext[Permit]:
        """A block during which a permit is held: `async with semaphore.permit() as permit`, or `with` in a thread.

        `within` is the longest wait in seconds, and `weight` the number of units. When the permit is lost, the body of an
        `async with` is cancelled, and the block raises Lost. A body that cannot be cancelled, as that of a `with`, runs to its end,
        and then the block raises Lost. With `cancel_on_loss=False` neither happens.
        """
    def acquire(self, *, within: _Seconds | None = None, weight: int = 1) -> Pending[Permit]:
        """Waits for a permit. `within` is the longest wait in seconds, and `weight` the number of units."""
    def try_acquire(self, *, weight: int = 1) -> Pending[Permit | None]:
        """Returns a permit if one is free and no acquire waits; None otherwise."""
    def release(self, id: str) -> Pending[bool]:
        """Releases a permit by its id. Returns whether it was held."""
    def release_member(self, id: str) -> Pending[bool]:
        """Removes a holder or a waiter by its id in the statistics, also one of another program. Returns whether it was there."""
    def position(self, id: str) -> Pending[int | None]:
        """Returns the number of waiters ahead of the acquire with this id; None if it does not wait."""
    def locked(self) -> Pending[bool]:
        """Returns whether an acquire would have to wait now."""
    def stats(self) -> Pending[SemaphoreStats]:
        """Returns how many permits are held, and how many acquires wait."""
    def set_capacity(self, capacity: int) -> Pending[None]:
        """Declares another capacity, for all programs."""
    def pin(self, capacity: int) -> Pending[None]:
        """Sets the capacity for all programs, whatever they declare, until `unpin`."""
    def unpin(self) -> Pending[None]:
        """Ends a `pin`: the newest declaration applies again."""
    def set_rate(self, starts: int, period: _Seconds, burst: int = 1) -> Pending[None]:
        """Sets the rate for all programs: at most `starts` permits in any `period` of seconds."""
    def clear_rate(self) -> Pending[None]:
        """Removes the rate, for all programs."""
    def pause(self, *, by: str | None = None, reason: str | None = None) -> Pending[None]:
        """Stops granting permits until `resume`. Holders keep their permits, and waiters their places."""
    def resume(self) -> Pending[None]:
        """Ends a `pause`."""
    def drain(
        self, *, within: _Seconds | None = None, by: str | None = None, reason: str | None = None
    ) -> Pending[None]:
        """Pauses the semaphore, and waits until no permit is held, for at most `within` seconds. The semaphore stays paused."""
    def forget(self) -> Pending[None]:
        """Removes the semaphore from the store, if it has no holders and no waiters."""

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
        """How many seconds the permit stays valid without another renewal; None if it does not expire."""
    def check(self) -> None:
        """Raises Lost if the permit was lost or released."""
    def lost(self) -> Pending[Literal["ttl-ended", "not-renewed", "gone", "released", "closed"]]:
        """Resolves with the reason when the permit is lost."""
    def release(self) -> Pending[bool]:
        """Releases the permit. Resolves when the store has released it: False if it was lost or released before."""
    def detach(self) -> str:
        """Returns the id of the permit, and keeps the permit held and renewed until `Semaphore.release` releases it."""

@final
class Lock(HeldContext[LockGuard]):
    """An exclusive lock with a key. Every holder has a fence that is larger than those before.

    It is not fair: for order use a semaphore with a capacity of 1.
    """

    @property
    def key(self) -> str: ...
    def guard(self, *, within: _Seconds | None = None, cancel_on_loss: bool = True) -> HeldContext[LockGuard]:
        """A block during which the lock is held: `async with lock.guard() as guard`, or `with` in a thread.

        `within` is the longest wait in seconds. For `cancel_on_loss` see `Semaphore.permit`.
        """
    def acquire(self, *, within: _Seconds | None = None) -> Pending[LockGuard]:
        """Waits for the lock, for at most `within` seconds."""
    def try_acquire(self) -> Pending[LockGuard | None]:
        """Returns the lock if it is free; None otherwise."""

@final
class LockGuard:
    """A lock that is held until it is released or garbage-collected, or until its lease ends."""

    @property
    def key(self) -> str: ...
    @property
    def id(self) -> str:
        """The lock id. It is enough to extend and release the lock, so do not log it."""
    @property
    def fence(self) -> int:
        """A number that is larger than the fence of every earlier holder of this key."""
    @property
    def expires_at(self) -> float:
        """When the lock ends unless it is extended, in seconds since 1970 by the clock of the store."""
    @property
    def valid_for(self) -> float:
        """How many seconds the lock stays held without another extension."""
    def check(self) -> None:
        """Raises Lost if the lock was lost or released."""
    def lost(self) -> Pending[Literal["ttl-ended", "not-renewed", "gone", "released", "closed"]]:
        """Resolves with the reason when the lock is lost."""
    def extend(self, ttl: _Seconds) -> Pending[None]:
        """Makes the lock end `ttl` seconds from now, whatever was left of its lease. Raises Lost if the lock was lost."""
    def auto_extend(self) -> None:
        """Extends the lock in the background from now on, at a third of its lease."""
    def release(self) -> Pending[bool]:
        """Releases the lock. Resolves when the store has released it: False if it was lost or released before."""
    def detach(self) -> str:
        """Returns the lock id, and keeps the lock held until its lease ends or `Locks.release` releases it."""

@final
class Locks:
    """All locks of a store, by key and by lock id. Each call is a single attempt."""

    def acquire(self, key: str, ttl: _Seconds) -> Pending[HeldLock | None]:
        """Acquires the lock for `ttl` seconds if it is free; None otherwise. Only its lock id extends or releases it."""
    def release(self, lock_id: str) -> Pending[bool]:
        """Releases a lock by its lock id. Returns whether it was held."""
    def extend(self, lock_id: str, ttl: _Seconds) -> Pending[bool]:
        """Makes a lock end `ttl` seconds from now. Returns whether it was held."""
    def is_locked(self, key: str) -> Pending[bool]:
        """Returns whether the lock is held."""
    def owns(self, lock_id: str) -> Pending[bool]:
        """Returns whether this lock id holds its lock."""
    def lookup(self, key: str) -> Pending[LockInfo | None]:
        """Returns the lock with this key; None if it is not held."""
    def lookup_id(self, lock_id: str) -> Pending[LockInfo | None]:
        """Returns the lock with this lock id; None if it is not held."""
    def list(self, limit: int = 100) -> Pending[list[LockInfo]]:
        """Returns the locks that are held, sorted by key; at most `limit`."""

@final
class Pool:
    """A fixed number of leases, each held by an instance id. There is no queue."""

    @property
    def name(self) -> str: ...
    @property
    def capacity(self) -> int: ...
    def acquire(self, instance_id: str) -> Pending[PoolAnswer]:
        """Acquires a lease for the instance if one is free, or renews its lease. After that, only `renew` renews it."""
    def renew(self, instance_id: str) -> Pending[PoolAnswer]:
        """Renews the lease of an instance."""
    def release(self, instance_id: str) -> Pending[PoolAnswer]:
        """Releases the lease of an instance."""
    def count(self) -> Pending[PoolCount]:
        """Returns how many leases are held, and how many expired leases were removed."""
    def lease(
        self, instance_id: str, *, within: _Seconds | None = None, cancel_on_loss: bool = True
    ) -> HeldContext[PoolLease]:
        """A block during which the instance holds a lease that renews itself.

        `within` is the longest wait in seconds. For `cancel_on_loss` see `Semaphore.permit`.
        """
    def try_lease(self, instance_id: str) -> Pending[PoolLease | None]:
        """Returns a lease that renews itself if one is free; None otherwise."""

@final
class PoolLease:
    """A lease of a pool, which renews itself. It is held until it is released or garbage-collected."""

    @property
    def pool(self) -> str: ...
    @property
    def instance_id(self) -> str: ...
    @property
    def valid_for(self) -> float:
        """How many seconds the lease stays valid without another renewal."""
    def check(self) -> None:
        """Raises Lost if the lease was lost or released."""
    def lost(self) -> Pending[Literal["ttl-ended", "not-renewed", "gone", "released", "closed"]]:
        """Resolves with the reason when the lease is lost."""
    def release(self) -> Pending[bool]:
        """Releases the lease. Resolves when the store has released it: False if it was lost or released before."""
