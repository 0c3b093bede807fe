"""Convert a checkpoint that `megatron-rl convert to-megatron` wrote to a Hugging Face folder, on CPUs.

Tensors keep their bits unless --dtype asks for another type. Every byte that is read is checked against the manifest.

    megatron-rl convert to-hf checkpoints/qwen3-32b models/Qwen3-32B-again
    megatron-rl convert to-hf checkpoints/qwen3-32b-tp8-pp4 models/Qwen3-32B-fp32 --dtype float32 --dry-run
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_rl.convert import command, open_checkpoint, to_hub
from megatron_rl.processes import piped


def main(arguments: Sequence[str] | None = None) -> int:
    return command.run(_convert, arguments)


def _convert(arguments: Sequence[str] | None) -> None:
    given = command.parse(command.conversion_parser(__doc__), arguments)
    command.convert(to_hub(open_checkpoint(given.source), command.options(given)), given)


if __name__ == "__main__":
    sys.exit(piped(main))
