"""The demo's task: addition of 3-digit numbers with the columns in the thought, and a model of 312,064 parameters.

    876+530=<think>6+0+0=6,7+3+0=10,8+5+1=14</think>1406

The thought has the columns from the right, with the carry as the third term. Each character is a token. The
demonstrations are imperfect on purpose: half of them answer without a thought, a tenth have the columns twice, and each
column is wrong with probability 0.1, and then the error carries over to the next column. So a policy that starts
from them must learn to think, and then to think without errors. All files depend only on the seed. Training and
held-out pairs are disjoint.

    python -m megatron_rl.recipes.tiny.task runs/tiny/task
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.recipes.tiny.model import write_character_model, write_rows, write_task_of

VOCABULARY = ["<pad>", "<eos>", "<think>", "</think>", "<unk>", *"0123456789+=,? ."]
NUM_TRAIN, NUM_EVAL, NUM_DEMONSTRATIONS = 8000, 500, 40000


def thought(a: int, b: int, rng: random.Random | None = None, slip: float = 0.0) -> tuple[str, str]:
    """The columns of a + b, and the answer that follows from them. `slip` is the probability that the last digit of a
    column's sum is replaced by a random digit."""
    columns, digits, carry = [], [], 0
    for _ in range(3):
        x, y = a % 10, b % 10
        total = x + y + carry
        if rng and rng.random() < slip:
            total = total - total % 10 + rng.randrange(10)
        columns.append(f"{x}+{y}+{carry}={total}")
        digits.append(total % 10)
        carry, a, b = total // 10, a // 10, b // 10
    answer = carry * 1000 + digits[2] * 100 + digits[1] * 10 + digits[0]
    return ",".join(columns), str(answer)


def demonstration(a: int, b: int, rng: random.Random) -> str:
    """A completion: 50 % have no thought, 40 % have the columns once, 10 % have them twice."""
    kind = rng.random()
    if kind < 0.5:
        return f"<think></think>{a + b}"
    columns, answer = thought(a, b, rng, slip=0.1)
    if kind >= 0.9:
        again, answer = thought(a, b, rng, slip=0.1)
        columns = f"{columns},{again}"
    return f"<think>{columns}</think>{answer}"


def write_task(folder: Path, seed: int = 0) -> None:
    """Write train.jsonl, eval.jsonl, demonstrations.jsonl and model/ (random weights) into the folder."""
    rng = random.Random(seed)
    pairs = [(100 + i // 900, 100 + i % 900) for i in rng.sample(range(900 * 900), NUM_TRAIN + NUM_EVAL)]
    questions = [{"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "dataset": "addition"} for a, b in pairs]
    chosen = [rng.choice(pairs[:NUM_TRAIN]) for _ in range(NUM_DEMONSTRATIONS)]
    demonstrations = [{"prompt": f"{a}+{b}=", "completion": demonstration(a, b, rng)} for a, b in chosen]
    write_rows(folder, questions[:NUM_TRAIN], questions[NUM_TRAIN:], demonstrations)
    write_model(folder / "model", seed)


def write_model(folder: Path, seed: int) -> None:
    write_character_model(folder, seed, VOCABULARY, ["<think>", "</think>"], num_positions=128)


def main(arguments: Sequence[str] | None = None) -> int:
    return write_task_of(__doc__, write_task, arguments)


if __name__ == "__main__":
    sys.exit(main())
