"""Measure how many verdicts a second the verifiers give in worker processes (megatron_rl/verifiers/pool.py).

    GSM8K           the rows of recipes/tiny/data, each with its answer in three forms
    LaTeX           the pairs of the table below, which sympy compares
    instructions    one answer with four instructions
    programs        a program of three lines with two asserts, in the sandbox
    nothing         a judge that does nothing: a verdict's time is what the pool adds to it
    long answers    answers of about 30 KB (8k tokens) with a boxed number at the end

Each kind is judged by each number of workers on as many cores (a verdict on a program uses two processes, so one worker
would fill two cores); the ratio is that of the most workers to the fewest. The times begin when the workers are started
and caches are filled. The tool fails if a verdict is not the expected one.

    python tools/bench_verifiers.py --json
    python tools/bench_verifiers.py --workers 1 16 --long 65536
    python tools/bench_verifiers.py --quick
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_rl.types import Verdict
from megatron_rl.verifiers import code, instructions, mathematics
from megatron_rl.verifiers.pool import Pool
from megatron_rl.verifiers.sandbox import Limits

ROWS = [
    Path(__file__).parents[1] / "recipes" / "tiny" / "data" / f"gsm8k_{split}_sample.jsonl"
    for split in ("train", "test")
]
FORMS = ("She sold 48/2 = <<48/2=24>>24 of them.\n#### {}", "So the answer is {}.", r"Therefore it is $\boxed{{{}}}$.")
LATEX = [
    (r"\frac{1}{2}", "0.5", 1.0),
    (r"\frac{3}{4}", r"\dfrac{6}{8}", 1.0),
    (r"2\sqrt{3}", r"\sqrt{12}", 1.0),
    (r"x^2+2x+1", r"(x+1)^2", 1.0),
    (r"\frac{\pi}{6}", r"\frac{\pi}{3}", 0.0),
    (r"(1, 2)", r"(2, 1)", 0.0),
    (r"\{1, 2, 3\}", r"\{3, 2, 1\}", 1.0),
    (r"[2, 5)", r"(2, 5)", 0.0),
    (r"\frac{1}{1+\sqrt{2}}", r"\sqrt{2}-1", 1.0),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}", 0.0),
]
"""(ground truth, answer, score)."""
FOLLOWED = {
    "instruction_id": [
        "punctuation:no_comma",
        "keywords:existence",
        "length_constraints:number_words",
        "startend:quotation",
    ],
    "kwargs": [{}, {"keywords": ["river"]}, {"relation": "at least", "num_words": 300}, {}],
}
STORY = '"' + "The river goes to the sea and takes the boats with it. " * 30 + '"'
PROGRAM = "It is\n```python\ndef double(n):\n    return 2 * n\n```\n"
ASSERTS = ["assert double(2) == 4", "assert double('a') == 'aa'"]
LONG_BYTES = 30_000
THOUGHT = "Let me add the two numbers again: 48 + 24 = 72, so $x = 72$ and not 71. "

Item = tuple[Any, ...]


def judge_mathematics(item: Item) -> Verdict:
    text, truth = item
    return mathematics.verify(text, truth, "strict")


def judge_instructions(item: Item) -> Verdict:
    text, truth = item
    return instructions.verify(text, truth, "all")


def judge_program(item: Item) -> Verdict:
    text, asserts = item
    return code.verify(text, asserts, Limits(), "all")


def judge_nothing(item: Item) -> Verdict:
    return Verdict(1.0)


JUDGES: dict[str, Callable[[Item], Verdict]] = {
    "GSM8K": judge_mathematics,
    "LaTeX": judge_mathematics,
    "instructions": judge_instructions,
    "programs": judge_program,
    "nothing": judge_nothing,
    "long answers": judge_mathematics,
}


class Judge:
    """Judges an item by its kind.

    The fork server unpickles it, and then judges a few examples. The first time, the parser of LaTeX and sympy fill
    caches for about a second, and the sandbox finds out what the machine permits. The workers inherit that.
    """

    def __init__(self, examples: Sequence[tuple[str, Item]]) -> None:
        self.examples = examples

    def __call__(self, item: tuple[str, Item]) -> Verdict:
        kind, content = item
        return JUDGES[kind](content)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for example in self.examples:
            self(example)


def workloads(num_long: int, quick: bool) -> dict[str, tuple[list[Item], list[float]]]:
    """The items of each kind and the scores that they must get."""
    truths = [json.loads(line)["ground_truth"] for path in ROWS for line in path.read_text().splitlines()]
    rows = [(form.format(truth), truth) for truth in truths[: 4 if quick else None] for form in FORMS]
    pairs = [(rf"It is $\boxed{{{answer}}}$.", truth) for truth, answer, _ in LATEX]
    times = 1 if quick else 20
    long = THOUGHT * (LONG_BYTES // len(THOUGHT))
    found: dict[str, tuple[list[Item], list[float]]] = {
        "GSM8K": (list(rows), [1.0] * len(rows)),
        "LaTeX": (pairs * times, [score for *_, score in LATEX] * times),
    }
    for kind, item, number in (
        ("instructions", (STORY, FOLLOWED), 50 * times),
        ("programs", (PROGRAM, ASSERTS), 2 * times),
        ("nothing", ("text", "truth"), 100 * times),
    ):
        found[kind] = [item] * number, [1.0] * number
    found["long answers"] = [(rf"{long}So it is $\boxed{{{i}}}$.", str(i)) for i in range(num_long)], [1.0] * num_long
    return found


@contextmanager
def on_cores(number: int) -> Iterator[None]:
    """This process and those that it starts use `number` of its cores, or all of them if it has fewer."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:number])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def measure(work: dict[str, tuple[list[Item], list[float]]], num_workers: int) -> dict[str, float]:
    """The seconds that all items of each kind take.

    Raises:
        ValueError: a verdict is not the expected one.
    """
    # A worker cannot import the program that is run as `__main__`, but it can import this module by its name.
    module = import_module("megatron_rl.tools.bench_verifiers")
    examples = [(kind, item) for kind, (items, _) in work.items() for item in items[: len(LATEX)]]
    found = {}
    with on_cores(num_workers), closing(Pool(module.Judge(examples), num_workers, 60.0)) as pool:
        pool.judge(examples)
        for kind, (items, expected) in work.items():
            named = [(kind, item) for item in items]
            start = time.perf_counter()
            verdicts = pool.judge(named)
            found[kind] = time.perf_counter() - start
            check(named, expected, verdicts)
    return found


def check(items: Sequence[tuple[str, Item]], expected: Sequence[float], verdicts: Sequence[Verdict]) -> None:
    """Raises ValueError if a verdict is not the expected one."""
    for (kind, item), score, verdict in zip(items, expected, verdicts, strict=True):
        if verdict.score != score:
            raise ValueError(f"{kind}, {str(item)[-200:]}: the score must be {score}, but the verdict is {verdict}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], metavar="N", help="the numbers of workers")
    parser.add_argument("--long", type=int, metavar="N", help="the number of long answers (default: 8192)")
    parser.add_argument(
        "--quick", action="store_true", help="a few verdicts of each kind, to see whether they are right"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    workers = sorted(options.workers)
    num_long = options.long or (16 if options.quick else 8192)
    work = workloads(num_long, options.quick)
    measured = {number: measure(work, number) for number in workers}
    kinds: dict[str, Any] = {}
    for kind, (items, _) in work.items():
        seconds = {number: measured[number][kind] for number in workers}
        kinds[kind] = {
            "verdicts": len(items),
            "seconds": seconds,
            "verdicts_per_s": {number: len(items) / time_s for number, time_s in seconds.items()},
            "ratio": seconds[workers[0]] / seconds[workers[-1]],
        }
    if options.json:
        overhead_s = kinds["nothing"]["seconds"][workers[0]] / kinds["nothing"]["verdicts"]
        print(json.dumps({"workers": workers, "overhead_s": overhead_s, "kinds": kinds}))
        return 0
    table = Table(title="verdicts a second by the number of workers", title_justify="left")
    table.add_column("")
    for number in workers:
        table.add_column(str(number), justify="right")
    for name in ("ratio", "verdicts", f"s with {workers[-1]}"):
        table.add_column(name, justify="right")
    for kind, found in kinds.items():
        rates = [f"{rate:,.0f}" for rate in found["verdicts_per_s"].values()]
        table.add_row(
            kind, *rates, f"{found['ratio']:.2f}", f"{found['verdicts']:,}", f"{found['seconds'][workers[-1]]:.2f}"
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
