"""Semaphores that all processes on one Redis server share."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Callable, TypeVar
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import leasehold

from ._common import (
    DEFAULT_LOGGER,
    AcquisitionResult,
    Logger,
    Semaphore,
    SemaphoreStats,
    in_use,
)

T = TypeVar("T")

#: The permits of this process, which the client renews while they are here.
_held: dict[str, leasehold.Permit] = {}


@dataclass(init=False, frozen=True)
class RedisConfig:
    """How to reach Redis. Semaphores with equal settings share one connection."""

    namespace: str = "adv-sem"
    """The prefix of every key."""

    url: str = "redis://localhost:6379"
    """The address of the server."""

    max_connections: int = 300
    """Has no effect: there is one connection. At least 11."""

    socket_timeout: int = 30
    """How long a request waits for its answer, in seconds."""

    socket_connect_timeout: int = 10
    """How long connecting takes at most, in seconds."""

    number_of_attempts: int = 3
    """How often a request is sent, in all, if Redis is unreachable."""

    retry_multiplier: float = 2
    """The delay before the first repetition, in seconds. It doubles with each one."""

    retry_min_delay: float = 1
    """The shortest delay before a repetition, in seconds."""

    retry_max_delay: float = 60
    """The longest delay before a repetition, in seconds."""

    def __init__(
        self,
        *,
        namespace: str = "adv-sem",
        url: str = "redis://localhost:6379",
        max_connections: int = 300,
        socket_timeout: int = 30,
        socket_connect_timeout: int = 10,
        number_of_attempts: int = 3,
        retry_multiplier: float = 2,
        retry_min_delay: float = 1,
        retry_max_delay: float = 60,
    ) -> None:
        values = dict(locals())
        for name in self.__dataclass_fields__:
            object.__setattr__(self, name, values[name])
        self.__post_init__()

    def __post_init__(self) -> None:
        if self.max_connections <= 10:
            raise ValueError(f"max_connections is {self.max_connections}: it must be greater than 10")

    def _delay(self, attempt: int) -> float:
        """Returns how long to wait after the attempt of this number, counted from 1."""
        delay = self.retry_multiplier * 2.0 ** (attempt - 1)
        return max(0.0, self.retry_min_delay, min(delay, self.retry_max_delay))


_clients: dict[RedisConfig, leasehold.Client] = {}

# Parameters of redis-py's URLs that tune its own connections.
_TUNING = frozenset(
    [
        "client_name",
        "decode_responses",
        "encoding",
        "encoding_errors",
        "health_check_interval",
        "lib_name",
        "lib_version",
        "max_connections",
        "protocol",
        "retry_on_timeout",
        "socket_connect_timeout",
        "socket_keepalive",
        "socket_read_size",
        "socket_timeout",
        "timeout",
    ]
)


def _client(config: RedisConfig) -> leasehold.Client:
    """Returns the client for these settings. Any loop and any thread can use it."""
    client = _clients.get(config)
    if client is None:
        url, authority = _address(config.url)
        client = leasehold.Client(
            url,
            namespace=config.namespace,
            ca_certificate=authority,
            connect_timeout=config.socket_connect_timeout,
            answer_timeout=config.socket_timeout,
        )
        # Without a lock, which a forked child could inherit locked: a client that lost the race has connected nothing.
        client = _clients.setdefault(config, client)
    return client


def _address(url: str) -> tuple[str, bytes | None]:
    """Returns a URL as leasehold has it, and the certificate of the authority that it names."""
    parts = urlsplit(url)
    if not parts.query or not parts.scheme.startswith("redis"):
        return url, None
    path, authority = parts.path, None
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name == "db":
            path = f"/{value}"
        elif name == "ssl_ca_certs":
            with open(value, "rb") as file:
                authority = file.read()
        elif name not in _TUNING:
            raise ValueError(f"the parameter {name!r} of the Redis URL is not supported")
    return urlunsplit((parts.scheme, parts.netloc, path, "", parts.fragment)), authority


async def _attempts(
    config: RedisConfig,
    logger: Logger,
    request: Callable[[float | None], Awaitable[T]],
    limit: float | None = None,
) -> T:
    """Sends a request again while Redis is unreachable, as often and for as long as it may.

    The request is called with how many seconds are left.
    """
    ends_at = None if limit is None else time.monotonic() + limit
    attempt = 0
    while True:
        attempt += 1
        left = None if ends_at is None else max(0.0, ends_at - time.monotonic())
        try:
            return await request(left)
        except leasehold.Unavailable as error:
            delay = config._delay(attempt)
            left = None if ends_at is None else ends_at - time.monotonic()
            if left is not None and left <= delay and (left <= 0 or attempt < config.number_of_attempts):
                await asyncio.sleep(max(0.0, left))
                raise leasehold.TimedOut(f"not acquired within {limit} s: {error}") from error
            if attempt >= config.number_of_attempts:
                raise _as_redis_error(error) from error
            logger.warning("Redis is unreachable, trying again in %s s: %s", delay, error)
            await asyncio.sleep(delay)
        except (leasehold.Denied, leasehold.NoRoom, leasehold.Unusable) as error:
            raise _as_redis_error(error) from error


def _as_redis_error(error: leasehold.Error) -> leasehold.Error:
    """Returns an error that code which expects an exception of the package redis catches, too.

    Such code has loaded the package.
    """
    redis = sys.modules.get("redis.exceptions")
    if redis is None:
        return error
    error_type = type(error)
    if isinstance(error, leasehold.Unavailable):
        bases: tuple[type, ...] = (error_type, redis.ConnectionError, redis.TimeoutError)
    elif isinstance(error, leasehold.Denied):
        bases = (error_type, redis.AuthenticationError, redis.ResponseError)
    else:
        bases = (error_type, redis.ResponseError)

    def reduce(error: leasehold.Error) -> tuple[object, ...]:
        # Pickle finds classes by their names, and this one has none: in another process, the error is ours alone.
        return error_type, error.args, error.__dict__

    both = type(
        error_type.__name__, bases, {"__module__": __name__, "__doc__": error_type.__doc__, "__reduce__": reduce}
    )
    converted: leasehold.Error = both(*error.args)
    converted.__dict__.update(error.__dict__)
    return converted


@dataclass(init=False)
class RedisSemaphore(Semaphore):
    """A semaphore that all processes with the same server, namespace and name share."""

    config: RedisConfig = field(default_factory=RedisConfig)
    """How to reach Redis."""

    heartbeat_max_interval: int = 180
    """How long a holder or waiter may be silent, in seconds, before its slot or place passes on.

    Lowered to `ttl` if that is shorter.
    """

    ping_interval: float | None = None
    """Has no effect: leases are renewed in time. Less than `heartbeat_max_interval`."""

    use_polling_after_delay: float = 100.0
    """Has no effect: nothing polls."""

    poll_delay: float = 1.0
    """Has no effect: nothing polls."""

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
        config: RedisConfig | None = None,
        heartbeat_max_interval: int = 180,
        ping_interval: float | None = None,
        use_polling_after_delay: float = 100.0,
        poll_delay: float = 1.0,
    ) -> None:
        self.name = name
        self.value = value
        self.max_acquire_time = max_acquire_time
        self.ttl = ttl
        self._logger = _logger
        self.config = RedisConfig() if config is None else config
        self.heartbeat_max_interval = heartbeat_max_interval
        self.ping_interval = ping_interval
        self.use_polling_after_delay = use_polling_after_delay
        self.poll_delay = poll_delay
        self._opened, self._opened_for = None, ()
        self.__post_init__()

    def __post_init__(self) -> None:
        if self.ping_interval is not None and self.ping_interval >= self.heartbeat_max_interval:
            raise ValueError(
                f"ping_interval is {self.ping_interval}: it must be lower than "
                f"heartbeat_max_interval, {self.heartbeat_max_interval}"
            )
        if self.ttl is not None and self.ttl < self.heartbeat_max_interval:
            self._log(logging.DEBUG, "heartbeat_max_interval is lowered to the TTL")
            self.heartbeat_max_interval = self.ttl
        elif self.heartbeat_max_interval < 10:
            self._log(logging.WARNING, "heartbeat_max_interval is below 10 s, a short outage ends leases")
        if self.ping_interval is not None and self.ping_interval < 1:
            self._log(logging.WARNING, "ping_interval is below 1 s, it has no effect")
        super().__post_init__()

    def _get_type(self) -> str:
        return "redis"

    async def locked(self) -> bool:
        """Returns whether all slots are held."""
        stats = await _attempts(self.config, self._logger, lambda _: self._open().stats())
        return stats.held >= self.value

    async def _acquire(self) -> AcquisitionResult:
        permit = await _attempts(
            self.config,
            self._logger,
            lambda left: self._open().acquire(within=left),
            self.max_acquire_time,
        )
        number = permit.slot_number
        assert number is not None, "the semaphore is numbered"
        # There is no await from here on: a cancelled task holds nothing.
        _held[permit.id] = permit
        return AcquisitionResult(acquisition_id=permit.id, slot_number=number)

    async def _release(self, acquisition_id: str) -> None:
        # If this is cancelled, the permit is released in the background when it is dropped.
        permit = _held.pop(acquisition_id, None)
        await _attempts(self.config, self._logger, lambda _: self._open().release_member(acquisition_id))
        del permit

    def _open(self) -> leasehold.Semaphore:
        """Returns the semaphore of the engine, and makes another one if an attribute has changed."""
        wanted = (self.name, self.value, self.ttl, self.heartbeat_max_interval, self.config)
        if self._opened is None or self._opened_for != wanted:
            self._opened = _client(self.config).semaphore(
                self.name,
                self.value,
                ttl=self.ttl,
                lease=self.heartbeat_max_interval,
                numbered=True,
            )
            self._opened_for = wanted
        return self._opened

    @classmethod
    async def get_acquired_stats(
        cls,
        *,
        names: list[str] | None = None,
        limit: int = 100,
        config: RedisConfig | None = None,
    ) -> dict[str, SemaphoreStats]:
        """Returns the use of the semaphores that are held, most used first.

        `names` selects semaphores, also if none of their slots is held. Otherwise at most `limit` are returned.
        """
        config = config or RedisConfig()
        has_names = names is not None
        client = _client(config)
        found = await _attempts(
            config,
            DEFAULT_LOGGER,
            lambda _: client.stats(names, limit=2**31, unused=has_names),
        )
        return in_use(found, unused=has_names, limit=None if has_names else limit)
