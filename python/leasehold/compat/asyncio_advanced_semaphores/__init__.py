"""The public interface of asyncio-advanced-semaphores 0.0.9, on leasehold's engine.

Change the import, and nothing else::

    from leasehold.compat.asyncio_advanced_semaphores import MemorySemaphore, RedisConfig, RedisSemaphore

Both packages can share one queue on Redis: they use the same keys. During a migration some processes run one package
and some the other. The limit holds, and both make progress.

`async with semaphore:` and `get_acquisition_statistics`, which earlier versions had instead of `cm` and
`get_acquired_stats`, work as well.

What differs from asyncio-advanced-semaphores:

- Any event loop and any thread can use a semaphore. One connection and one thread per `RedisConfig` serve them all, so
  `max_connections`, `ping_interval`, `use_polling_after_delay` and `poll_delay` are checked but have no effect.
- A release hands the slot to the next waiter at once. Waiters do not poll: the client renews all its places together.
- `slot_number` is the lowest number from 1 that no other live holder in this package has. The other package returns
  how many slots are held, so that two of its holders can have the same number.
- `acquisition_id` is a string of another form. Any object of the same name can release it, also in another process.
- On Redis, leases and TTLs are counted by the clock of the server, not by those of the clients. A `ttl` is not rounded
  to whole seconds; it is at least 0.1 s, and `heartbeat_max_interval` at least 0.3 s.
- If objects of one name on Redis have different values, the value that was declared last applies to all of them.
- If Redis becomes unreachable while an acquire waits, the acquire keeps its place and keeps waiting, up to
  `max_acquire_time`. `number_of_attempts` and the retry delays apply when a request fails.
- If Redis stays unreachable, `leasehold.Unavailable` is raised, which is a `ConnectionError`. If the package `redis` is
  loaded, the exception is also a `redis.exceptions.ConnectionError` and a `redis.exceptions.TimeoutError`.
- A task that is cancelled while it releases gets its `CancelledError` at once. The release continues in the background.
- A slot that is never released stays held until its TTL or its process ends, not until the event loop ends.
  A process that exits normally releases its slots.
- Lost leases are logged by the logger `leasehold`, not by `asyncio_advanced_semaphores`.
- Names are limited to 512 bytes.
- Parameters of the Redis URL other than `db` and `ssl_ca_certs` are ignored if they tune the connection. Others,
  such as `ssl_cert_reqs`, raise `ValueError`.
- Private names, such as `_queue_manager` and `RedisClientManager`, are missing.
"""

from ._common import AcquisitionResult, Semaphore, SemaphoreStats
from ._memory import MemorySemaphore
from ._redis import RedisConfig, RedisSemaphore

VERSION = "0.0.9"
"""The version of asyncio-advanced-semaphores whose interface this is."""

__all__ = [
    "AcquisitionResult",
    "MemorySemaphore",
    "RedisConfig",
    "RedisSemaphore",
    "Semaphore",
    "SemaphoreStats",
]
