"""The recipe's task: a program with a wrong operator and a test that says what it should compute.

    f.py                     test.py, when it is run
    1 def gk(a, t):          gk(3, 4) is -1, not 7
    2     return a - t
                             [exit status 1]

The model has the tools of a `Workspace`: it reads `f.py`, runs the test, edits the operator and runs the test again.
Hidden cases with other numbers decide. Each whole call, and each piece of an edit around the two texts, is a token; all
else is characters. The demonstrations are imperfect on purpose: they leave out steps, slip when they copy, and half of
their first edits have a wrong operator. All files depend only on the seed. Training and held-out tasks are disjoint.

    python -m megatron_rl.recipes.repair.task runs/repair/task
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.recipes.tiny.model import chat_tokenizer, write_random_qwen3, write_rows, write_task_of

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "%": lambda a, b: a % b,
}
LETTERS = "abcdghkmptwxyz"
READ = '<tool_call>{"name": "read_file", "arguments": {"path": "f.py"}}</tool_call>'
RUN = '<tool_call>{"name": "run", "arguments": {"command": "python3 -S test.py"}}</tool_call>'
EDIT = ('<tool_call>{"name": "edit_file", "arguments": {"path": "f.py", "old": "', '", "new": "', '"}}</tool_call>')
DONE = "done"
TURNS = ["<user>", "<assistant>", "<tool>"]
CHARACTERS = "0123456789-+*%(),:[]'._ \n" + "abcdefghijklmnopqrstuvwxyz" + "ETN"
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("edit_file", "read_file", "run", "write_file")]
NUM_TRAIN, NUM_EVAL, NUM_DEMONSTRATIONS = 4000, 100, 20000
READS, RUNS, RIGHT, CHECKS, TRIES_AGAIN, SLIP = 0.85, 0.6, 0.5, 0.7, 0.5, 0.02
"""How often a demonstration reads the program, runs the test first, has the right operator first, runs the test again,
and edits once more after a failure; and how often it copies a letter wrongly."""


@dataclass(frozen=True, slots=True)
class FaultyProgram:
    """A function of one operator, and an example of what it should compute."""

    name: str
    left: str
    right: str
    operator: str
    wanted: str
    a: int
    b: int

    @property
    def expression(self) -> str:
        return f"{self.left} {self.operator} {self.right}"

    @property
    def text(self) -> str:
        return f"def {self.name}({self.left}, {self.right}):\n    return {self.expression}\n"

    @property
    def test(self) -> str:
        call, wanted = f"{self.name}({self.a}, {self.b})", OPERATORS[self.wanted](self.a, self.b)
        return (
            f"from f import {self.name}\nfound = {call}\nif found != {wanted}:\n"
            f"    print(f'{call} is {{found}}, not {wanted}')\n    raise SystemExit(1)\nprint('right')\n"
        )

    @property
    def hidden_test(self) -> str:
        cases = [(a, b, OPERATORS[self.wanted](a, b)) for a, b in ((7, 5), (12, 10), (3, 8))]
        return f"from f import {self.name}\n" + "".join(f"assert {self.name}({a}, {b}) == {c}\n" for a, b, c in cases)

    def said(self) -> str:
        """What the tool `run` returns of the test."""
        found, wanted = OPERATORS[self.operator](self.a, self.b), OPERATORS[self.wanted](self.a, self.b)
        if found == wanted:
            return "right\n\n[exit status 0]"
        return f"{self.name}({self.a}, {self.b}) is {found}, not {wanted}\n\n[exit status 1]"

    def shown(self) -> str:
        """What the tool `read_file` returns of the program."""
        return "\n".join(f"{number} {line}" for number, line in enumerate(self.text.splitlines(), 1))


def programs(rng: random.Random) -> Iterator[FaultyProgram]:
    """Programs whose examples tell the operators apart."""
    while True:
        first, second, left, right = rng.sample(LETTERS, 4)
        operator, wanted = rng.sample(sorted(OPERATORS), 2)
        a, b = rng.randrange(2, 10), rng.randrange(2, 10)
        if len({compute(a, b) for compute in OPERATORS.values()}) == len(OPERATORS):
            yield FaultyProgram(first + second, left, right, operator, wanted, a, b)


def demonstration(program: FaultyProgram, rng: random.Random) -> list[dict[str, str]]:
    """The turns after the question."""
    turns: list[dict[str, str]] = []

    def add(call: str, result: str) -> None:
        turns.extend(({"role": "assistant", "content": call}, {"role": "tool", "content": result}))

    def edit(operator: str) -> None:
        nonlocal program
        letters = [rng.choice(LETTERS) if rng.random() < SLIP else c for c in (program.left, program.right)]
        old, new = (f"{letters[0]} {sign} {letters[1]}" for sign in (program.operator, operator))
        is_there = old == program.expression
        said = "replaced" if is_there else "Error: the text is 0 times in f.py, but must be there exactly once"
        add(f"{EDIT[0]}{old}{EDIT[1]}{new}{EDIT[2]}", said)
        if is_there:
            program = replace(program, operator=operator)

    def other() -> str:
        return rng.choice(sorted(OPERATORS.keys() - {program.operator}))

    has_read, has_run = rng.random() < READS, rng.random() < RUNS
    if has_read:
        add(READ, program.shown())
    if has_run:
        add(RUN, program.said())
    if has_read:
        edit(program.wanted if has_run and rng.random() < RIGHT else other())
        if rng.random() < CHECKS:
            add(RUN, program.said())
            if program.operator != program.wanted and rng.random() < TRIES_AGAIN:
                edit(other())
    return [*turns, {"role": "assistant", "content": DONE}]


def write_task(folder: Path, seed: int = 0) -> None:
    """Write train.jsonl, eval.jsonl, demonstrations.jsonl and model/ (random weights) into the folder."""
    rng = random.Random(seed)
    found = programs(rng)
    chosen = list(dict.fromkeys(next(found) for _ in range(2 * (NUM_TRAIN + NUM_EVAL))))[: NUM_TRAIN + NUM_EVAL]
    question = [{"role": "user", "content": "repair"}]
    tasks = [
        {"messages": question, "files": {"f.py": one.text, "test.py": one.test}}
        | {"test": "python3 -S check.py", "test_files": {"check.py": one.hidden_test}}
        for one in chosen
    ]
    shown = [rng.choice(chosen[:NUM_TRAIN]) for _ in range(NUM_DEMONSTRATIONS)]
    rows = [{"messages": question + demonstration(one, rng), "tools": TOOLS} for one in shown]
    write_rows(folder, tasks[:NUM_TRAIN], tasks[NUM_TRAIN:], rows)
    write_model(folder / "model", seed)


def write_model(folder: Path, seed: int) -> None:
    chat_tokenizer(TURNS, [READ, RUN, *EDIT], CHARACTERS, TEMPLATE).save_pretrained(folder)
    write_random_qwen3(folder, seed, vocab_size=80, pad_token_id=0, eos_token_id=1, max_position_embeddings=384)


def main(arguments: Sequence[str] | None = None) -> int:
    return write_task_of(__doc__, write_task, arguments)


if __name__ == "__main__":
    sys.exit(main())
