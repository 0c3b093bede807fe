"""Run the program of README.md that trains with a reward of its own, with several seeds: the numbers of README.

    python tools/bench/readme_program.py --seeds 0 1 2 > program.json
    for name in "own reward/first" "own reward/last" "own reward/steps" "own reward/program"; do
        python -m megatron_rl.tools.docs.numbers store "$name" program.json
    done

Prints one JSON object: the mean reward of the first and of the last step, the seconds of all steps, and of the program,
each with one number for each seed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"<!-- run -->\n```python\n(.*?)```", re.DOTALL)
LAST_LINE = """
import json
rows = [step for step in run.metrics if "reward/mean" in step]
print(json.dumps([rows[0]["reward/mean"], rows[-1]["reward/mean"], sum(step["time/total_s"] for step in rows)]))
"""


def run(seed: int) -> dict[str, float]:
    [program] = BLOCK.findall((ROOT / "README.md").read_text())
    text = program.replace("**settings)", f'run={{"seed": {seed}}}, **settings)') + LAST_LINE
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "program.py").write_text(text)
        began = time.monotonic()
        variables = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "program.py"], cwd=folder, env=variables, stdout=subprocess.PIPE, text=True, check=True
        )
        seconds = time.monotonic() - began
    first, last, steps = json.loads(done.stdout.splitlines()[-1])
    return {"first": first, "last": last, "steps_s": steps, "program_s": seconds}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    results = [run(seed) for seed in parser.parse_args(arguments).seeds]
    print(json.dumps({name: [result[name] for result in results] for name in results[0]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
