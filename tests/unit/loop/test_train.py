"""The loop against small in-process ports: order, versions, what stops it, what it counts. The real ports meet it in
tests/e2e."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.load import judge
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data import ShuffledStream
from megatron_rl.loop.checkpoints import Checkpoints
from megatron_rl.loop.train import Ports, Prompts, train
from megatron_rl.types import Group, Mesh, ModelShape, Prompt, Sample, Tokens, Verdict

SHAPE = ModelShape("qwen3", 1, 8, 2, 2, 4, 8, 32, 1e4, 1e-6, 64, False)
PROMPTS = [Prompt(f"row {i}", (5, 6 + i), "") for i in range(10)]


class World:
    """All ports in one: a policy that counts its updates, an engine that answers with its seed, a log of all calls."""

    def __init__(self, score=lambda group, i: float(i % 2)):
        self.calls: list[str] = []
        self.logged: list[tuple[int, dict]] = []
        self.score_of, self.updates, self.version, self.mismatch = score, 0, None, 0.0
        self.mesh = Mesh()

    # Policy
    def begin(self, batch, plan):
        self.calls.append("begin")
        self.batch, self.plan = batch, plan
        return {"mismatch/mean_abs": self.mismatch}

    def update(self, minibatch):
        self.calls.append(f"update {minibatch}")
        self.updates += 1
        return {"ratio/max": 1.0 + minibatch, "ratio/min": 1.0 - minibatch / 4, "loss": float(self.updates)}

    def save(self, folder: Path, extra):
        self.calls.append(f"save {folder.name}")
        folder.mkdir()
        (folder / "state").write_text(json.dumps([self.updates, extra]))

    def load(self, folder: Path):
        self.updates, extra = json.loads((folder / "state").read_text())
        return extra

    # Engine and bridge
    def push(self, version):
        self.calls.append(f"push {version}")
        self.version = version
        return {}

    def generate(self, prompts, num_samples, version, seed):
        assert version == self.version, "answers are of the weights that were pushed"
        self.calls.append(f"generate {len(prompts)} x {num_samples}, seed {seed}")
        tokens = Tokens(*(np.zeros(4, t) for t in (np.int32, bool, np.float32, np.int32)))

        def answers():
            return [
                Sample(length=4, num_prompt_tokens=2, num_actions=2, num_thought_tokens=0, finish="stop")
                for _ in range(num_samples)
            ]

        return [Group(prompt, answers(), [tokens] * num_samples, version) for prompt in prompts]

    def tokens(self, group):
        return group.payload

    # Verifier
    def score(self, groups):
        verdict = lambda score: Verdict(score, "" if score is not None else "the judge was away")  # noqa: E731
        return [[verdict(self.score_of(g, i)) for i in range(len(group.samples))] for g, group in enumerate(groups)]

    # Sink
    @contextmanager
    def phase(self, name):
        yield

    def log(self, step, metrics):
        self.logged.append((step, metrics))

    def samples(self, step, groups, payloads):
        pass


def config(**changes) -> GrpoRunConfig:
    merged = {
        "run": {"name": "x", "steps": 3},
        "model": {"path": "nowhere"},
        "data": {"train": "rows"},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_response_tokens": 8},
        "balance": {"max_tokens_per_microbatch": 16},
        "checkpoint": {"every": 1, "keep": 2},
    }
    return judge(GrpoRunConfig, merged | changes)


def run(world: World, folder: Path, cfg: GrpoRunConfig, *, resume=False, stopping=lambda: False, heldout=()) -> int:
    stream = ShuffledStream(PROMPTS, cfg.rollout.prompts_per_step, seed=0)
    checkpoints = Checkpoints(folder, keep=cfg.checkpoint.keep, resume=resume)
    ports = Ports(world, world, world, world)
    return train(cfg, SHAPE, ports, Prompts(stream, heldout), (world, checkpoints), stopping)


def test_a_step_pushes_answers_trains_and_saves_in_this_order(tmp_path):
    world = World()
    assert run(world, tmp_path / "c", config(), heldout=PROMPTS[:3]) == 3
    first_steps = ["push 0", f"generate 3 x 1, seed {2**20 - 1}"]
    for step in range(3):
        first_steps += [
            f"generate 4 x 2, seed {step}",
            "begin",
            "update 0",
            f"save step_{step + 1:06d}",
            f"push {step + 1}",
        ]
    assert world.calls == [*first_steps, f"generate 3 x 1, seed {2**20 - 1}"]
    assert [step for step, _ in world.logged] == [0, 1, 2, 3]
    assert [("eval/accuracy" in m, "loss" in m) for _, m in world.logged] == [(1, 1), (0, 1), (0, 1), (1, 0)]
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["step_000002", "step_000003"]


def test_stop_and_resume_continue_where_the_run_stood(tmp_path):
    whole, broken, resumed = World(), World(), World()
    run(whole, tmp_path / "whole", config())
    stop = iter([False, True])
    assert run(broken, tmp_path / "c", config(), stopping=lambda: next(stop)) == 2
    assert run(resumed, tmp_path / "c", config(), resume=True) == 3
    assert resumed.updates == whole.updates == 3
    assert resumed.calls == whole.calls[whole.calls.index("push 2") :]
    assert [g.prompt.uid for g in resumed.batch.groups] == [g.prompt.uid for g in whole.batch.groups]


def test_a_folder_with_checkpoints_is_not_overwritten(tmp_path):
    run(World(), tmp_path / "c", config())
    with pytest.raises(ValueError, match="newest: step 3.*--resume auto"):
        run(World(), tmp_path / "c", config())


def test_half_written_checkpoints_do_not_count(tmp_path):
    (tmp_path / "step_000007.tmp-1").mkdir()
    assert Checkpoints(tmp_path, keep=1, resume=True).first_step == 0


def test_updates_per_step_are_mini_batches_of_whole_groups(tmp_path):
    world = World()
    run(world, tmp_path / "c", config(algorithm={"updates_per_step": 2}))
    assert world.updates == 6
    first = world.logged[0][1]
    assert (first["loss"], first["ratio/max"], first["ratio/min"], first["on_policy/ratio_error"]) == (
        1.5,
        2.0,
        0.75,
        0.0,
    )
    for minibatch in world.plan.minibatches:
        samples = [s for rank in minibatch for micro in rank for s in micro]
        assert len(samples) == 4 and len(set(world.batch.group_of[samples])) == 2


def test_zero_signal_groups_leave_the_step_and_are_counted(tmp_path):
    world = World(score=lambda group, i: 1.0 if group < 3 else float(i))
    run(world, tmp_path / "c", config())
    metrics = world.logged[0][1]
    assert metrics["groups/zero_signal"] == 3 and metrics["samples/active"] == 2
    assert [s for rank in world.plan.minibatches[0] for micro in rank for s in micro] == [6, 7]
    assert world.plan.denominators[0].num_tokens == 4 and world.plan.denominators[0].num_samples == 2


def test_a_step_without_signal_has_no_update(tmp_path):
    world = World(score=lambda group, i: 0.0)
    assert run(world, tmp_path / "c", config()) == 3
    assert world.updates == 0 and "begin" not in world.calls


def test_abstentions_are_counted_and_silence_stops_the_run(tmp_path):
    world = World(score=lambda group, i: None if group == 0 else float(i))
    run(world, tmp_path / "a", config())
    assert world.logged[0][1]["samples/abstained"] == 2 and world.logged[0][1]["samples/active"] == 6
    with pytest.raises(ValueError, match="every one of 8 answers .* because: the judge was away"):
        run(World(score=lambda group, i: None), tmp_path / "b", config())


@pytest.mark.parametrize("seen", [2e-2, float("nan")])
def test_disagreement_of_engine_and_trainer_stops_before_the_update(tmp_path, seen):
    world = World()
    world.mismatch = seen
    with pytest.raises(ValueError, match="step 0: trainer and engine disagree.*algorithm.max_mismatch = 0.01"):
        run(world, tmp_path / "c", config())
    assert world.updates == 0
