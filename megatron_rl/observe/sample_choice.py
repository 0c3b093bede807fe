"""The answers that a page shows. A page has a largest size, so of many answers it shows a part.

Invariants: the answers are taken evenly over the steps, and how many are left out is known. The memory for reading is
bounded by the size of the page, not of the file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.observe.records import explained_file, lines, read_line, step_of

MOST_SAMPLES = 5000
MOST_BYTES = 20 * 2**20
"""The largest size of all answers of a page; one answer is always shown."""


class ShownSamples(NamedTuple):
    samples: list[dict[str, Any]]
    """The records, in the order of the file."""
    left_out: int
    """The number of the file's other records."""


class _Answer(NamedTuple):
    """The place of a record in the file."""

    number: int
    """The number of the line, counted from 1."""
    step: int
    rank: int
    """The number of records of the same step before it."""
    place: int
    """The offset of the line's first byte."""
    size: int


def shown_samples(path: Path) -> ShownSamples:
    """The answers to show: the first answer of every step, then the second ones, until a bound is reached. If not all
    steps fit, they are spread over the run.

    Args:
        path: the file; none is like an empty one.

    Raises:
        ValueError: a line is not JSON. The message gives its number.
    """
    if not path.exists():
        return ShownSamples([], 0)
    ranks: Counter[int] = Counter()
    answers: list[_Answer] = []
    for number, (place, line) in enumerate(lines(path), start=1):
        step = step_of(line, path, number)
        answers.append(_Answer(number, step, ranks[step], place, len(line)))
        ranks[step] += 1
    steps = sorted(ranks, reverse=True)  # the last step is always shown
    turn = {step: _reversed_bits(i, len(steps).bit_length()) for i, step in enumerate(steps)}
    chosen: list[_Answer] = []
    total = 0
    for answer in sorted(answers, key=lambda one: (one.rank, turn[one.step])):
        total += answer.size
        if chosen and (len(chosen) == MOST_SAMPLES or total > MOST_BYTES):
            break
        chosen.append(answer)
    samples = []
    with path.open("rb") as file:
        for answer in sorted(chosen):
            file.seek(answer.place)
            samples.append(read_line(file.read(answer.size), path, answer.number))
    return ShownSamples(samples, len(answers) - len(chosen))


def add_explained(samples: Sequence[dict[str, Any]], run_folder: Path) -> None:
    """Give the answers of steps that `megatron-rl explain` has computed again the numbers of their tokens: the
    trainer's log-prob (`logp`), what the token adds to the loss (`loss`), and the derivative of this to the log-prob
    (`slope`)."""
    with_tokens = [sample for sample in samples if sample.get("tokens")]
    for step in {sample["step"] for sample in with_tokens}:
        path = explained_file(run_folder, step)
        if not path.is_file():
            continue
        explained = json.loads(path.read_text(encoding="utf-8"))["samples"]
        numbers = {(one["uid"], one["index"]): one["tokens"] for one in explained}
        for sample in with_tokens:
            if sample["step"] == step:
                sample["tokens"]["columns"] |= numbers.get((sample["uid"], sample["index"]), {})


def _reversed_bits(number: int, num_bits: int) -> int:
    """Numbers in the order of their reversed bits are spread evenly, wherever the order ends: 0 4 2 6 1 5 3 7."""
    return int(f"{number:0{num_bits}b}"[::-1], 2)
