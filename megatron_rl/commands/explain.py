"""Compute a step of a run again, and name the answers and tokens that one of its metrics comes from.

The step's answers must have been kept: `rollout.dump: true` keeps all, `rollout.dump: {last: 20}` the last ones, and a
run keeps by itself the answers of a step that breaks a health rule about its numbers. The trainers load the newest
checkpoint before the step and train on the answers of the steps between, if these were kept too. Nothing in the run's
folder changes but `explained/`.

megatron-rl explain runs/my_run --step 21 [--metric grad_norm | loss | mismatch | reward | entropy | length] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from megatron_rl.commands.interrupt import Interrupt
from megatron_rl.commands.launch import log_to_file, quiet_environment
from megatron_rl.commands.screen import console, tell_error
from megatron_rl.processes import piped

quiet_environment()

from megatron_rl.commands.screen import waiting  # noqa: E402
from megatron_rl.config.load import validate  # noqa: E402
from megatron_rl.config.machine import num_cores, threads_of_ranks  # noqa: E402
from megatron_rl.config.schema import GrpoRunConfig, PpoRunConfig  # noqa: E402
from megatron_rl.data.saved_rollouts import path_of, read_step  # noqa: E402
from megatron_rl.explain.causes import asks_for_older_weights, causes  # noqa: E402
from megatron_rl.explain.search import FoundSpan, largest_tokens  # noqa: E402
from megatron_rl.explain.step import METRICS, STORED, ExplainedStep, answers_of  # noqa: E402
from megatron_rl.explain.text import Explanation, as_json, show, write  # noqa: E402
from megatron_rl.loop.checkpoints import find_checkpoints  # noqa: E402
from megatron_rl.models import read_shape  # noqa: E402
from megatron_rl.observe.records import CONFIG, read_metrics  # noqa: E402
from megatron_rl.ports import StopRequested  # noqa: E402
from megatron_rl.types import Gradient, Metrics, Rollouts, Shares, Tokenizer, TokenSpan  # noqa: E402

if TYPE_CHECKING:
    from megatron_rl.cluster.policy import PolicyGroup

NUM_PASSES = 100
"""The largest number of passes of a search."""


@dataclass(frozen=True, slots=True)
class Start:
    """The state that a step is computed from."""

    checkpoint: int
    """The step of the checkpoint; 0: the weights that the run began with."""
    replayed: range
    """The steps that are trained on before."""
    is_exact: bool

    def __str__(self) -> str:
        origin = (
            f"the checkpoint of step {self.checkpoint}" if self.checkpoint else "the weights that the run began with"
        )
        if self.is_exact:
            num = len(self.replayed)
            between = f", trained on the {f'{num} steps' if num > 1 else 'step'} between" if num else ""
            return f"the state before the step ({origin}{between})"
        return (
            f"{origin}, because there is no older checkpoint from which the answers of all steps between are kept: the "
            "numbers are of other weights than the run's. For the state before the step keep more checkpoints "
            "(checkpoint.keep) and the answers since the oldest of them (rollout.dump: {last: n})"
        )


def start_of(run: Path, rollouts: Path, step: int) -> Start:
    """The newest state before a step; the nearest one, which may be later, if the steps between were not kept."""
    saved = [0, *find_checkpoints(run / "checkpoints")]
    before = [s for s in saved if s <= step]
    between = range(before[-1], step)
    if all(path_of(rollouts, s).exists() for s in between):
        return Start(before[-1], between, True)
    nearest = min(saved, key=lambda s: (abs(s - step), s))
    return Start(nearest, range(0), nearest == step)


def config_of(run: Path) -> GrpoRunConfig:
    """The configuration of a run, for trainers alone.

    Raises:
        ValueError: the folder has no run of reinforcement learning.
    """
    path = run / CONFIG
    if not path.is_file():
        raise ValueError(f"{run} has no {CONFIG}, so it is no run's folder; give the folder run.folder/run.name")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        given, version = record["config"], record.get("versions", {}).get("megatron_rl")
        if "rollout" not in given:
            raise ValueError(f"{run} is a supervised run; only steps of reinforcement learning can be explained")
        replayed = given["rollout"].get("replay") or str(run / "rollouts")
        own = {
            "rollout": {"replay": replayed, "dump": False},
            "data": {"eval": None},
            "cluster": {"colocate": False, "mirror": False},
            "checkpoint": {"keep_best": None},
            "eval": {"every": 0},
            "run": {"stop_on": []},
        }
        given |= {name: given.get(name, {}) | values for name, values in own.items()} | {"observe": []}
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not the file that a run writes ({error!r})") from error
    try:
        return validate(PpoRunConfig if given.get("critic") else GrpoRunConfig, given).absolute()
    except ValueError as error:
        raise ValueError(
            f"{path} was written by megatron_rl {version}, and this version refuses it: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class ExplainRequest:
    """What is to be explained: a metric of a step of a run."""

    run: Path
    step: int
    metric: str


def read_rollouts(config: GrpoRunConfig, run: Path, step: int) -> Rollouts:
    """The answers of a step that were kept.

    Raises:
        ValueError: they were not kept, or with other settings.
    """
    from megatron_rl.loop.replay import settings

    folder = config.rollout.replay or run / "rollouts"
    if not path_of(folder, step).exists():
        kept = [int(path.stem.removeprefix("step_")) for path in sorted(folder.glob("step_*.groups"))]
        found = f"it has the steps {kept[0]} to {kept[-1]}" if kept else "it has none"
        done = [s for record in read_metrics(run) if (s := int(record["step"])) < config.run.steps]
        if step not in done:
            reached = f"its steps are {done[0]} to {done[-1]}" if done else "it has done no step"
            raise ValueError(f"{run} has not done step {step}: {reached}")
        raise ValueError(
            f"{run} has not kept the answers of step {step}: {found}. rollout.dump: true keeps the answers of all "
            "steps, and {last: 20} of the last ones"
        )
    return read_step(folder, step, settings(config))


def look(config: GrpoRunConfig, asked: ExplainRequest) -> ExplainedStep:
    """A step as far as its answers and the run's records tell, without trainers."""
    from megatron_rl.loop.shares import batch_of, plan_step

    rollouts = read_rollouts(config, asked.run, asked.step)
    shape = config.policy.adapted(read_shape(config.model.path))
    shares, _ = plan_step(config, shape, batch_of(config, rollouts, asked.step))
    return ExplainedStep(
        number=asked.step,
        answers=answers_of(rollouts, shares.policy, {}),
        records={int(record["step"]): record for record in read_metrics(asked.run)},
        labels=[reward.label for reward in config.rewards],
        max_lag=config.rollout.max_lag,
        num_updates=shares.num_updates,
    )


def compute(config: GrpoRunConfig, asked: ExplainRequest, check: Callable[[], None], logs: Path) -> Explanation:
    """Compute a step again with the run's trainers.

    Args:
        check: is called several times a second, and ends the work by raising.
    """
    from megatron_rl.algorithms import Coefficients
    from megatron_rl.cluster.models import Models
    from megatron_rl.cluster.nodes import RayPlacement
    from megatron_rl.cluster.policy import PolicyGroup
    from megatron_rl.cluster.restarts import Restarts
    from megatron_rl.cluster.session import ray_session
    from megatron_rl.commands.grpo import policy_spec, start_others
    from megatron_rl.loop.shares import batch_of, plan_step
    from megatron_rl.loop.updates import Updates

    looked, shape = look(config, asked), config.policy.adapted(read_shape(config.model.path))
    start = start_of(asked.run, config.rollout.replay or asked.run / "rollouts", asked.step)
    coefficients = Coefficients(config.algorithm, False)
    with ExitStack() as cleaning, waiting(console, "Ray starts") as tell:
        threads, ranks = threads_of_ranks(config, num_cores()), config.num_trainer_ranks
        cleaning.enter_context(ray_session(config.cluster, ranks, logs, check, num_threads=threads))
        tell("the trainer ranks load the weights")
        placement = RayPlacement(config)
        others = start_others(config, shape, logs, placement)
        policy = PolicyGroup(policy_spec(config, shape), config.cluster, logs, placement)
        trained = Models(policy, Restarts(0), others, config.num_warmup_steps)
        trained.start(is_resumed=start.checkpoint > 0)
        if start.checkpoint:
            saved = trained.load(find_checkpoints(asked.run / "checkpoints")[start.checkpoint])
            coefficients.restore(saved["coefficients"])
        coefficients.max_mismatch = math.inf  # what differs is to be seen, and not refused
        quiet: Any = SimpleNamespace(phase=lambda name: nullcontext(), warn=lambda message, *about: None)
        updates = Updates(config, trained, coefficients, quiet)
        numbers, found, earlier = {}, [], {}

        def planned(step: int) -> tuple[Rollouts, Shares, Metrics]:
            rollouts = read_rollouts(config, asked.run, step)
            return rollouts, *plan_step(config, shape, batch_of(config, rollouts, step))

        shares = planned(asked.step)[1]
        for step in start.replayed:
            if shares.num_updates and asks_for_older_weights(looked):
                tell(f"step {asked.step} is looked at with the weights of step {step}")
                trained.begin(shares, coefficients.values)
                earlier[step] = {i: own["logp"] for i, own in policy.token_numbers(coefficients.values).items()}
            tell(f"step {step} is trained on again")
            rollouts, own_shares, metrics = planned(step)
            updates.make(own_shares, metrics, rollouts, step)
        tell(f"step {asked.step} is looked at")
        if shares.num_updates:
            trained.begin(shares, coefficients.values)
            numbers = policy.token_numbers(coefficients.values)
            if asked.metric == "grad_norm":
                found = _search(policy, shares, looked, coefficients.values)
        answers = [answer.with_numbers(numbers.get(answer.index, {})) for answer in looked.answers]
        looked = replace(looked, answers=answers, untrained=policy.find_untrained(), is_exact=start.is_exact)
        looked = replace(looked, earlier=earlier)
    return Explanation(looked, asked.metric, str(start), start.is_exact, _whole(found), found, causes(looked))


def _whole(found: Sequence[FoundSpan]) -> Gradient | None:
    """The gradient of the largest part: all samples of a mini-batch."""
    return max(found, key=lambda one: len(one.part.samples)).gradient if found else None


def _search(
    policy: PolicyGroup, shares: Shares, step: ExplainedStep, coefficients: dict[str, float]
) -> list[FoundSpan]:
    """The tokens with the largest gradients, in all mini-batches of the first epoch."""
    tokens = {answer.index: answer.actions for answer in step.answers}
    first, found = shares.policy[0], []
    num_updates = len(first[0].minibatches)
    for minibatch in range(num_updates):
        rows = [micro for share in first for micro in _rows(share, minibatch)]
        samples = [sample for row in rows for sample in row]

        def gradient_of(part: TokenSpan, minibatch: int = minibatch) -> Gradient:
            return policy.gradient_of(minibatch, part, coefficients)

        passes = max(10, NUM_PASSES // num_updates)
        found += largest_tokens(gradient_of, samples, tokens, num_tokens=3, num_passes=passes)
    return sorted(found, key=lambda one: -one.gradient.norm)


def _rows(share: Any, minibatch: int) -> list[list[int]]:
    """The samples of each micro-batch of a share, by their indices in the step."""
    return [[int(share.index[place]) for place in micro] for micro in share.minibatches[minibatch]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--step", type=int, required=True, help="the step, counted from 0 as in metrics.jsonl")
    parser.add_argument("--metric", choices=METRICS, default="grad_norm", help="default: grad_norm")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_args(arguments)
    sys.path.insert(0, os.getcwd())
    interrupt, run = Interrupt(), options.run.absolute()
    try:
        with interrupt.listening(), tempfile.TemporaryDirectory() as logs:
            config, asked = config_of(run), ExplainRequest(run, options.step, options.metric)
            if asked.metric in STORED:
                looked = look(config, asked)
                told = Explanation(looked, asked.metric, "what was kept", True, None, [], causes(looked))
            else:
                log_to_file(Path(logs))
                told = compute(config, asked, interrupt.check, Path(logs))
            from megatron_rl.data.tokenizer import open_tokenizer

            path = None if asked.metric in STORED else write(told, run)
            if options.json:
                print(json.dumps(as_json(told)))
            else:
                show(told, cast(Tokenizer, open_tokenizer(config.model.path)), console)
                if path is not None:
                    console.print(f"all numbers: {path}", style="bright_black", soft_wrap=True)
        return 0
    except (StopRequested, KeyboardInterrupt):
        return 128 + (interrupt.signal or signal.SIGINT)
    except (ValueError, OSError, RuntimeError) as error:
        return tell_error(error)


if __name__ == "__main__":
    sys.exit(piped(partial(main)))
