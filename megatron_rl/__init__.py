"""Reinforcement learning of large language models with Megatron-Core and vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.api import Run, RunPlan, dpo, grpo, plan, ppo, sft

__all__ = ["Run", "RunPlan", "dpo", "grpo", "plan", "ppo", "sft"]


def __getattr__(name: str) -> Any:
    """Names of api.py are imported when they are used: every process of a run imports this package."""
    if name not in __all__:
        raise AttributeError(f"module 'megatron_rl' has no attribute {name!r}")
    from megatron_rl import api

    return getattr(api, name)
