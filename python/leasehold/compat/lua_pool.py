"""The calls and words of the Lua scripts of osparc's ``DistributedSemaphore``."""

from __future__ import annotations

from .._leasehold import LuaPool
from .._types import PoolAnswer, PoolCount

__all__ = ["LuaPool", "PoolAnswer", "PoolCount"]
