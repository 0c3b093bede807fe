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

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.recipes.tiny.model import write_random_qwen3, write_task_of

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
    folder.mkdir(parents=True, exist_ok=True)

    def write(name: str, rows: list[dict[str, str]]) -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    questions = [{"prompt": question(a, b), "ground_truth": str(a + b), "dataset": "addition"} for a, b in pairs]
    write("train.jsonl", questions[:NUM_TRAIN])
    write("eval.jsonl", questions[NUM_TRAIN:])
    chosen = [rng.choice(pairs[:NUM_TRAIN]) for _ in range(NUM_DEMONSTRATIONS)]
    write(
        "demonstrations.jsonl", [{"prompt": question(a, b), "completion": demonstration(a, b, rng)} for a, b in chosen]
    )
    write_model(folder / "model", seed)


def write_model(folder: Path, seed: int) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")  # type: ignore[no-untyped-call]
    # They are no special tokens, so that people and verifiers see them in the text.
    fast.add_tokens(["<think>", "</think>"])
    fast.save_pretrained(folder)
    write_random_qwen3(folder, seed, vocab_size=64, pad_token_id=0, eos_token_id=1, max_position_embeddings=128)


def main(arguments: Sequence[str] | None = None) -> int:
    return write_task_of(__doc__, write_task, arguments)


if __name__ == "__main__":
    sys.exit(main())
