"""Check a checkpoint, which is a Hugging Face folder or a folder that `megatron-rl convert to-megatron` wrote.

The tool checks that every tensor belongs to one row of the family's table and has its extents, that every byte matches
the manifest, if there is one, and that what is stored twice is equal. With --against it also checks that every tensor
has the same bits as in another checkpoint of any form. The exit code is 0, or 1 with an error that names the file and
the tensor of the first fault.

    megatron-rl convert verify checkpoints/qwen3-32b
    megatron-rl convert verify checkpoints/qwen3-32b-tp8-pp4 --against models/Qwen3-32B
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.convert import Verification, command
from megatron_rl.processes import piped


def main(arguments: Sequence[str] | None = None) -> int:
    return command.run(_verify, arguments)


def _verify(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the checkpoint's folder")
    parser.add_argument("--against", type=Path, metavar="OTHER", help="another checkpoint to compare with")
    command.add_common(parser)
    given = parser.parse_args(arguments)
    verification = Verification(given.folder, given.against)
    with command.Bar("verifying", verification.num_work_bytes) as bar:
        verified = asdict(verification.run(given.workers, bar))
    if given.json:
        print(json.dumps(verified))
        return
    table = Table(show_header=False)
    for name, value in verified.items():
        table.add_row(name.removeprefix("num_").replace("_", " "), f"{value:,}" if isinstance(value, int) else value)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(piped(main))
