"""Results of operations, and the delays of retries. All durations are in seconds, and all points in time are seconds since 1970."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from ._exceptions import Error


@dataclass(frozen=True)
class Retry:
    """The delays between the attempts of a waiting acquire of a lock, or of a pool lease.

    When a client of leasehold releases a lock, waiting acquires retry at once. They notice a release by another program only at their
    next retry. A pool notifies no one, so a wait for a lease always ends at a retry.
    """

    #: The delay before the first retry.
    delay: float | timedelta = 0.1
    #: The factor by which each delay is longer than the one before.
    multiplier: float = 2.0
    #: The longest delay.
    max_delay: float | timedelta = 5.0
    #: How much of a delay is random: ``"equal"`` (half of it), ``"full"`` (all of it) or ``"none"``.
    jitter: str = "equal"


@dataclass(frozen=True)
class SemaphoreMember:
    """A holder or a waiter of a semaphore."""

    #: The acquisition id. On Redis it may belong to another program that shares the semaphore, and have another form.
    id: str
    #: The label of the ``Semaphore`` object that requested it, if it has one.
    label: str | None
    #: The host of its client; None in memory, and for other programs on Redis.
    host: str | None
    #: The process of its client; None in memory, and for other programs on Redis.
    pid: int | None
    #: How long it has held or waited; None for other programs on Redis.
    age: float | None
    #: Seconds until it expires unless it is renewed; None if it does not expire.
    expires_in: float | None
    #: Seconds until its TTL ends the permit; None without a TTL, and for a waiter.
    ttl_ends_in: float | None
    #: Seconds since its client renewed it last; None in memory, on one host, and for other programs on Redis.
    silent_for: float | None
    #: The fence of its permit; None for a waiter, and for other programs on Redis.
    fence: int | None
    #: How many units of the capacity it takes.
    weight: int
    #: The slot number of its permit, if it has one.
    slot_number: int | None


@dataclass(frozen=True)
class Paused:
    """A pause of a semaphore."""

    #: How long the pause has lasted.
    lasts: float
    #: The person or program that paused the semaphore.
    by: str
    #: The reason, if one was given.
    reason: str | None


@dataclass(frozen=True)
class RateLimit:
    """A limit on how often permits are granted: at most ``starts`` in any ``period``. ``str()`` is "100 per minute, burst 10"."""

    #: How many permits may start in any period.
    starts: int
    #: The period, in seconds.
    period: float
    #: How many of these permits may start at once after a quiet time.
    burst: int
    #: The time in which one token arrives: ``period / (starts - burst + 1)``. Every permit takes one.
    interval: float

    def __str__(self) -> str:
        units = (("day", 86400.0), ("hour", 3600.0), ("minute", 60.0), ("second", 1.0))
        unit, length = next(((unit, length) for unit, length in units if self.period % length == 0), ("second", 1.0))
        count = self.period / length
        period = unit if count == 1 else f"{count:g} {unit}s"
        burst = f", burst {self.burst}" if self.burst > 1 else ""
        return f"{self.starts} per {period}{burst}"


@dataclass(frozen=True)
class SemaphoreStats:
    """The state of one semaphore at one moment."""

    name: str
    #: The capacity that applies. Zero if no program has declared one yet.
    capacity: int
    #: The newest declaration of a program. It is the capacity unless the semaphore is pinned.
    declared: int
    #: The capacity that ``Semaphore.pin`` has set; None if the semaphore is not pinned.
    pinned: int | None
    #: The pause, if the semaphore is paused.
    paused: Paused | None
    #: How many permits are held.
    held: int
    #: How many units of the capacity are held: the sum of the weights.
    held_units: int
    #: How many acquires wait.
    waiting: int
    #: What the first waiter waits for; None if no acquire waits. ``"room"``: free units. ``"rate"``: the rate. ``"resume"``: the end
    #: of the pause. ``"capacity"``: a larger capacity. ``"client"``: its own client, which is unreachable.
    waits_for: str | None
    #: The limit on how often permits are granted, if there is one.
    rate: RateLimit | None
    #: Seconds until the rate allows the next permit; None if it allows one now.
    next_token: float | None
    #: How long the longest-held permit has been held.
    oldest_hold: float | None
    #: How long the first waiter has waited.
    oldest_wait: float | None
    #: The holders. The one that has held for the longest time comes first.
    holders: list[SemaphoreMember]
    #: The first waiters, in the order of the queue: as many as the argument ``waiters`` of ``Client.stats`` says.
    waiters: list[SemaphoreMember]

    @property
    def percent(self) -> float:
        """How much of the capacity is held, in percent."""
        return 100.0 * self.held_units / max(self.capacity, 1)


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
    """An outage: the store cannot be reached."""

    #: How long the outage has lasted.
    lasts: float
    #: The most recent error.
    error: Error


@dataclass(frozen=True)
class HeldLock:
    """A lock that was acquired without a guard."""

    #: The lock id. It is enough to extend and release the lock, so do not log it. The ``repr`` leaves it out.
    id: str = field(repr=False)
    fence: int
    #: When the lock expires unless it is extended, by the clock of the store.
    expires_at: float


@dataclass(frozen=True)
class LockInfo:
    """A lock that is held."""

    key: str
    #: The lock id. It is enough to extend and release the lock, so do not log it. The ``repr`` leaves it out.
    id: str = field(repr=False)
    #: A hash of the key, for logs: 24 hexadecimal digits.
    key_hash: str
    #: A hash of the lock id, for logs: 24 hexadecimal digits.
    id_hash: str
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

    #: How many leases are held.
    current_count: int
    #: How many expired leases the call removed.
    expired_count: int


@dataclass(frozen=True)
class PoolMember:
    """An instance that holds a lease."""

    #: The instance id.
    id: str
    #: How long ago it acquired or renewed its lease.
    silent_for: float
    #: Seconds until the lease expires unless it is renewed; None if it has expired.
    expires_in: float | None


@dataclass(frozen=True)
class PoolStats:
    """One pool that has members."""

    name: str
    #: The members. The one that has been silent for the longest time comes first.
    members: list[PoolMember]
