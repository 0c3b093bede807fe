"""Print what the metrics of a run mean: all of them, or the ones whose names contain a word.

megatron-rl metrics               all
megatron-rl metrics mismatch      the ones with this word in their names
megatron-rl metrics --markdown    docs/metrics.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_rl.observe.metric_names import SECTIONS, markdown, meaning
from megatron_rl.processes import piped


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="", metavar="WORD", help="a part of a name, or a whole name")
    parser.add_argument("--markdown", action="store_true", help="print the whole reference as Markdown")
    given = parser.parse_args(arguments)
    if given.markdown:
        print(markdown(), end="")
        return 0
    found = {name: said for names in SECTIONS.values() for name, said in names.items() if given.word in name}
    if not found and (said := meaning(given.word)):
        found = {given.word: said}
    if not found:
        print(f"error: no metric has {given.word!r} in its name; `megatron-rl metrics` prints all", file=sys.stderr)
        return 2
    table = Table("metric", "meaning", box=None)
    for name, said in found.items():
        table.add_row(name, said)
    Console(soft_wrap=not sys.stdout.isatty()).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(piped(main))
