"""Small in-process ports for the loop, and a way to run it with them."""

from __future__ import annotations

import json
import random
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from small_models import model

from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data import ShuffledStream
from megatron_rl.data.journal import JournalWriter
from megatron_rl.loop.checkpoints import Checkpoints
from megatron_rl.loop.source import Prompts
from megatron_rl.loop.stopping import NEVER
from megatron_rl.loop.train import train
from megatron_rl.ports import Collected, Ports, StopRequested, TooManyRestarts
from megatron_rl.types import Group, Mesh, Prompt, Rollout, Tokens, Verdict

SHAPE = model("qwen3", 1, 8, 2, 2, 4, 8, 32)
PROMPTS = [Prompt(f"row {i}", (5, 6 + i), "") for i in range(10)]


class World:
    """All ports in one: a policy that counts its updates, a stream whose groups end in any order, and a log."""

    def __init__(self, score=lambda group, i: float(i % 2), stops_at=sys.maxsize, masked_from=sys.maxsize):
        self.calls: list[str] = []
        self.logged: list[tuple[int, dict]] = []
        self.warnings: list[str] = []
        self.score_of, self.updates, self.version, self.mismatch = score, 0, None, 0.0
        self.num_changes = 0
        self.mesh = Mesh()
        self.stops_at, self.masked_from = stops_at, masked_from
        """The update of a step before which the objective stops it, and the first one without unmasked tokens."""
        self.coefficients: list[dict[str, float]] = []
        self.restarts_left, self.keeps_mirrors = 0, False
        self.mirrors: dict[int, int] = {}
        self.asked: dict[int, Group] = {}
        self.seeds: dict[int, tuple[int, ...]] = {}
        self.is_batch = False
        """As in the configuration of the run."""
        self.journal: JournalWriter | None = None
        self.spans: list[dict[str, float]] = []
        """What the stream tells of its engines, one entry each time that groups are collected."""
        self.random = random.Random(0)

    # Policy
    def begin(self, shares, coefficients):
        self.calls.append("begin")
        [share], *self.later = shares.policy
        self.share, order = share, np.argsort(share.index)
        # What the step trained on, in the order of the samples in the step.
        self.names = [share.names[i] for i in order]
        self.advantages, self.weights = share.advantages[order], share.weights[order]
        return {"mismatch/mean_abs": self.mismatch}

    def update(self, coefficients):
        num_updates = len(self.share.minibatches) + sum(len(share.minibatches) for [share] in self.later)
        num_updates = min(num_updates, self.stops_at)
        updates = [self.update_once(i, coefficients) for i in range(num_updates)]
        return updates + ([{"stopped": 1.0, "ppo_kl": 1.0}] if num_updates == self.stops_at else []), {}

    def update_once(self, minibatch, coefficients):
        self.calls.append(f"update {minibatch}")
        self.updates, self.num_changes = self.updates + 1, self.num_changes + 1
        self.coefficients.append(coefficients)
        told = {"ratio/max": 1.0 + minibatch, "ratio/min": 1.0 - minibatch / 4, "loss": float(self.updates)}
        told |= {"kl": 0.02, "entropy": 0.5, "masked": float(minibatch >= self.masked_from)}
        return told

    def save(self, folder: Path, extra):
        self.calls.append(f"save {folder.name}")
        folder.mkdir()
        (folder / "state").write_text(json.dumps(self.updates))
        (folder / "extra.json").write_text(json.dumps(extra))

    def finish_save(self, wait):
        return True

    def load(self, folder: Path):
        self.updates = json.loads((folder / "state").read_text())
        return json.loads((folder / "extra.json").read_text())

    def mirror(self, step):
        if self.keeps_mirrors:
            self.mirrors[step] = self.updates

    def restart(self, cause):
        self.calls.append("restart")
        if not self.restarts_left:
            raise TooManyRestarts(str(cause))
        self.restarts_left -= 1
        self.updates = 0
        return list(self.mirrors)

    def load_mirror(self, step):
        self.calls.append(f"load mirror {step}")
        self.updates = self.mirrors[step]

    # Bridge and stream
    def rejoin(self):
        self.calls.append("rejoin")

    def push(self, version):
        self.calls.append(f"push {version}")
        self.version = version
        return {}

    def export_hf(self, folder):
        self.calls.append(f"export {folder.parent.name}/{folder.name}")

    def groups(self, prompts, num_samples, version):
        tokens = Tokens(*(np.zeros(4, t) for t in (np.int32, bool, np.float32, np.int32)))

        def answers():
            return [
                Rollout(4, 2, num_actions=2, num_thought_tokens=0, finish="stop", oldest_version=version)
                for _ in range(num_samples)
            ]

        return [Group(prompt, answers(), [tokens] * num_samples, version) for prompt in prompts]

    def ask(self, requests, version):
        assert version == self.version, "groups are asked for with the weights that were pushed"
        for request in requests:
            prompt, greedy = request.prompt, ", greedy" if request.is_greedy else ""
            self.calls.append(f"ask {request.number}: {prompt.uid} x {request.num_samples}{greedy}")
            self.asked[request.number] = self.groups([prompt], request.num_samples, version)[0]
            self.seeds[request.number] = request.seed

    def cancel(self, number):
        self.calls.append(f"cancel {number}")
        del self.asked[number]

    def collect(self, version):
        """Some of the groups, in any order; in a synchronous batch all of them, in theirs."""
        assert version == self.version and self.asked, "the loop waits for a group that was asked for"
        numbers = list(self.asked)
        if not self.is_batch:
            numbers = self.random.sample(sorted(numbers), self.random.randint(1, len(numbers)))
        groups = {number: self.asked.pop(number) for number in numbers}
        judged, metrics = self.judge(list(groups.values()))
        groups = dict(zip(groups, judged, strict=True))
        if self.journal:
            self.journal.write({number: group for number, group in groups.items() if number >= 0})
        return Collected(groups, metrics | self.spans.pop(0) if self.spans else metrics)

    def tokens(self, group, with_routes=False):
        return group.payload

    def judge(self, groups):
        """The groups with their verdicts, and the metrics."""
        verdicts, metrics = self.score(groups)
        return [group.judged(given) for group, given in zip(groups, verdicts, strict=True)], metrics

    def score(self, groups):
        def verdict(score):
            if isinstance(score, Verdict):
                return score
            return Verdict(score, "" if score is not None else "the judge was away", parts=(score,))

        verdicts = [
            [verdict(self.score_of(g, i)) for i in range(len(group.rollouts))] for g, group in enumerate(groups)
        ]
        return verdicts, {"reward/exact_answer/seconds": 0.5, "reward/exact_answer/failed": 0.5}

    # Sink
    @contextmanager
    def phase(self, name):
        yield

    def log(self, step, metrics):
        self.logged.append((step, metrics))
        return metrics

    def recorded(self, last):
        return [metrics | {"step": step} for step, metrics in self.logged][-last:]

    def rewind(self, step):
        self.logged = [record for record in self.logged if record[0] < step]

    def samples(self, step, groups, fetch, most, shares=()):
        pass

    def warn(self, message, rule=None, step=None):
        self.warnings.append(message)


class StopAfter:
    """Asks for a stop once so many steps are done; `at_once`: inside the generation of the step after them."""

    def __init__(self, world: World, steps: int, at_once: bool = False):
        self.world, self.steps, self.at_once = world, steps, at_once

    def __call__(self):
        return self.world.updates >= self.steps and not self.at_once

    @contextmanager
    def promptly(self):
        yield
        if self.at_once and self.world.updates >= self.steps:
            raise StopRequested


def open_checkpoints(folder: Path, cfg: GrpoRunConfig, resume) -> Checkpoints:
    return Checkpoints(folder, cfg, resume=resume)


def config(**changes) -> GrpoRunConfig:
    merged = {
        "run": {"name": "x", "steps": 3},
        "model": {"path": "nowhere", "dtype": "bfloat16"},
        "data": {"train": "rows"},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_response_tokens": 8},
        "balance": {"max_tokens_per_microbatch": 16},
        "checkpoint": {"every": 1, "keep": 2},
    }
    return validate(GrpoRunConfig, merged | changes)


def run(
    world: World, folder: Path, cfg: GrpoRunConfig, *, resume=None, stopping=NEVER, heldout=(), train_on=PROMPTS
) -> int:
    stream = ShuffledStream(train_on, cfg.rollout.prompts_per_step, seed=0)
    checkpoints = open_checkpoints(folder, cfg, resume)
    ports = Ports(world, world, world)
    world.is_batch = not cfg.rollout.one_by_one
    return train(cfg, SHAPE, ports, Prompts(stream, heldout), (world, checkpoints), stopping)
