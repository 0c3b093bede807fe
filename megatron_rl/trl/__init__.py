"""Scripts of TRL: `from megatron_rl.trl import GRPOConfig, GRPOTrainer` in the place of `from trl import ...`, and the
same for the trainers of preferences, SFT, reward models and distillation.

docs/coming_from_trl.md has every argument of TRL's configurations and what becomes of it.
"""

from typing import Any

from megatron_rl.trl.arguments import ARGUMENTS
from megatron_rl.trl.configuration import (
    CPOConfig,
    DPOConfig,
    GKDConfig,
    GRPOConfig,
    KTOConfig,
    ORPOConfig,
    RewardConfig,
    SFTConfig,
)
from megatron_rl.trl.gkd import GKDTrainer
from megatron_rl.trl.grpo import GRPOTrainer
from megatron_rl.trl.offline_trainers import CPOTrainer, DPOTrainer, KTOTrainer, ORPOTrainer, RewardTrainer, SFTTrainer

__all__ = [
    "ARGUMENTS",
    "CPOConfig",
    "CPOTrainer",
    "DPOConfig",
    "DPOTrainer",
    "GKDConfig",
    "GKDTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "ORPOConfig",
    "ORPOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
]

IN_PLACE = {
    "Distillation": "GKDTrainer does the same with lmbda=1.0, temperature=1.0 and beta=1.0",
}
"""What is here for TRL's other trainers."""
STAYS = ("ModelConfig", "ScriptArguments", "TrlParser", "get_peft_config", "get_quantization_config", "rewards")


def __getattr__(name: str) -> Any:
    """What another name of TRL's is here."""
    if name.endswith(("Trainer", "Config")) and name not in STAYS:
        known = IN_PLACE.get(name.removesuffix("Trainer").removesuffix("Config"))
        raise ImportError(
            f"megatron_rl.trl has no {name}: {known or 'it has GRPO, preferences, SFT, reward models and GKD'}"
        )
    if name in STAYS:
        raise ImportError(f"megatron_rl.trl has no {name}: import it from trl itself, which works with GRPOConfig here")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
