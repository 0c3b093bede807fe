"""Reinforcement learning of large language models with Megatron-Core and vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.api import Run, dpo, grpo, ppo, reward_model, sft
    from megatron_rl.run_plan import RunPlan, plan

__all__ = ["Run", "RunPlan", "dpo", "grpo", "plan", "ppo", "reward_model", "sft"]


def __getattr__(name: str) -> Any:
    """Names are imported when they are used: every process of a run imports this package."""
    if name not in __all__:
        raise AttributeError(f"module 'megatron_rl' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"megatron_rl.{'run_plan' if name in ('RunPlan', 'plan') else 'api'}"), name)
