"""Tests need no server: the store in memory follows the same rules."""

import asyncio
from collections.abc import Iterator

import pytest

import leasehold


@pytest.fixture
def client() -> Iterator[leasehold.Client]:
    with leasehold.Client.memory() as client:
        yield client


def test_only_one_export_at_a_time(client: leasehold.Client) -> None:
    exports = client.semaphore("exports", 1)
    with exports.guard():
        assert exports.try_acquire().wait() is None


def test_an_export_waits_for_its_turn(client: leasehold.Client) -> None:
    exports = client.semaphore("exports", 1)

    async def main() -> None:
        async with exports.guard():
            with pytest.raises(leasehold.TimedOut):
                await exports.acquire(within=0.01)

    asyncio.run(main())
