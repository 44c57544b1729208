"""What both kinds of semaphores have in common: results, logging, and the context manager."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Union
from weakref import WeakKeyDictionary

import leasehold

Logger = Union[logging.Logger, "logging.LoggerAdapter[Any]"]
DEFAULT_LOGGER = logging.getLogger("asyncio_advanced_semaphores")


@dataclass
class SemaphoreStats:
    """How much of a semaphore is in use."""

    acquired_slots: int
    """The number of slots that are held."""

    max_slots: int
    """The number of slots that there are."""

    @property
    def acquired_percent(self) -> float:
        """The share of the slots that is held, in percent."""
        assert self.max_slots > 0
        return 100.0 * self.acquired_slots / self.max_slots


@dataclass
class AcquisitionResult:
    """A slot that was acquired."""

    acquisition_id: str
    """The id of the slot. `Semaphore.release` takes it."""

    slot_number: int
    """The lowest number from 1 that no other live holder of the name has."""


class SemaphoreContextManager(AbstractAsyncContextManager[AcquisitionResult]):
    """Holds one slot inside an `async with` block. It can be entered once."""

    def __init__(self, semaphore: Semaphore) -> None:
        self._semaphore = semaphore
        self._result: AcquisitionResult | None = None
        self._exited = False

    async def __aenter__(self) -> AcquisitionResult:
        if self._exited:
            raise Exception("MISUSE: this context manager has been exited: call cm() for each block")
        if self._result is not None:
            raise Exception("MISUSE: this context manager is in use: call cm() for each block")
        self._result = await self._semaphore.acquire()
        return self._result

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._exited:
            raise Exception("MISUSE: this context manager has been exited: call cm() for each block")
        if self._result is None:
            raise Exception("MISUSE: this context manager was not entered")
        # Before the await: if the release is cancelled, it goes on, and the block has ended.
        result, self._result, self._exited = self._result, None, True
        await self._semaphore.release(result.acquisition_id)


# `init=False`: keyword-only fields of dataclasses need Python 3.10. A subclass that is a dataclass has an `__init__` of
# its own, so all checks are in `__post_init__`.
@dataclass(init=False)
class Semaphore(ABC):
    """A named semaphore. Objects of one kind with the same name share their slots."""

    name: str
    """Names the semaphore."""

    value: int
    """How many slots there are."""

    max_acquire_time: float | None = None
    """The longest that an acquire waits, in seconds. Then it raises `TimeoutError`. `None`: no limit."""

    ttl: int | None = None
    """The longest that a slot is held, in seconds. Then it is released. `None`: no limit."""

    _logger: Logger = field(default_factory=lambda: DEFAULT_LOGGER)

    def __post_init__(self) -> None:
        if self.value <= 0:
            raise Exception(f"value is {self.value}: a semaphore has at least one slot")

    @abstractmethod
    def _get_type(self) -> str:
        """Returns what log lines call this kind of semaphore."""

    @abstractmethod
    async def locked(self) -> bool:
        """Returns whether all slots are held."""

    @abstractmethod
    async def _acquire(self) -> AcquisitionResult: ...

    @abstractmethod
    async def _release(self, acquisition_id: str) -> None: ...

    async def acquire(self) -> AcquisitionResult:
        """Acquires one slot, and waits for it if need be. Release it with `release`, or use `cm` instead.

        Raises `TimeoutError` if `max_acquire_time` ends first.
        """
        self._log(logging.DEBUG, "Acquiring semaphore...", max_slots=self.value)
        before = time.perf_counter()
        result = await self._acquire()
        self._log(
            logging.INFO,
            "Acquisition successful",
            acquire_time=time.perf_counter() - before,
            slot_number=result.slot_number,
            max_slots=self.value,
        )
        return result

    async def release(self, acquisition_id: str) -> None:
        """Releases one slot. Does nothing if the slot is not held."""
        self._log(logging.DEBUG, "Releasing semaphore...", acquisition_id=acquisition_id)
        await self._release(acquisition_id)
        self._log(logging.INFO, "Release successful")

    async def __aenter__(self) -> AcquisitionResult:
        """Acquires one slot. The same task releases it at the end of its block; `cm` has no such condition."""
        result = await self.acquire()
        _entered_by_this_task().append((self, result.acquisition_id))
        return result

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        entered = _entered_by_this_task()
        innermost = next((pair for pair in reversed(entered) if pair[0] is self), None)
        if innermost is None:
            raise Exception("MISUSE: this task has not entered the semaphore: use cm() to leave it in another task")
        # Before the await: if the release is cancelled, it goes on, and the block has ended.
        entered.remove(innermost)
        await self.release(innermost[1])

    def cm(self) -> AbstractAsyncContextManager[AcquisitionResult]:
        """Returns a context manager that holds one slot inside `async with`. Call it for each block."""
        return SemaphoreContextManager(self)

    @classmethod
    @abstractmethod
    async def get_acquired_stats(cls, *, names: list[str] | None = None, limit: int = 100) -> dict[str, SemaphoreStats]:
        """Returns the use of the semaphores that are held, most used first.

        `names` selects semaphores, also if none of their slots is held. Otherwise at most `limit` are returned.
        """

    @classmethod
    async def get_acquisition_statistics(cls, **query: Any) -> dict[str, SemaphoreStats]:
        """Returns the same as `get_acquired_stats`, under its earlier name."""
        return await cls.get_acquired_stats(**query)

    def _log(self, level: int, event: str, **fields: object) -> None:
        if self._logger.isEnabledFor(level):
            fields["semaphore_name"] = self.name
            fields["type"] = self._get_type()
            # stlog shows the fields that are listed here.
            fields["_stlog_extra"] = set(fields)
            self._logger.log(level, event, extra=fields)


#: The blocks that each task has entered with `async with semaphore`, and the slots that it holds there.
_entered: WeakKeyDictionary[asyncio.Task[Any], list[tuple[Semaphore, str]]] = WeakKeyDictionary()


def _entered_by_this_task() -> list[tuple[Semaphore, str]]:
    task = asyncio.current_task()
    assert task is not None, "only a task can await"
    return _entered.setdefault(task, [])


def in_use(
    found: Iterable[leasehold.SemaphoreStats], *, unused: bool, limit: int | None = None
) -> dict[str, SemaphoreStats]:
    """Returns the statistics by the share of the slots that is held, the largest first."""
    stats = {
        one.name: SemaphoreStats(acquired_slots=one.held, max_slots=one.capacity)
        for one in found
        if one.capacity and (one.held or unused)
    }
    by_use = sorted(stats.items(), key=lambda item: item[1].acquired_percent, reverse=True)
    return dict(by_use[:limit])
