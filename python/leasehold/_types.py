"""Statistics and other reports of the store. All durations are in seconds, and all points in time are seconds since 1970."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from ._exceptions import Error


@dataclass(frozen=True)
class Retry:
    """How an acquire of a lock or a pool asks again while it is taken.

    A release by leasehold wakes a waiting lock at once. Asking again is for locks of programs that do not notify.
    """

    #: How many times to ask again.
    times: int = 10
    #: How long to wait before the first time, in seconds.
    delay: float | timedelta = 0.1
    #: The factor by which the wait grows each time.
    multiplier: float = 2.0
    #: The longest wait before asking again, in seconds.
    max_delay: float | timedelta = 60.0
    #: How much of a delay is random: ``"equal"`` (half), ``"full"`` or ``"none"``.
    jitter: str = "equal"


@dataclass(frozen=True)
class Member:
    """A holder or a waiter."""

    #: Its acquisition id. On Redis other programs, with ids of their own, may share a semaphore.
    id: str
    #: The label of the semaphore that acquired it.
    label: str | None
    #: The host of its client; None in memory, and for other programs on Redis.
    host: str | None
    #: The process of its client; None in memory, and for other programs on Redis.
    pid: int | None
    #: For how long it has held or waited; None for other programs on Redis.
    age: float | None
    #: In how many seconds it ends unless it is renewed; None if it does not end.
    ends_in: float | None
    #: The fence of its permit; None for a waiter.
    fence: int | None
    #: How many units it takes.
    weight: int
    #: The slot number of its permit, if it has one.
    slot_number: int | None


@dataclass(frozen=True)
class Paused:
    """A pause of a semaphore."""

    #: For how long it has lasted.
    lasts: float
    #: The person or program that paused it.
    by: str
    #: Why, if a reason was given.
    reason: str | None


@dataclass(frozen=True)
class RateLimit:
    """How often permits are granted at most."""

    #: One permit is granted in this time.
    interval: float
    #: How many may be granted at once after a quiet time.
    burst: int


@dataclass(frozen=True)
class SemaphoreStats:
    """One semaphore at one moment."""

    name: str
    #: The capacity that applies. Zero if none was declared yet.
    capacity: int
    #: The newest declaration.
    declared: int
    #: The capacity that was pinned, if one was.
    pinned: int | None
    #: The pause, if the semaphore is paused.
    paused: Paused | None
    #: How many permits are held.
    held: int
    #: How much of the capacity is held: the sum of the weights.
    units: int
    #: How many acquires wait.
    waiting: int
    #: What the first waiter needs: ``"room"``, ``"rate"``, ``"resume"``, ``"capacity"`` or ``"client"``.
    waits_for: str | None
    #: How often permits are granted at most, if there is a rate.
    rate: RateLimit | None
    #: When the next permit can be granted, if the rate does not allow it now.
    next_token: float | None
    #: For how long the longest held permit has been held.
    oldest_hold: float | None
    #: For how long the first waiter has waited.
    oldest_wait: float | None
    #: The holders, the longest first.
    holders: list[Member]
    #: The waiters in their order, as many as were asked for.
    waiters: list[Member]

    @property
    def percent(self) -> float:
        """How much of the capacity is held, in percent."""
        return 100.0 * self.units / max(self.capacity, 1)


@dataclass(frozen=True)
class ClientInfo:
    """A client of a store."""

    #: The client id, with which the ids of its permits begin.
    id: str
    host: str | None
    pid: int | None
    #: The name of its program.
    program: str | None
    #: When it was opened, by its own clock; None in memory.
    since: float | None


@dataclass(frozen=True)
class Outage:
    """A store that cannot be reached."""

    #: For how long it has lasted.
    lasts: float
    #: The most recent error.
    error: Error


@dataclass(frozen=True)
class HeldLock:
    """A lock that was acquired without a guard."""

    #: The lock id, which extends and releases the lock.
    id: str
    fence: int
    #: When it ends unless it is extended, by the clock of the store.
    expires_at: float


@dataclass(frozen=True)
class LockInfo:
    """A lock that is held."""

    key: str
    #: The lock id. It is enough to release the lock, so do not log it.
    lock_id: str
    #: A hash of the key, for logs: 24 hexadecimal digits.
    key_hash: str
    #: A hash of the lock id, for logs: 24 hexadecimal digits.
    lock_id_hash: str
    acquired_at: float
    expires_at: float
    fence: int
    host: str | None
    pid: int | None
    label: str | None


@dataclass(frozen=True)
class PoolAnswer:
    """The result of a call, and how full the pool is."""

    #: ``acquire``: "acquired" or "capacity_full"; ``renew``: "renewed", "not_held" or "expired"; ``release``: "released",
    #: "not_held" or "already_expired".
    status: str
    #: How many leases are held after the call.
    current_count: int
    #: How many expired leases the call removed.
    expired_count: int


@dataclass(frozen=True)
class PoolCount:
    """How full a pool is."""

    current_count: int
    expired_count: int


@dataclass(frozen=True)
class PoolMember:
    """An instance that holds a lease."""

    instance_id: str
    #: How long ago it acquired or renewed its lease.
    silent_for: float
    #: For how long it is valid without a renewal; None if it has expired.
    ends_in: float | None


@dataclass(frozen=True)
class PoolStats:
    """One pool that has members."""

    name: str
    #: The members, the most silent first.
    members: list[PoolMember]
