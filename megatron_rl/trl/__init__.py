"""Scripts of TRL: `from megatron_rl.trl import GRPOConfig, GRPOTrainer` in the place of `from trl import ...`.

docs/coming_from_trl.md has every argument of TRL's GRPOConfig and what becomes of it.
"""

from megatron_rl.trl.arguments import ARGUMENTS, GRPOConfig
from megatron_rl.trl.trainer import GRPOTrainer

__all__ = ["ARGUMENTS", "GRPOConfig", "GRPOTrainer"]
