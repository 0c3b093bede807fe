"""The recipe's task: products of 3-digit numbers, which a model of 320,000 parameters cannot compute, but a calculator
can.

    [calculator]<user>876*530<end><assistant><call>876*530</call><end><tool>464280<end><assistant>464280<end>

Here `<call>` and `</call>` stand for the texts around the expression, `<tool_call>{"name": "calculator", "arguments":
{"expression": "` and `"}}</tool_call>`, whose pieces are tokens; otherwise each character is one. The demonstrations
are imperfect on purpose: seven of ten answer at once, with a number that has the right length and nothing else right,
and of the calls some copy a digit wrongly. So a policy that starts from them calls the calculator sometimes, and must
learn that it is worth it. All files depend only on the seed. Training and held-out pairs are disjoint.

    python -m megatron_rl.recipes.calculator.task runs/calculator/task
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.recipes.tiny.model import chat_tokenizer, write_random_qwen3, write_rows, write_task_of

TURNS = ["<user>", "<assistant>", "<tool>"]
CALL = ["<tool_call>", '{"name": "', "calculator", '", "arguments": {"expression": "', '"}}', "</tool_call>"]
CHARACTERS = "0123456789*[] .:'-ErrValuoncticsygid,"
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NUM_TRAIN, NUM_EVAL, NUM_DEMONSTRATIONS = 4000, 500, 20000
SHARE_OF_CALLS, SLIP = 0.3, 0.02
TOOLS = [{"type": "function", "function": {"name": "calculator"}}]


def call(expression: str) -> str:
    return "".join((*CALL[:4], expression, *CALL[4:]))


def demonstration(a: int, b: int, rng: random.Random) -> list[dict[str, str]]:
    """The turns after the question. The last one is what the model learns."""
    if rng.random() > SHARE_OF_CALLS:
        return [{"role": "assistant", "content": str(rng.randrange(100_000, 1_000_000))}]
    copied = "".join(rng.choice("0123456789") if rng.random() < SLIP else c for c in f"{a}*{b}")
    turns = [{"role": "assistant", "content": call(copied)}]
    if rng.random() < 0.5:  # otherwise this turn is what the model learns
        result = str(a * b)
        turns += [{"role": "tool", "content": result}, {"role": "assistant", "content": result}]
    return turns


def write_task(folder: Path, seed: int = 0) -> None:
    """Write train.jsonl, eval.jsonl, demonstrations.jsonl and model/ (random weights) into the folder."""
    rng = random.Random(seed)
    pairs = rng.sample([(a, b) for a in range(100, 1000) for b in range(100, 1000)], NUM_TRAIN + NUM_EVAL)

    def question(a: int, b: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{a}*{b}"}]

    questions = [{"messages": question(a, b), "ground_truth": str(a * b)} for a, b in pairs]
    chosen = [rng.choice(pairs[:NUM_TRAIN]) for _ in range(NUM_DEMONSTRATIONS)]
    rows = [{"messages": question(a, b) + demonstration(a, b, rng), "tools": TOOLS} for a, b in chosen]
    write_rows(folder, questions[:NUM_TRAIN], questions[NUM_TRAIN:], rows)
    write_model(folder / "model", seed)


def write_model(folder: Path, seed: int) -> None:
    chat_tokenizer(TURNS, CALL, CHARACTERS, TEMPLATE).save_pretrained(folder)
    write_random_qwen3(folder, seed, vocab_size=64, pad_token_id=0, eos_token_id=1, max_position_embeddings=128)


def main(arguments: Sequence[str] | None = None) -> int:
    return write_task_of(__doc__, write_task, arguments)


if __name__ == "__main__":
    sys.exit(main())
