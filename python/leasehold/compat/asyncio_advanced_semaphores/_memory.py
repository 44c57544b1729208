"""Semaphores of one process."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import leasehold

from ._common import (
    DEFAULT_LOGGER,
    AcquisitionResult,
    Logger,
    Semaphore,
    SemaphoreStats,
    in_use,
)


class _Declared:
    """The value that counts for a name. All semaphores of the name share it."""

    def __init__(self) -> None:
        self.value: int | None = None


_client = leasehold.Client.memory()
_declared: WeakValueDictionary[str, _Declared] = WeakValueDictionary()
_timers: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.TimerHandle]] = {}
_prune_timers_at = 1000


@dataclass(init=False)
class MemorySemaphore(Semaphore):
    """A semaphore that all tasks and threads of this process share."""

    cancel_task_after_ttl: bool = False
    """Whether the task that acquired a slot is cancelled when the TTL of the slot ends."""

    _shared: _Declared | None = field(default=None, init=False, repr=False, compare=False)
    _opened: leasehold.Semaphore | None = field(default=None, init=False, repr=False, compare=False)
    _opened_for: tuple[object, ...] = field(default=(), init=False, repr=False, compare=False)

    def __init__(
        self,
        *,
        name: str,
        value: int,
        max_acquire_time: float | None = None,
        ttl: int | None = None,
        _logger: Logger = DEFAULT_LOGGER,
        cancel_task_after_ttl: bool = False,
    ) -> None:
        self.name = name
        self.value = value
        self.max_acquire_time = max_acquire_time
        self.ttl = ttl
        self._logger = _logger
        self.cancel_task_after_ttl = cancel_task_after_ttl
        self._shared, self._opened, self._opened_for = None, None, ()
        self.__post_init__()

    def _get_type(self) -> str:
        return "in-memory"

    async def locked(self) -> bool:
        """Returns whether all slots are held."""
        semaphore = await self._open()
        return (await semaphore.stats()).held >= self.value

    async def _acquire(self) -> AcquisitionResult:
        semaphore = await self._open()
        within = self.max_acquire_time
        permit = await semaphore.acquire(within=None if within is None else max(0.0, within))
        number = permit.slot_number
        assert number is not None, "the semaphore is numbered"
        # There is no await from here on: a cancelled task holds nothing.
        acquisition_id = permit.detach()
        if self.ttl is not None:
            self._start_timer(acquisition_id, self.ttl)
        return AcquisitionResult(acquisition_id=acquisition_id, slot_number=number)

    async def _release(self, acquisition_id: str) -> None:
        timer = _timers.pop(acquisition_id, None)
        if timer is not None:
            loop, handle = timer
            # If the loop is closed, the timer cannot fire.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(handle.cancel)
        await (await self._open(check=False)).release_member(acquisition_id)

    async def _open(self, check: bool = True) -> leasehold.Semaphore:
        """Returns the semaphore of the engine, and makes another one if an attribute has changed."""
        wanted = (self.name, self.value, self.ttl)
        shared, opened = self._shared, self._opened
        if shared is None or opened is None or self._opened_for != wanted:
            shared = self._shared = _declared.setdefault(self.name, _Declared())
            opened = None
        if check and shared.value != self.value:
            await self._declare(shared)
            opened = None
        if opened is None:
            opened = _client.semaphore(self.name, self.value, ttl=self.ttl, numbered=True)
            self._opened, self._opened_for = opened, wanted
        return opened

    async def _declare(self, shared: _Declared) -> None:
        """Changes the value that counts for the name, unless the name is in use with another one."""
        for one in await _client.stats([self.name]):
            if one.capacity != self.value and (one.held or one.waiting):
                raise Exception(
                    f"the semaphore {self.name!r} is in use with value={one.capacity}, not {self.value}: "
                    "use the same value, or release all of its slots first"
                )
        shared.value = self.value

    def _start_timer(self, acquisition_id: str, ttl: float) -> None:
        global _prune_timers_at
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if len(_timers) >= _prune_timers_at:
            # A loop that has been closed leaves the timers of slots that were not released.
            for closed in [timer_id for timer_id, (timer_loop, _) in list(_timers.items()) if timer_loop.is_closed()]:
                _timers.pop(closed, None)
            _prune_timers_at = max(1000, 2 * len(_timers))
        handle = loop.call_later(ttl, self._expire, acquisition_id, task)
        _timers[acquisition_id] = (loop, handle)

    def _expire(self, acquisition_id: str, task: asyncio.Task[object] | None) -> None:
        """The engine ends the permit by itself; this reports it, and cancels the task."""
        if _timers.pop(acquisition_id, None) is None:
            return
        self._log(logging.WARNING, "TTL expired, the slot is released", acquisition_id=acquisition_id)
        if self.cancel_task_after_ttl and task is not None:
            task.cancel()

    @classmethod
    async def get_acquired_stats(cls, *, names: list[str] | None = None, limit: int = 100) -> dict[str, SemaphoreStats]:
        """Returns the use of the semaphores that are held, most used first.

        `names` selects semaphores, also if none of their slots is held. At most `limit` are returned.
        """
        has_names = names is not None
        # Names with waiters alone are left out below: the limit is applied after that.
        found = await _client.stats(names, limit=2**31, unused=has_names)
        return in_use(found, unused=has_names, limit=limit)
