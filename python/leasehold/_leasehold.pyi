import os
from collections.abc import Coroutine, Generator, Sequence
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
_LossReason = Literal["ttl-ended", "not-renewed", "missing", "released", "closed"]

__version__: str

def _after_fork_in_child() -> None: ...
def _at_exit() -> None: ...
def _begin(main_thread: int, /) -> None: ...

@final
class Pending(Coroutine[Any, Any, _T_co], Generic[_T_co]):
    """An operation that may wait. Await it in asyncio, or call `wait()` to block the thread.

    Nothing is sent to the store before that. `asyncio.create_task` accepts it, as it accepts a coroutine. It can be awaited once.
    """

    def __await__(self) -> Generator[Any, Any, _T_co]: ...
    def __iter__(self) -> Generator[Any, Any, _T_co]: ...
    def __next__(self) -> Any: ...
    def send(self, value: Any, /) -> Any: ...
    def throw(self, kind: Any, value: Any = None, traceback: Any = None, /) -> Any: ...
    def close(self) -> None: ...
    def wait(self) -> _T_co:
        """Blocks this thread until the operation is done, and returns its result.

        Other threads run in the meantime. In the main thread, Ctrl-C cancels the operation and raises KeyboardInterrupt.
        """
    @property
    def id(self) -> str | None:
        """The id of the permit that an acquire waits for; None for other operations, and until the store is open."""

class HeldContext(Generic[_T]):
    """A context manager that holds a permit, a lock or a pool lease during its block. Use it with `async with` or `with`.

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
    """A client of the store that `url` names.

    The URL is `memory:`, `sqlite:PATH`, `redis://…`, `unix://…`, `redis-sentinel://…` or `redis-cluster://…`. Over TLS it begins with
    `rediss`. Without a URL, the client uses `$LEASEHOLD_STORE`, and raises InvalidArgument if that variable is not set.

    The client connects at its first operation. Any number of threads and event loops can use it. After a fork, the child opens the
    store again when it first uses the client.

    For Redis:

    - `namespace`: the prefix of the keys of semaphores (`adv-sem`).
    - `lock_prefix`: the prefix of the keys of locks (`syncguard`).
    - `ca_certificate`: the certificate authorities to trust over TLS, as PEM or as the path of a PEM file. By default these are the
      public authorities that browsers trust.
    - `connect_timeout`: how long connecting may take (2 s).

    For Redis and `sqlite:`:

    - `answer_timeout`: how long the client waits for an answer of the store (5 s). After that, an operation raises Unavailable. An
      acquire that waits has no such limit.
    - `claim_within`: how long another client has to claim a permit that this client grants to it (5 s). After that, the permit
      passes to the next waiter. The minimum is 1 s.
    - `read_only`: the client only reads statistics and looks up locks. Everything else raises Denied.
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
        claim_within: _Seconds | None = None,
        read_only: bool = False,
    ) -> Client: ...
    @staticmethod
    def memory() -> Client:
        """Returns a client in memory. The tasks and threads that use this object share its permits; other clients do not."""
    def open(self) -> Pending[Client]:
        """Opens the store now instead of at the first operation, and returns this client. Raises Unavailable if that fails."""
    @property
    def id(self) -> str | None:
        """The client id, with which the ids of its permits begin; None until the store is open."""
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
        within: _Seconds | None = None,
        label: str | None = None,
        numbered: bool = False,
        rate: tuple[int, _Seconds] | None = None,
        burst: int | None = None,
        unless_declared: bool = False,
    ) -> Semaphore:
        """Returns a fair semaphore, and declares its capacity and its rate.

        A declaration takes effect at the first use. It applies to all programs that use the name in this store, until one of them
        declares another capacity or rate. All durations are in seconds.

        - `capacity`: how many units can be held at once. Without it, the capacity in the store applies, or 1 if there is none.
        - `ttl`: the longest time that a permit may be held. After that it is lost. By default there is no limit.
        - `lease`: on Redis, how long a holder or waiter may be silent before it loses its permit or its place (30 s). The client renews
          the lease in the background.
        - `within`: the longest wait of an acquire. After that it raises TimedOut. By default there is no limit.
        - `label`: a text that statistics show beside the holders and waiters of this object.
        - `numbered`: whether each permit has a `slot_number`.
        - `rate`: with `(100, 60)`, never more than 100 permits start in any minute, evenly spread. A rate stays until
          it is changed or removed (`Semaphore.clear_rate`), even if no program declares it any more.
        - `burst`: how many permits of the rate start at once after a quiet time (1). They are a part of the rate, so the
          others are slowed down: `(100, 60)` with a burst of 10 grants 91 per minute in the long run.
        - `unless_declared`: whether `capacity` applies only if the store has none yet.
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
        """Returns a semaphore that limits only the rate: never more than `starts` permits in any `period` of seconds.

        Any number of permits can be held at once, unless another program has declared a capacity for the name. A rate
        counts starts, so a weight is refused.

        - `burst`: how many of these permits start at once after a quiet time (1); see `semaphore`.
        - `label`: a text that statistics show beside the holders and waiters of this object.
        """
    def lock(
        self,
        key: str,
        *,
        lease: _Seconds | None = None,
        ttl: _Seconds | None = None,
        label: str | None = None,
        within: _Seconds | None = None,
        retry: Retry | None = None,
    ) -> Lock:
        """Returns a fenced lock. All durations are in seconds.

        - `lease`: how long the holder may be silent before the lock expires (30 s). The client renews the lease in the background.
        - `ttl`: the longest time that the lock may be held. After that it is lost. By default there is no limit.
        - `label`: a text that a lookup shows beside the holder.
        - `within`: the longest wait of an acquire. After that it raises TimedOut. By default there is no limit.
        - `retry`: the delays between the attempts of a waiting acquire: by default from 0.1 s to 5 s.
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
        ttl: _Seconds | None = None,
        within: _Seconds | None = None,
        retry: Retry | None = None,
    ) -> Pool:
        """Returns a pool of `capacity` leases. All durations are in seconds.

        - `lease`: how long an instance may be silent before its lease expires (30 s). Use the same value in all programs. The client
          renews the lease in the background.
        - `ttl`: the longest time that a lease may be held. After that it is lost. By default there is no limit.
        - `within`: the longest wait of an acquire. After that it raises TimedOut. By default there is no limit.
        - `retry`: the delays between the attempts of a waiting acquire: by default from 0.1 s to 5 s.
        """
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

        - `names`: the semaphores. Without it, all are returned.
        - `limit`: the largest number of semaphores that are returned.
        - `unused`: whether to include names without holders and waiters.
        - `waiters`: how many waiters of each name are listed.
        """
    def clients(self, limit: int = 100) -> Pending[list[ClientInfo]]:
        """Returns the clients of the store, sorted by id; at most `limit`."""
    def outage(self) -> Outage | None:
        """Returns the current outage of the store; None if the store can be reached, or is not open yet."""
    def close(self) -> Pending[None]:
        """Closes the client, and returns when the store has released its permits, locks and pool leases. Waiting acquires raise Closed.

        What was detached, and what `Locks.try_acquire` acquired, stays held until it expires.
        """
    async def __aenter__(self) -> Client: ...
    async def __aexit__(self, *exception: object) -> None: ...
    def __enter__(self) -> Client: ...
    def __exit__(self, *exception: object) -> None: ...

@final
class Semaphore(HeldContext[Permit]):
    """A fair counting semaphore: permits are granted in the order in which they were requested.

    Semaphores with the same name share their permits, in all programs that use the same store. `async with semaphore` and
    `with semaphore` hold one permit, as `semaphore.guard()` does.
    """

    @property
    def name(self) -> str:
        """The name."""
    @property
    def capacity(self) -> int:
        """The capacity that this client declared last. The store may have another: see `stats`."""
    def guard(
        self, *, within: _Seconds | None = None, weight: int = 1, cancel_on_loss: bool = True
    ) -> HeldContext[Permit]:
        """Returns a context manager that holds a permit: `async with semaphore.guard() as permit`, or `with` in a thread.

        - `within`: the longest wait, in seconds. After that the block raises TimedOut.
        - `weight`: how many units of the capacity the permit takes.
        - `cancel_on_loss`: whether the loss of the permit cancels the body of an `async with`. The block then raises Lost. The body of
          a `with` cannot be cancelled: it runs to its end, and then the block raises Lost. With False, neither happens.
        """
    def acquire(self, *, within: _Seconds | None = None, weight: int = 1) -> Pending[Permit]:
        """Waits for a permit and returns it.

        - `within`: the longest wait, in seconds. After that the acquire raises TimedOut.
        - `weight`: how many units of the capacity the permit takes.
        """
    def try_acquire(self, *, weight: int = 1) -> Pending[Permit | None]:
        """Returns a permit if one is free and no acquire waits; otherwise None. `weight` is how many units the permit takes."""
    def extend(self, id: str) -> Pending[bool]:
        """Renews the permit with this id once, such as one that was detached. Returns whether it was held."""
    def release(self, id: str) -> Pending[bool]:
        """Releases the permit with this id, or cancels the acquire that waits with it. Returns whether it held or waited."""
    def release_member(self, id: str) -> Pending[bool]:
        """Releases the holder, or removes the waiter, with this id of the statistics. It may belong to another program.

        Returns True if a holder was released or a waiter was removed.
        """
    def position(self, id: str) -> Pending[int | None]:
        """Returns the number of waiters ahead of the acquire with this id; None if it does not wait."""
    def locked(self) -> Pending[bool]:
        """Returns whether an acquire of one unit would have to wait now."""
    def stats(self) -> Pending[SemaphoreStats]:
        """Returns the limits, the holders and the number of waiters. `Client.stats` also lists the waiters."""
    def set_capacity(self, capacity: int) -> Pending[None]:
        """Sets the capacity for all programs, until one declares another. Raises Pinned if the semaphore is pinned."""
    def pin(self, capacity: int) -> Pending[None]:
        """Sets the capacity for all programs until `unpin`. Until then, declarations have no effect."""
    def unpin(self) -> Pending[None]:
        """Ends a `pin`. The newest declaration applies again."""
    def set_rate(self, starts: int, period: _Seconds, burst: int = 1) -> Pending[None]:
        """Sets the rate for all programs, until one declares another: never more than `starts` permits in any `period` of seconds.

        `burst` is how many of these permits start at once after a quiet time.
        """
    def clear_rate(self) -> Pending[None]:
        """Removes the rate for all programs, until one declares another."""
    def pause(self, *, by: str | None = None, reason: str | None = None) -> Pending[None]:
        """Stops granting permits until `resume`. Holders keep their permits, and waiters keep their places.

        Statistics show `reason`, and `by`: who pauses the semaphore, by default the host and the process id.
        """
    def resume(self) -> Pending[None]:
        """Ends a `pause`. Waiters are granted the free permits in their order."""
    def drain(
        self, *, within: _Seconds | None = None, by: str | None = None, reason: str | None = None
    ) -> Pending[None]:
        """Pauses the semaphore, and waits until no permit is held. The semaphore stays paused.

        `within` is the longest wait, in seconds. After that the drain raises NotDrained. For `by` and `reason` see `pause`.
        """
    def forget(self) -> Pending[None]:
        """Removes the semaphore with its limits and its last fence from the store.

        Raises InUse if it has holders or waiters, and Unknown if the store does not know it.
        """

@final
class Permit:
    """A permit of a semaphore. It is held until it is released, garbage-collected or lost."""

    @property
    def id(self) -> str:
        """The id of the permit in the store. `Semaphore.release` takes it."""
    @property
    def name(self) -> str:
        """The name of the semaphore."""
    @property
    def fence(self) -> int:
        """A number that is larger than the fence of every permit of this name that was granted before.

        A resource that stores the largest fence it has seen can reject a write of an earlier holder.
        """
    @property
    def slot_number(self) -> int | None:
        """The lowest number from 1 that was free at the grant; None unless the semaphore is numbered.

        No other live permit of the semaphore has it.
        """
    @property
    def weight(self) -> int:
        """How many units the permit takes."""
    @property
    def waited(self) -> float:
        """How long the acquire waited, in seconds."""
    @property
    def valid_for(self) -> float | None:
        """How many seconds the permit stays valid without another renewal; None if it does not expire."""
    def check(self) -> None:
        """Raises Lost if the permit was lost or released."""
    def lost(self) -> Pending[_LossReason]:
        """Waits until the permit is lost or released, and returns the reason."""
    def release(self) -> Pending[bool]:
        """Releases the permit. Returns True once the store has released it; False if it was lost or released before.

        If this is never awaited, the permit is released in the background, with a RuntimeWarning.
        """
    def detach(self) -> str:
        """Detaches the permit from this object, and returns its id.

        The client no longer renews it. On Redis it stays held until its lease ends, or until `Semaphore.release` releases it.
        `Semaphore.extend` renews it. On other stores, where permits need no renewal, it ends with its client. Its TTL ends it everywhere.
        """

@final
class Lock(HeldContext[LockGuard]):
    """An exclusive lock with a key. Every holder has a larger fence than all earlier holders.

    It is not fair: after a release, the first client that asks acquires it. If the order matters, use a semaphore with a capacity of 1.
    """

    @property
    def name(self) -> str:
        """The key."""
    def guard(self, *, within: _Seconds | None = None, cancel_on_loss: bool = True) -> HeldContext[LockGuard]:
        """Returns a context manager that holds the lock: `async with lock.guard() as guard`, or `with` in a thread.

        - `within`: the longest wait, in seconds. By default it is that of the lock.
        - `cancel_on_loss`: see `Semaphore.guard`.
        """
    def acquire(self, *, within: _Seconds | None = None) -> Pending[LockGuard]:
        """Waits for the lock and returns a guard. `within` is the longest wait, in seconds. By default it is that of the lock."""
    def try_acquire(self) -> Pending[LockGuard | None]:
        """Returns a guard if the lock is free; otherwise None."""
    def extend(self, lock_id: str) -> Pending[bool]:
        """Renews the lock with this lock id once, such as one that was detached. Returns whether it was held."""
    def release(self, lock_id: str) -> Pending[bool]:
        """Releases the lock with this lock id. Returns whether it was held."""
    def lookup(self) -> Pending[LockInfo | None]:
        """Returns who holds the lock; None if it is free."""

@final
class LockGuard:
    """A guard that holds a lock until it is released, garbage-collected or lost."""

    @property
    def name(self) -> str:
        """The key of the lock."""
    @property
    def id(self) -> str:
        """The lock id. It is enough to extend and release the lock, so do not log it."""
    @property
    def fence(self) -> int:
        """A number that is larger than the fence of every earlier holder of this key. For its use see `Permit.fence`."""
    @property
    def waited(self) -> float:
        """How long the acquire waited, in seconds."""
    @property
    def expires_at(self) -> float:
        """When the lock expires unless it is extended, in seconds since 1970 by the clock of the store."""
    @property
    def valid_for(self) -> float | None:
        """How many seconds the lock stays valid without another renewal. It is never None."""
    def check(self) -> None:
        """Raises Lost if the lock was lost or released."""
    def lost(self) -> Pending[_LossReason]:
        """Waits until the lock is lost or released, and returns the reason."""
    def extend(self, lease: _Seconds) -> Pending[None]:
        """Lets the lock expire `lease` seconds from now, whatever was left of its lease. Raises Lost if the lock was lost.

        Once less is left than the lease that the lock was declared with, the client renews it again.
        """
    def release(self) -> Pending[bool]:
        """Releases the lock. Returns True once the store has released it; False if it was lost or released before.

        If this is never awaited, the lock is released in the background, with a RuntimeWarning.
        """
    def detach(self) -> str:
        """Detaches the lock from this object, and returns its lock id.

        The client no longer renews it or ends it with its TTL: it stays held until its lease ends, or until `Locks.release`
        releases it. `Locks.extend` extends it.
        """

@final
class Locks:
    """All locks of a store, by key and by lock id. No call waits for a lock to become free."""

    def try_acquire(self, key: str, lease: _Seconds) -> Pending[HeldLock | None]:
        """Acquires the lock with this key if it is free; otherwise returns None.

        There is no guard: the lock expires after `lease` seconds unless it is extended or released by its lock id.
        """
    def release(self, lock_id: str) -> Pending[bool]:
        """Releases the lock with this lock id. Returns whether it was held."""
    def extend(self, lock_id: str, lease: _Seconds) -> Pending[bool]:
        """Lets the lock with this lock id expire `lease` seconds from now. Returns whether it was held."""
    def is_locked(self, key: str) -> Pending[bool]:
        """Returns whether the lock with this key is held."""
    def owns(self, lock_id: str) -> Pending[bool]:
        """Returns whether the lock with this lock id is held."""
    def lookup(self, key: str | None = None, *, id: str | None = None) -> Pending[LockInfo | None]:
        """Returns the lock with this key, or with this lock id: `lookup("invoice:42")`, `lookup(id=guard.id)`. None if it is not held."""
    def list(self, limit: int = 100) -> Pending[list[LockInfo]]:
        """Returns the locks that are held, sorted by key; at most `limit`."""

@final
class Pool:
    """A fixed number of pool leases, each held by an instance with an id. There is no queue.

    An instance that acquires again renews its lease, and does not take a second one. So each worker needs an id of its own.
    """

    @property
    def name(self) -> str:
        """The name."""
    @property
    def capacity(self) -> int:
        """The number of leases."""
    def acquire(self, instance_id: str, *, within: _Seconds | None = None) -> Pending[PoolLease]:
        """Waits for a pool lease of the instance and returns it. The client renews it in the background.

        `within` is the longest wait, in seconds. By default it is that of the pool.
        """
    def try_acquire(self, instance_id: str) -> Pending[PoolLease | None]:
        """Returns a pool lease of the instance if one is free; otherwise None. The client renews it in the background."""
    def guard(
        self, instance_id: str, *, within: _Seconds | None = None, cancel_on_loss: bool = True
    ) -> HeldContext[PoolLease]:
        """Returns a context manager that holds a pool lease: `async with pool.guard("worker-1") as lease`, or `with` in a thread.

        The client renews the lease in the background.

        - `within`: the longest wait, in seconds. By default it is that of the pool.
        - `cancel_on_loss`: see `Semaphore.guard`.
        """
    def extend(self, instance_id: str) -> Pending[bool]:
        """Renews the pool lease of the instance once, such as one that was detached. Returns whether it was held."""
    def release(self, instance_id: str) -> Pending[bool]:
        """Releases the pool lease of the instance. Returns whether it was held."""
    def stats(self) -> Pending[PoolStats]:
        """Returns the members of the pool."""

@final
class LuaPool:
    """A pool whose calls answer with the statuses and counts of the Lua scripts of osparc's `DistributedSemaphore`.

    No lease has a guard, and nothing runs between the calls. It shares its leases with the pool that it is made of.
    """

    def __new__(cls, pool: Pool) -> LuaPool: ...
    def acquire(self, instance_id: str) -> Pending[PoolAnswer]:
        """Acquires a lease for the instance if one is free, or renews the lease that it holds."""
    def renew(self, instance_id: str) -> Pending[PoolAnswer]:
        """Renews the lease of the instance."""
    def release(self, instance_id: str) -> Pending[PoolAnswer]:
        """Releases the lease of the instance."""
    def count(self) -> Pending[PoolCount]:
        """Removes expired leases, and returns how many leases are held and how many were removed."""

@final
class PoolLease:
    """A pool lease, which the client renews. It is held until it is released, garbage-collected or lost."""

    @property
    def name(self) -> str:
        """The name of the pool."""
    @property
    def id(self) -> str:
        """The instance that holds the lease."""
    @property
    def waited(self) -> float:
        """How long the acquire waited, in seconds."""
    @property
    def valid_for(self) -> float | None:
        """How many seconds the lease stays valid without another renewal. It is never None."""
    def check(self) -> None:
        """Raises Lost if the lease was lost or released."""
    def lost(self) -> Pending[_LossReason]:
        """Waits until the lease is lost or released, and returns the reason."""
    def release(self) -> Pending[bool]:
        """Releases the lease. Returns True once the store has released it; False if it was lost or released before.

        If this is never awaited, the lease is released in the background, with a RuntimeWarning.
        """
    def detach(self) -> str:
        """Detaches the lease from this object, and returns its instance id.

        The client no longer renews it or ends it with its TTL: it stays held until it expires, or until `Pool.release`
        releases it. `Pool.extend` renews it.
        """
