"""Training of a reward model on preferences, with the same Megatron actor as reinforcement learning: a head gives each
answer a score at its last token, and the scores of pairs are trained by the Bradley-Terry loss.

megatron-rl reward-model FILE.yaml ... section.key=value ... [--dry-run] [--resume auto]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_rl.commands.launch import launch
from megatron_rl.commands.sft import describe, run
from megatron_rl.config.schema import RewardModelRunConfig


def main(arguments: Sequence[str] | None = None) -> int:
    return launch(RewardModelRunConfig, arguments, program="reward-model", describe=describe, run=run)


if __name__ == "__main__":
    sys.exit(main())
