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
    what: str | None = None


class TimedOut(Error, _TimeoutError):
    """Nothing became free within the time limit, or before the retries were used up."""

    #: What the call waited for: ``"permit"``, ``"lock"``, ``"lease"`` or ``"drain"``.
    what: str = ""
    #: The name of the semaphore or pool, or the key of the lock.
    name: str = ""
    #: The time limit in seconds, or how long the call waited if its retries were used up before.
    limit: float = 0.0


class Lost(Error):
    """The permit, lock or lease is no longer held. Stop the work that depends on it."""

    #: What was lost: ``"permit"``, ``"lock"`` or ``"lease"``.
    what: str = ""
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


class Refused(Error, PermissionError):
    """The store denied access, or the request was refused. The message says what would allow it."""


class Stopped(Error, RuntimeError):
    """The client's background thread does not run. Create another client."""


class Forked(Error, RuntimeError):
    """An object of the parent process was used in a forked child, or the child cannot open a `sqlite:` store."""


class Internal(Error):
    """A bug in this package. Report it."""


for _class in (Error, InvalidArgument, TimedOut, Lost, Closed, Unavailable, Refused, Stopped, Forked, Internal):
    # As users import them, for tracebacks.
    _class.__module__ = "leasehold"
