"""Scripts of TRL: `from megatron_rl.trl import GRPOConfig, GRPOTrainer` in the place of `from trl import ...`, and the
same for DPO and SFT.

docs/coming_from_trl.md has every argument of TRL's configurations and what becomes of it.
"""

from typing import Any

from megatron_rl.trl.arguments import ARGUMENTS
from megatron_rl.trl.configuration import DPOConfig, GRPOConfig, SFTConfig
from megatron_rl.trl.grpo import GRPOTrainer
from megatron_rl.trl.offline_trainers import DPOTrainer, SFTTrainer

__all__ = ["ARGUMENTS", "DPOConfig", "DPOTrainer", "GRPOConfig", "GRPOTrainer", "SFTConfig", "SFTTrainer"]

PREFERENCES = tuple(f"{loss}{part}" for loss in ("KTO", "ORPO", "CPO") for part in ("Trainer", "Config"))
STAYS = ("ModelConfig", "ScriptArguments", "TrlParser", "get_peft_config", "get_quantization_config", "rewards")


def __getattr__(name: str) -> Any:
    """What another name of TRL's is here."""
    if name in PREFERENCES:
        raise ImportError(f"megatron_rl.trl has no {name}: `megatron_rl.dpo(model, rows)` trains on preferences")
    if name.endswith(("Trainer", "Config")) and name not in STAYS:
        raise ImportError(f"megatron_rl.trl has no {name}: GRPOTrainer, DPOTrainer and SFTTrainer are there")
    if name in STAYS:
        raise ImportError(f"megatron_rl.trl has no {name}: import it from trl itself, which works with GRPOConfig here")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
