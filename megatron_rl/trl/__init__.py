"""Scripts of TRL: `from megatron_rl.trl import GRPOConfig, GRPOTrainer` in the place of `from trl import ...`.

docs/coming_from_trl.md has every argument of TRL's GRPOConfig and what becomes of it.
"""

from typing import Any

from megatron_rl.trl.arguments import ARGUMENTS
from megatron_rl.trl.configuration import GRPOConfig
from megatron_rl.trl.trainer import GRPOTrainer

__all__ = ["ARGUMENTS", "GRPOConfig", "GRPOTrainer"]

PREFERENCES = tuple(f"{loss}{part}" for loss in ("DPO", "KTO", "ORPO", "CPO") for part in ("Trainer", "Config"))
STAYS = ("ModelConfig", "ScriptArguments", "TrlParser", "get_peft_config", "get_quantization_config", "rewards")


def __getattr__(name: str) -> Any:
    """What another name of TRL's is here."""
    if name in ("SFTTrainer", "SFTConfig"):
        raise ImportError(f"megatron_rl.trl has no {name}: `megatron_rl.sft(model, rows)` trains on demonstrations")
    if name in PREFERENCES:
        raise ImportError(f"megatron_rl.trl has no {name}: `megatron_rl.dpo(model, rows)` trains on preferences")
    if name.endswith(("Trainer", "Config")) and name not in STAYS:
        raise ImportError(f"megatron_rl.trl has no {name}: of TRL's trainers only GRPOTrainer is there")
    if name in STAYS:
        raise ImportError(f"megatron_rl.trl has no {name}: import it from trl itself, which works with GRPOConfig here")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
