"""PPO: as `megatron-rl grpo`, with a critic that is trained together with the policy.

megatron-rl ppo FILE.yaml ... section.key=value ... [--dry-run] [--resume auto]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_rl.commands.launch import launch, quiet_environment

quiet_environment()

from megatron_rl.commands.grpo import describe, run  # noqa: E402
from megatron_rl.config.schema import PpoRunConfig  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    return launch(PpoRunConfig, arguments, program="ppo", describe=describe, run=run)


if __name__ == "__main__":
    sys.exit(main())
