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
    """Nothing became free within the time limit."""

    #: What the call waited for: ``"permit"``, ``"lock"``, ``"lease"`` or ``"drain"``.
    what: str = ""
    #: The name of the semaphore or pool, or the key of the lock.
    name: str = ""
    #: The longest wait, in seconds.
    limit: float = 0.0


class Lost(Error):
    """The permit, lock or lease is no longer held. Stop the work that depends on it."""

    #: What was lost: ``"permit"``, ``"lock"`` or ``"lease"``.
    what: str = ""
    #: The name of the semaphore or pool, or the key of the lock.
    name: str = ""
    #: The id in the store, if it is known. Do not log a lock's id: it releases the lock.
    id: str = ""
    #: ``"ttl-ended"``, ``"not-renewed"``, ``"gone"``, ``"released"`` or ``"closed"``.
    reason: str = ""


class Closed(Error):
    """The client was closed. Create another one."""


class Unavailable(Error, ConnectionError):
    """The store cannot be reached, or does not answer. Try again later."""

    #: Whether the store was reached, but did not answer in time.
    timed_out: bool = False
    #: How long the store has not answered, in seconds, if that is known.
    silent_for: float | None = None
    #: The underlying error, if there is one.
    detail: str | None = None


class Refused(Error, PermissionError):
    """The store denied access, or refused the request."""


class Stopped(Error, RuntimeError):
    """The client's background thread does not run. Create another client."""


class Forked(Error, RuntimeError):
    """An object of the parent process was used in a forked child."""


class Internal(Error):
    """A bug in this package. Report it."""


for _class in (Error, InvalidArgument, TimedOut, Lost, Closed, Unavailable, Refused, Stopped, Forked, Internal):
    # As users import them, for tracebacks.
    _class.__module__ = "leasehold"
