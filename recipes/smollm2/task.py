"""The real model's task: sums of one-digit numbers, asked through its chat template.

There are 100 sums. 20 of them are held out; all depends only on the seed.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

NUM_EVAL = 20


def question(a: int, b: int) -> dict[str, Any]:
    """The row that asks for a + b."""
    text = f"What is {a} + {b}? Answer with the number only."
    return {"messages": [{"role": "user", "content": text}], "ground_truth": str(a + b), "dataset": "sums"}


def write_rows(folder: Path, seed: int = 0) -> None:
    """Write train.jsonl and eval.jsonl into the folder."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    random.Random(seed).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("eval.jsonl", pairs[:NUM_EVAL]), ("train.jsonl", pairs[NUM_EVAL:])):
        (folder / name).write_text("".join(json.dumps(question(a, b)) + "\n" for a, b in part))
