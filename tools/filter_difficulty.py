"""Measure how often a model answers each prompt of a run right, and keep the prompts that are neither too easy nor too
hard for it.

Pass the arguments of the run that will train: YAML files and overrides, merged from left to right. The engines
load the weights of `model.path`, answer each prompt of `data.train` several times with the sampling and the budgets of
`rollout`, and the verifiers of `rewards` judge the answers. There are no trainers, so engines may have all GPUs
(`rollout.num_engines`). For weights of a run see tools/export_checkpoint.py.

OUT gets `pass_rates.jsonl`, with a line for each prompt, and at the end `rows.jsonl`: the rows whose share of right
answers is within the bounds, with this share in the column `pass_rate`. Which answers are right is what `eval.verifier`
says. A prompt without any scored answer is not kept, and is counted. The same command goes on where a stopped one
ended; other bounds then need no new answers.

    python tools/filter_difficulty.py configs/run/gsm8k_32b.yaml rollout.num_engines=2 --out data/gsm8k_filtered
    python tools/filter_difficulty.py configs/run/gsm8k_32b.yaml --out data/gsm8k_filtered --min 0.125 --max 0.875
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data.files import load_rows
from megatron_rl.loop.evaluation import right_answers
from megatron_rl.loop.rollouts import verdicts_of
from megatron_rl.loop.run_lock import run_lock
from megatron_rl.ports import StopRequested
from megatron_rl.preflight.row_sources import training_sources
from megatron_rl.processes import open_text, piped
from megatron_rl.recipes.engines_alone import check_settings, config_without_trainers, engines_alone, settings_of
from megatron_rl.recipes.launch import Interrupt, console, log_to_file, quiet_environment
from megatron_rl.types import Group, GroupRequest, Prompt

quiet_environment()

SETTINGS, PASS_RATES, ROWS = "settings.json", "pass_rates.jsonl", "rows.jsonl"
WAVES = 2
"""Twice as many answers run as the engines decode at once, so that the engines never wait."""


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
    """The pass rates by uid. A last line that a kill has cut is removed from the file."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(path, len(whole))
    rates = [PassRate(**json.loads(line)) for line in whole.splitlines()]
    return {rate.uid: rate for rate in rates}


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


def rated(config: GrpoRunConfig, out: Path, waiting: Sequence[tuple[int, Prompt]], check: Any) -> Iterator[PassRate]:
    """Answer and judge the prompts, which have numbers that seed their answers.

    Args:
        check: is called several times a second, and ends the work by raising.
    """
    from megatron_rl.cluster.stream import RayStream

    rollout = config.rollout
    with engines_alone(config, out / "logs", check) as (engines, verifiers):
        stream = RayStream(config, engines, verifiers, in_turns=False)
        left, under_way = list(reversed(waiting)), 0
        most = -(-WAVES * rollout.num_engines * rollout.max_sequences // rollout.samples_per_prompt)
        while left or under_way:
            asked = [left.pop() for _ in range(min(len(left), most - under_way))]
            under_way += len(asked)
            own = [-1 - number for number, _ in asked]  # below 0: not for a run's journal
            requests = [
                GroupRequest(number, prompt, rollout.samples_per_prompt, (number,))
                for number, (_, prompt) in zip(own, asked, strict=True)
            ]
            stream.ask(requests, version=0)
            groups = stream.collect(0).groups.values()
            under_way -= len(groups)
            yield from (pass_rate_of(config, group) for group in groups)


def rate_all(config: GrpoRunConfig, out: Path, interrupt: Interrupt) -> None:
    """Measure the pass rates that `out` does not have yet."""
    from megatron_rl.data import Rules, load_prompts
    from megatron_rl.data.tokenizer import open_tokenizer
    from megatron_rl.verifiers.compose import required_columns

    data, tokenizer = config.data, open_tokenizer(config.model.path)
    required, column = required_columns(config.rewards), config.rollout.thought_column
    rules = Rules(config.rollout.max_prompt_tokens, data.on_bad_row, required, column, deduplicate=data.deduplicate)
    [source] = training_sources(data, config.rollout.environment)

    def tell(note: str) -> None:
        console.print(note, markup=False, highlight=False, soft_wrap=True)

    prompts = load_prompts(source.path, tokenizer, rules, source.reading, data.cache, tell)
    tell(f"{source.path}: {prompts.tally}")
    done = read_pass_rates(out / PASS_RATES)
    waiting = [(number, prompt) for number, prompt in enumerate(prompts) if prompt.uid not in done]
    if not waiting:
        return
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
    with (
        (out / PASS_RATES).open("a", encoding="utf-8") as file,
        Progress(*columns, console=console) as progress,
    ):
        task = progress.add_task("prompts", total=len(prompts), completed=len(prompts) - len(waiting))
        for rate in rated(config, out, waiting, interrupt.check):
            line = {name: getattr(rate, name) for name in PassRate.__slots__}
            file.write(json.dumps(line) + "\n")
            file.flush()
            progress.advance(task)


def configured(arguments: Sequence[str], out: Path, samples: int) -> GrpoRunConfig:
    """
    Raises:
        ValueError: the configuration is wrong, has no reward that decides which answers are right, or names several
            sources of rows, or weights that engines cannot load.
    """
    own = [f"rollout.samples_per_prompt={samples}", "data.easy_first_epochs=0"]
    config = config_without_trainers([*arguments, *own], out)
    if isinstance(config.data.train, tuple):
        raise ValueError("data.train is a mixture; filter its sources one by one: data.train=PATH, each with its --out")
    if not config.deciding_rewards:
        raise ValueError(
            "no reward compares answers with a ground truth, so none decides which answers are right; name the one "
            f"that does with eval.verifier, one of {[reward.label for reward in config.rewards]}"
        )
    return config


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
    try:
        with interrupt.listening():
            if not 0 <= options.min <= options.max <= 1:
                raise ValueError(f"--min {options.min:g} and --max {options.max:g} must be in order, from 0 to 1")
            config = configured(options.configuration, out, options.samples)
            with run_lock(out):
                log_to_file(out / "logs")
                check_settings(out / SETTINGS, settings_of(config))
                rate_all(config, out, interrupt)
                train = config.data.train
                assert not isinstance(train, tuple), "`configured` refuses a mixture"
                rows, _ = load_rows(train, lambda uid, row: (uid, row), config.data.on_bad_row)
                counts = write_rows(out, rows, options.min, options.max)
        if warning := warning_of(read_pass_rates(out / PASS_RATES).values(), options.min):
            console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
        told = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
        console.print(f"{out / ROWS}: of {len(rows)} rows, {told}", soft_wrap=True)
        return 0
    except (StopRequested, KeyboardInterrupt):
        num = len(read_pass_rates(out / PASS_RATES))
        console.print(f"Stopped. {out} has the pass rates of {num} prompts; the same command goes on.", soft_wrap=True)
        return 128 + (interrupt.signal or signal.SIGINT)
    except (ValueError, OSError, RuntimeError) as error:
        console.print("[bold red]error:[/]", end=" ")
        console.print(str(error), markup=False, soft_wrap=True)
        return 1


if __name__ == "__main__":
    sys.exit(piped(main))
