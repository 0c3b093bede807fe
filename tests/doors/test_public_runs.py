"""The public scripts whose dry run passes, as real runs of two steps, with short answers.

`make test-trl` runs all of them, and the turns of the deep tier two.
"""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import replace

import cover
import pytest
import real  # noqa: F401  # skips
from public import PARSED, parsed, proofs, scripts
from trl import get_peft_config
from trl.rewards import accuracy_reward, think_format_reward

from megatron_rl.trl import GRPOConfig, GRPOTrainer
from megatron_rl.trl.coverage import SCRIPTS

PASSING = [name for name, (passes, _) in SCRIPTS.items() if passes]
FIRST = ["open-r1's grpo.py with a recipe", "the cookbook's LoRA run"]
SHORT = {"max_completion_length": 6, "max_steps": 2, "max_prompt_length": None, "report_to": "none"}


@pytest.mark.deadline(600)
@pytest.mark.parametrize("name", cover.essential(PASSING, *FIRST))
def test_two_steps_of_a_public_script(name, models, tmp_path, monkeypatch):
    monkeypatch.chdir(models)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setitem(os.environ, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    folder = str(tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name in PARSED:
            args, model_args = parsed(name, folder)
            args = replace(args, **SHORT)
            rewards = [accuracy_reward, think_format_reward]
            given = {"reward_funcs": rewards, "train_dataset": proofs(), "peft_config": get_peft_config(model_args)}
        else:
            script = scripts()[name]
            given = script.given
            args = GRPOConfig(output_dir=folder, **{**script.args, **SHORT})
        trainer = GRPOTrainer(**{"model": "qwen2", **given}, args=args)
        done = trainer.train()
    steps = [log for log in trainer.state.log_history if "reward" in log]
    assert [log["step"] for log in steps] == [1, 2] and done.global_step == 2
    assert all(math.isfinite(log["loss"]) and log["completions/mean_length"] <= 6 for log in steps)
    rewards = given["reward_funcs"] if isinstance(given["reward_funcs"], list) else [given["reward_funcs"]]
    assert all(f"rewards/{reward.__name__}/mean" in log for log in steps for reward in rewards)
    assert (trainer.run.model / "model.safetensors").exists()
