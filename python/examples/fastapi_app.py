"""At most two reports are made at a time, by all worker processes together.

LEASEHOLD_STORE=redis://localhost:6379 uvicorn fastapi_app:app --workers 4
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException

import leasehold

client = leasehold.Client()  # $LEASEHOLD_STORE; each worker connects at its first use
reports = client.semaphore("reports", 2)


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    yield
    await client.close()


app = FastAPI(lifespan=lifespan)


@app.get("/reports/{number}")
async def report(number: int) -> dict[str, Any]:
    try:
        async with reports.guard(within=2) as permit:
            await asyncio.sleep(0.2)  # make the report
            return {"report": number, "fence": permit.fence}
    except leasehold.TimedOut:
        raise HTTPException(503, "too many reports are being made", {"Retry-After": "2"}) from None
