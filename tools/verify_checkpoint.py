"""Check a checkpoint: a Hugging Face folder, or what hf_to_megatron.py wrote.

Every tensor is accounted for by one row of the family's table, with its extents; every byte is that of the manifest,
where there is one; what is stored twice is the same. With --against, every tensor has the bits that it has in another
checkpoint, of whatever form. The exit code is 0, or 1 with the first fault, its file and its tensor.

    python tools/verify_checkpoint.py checkpoints/qwen3-32b
    python tools/verify_checkpoint.py checkpoints/qwen3-32b-tp8-pp4 --against models/Qwen3-32B
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


def main(arguments: Sequence[str] | None = None) -> int:
    return command.run(_verify, arguments)


def _verify(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--against", type=Path, metavar="OTHER")
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
    sys.exit(main())
