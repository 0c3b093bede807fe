"""What the workers of an engine hold."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.rollout.engine import Engine


async def called_in_workers(engine: Engine, function: str | Callable) -> list:
    """What a method, or a function of the worker, returns in each of an engine's workers."""
    return await engine.sampler._thread.call(lambda: engine.sampler._thread.engine.collective_rpc(function))
