"""Scripts of TRL: `from megatron_rl.trl import GRPOConfig, GRPOTrainer` in the place of `from trl import ...`, and the
same for DPO, KTO, SFT and reward models.

docs/coming_from_trl.md has every argument of TRL's configurations and what becomes of it.
"""

from typing import Any

from megatron_rl.trl.arguments import ARGUMENTS
from megatron_rl.trl.configuration import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, SFTConfig
from megatron_rl.trl.grpo import GRPOTrainer
from megatron_rl.trl.offline_trainers import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer

__all__ = [
    "ARGUMENTS",
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
]

IN_PLACE = {
    **dict.fromkeys(("ORPO", "CPO"), "`megatron_rl.dpo(model, rows)` trains on preferences"),
    "GKD": "`megatron_rl.grpo` with the sections teachers and algorithm.distillation learns from teachers",
}
"""What is here for TRL's other trainers."""
STAYS = ("ModelConfig", "ScriptArguments", "TrlParser", "get_peft_config", "get_quantization_config", "rewards")


def __getattr__(name: str) -> Any:
    """What another name of TRL's is here."""
    if name.endswith(("Trainer", "Config")) and name not in STAYS:
        known = IN_PLACE.get(name.removesuffix("Trainer").removesuffix("Config"))
        raise ImportError(
            f"megatron_rl.trl has no {name}: {known or 'trainers of GRPO, DPO, KTO, SFT and reward models are there'}"
        )
    if name in STAYS:
        raise ImportError(f"megatron_rl.trl has no {name}: import it from trl itself, which works with GRPOConfig here")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
