"""A step whose gradient norm jumps is told and kept, and a rule of `run.stop_on` ends the run with its state saved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_ports import StopAfter, World, config, run
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_rl.data.saved_rollouts import read_step
from megatron_rl.types import Tokens


class Jumping(World):
    """Its eighth update has a large gradient."""

    def update_once(self, minibatch, coefficients):
        told = super().update_once(minibatch, coefficients)
        return told | {"grad_norm": 900.0 if self.updates == 8 else 1.5}

    def warn(self, message, rule=None, step=None):
        super().warn(message, rule, step)
        if rule in self.stop_on:
            raise ValueError(f"{message}: {rule}")

    stop_on = ()


def given(tmp_path, **rollout):
    sizes = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_response_tokens": 8}
    return config(run={"name": "x", "folder": str(tmp_path), "steps": 12}, rollout=sizes | rollout)


def test_a_jump_is_told_and_keeps_its_answers_and_the_checkpoint_before_it(tmp_path):
    world, cfg = Jumping(), given(tmp_path)
    assert run(world, tmp_path / "x" / "checkpoints", cfg) == 12
    [message] = [one for one in world.warnings if "gradient norm" in one]
    assert message.startswith(
        "the gradient norm is 900, 600 times its median over the last 7 steps. The step's answers"
    )
    assert message.endswith(f"megatron-rl explain {tmp_path}/x --step 7")
    kept = tmp_path / "x" / "rollouts"
    assert sorted(path.name for path in kept.iterdir()) == ["step_000007.groups", "step_000007.kept"]
    assert len(read_step(kept, 7).groups) == 4
    steps = sorted(path.name for path in (tmp_path / "x" / "checkpoints").glob("step_*"))
    assert steps == ["step_000007", "step_000011", "step_000012"], "the one before the jump, and the two newest"


def test_the_last_steps_are_kept_with_the_one_that_jumped(tmp_path):
    run(Jumping(), tmp_path / "x" / "checkpoints", given(tmp_path, dump={"last": 3}))
    left = sorted(path.stem for path in (tmp_path / "x" / "rollouts").glob("*.groups"))
    assert left == ["step_000007", "step_000009", "step_000010", "step_000011"]


def test_a_fatal_rule_ends_the_run_with_its_state(tmp_path):
    world = Jumping()
    world.stop_on = ("jump",)
    with pytest.raises(ValueError, match="900, 600 times its median"):
        run(world, tmp_path / "x" / "checkpoints", given(tmp_path))
    assert (tmp_path / "x" / "checkpoints" / "step_000008").is_dir(), "the step is done, and its state is saved"


def test_a_resumed_run_looks_back_on_the_steps_before_it(tmp_path):
    """The first step after a resume jumps: only the records of the steps before tell that."""
    before, resumed = Jumping(), Jumping()
    folder, cfg = tmp_path / "x" / "checkpoints", given(tmp_path)
    assert run(before, folder, cfg, stopping=StopAfter(before, 7)) == 7
    resumed.logged = before.logged
    assert run(resumed, folder, cfg, resume="auto") == 12
    [message] = [one for one in resumed.warnings if "gradient norm" in one]
    assert message.startswith("the gradient norm is 900, 600 times its median over the last 7 steps")


class Padding(World):
    """Its answers to the sixth step's first prompt have tokens that no training has moved."""

    def __init__(self):
        super().__init__()
        self.asked_for = 0

    def groups(self, prompts, num_samples, version):
        [group] = super().groups(prompts, num_samples, version)
        self.asked_for += 1
        if self.asked_for == 21:
            mask = np.array([False, True, True, True])
            rest = np.zeros(4, np.float32), np.zeros(4, np.int32)
            payload = [Tokens(np.array([3, 0, 3, one], np.int32), mask, *rest) for one in (3, 2)]
            group = replace(group, payload=payload)
        return [group]

    def update_once(self, minibatch, coefficients):
        told = super().update_once(minibatch, coefficients)
        return told | {"tokens/untrained": 0.06} if self.updates == 6 else told

    def find_untrained(self):
        return [2, 3, 5]


def test_untrained_tokens_are_named_and_counted(tmp_path):
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<pad>": 2, "<odd>": 3, "c": 4, "d": 5}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained(tmp_path / "model")
    cfg = given(tmp_path)
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"path": tmp_path / "model"})})
    world = Padding()
    run(world, tmp_path / "x" / "checkpoints", cfg)
    [message] = [one for one in world.warnings if "no training has moved" in one]
    assert message == (
        "0.06 of the sampled tokens have embeddings that no training has moved, so that one of them may make a "
        "gradient of any size: '<odd>' (id 3, sampled 3 times), '<pad>' (id 2, sampled once). Forbid them with "
        "rollout.sampling.forbid. The step's answers and the newest checkpoint before it are kept; this command "
        f"looks into them: megatron-rl explain {tmp_path}/x --step 5"
    )
    assert len(read_step(tmp_path / "x" / "rollouts", 5).groups) == 4
