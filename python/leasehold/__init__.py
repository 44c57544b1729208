"""Fair semaphores, fenced locks and lease pools, for asyncio and for threads.

>>> import asyncio
>>> import leasehold
>>> client = leasehold.Client.memory()
>>> api = client.semaphore("api", 5)
>>> async def call() -> str:
...     async with api.guard(within=10):
...         return "answer"
>>> asyncio.run(call())
'answer'

The same objects work in threads: ``with api.guard(within=10): ...``, and ``api.acquire().wait()``.
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
from typing import Any as _Any

from ._exceptions import (
    Cancelled,
    Closed,
    Denied,
    Error,
    ForeignData,
    Forked,
    Internal,
    InUse,
    InvalidArgument,
    Lost,
    NoRoom,
    NotDrained,
    Pinned,
    Stopped,
    TimedOut,
    TooHeavy,
    Unavailable,
    Unknown,
    Unusable,
    WrongThread,
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
    Outage,
    Paused,
    PoolMember,
    PoolStats,
    RateLimit,
    Retry,
    SemaphoreMember,
    SemaphoreStats,
)

__all__ = [
    "Cancelled",
    "Client",
    "ClientInfo",
    "Closed",
    "Denied",
    "Error",
    "ForeignData",
    "Forked",
    "HeldContext",
    "HeldLock",
    "InUse",
    "Internal",
    "InvalidArgument",
    "Lock",
    "LockGuard",
    "LockInfo",
    "Locks",
    "Lost",
    "NoRoom",
    "NotDrained",
    "Outage",
    "Paused",
    "Pending",
    "Permit",
    "Pinned",
    "Pool",
    "PoolLease",
    "PoolMember",
    "PoolStats",
    "RateLimit",
    "Retry",
    "Semaphore",
    "SemaphoreMember",
    "SemaphoreStats",
    "Stopped",
    "TimedOut",
    "TooHeavy",
    "Unavailable",
    "Unknown",
    "Unusable",
    "WrongThread",
    "__version__",
]


def _forked() -> None:
    _after_fork_in_child()
    # The thread that has forked is the main thread now.
    _begin(_threading.get_ident())
    _close_in_workers()


def _close_in_workers() -> None:
    """Makes workers of multiprocessing, and of Celery, close their clients when they end: they do not run atexit."""
    for name in ("multiprocessing", "billiard"):
        util = _sys.modules.get(f"{name}.util")
        if util is None:
            continue

        def started(_: object, util: _Any = util) -> None:
            util.Finalize(None, _end_of_worker, exitpriority=-100)

        # A worker forgets the handlers of its parent when it starts, and then calls this.
        util.register_after_fork(_end_of_worker, started)
        if getattr(_sys.modules.get(f"{name}.process"), "_parent_process", None) is not None:
            started(None)


def _end_of_worker() -> None:
    def close() -> None:
        for thread in threads:
            thread.join()
        _at_exit()

    # The worker joins its threads after this, and they may use their clients until then.
    skipped = (_threading.current_thread(), _threading.main_thread())
    threads = [thread for thread in _threading.enumerate() if thread not in skipped and not thread.daemon]
    if threads:
        _threading.Thread(target=close, name="leasehold-exit").start()
    else:
        close()


_begin(_threading.main_thread().ident or 0)
# As libraries do: nothing is printed unless the program configures logging.
_logging.getLogger(__name__).addHandler(_logging.NullHandler())
_os.register_at_fork(after_in_child=_forked)
_atexit.register(_at_exit)
_close_in_workers()
