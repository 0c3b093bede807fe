"""Write the report of a run, or a comparison of several runs. They may have finished, crashed or be still running.

megatron-rl report runs/gsm8k                        writes runs/gsm8k/report.html and curves.png
megatron-rl report runs/a runs/b --out comparison    writes comparison/comparison.html and comparison.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.observe import write_comparison, write_report
from megatron_rl.processes import failed, piped


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and print its path; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, with its metrics.jsonl")
    parser.add_argument(
        "--out", type=Path, help="the folder to write to; default: the run's folder, or for several runs `comparison`"
    )
    options = parser.parse_args(arguments)
    try:
        if len(options.runs) == 1:
            print(write_report(options.runs[0], options.out))
        else:
            print(write_comparison(options.runs, options.out or Path("comparison")))
    except (ValueError, OSError) as error:
        return failed(error)
    return 0


if __name__ == "__main__":
    sys.exit(piped(main))
