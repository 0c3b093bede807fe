"""Print all algorithms with kind, formula, source and defaults.

megatron-rl algorithms [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markdown import Markdown

from megatron_rl.algorithms.catalogue import markdown, tables
from megatron_rl.processes import piped


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    given = parser.parse_args(arguments)
    if given.json:
        print(json.dumps({"tables": [table.as_dict() for table in tables()]}))
    elif sys.stdout.isatty():
        Console().print(Markdown(markdown()))
    else:
        print(markdown())
    return 0


if __name__ == "__main__":
    sys.exit(piped(main))
