"""The recipe's task: addition of 5-digit numbers by a model that has half of the columns wrong, so that hardly any
whole answer is right.

    48876+53530=<think>#6+0+0=6 #7+3+0=10 #8+5+1=14 #8+3+1=12 #4+5+1=10 </think>102406

The thought has the columns from the right, with the carry as the third term; `#` begins a column, and a space ends it.
Each character is a token. The demonstrations are imperfect on purpose: each column is wrong with probability 0.5, and
then the error carries over to the next column, and a thought ends after any column, or before the first one. The last
digits of the answer come from the thought; the others, which have no column, are right, but the model cannot compute
them without columns. So it learns to copy from its thought, and the right answer is more probable after a right column,
and less after a wrong one. All files depend only on the seed. Training and held-out pairs are disjoint.

    python -m megatron_rl.recipes.process_rewards.task runs/process_rewards/task
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.recipes.tiny.model import write_character_model, write_rows, write_task_of

VOCABULARY = ["<pad>", "<eos>", "<think>", "</think>", "<unk>", *"0123456789+=# "]
DIGITS, SLIP = 5, 0.5
NUM_TRAIN, NUM_EVAL, NUM_DEMONSTRATIONS = 8000, 500, 40000


def question(a: int, b: int) -> str:
    return f"{a}+{b}=<think>"


def derivation(a: int, b: int, num_columns: int, rng: random.Random | None = None) -> tuple[list[str], str]:
    """The first columns of a + b, and the answer that follows from them: its other digits are right with the carry of
    the last column. With `rng` the last digit of a column's sum is random with the probability `SLIP`."""
    columns, digits, carry = [], "", 0
    for _ in range(num_columns):
        x, y = a % 10, b % 10
        total = x + y + carry
        if rng and rng.random() < SLIP:
            total = total - total % 10 + rng.randrange(10)
        columns.append(f"#{x}+{y}+{carry}={total} ")
        digits = str(total % 10) + digits
        carry, a, b = total // 10, a // 10, b // 10
    rest = a + b + carry
    return columns, (str(rest) if rest else "") + digits


def demonstration(a: int, b: int, rng: random.Random) -> str:
    """What follows the question."""
    columns, answer = derivation(a, b, rng.randint(0, DIGITS), rng)
    return f"{''.join(columns)}</think>{answer}"


def write_task(folder: Path, seed: int = 0) -> None:
    """Write train.jsonl, eval.jsonl, demonstrations.jsonl and model/ (random weights) into the folder."""
    rng = random.Random(seed)
    first, last = 10 ** (DIGITS - 1), 10**DIGITS - 1
    drawn = dict.fromkeys((rng.randint(first, last), rng.randint(first, last)) for _ in range(2 * NUM_TRAIN))
    pairs = list(drawn)[: NUM_TRAIN + NUM_EVAL]
    questions = [{"prompt": question(a, b), "ground_truth": str(a + b), "dataset": "addition"} for a, b in pairs]
    chosen = [rng.choice(pairs[:NUM_TRAIN]) for _ in range(NUM_DEMONSTRATIONS)]
    demonstrations = [{"prompt": question(a, b), "completion": demonstration(a, b, rng)} for a, b in chosen]
    write_rows(folder, questions[:NUM_TRAIN], questions[NUM_TRAIN:], demonstrations)
    write_character_model(folder / "model", seed, VOCABULARY, ["<think>", "</think>"], num_positions=128)


def main(arguments: Sequence[str] | None = None) -> int:
    return write_task_of(__doc__, write_task, arguments)


if __name__ == "__main__":
    sys.exit(main())
