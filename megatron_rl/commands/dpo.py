"""Training on preferences, which are pairs of answers, with the same Megatron actor as reinforcement learning: by DPO,
IPO, SimPO, ORPO or KTO (`dpo.loss.kind`).

megatron-rl dpo FILE.yaml ... section.key=value ... [--dry-run] [--resume auto]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_rl.commands.launch import launch
from megatron_rl.commands.sft import describe, run
from megatron_rl.config.schema import DpoRunConfig


def main(arguments: Sequence[str] | None = None) -> int:
    return launch(DpoRunConfig, arguments, program="dpo", describe=describe, run=run)


if __name__ == "__main__":
    sys.exit(main())
