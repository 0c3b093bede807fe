"""Measure how often a model answers each prompt of a run right, and keep the prompts that are neither too easy nor too
hard for it.

Pass the arguments of the run that will train: YAML files and overrides, merged from left to right. The engines
load the weights of `model.path`, answer each prompt of `data.train` several times with the sampling and the budgets of
`rollout`, and the verifiers of `rewards` judge the answers. There are no trainers, so engines may have all GPUs
(`rollout.num_engines`). For weights of a run see `megatron-rl export`.

OUT gets `pass_rates.jsonl`, with a line for each prompt, and at the end `rows.jsonl`: the rows whose share of right
answers is within the bounds, with this share in the column `pass_rate`. Which answers are right is what `eval.verifier`
says. A prompt without any scored answer is not kept, and is counted. The same command goes on where a stopped one
ended; other bounds then need no new answers.

    MODEL="configs/model/qwen3_32b.yaml configs/cluster/h100_8n8g.yaml"
    megatron-rl filter-difficulty $MODEL configs/run/gsm8k_32b.yaml rollout.num_engines=2 --out data/gsm8k_filtered
    megatron-rl filter-difficulty $MODEL configs/run/gsm8k_32b.yaml --out data/gsm8k_filtered --min 0.125 --max 0.875
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_rl.commands.engines_alone import (
    answer_all,
    check_settings,
    configured,
    run_tool,
    settings_of,
    whole_lines,
)
from megatron_rl.commands.interrupt import Interrupt
from megatron_rl.commands.launch import log_to_file, quiet_environment
from megatron_rl.commands.screen import console
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data.files import load_rows
from megatron_rl.loop.evaluation import right_answers
from megatron_rl.loop.rollouts import verdicts_of
from megatron_rl.loop.run_lock import run_lock
from megatron_rl.processes import open_text, piped
from megatron_rl.types import Group

quiet_environment()

SETTINGS, PASS_RATES, ROWS = "settings.json", "pass_rates.jsonl", "rows.jsonl"


@dataclass(frozen=True, slots=True)
class PassRate:
    """How a prompt was answered."""

    uid: str
    pass_rate: float | None
    """The share of right answers among the answers that a deciding reward scored; None if there are none."""
    num_scored: int
    num_answers: int
    mean_tokens: float
    """The mean length of the answers, in tokens."""


def pass_rate_of(config: GrpoRunConfig, group: Group) -> PassRate:
    right = right_answers(config, verdicts_of([group]))
    mean_tokens = fmean(rollout.num_response_tokens for rollout in group.rollouts)
    return PassRate(group.prompt.uid, fmean(right) if right else None, len(right), len(group.rollouts), mean_tokens)


def read_pass_rates(path: Path) -> dict[str, PassRate]:
    """The pass rates by uid."""
    return {line["uid"]: PassRate(**line) for line in whole_lines(path)}


def is_kept(rate: PassRate | None, low: float, high: float) -> bool:
    return rate is not None and rate.pass_rate is not None and low <= rate.pass_rate <= high


def write_rows(out: Path, rows: Sequence[tuple[str, Mapping[str, Any]]], low: float, high: float) -> dict[str, int]:
    """Write the rows that are kept, and return how many were kept and how many were not, by reason."""
    rates = read_pass_rates(out / PASS_RATES)
    counts = dict.fromkeys(("kept", "too hard", "too easy", "without a score", "not asked"), 0)
    part = out / f"{ROWS}.part"
    with open_text(part) as file:
        for uid, row in rows:
            rate = rates.get(uid)
            if rate is None:
                counts["not asked"] += 1
            elif rate.pass_rate is None:
                counts["without a score"] += 1
            elif is_kept(rate, low, high):
                counts["kept"] += 1
                file.write(json.dumps({**row, "pass_rate": rate.pass_rate}, ensure_ascii=False) + "\n")
            else:
                counts["too hard" if rate.pass_rate < low else "too easy"] += 1
    part.replace(out / ROWS)
    return counts


def warning_of(rates: Collection[PassRate], low: float) -> str | None:
    """What is suspicious about all pass rates together; None if nothing is."""
    known = [rate.pass_rate for rate in rates if rate.pass_rate is not None]
    if known and max(known) == 0:
        kept = "" if low > 0 else ", and --min 0 keeps them all"
        return (
            f"no answer to any of {len(known)} prompts was right{kept}. Look at some answers: is the reward the right "
            "one, and rollout.max_response_tokens large enough? Training needs prompts that are solved sometimes"
        )
    if known and min(known) == 1:
        return f"every answer to each of {len(known)} prompts was right: training would have no signal"
    return None


def rate_all(config: GrpoRunConfig, out: Path, interrupt: Interrupt) -> None:
    """Measure the pass rates that `out` does not have yet."""
    done = read_pass_rates(out / PASS_RATES)
    with (out / PASS_RATES).open("a", encoding="utf-8") as file:
        for group, _ in answer_all(config, out, done, interrupt.check):
            rate = pass_rate_of(config, group)
            file.write(json.dumps({name: getattr(rate, name) for name in PassRate.__slots__}) + "\n")
            file.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configuration", nargs="+", metavar="FILE.yaml | section.key=value")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the results")
    parser.add_argument("--samples", type=int, default=8, help="answers to each prompt (default: 8)")
    parser.add_argument("--min", type=float, default=0.0, help="the lowest pass rate that is kept (default: 0)")
    parser.add_argument("--max", type=float, default=0.625, help="the highest pass rate that is kept (default: 0.625)")
    options = parser.parse_intermixed_args(arguments)
    sys.path.insert(0, os.getcwd())  # the module of a reward function may be in the working folder
    interrupt, out = Interrupt(), options.out.absolute()

    def work() -> None:
        if not 0 <= options.min <= options.max <= 1:
            raise ValueError(f"--min {options.min:g} and --max {options.max:g} must be in order, from 0 to 1")
        config = configured(options.configuration, out, options.samples)
        settings = settings_of(config)
        with run_lock(out):
            log_to_file(out / "logs")
            check_settings(out / SETTINGS, settings, [out / PASS_RATES])
            rate_all(config, out, interrupt)
            train = config.data.train
            assert not isinstance(train, tuple), "`configured` refuses a mixture"
            rows, _ = load_rows(train, lambda uid, row: (uid, row), config.data.on_bad_row)
            counts = write_rows(out, rows, options.min, options.max)
        if warning := warning_of(read_pass_rates(out / PASS_RATES).values(), options.min):
            console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
        told = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
        console.print(f"{out / ROWS}: of {len(rows)} rows, {told}", soft_wrap=True)

    def stopped() -> str:
        return f"{out} has the pass rates of {len(read_pass_rates(out / PASS_RATES))} prompts"

    return run_tool(interrupt, work, stopped)


if __name__ == "__main__":
    sys.exit(piped(main))
