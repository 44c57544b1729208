"""The exceptions. Each also derives from the built-in class that Python programs expect, where there is one."""

from __future__ import annotations

import asyncio
import sys

if sys.version_info >= (3, 11):
    _TimeoutError = TimeoutError
else:

    class _TimeoutError(TimeoutError, asyncio.TimeoutError):
        """Both time-out classes of Python before 3.11."""


class Error(Exception):
    """The base class of all exceptions of this package."""


class InvalidArgument(Error, ValueError):
    """An argument is invalid. Nothing was changed. Correct the call."""

    #: The name of the argument, if it is known.
    argument: str | None = None


class ForeignData(Error, ValueError):
    """What the store contains under this name belongs to another program, or cannot be read. Choose another name or namespace."""

    #: The name of the semaphore or pool, or the key of the lock. Empty if it is not known.
    name: str = ""


class Pinned(Error, ValueError):
    """An operator has pinned the capacity of the semaphore, so it was not set. Unpin it, or pin another capacity."""

    #: The name of the semaphore.
    name: str = ""
    #: The capacity to which it is pinned.
    capacity: int = 0


class InUse(Error, ValueError):
    """The semaphore is held or waited for, so it was not forgotten. Drain it first, and cancel the waiters."""

    #: The name of the semaphore.
    name: str = ""
    #: The number of permits that are held.
    held: int = 0
    #: The number of waiters.
    waiting: int = 0


class Unknown(Error, ValueError):
    """The store knows no semaphore of this name, so there was nothing to change. Correct the name."""

    #: The name of the semaphore.
    name: str = ""


class TooHeavy(Error, ValueError):
    """The permit weighs more than the capacity, so it cannot be granted. Ask for less, or raise the capacity."""

    #: The name of the semaphore.
    name: str = ""
    #: The weight of the permit.
    weight: int = 0
    #: The capacity of the semaphore.
    capacity: int = 0


class WrongThread(Error, RuntimeError):
    """A call that blocks its thread was made on the thread of an event loop. Nothing was changed. Await it instead."""


class TimedOut(Error, _TimeoutError):
    """Nothing became free within the time limit, or before the retries were used up."""

    #: What the call tried to acquire: ``"semaphore"``, ``"lock"`` or ``"pool"``.
    primitive: str = ""
    #: The name of the semaphore or pool, or the key of the lock.
    name: str = ""
    #: The time limit in seconds, or how long the call waited if its retries were used up before.
    limit: float = 0.0
    #: For a pool: how many leases were held at the end; otherwise None.
    held: int | None = None
    #: For a pool: its capacity; otherwise None.
    capacity: int | None = None


class NotDrained(Error, _TimeoutError):
    """Permits were still held when the time limit of a drain passed. The semaphore stays paused."""

    #: The name of the semaphore.
    name: str = ""
    #: The time limit in seconds.
    limit: float = 0.0


class Cancelled(Error):
    """The wait was cancelled: a client released its id."""

    #: The name of the semaphore.
    name: str = ""
    #: The id of the acquire that waited.
    id: str = ""


class Lost(Error):
    """The permit, lock or pool lease is no longer held. Stop the work that depends on it."""

    #: What was held: ``"semaphore"`` for a permit, ``"lock"``, or ``"pool"`` for a lease.
    primitive: str = ""
    #: The name of the semaphore or pool, or the key of the lock.
    name: str = ""
    #: The id of the permit or lease in the store; for a lock, a hash of its id. Empty if it is not known.
    id: str = ""
    #: Why it was lost. ``"ttl-ended"``: it was held for as long as its TTL allows. ``"not-renewed"``: it could not be renewed in time.
    #: ``"missing"``: it is no longer in the store. ``"released"``: it was released. ``"closed"``: its client was closed.
    reason: str = ""


class Closed(Error):
    """The client was closed. Create another one."""


class Unavailable(Error, ConnectionError):
    """The store cannot be reached, or does not answer in time. Try again later."""

    #: True if the store did not answer in time; False if connecting failed or the connection was lost.
    timed_out: bool = False
    #: How long the store has not answered, in seconds, if that is known.
    silent_for: float | None = None
    #: The underlying error, if there is one.
    detail: str | None = None


class Denied(Error, PermissionError):
    """The store denied access, or the client is read-only. The message says what would allow it."""


class NoRoom(Error, OSError):
    """The disk or the memory of the store is full, or the server cannot save its data. Make room, and try again."""


class Unusable(Error, OSError):
    """The file or server cannot be used as a store: for example, it is damaged, or a replica. The message says what to do."""


class Stopped(Error, RuntimeError):
    """The client's background thread does not run. Create another client."""


class Forked(Error, RuntimeError):
    """An object of the parent process was used in a forked child, or the child cannot open a `sqlite:` store."""


class Internal(Error):
    """A bug in this package. Report it."""


for _class in (Error, *Error.__subclasses__()):
    # As users import them, for tracebacks.
    _class.__module__ = "leasehold"
