"""Run `make check` and `make test`, and write into README.md how long they took on this machine.

python tools/record_times.py
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
MARKED = re.compile(r"(<!-- times -->\n).*(\n<!-- end of times -->)")
"""The one line of README.md that this tool writes."""


def replaced(text: str, line: str) -> str:
    """The README's text with `line` between the markers.

    Raises:
        ValueError: the markers are missing.
    """
    changed, count = MARKED.subn(lambda found: found[1] + line + found[2], text)
    if count != 1:
        raise ValueError(f"{README} has {count} pairs of the markers <!-- times -->; one is needed around one line")
    return changed


def measured(target: str) -> str:
    """The number of tests and the wall time of a make target, in words."""
    start = time.monotonic()
    done = subprocess.run(["make", target], cwd=README.parent, stdout=subprocess.PIPE, text=True)
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    print(done.stdout)
    passed = re.search(r"(\d+) passed", done.stdout)
    if done.returncode or passed is None:
        raise SystemExit(f"make {target} failed, so no time is recorded; see above")
    return f"`make {target}` took {minutes} min {seconds} s ({passed[1]} tests)"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    subprocess.run(["make", "setup"], cwd=README.parent, check=True)  # its time is not measured
    cores = len(os.sched_getaffinity(0))
    line = f"{measured('check')} and {measured('test')}, on {cores} cores with Python {platform.python_version()}."
    README.write_text(replaced(README.read_text(), line))
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
