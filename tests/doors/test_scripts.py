"""The arguments of public scripts with the import changed, as dry runs."""

from __future__ import annotations

import os
import warnings

import pytest
import real  # noqa: F401  # skips
from public import PARSED, parsed, proofs, scripts
from trl import get_peft_config
from trl.rewards import accuracy_reward, think_format_reward

from megatron_rl.trl import GRPOConfig, GRPOTrainer
from megatron_rl.trl.coverage import SCRIPTS


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in PARSED])
def test_a_public_script(name, dry, tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "HF_TOKEN_PATH", str(tmp_path / "none"))
    script = scripts()[name]
    passes, _ = SCRIPTS[name]
    assert passes == (not script.refused)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def train() -> None:
            args = GRPOConfig(output_dir=str(tmp_path / "out"), report_to="none", **script.args)
            GRPOTrainer(**{"model": "qwen2", **script.given}, args=args).train()

        if script.refused:
            with pytest.raises(ValueError, match=script.refused):
                train()
        else:
            train()


@pytest.mark.parametrize("name", PARSED)
def test_a_public_script_that_parses_its_arguments(name, dry, tmp_path):
    assert SCRIPTS[name][0]
    args, model_args = parsed(name, str(tmp_path / "out"))
    assert args.system_prompt == "Think." and args.get_process_log_level() in (20, 30) and args.n_gpu in (0, 1)
    trainer = GRPOTrainer(
        model="qwen2",
        reward_funcs=[accuracy_reward, think_format_reward],
        args=args,
        train_dataset=proofs(),
        peft_config=get_peft_config(model_args),
        callbacks=[],
    )
    trainer.train()
    assert args.max_prompt_length in (256, 512) and trainer.state.max_steps in (16, 450)
