"""Print the reference of the configuration: the sections, or the keys of one section, or one key.

megatron-rl config                       the sections
megatron-rl config rollout.thinking      a section with everything inside
megatron-rl config policy.optimizer.lr   one key
megatron-rl config --markdown            all sections and keys, as Markdown
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markdown import Markdown

from megatron_rl.config.reference import HEAD, find, markdown, parts, plain
from megatron_rl.processes import piped


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("key", nargs="?", metavar="KEY", help="a section or a key, such as rollout.num_engines")
    parser.add_argument("--markdown", action="store_true", help="print the whole reference as Markdown")
    given = parser.parse_args(arguments)
    if given.markdown:
        print(f"{HEAD}\n{markdown(parts())}")
        return 0
    if given.key is None:
        names = dict.fromkeys(plain(part.path) for part in parts() if "." not in part.path)
        text = "\n".join(f"- `{name}`" for name in names) + "\n\n`megatron-rl config SECTION` prints its keys."
    else:
        try:
            text = markdown(find(given.key))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if sys.stdout.isatty():
        Console().print(Markdown(text))
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(piped(main))
