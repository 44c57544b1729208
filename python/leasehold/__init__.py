"""Fair semaphores, fenced locks and lease pools, for asyncio and for threads.

>>> import asyncio
>>> import leasehold
>>> client = leasehold.Client.memory()
>>> api = client.semaphore("api", 5)
>>> async def call() -> str:
...     async with api.permit(within=10):
...         return "answer"
>>> asyncio.run(call())
'answer'

The same objects work in threads: ``with api.permit(within=10): ...``, and ``api.acquire().wait()``.
"""

from __future__ import annotations

import sys as _sys

if not getattr(_sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "leasehold does not support free-threaded Python: use the ordinary build, or enable the GIL with PYTHON_GIL=1"
    )

import atexit as _atexit
import logging as _logging
import os as _os
import threading as _threading

from ._exceptions import (
    Closed,
    Error,
    Forked,
    Internal,
    InvalidArgument,
    Lost,
    Refused,
    Stopped,
    TimedOut,
    Unavailable,
)
from ._leasehold import (
    Client,
    HeldContext,
    Lock,
    LockGuard,
    Locks,
    Pending,
    Permit,
    Pool,
    PoolLease,
    Semaphore,
    __version__,
    _after_fork_in_child,
    _at_exit,
    _begin,
)
from ._types import (
    ClientInfo,
    HeldLock,
    LockInfo,
    Member,
    Outage,
    Paused,
    PoolAnswer,
    PoolCount,
    PoolMember,
    PoolStats,
    RateLimit,
    Retry,
    SemaphoreStats,
)

__all__ = [
    "Client",
    "ClientInfo",
    "Closed",
    "Error",
    "Forked",
    "HeldContext",
    "HeldLock",
    "Internal",
    "InvalidArgument",
    "Lock",
    "LockGuard",
    "LockInfo",
    "Locks",
    "Lost",
    "Member",
    "Outage",
    "Paused",
    "Pending",
    "Permit",
    "Pool",
    "PoolAnswer",
    "PoolCount",
    "PoolLease",
    "PoolMember",
    "PoolStats",
    "RateLimit",
    "Refused",
    "Retry",
    "Semaphore",
    "SemaphoreStats",
    "Stopped",
    "TimedOut",
    "Unavailable",
    "__version__",
]


def _forked() -> None:
    # The store counts the parent as alive for as long as anybody has these descriptors open.
    for descriptor in _after_fork_in_child():
        _os.close(descriptor)
    # The thread that has forked is the main thread now.
    _begin(_threading.get_ident())


_begin(_threading.main_thread().ident or 0)
# As libraries do: nothing is printed unless the program configures logging.
_logging.getLogger(__name__).addHandler(_logging.NullHandler())
_os.register_at_fork(after_in_child=_forked)
_atexit.register(_at_exit)
