"""TRL's own tests as dry runs: which ones have TRL's meaning, and which ones are refused by name."""

from __future__ import annotations

import warnings
from dataclasses import MISSING, fields
from importlib.metadata import version

import pytest
import real  # noqa: F401  # skips
import trl
from cases import CASES, LAZY, Case
from given import length, texts
from trl.experimental import cpo, gkd, orpo

from megatron_rl.trl import (
    CPOConfig,
    DPOConfig,
    GKDConfig,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    ORPOConfig,
    RewardConfig,
    SFTConfig,
)
from megatron_rl.trl.coverage import CASES_REFUSED, TESTS, VERSIONS

VERDICTS = {test: group.verdict for group in TESTS for test in group.tests}

CONFIGS = dict.fromkeys((GRPOConfig, DPOConfig, KTOConfig, SFTConfig, RewardConfig), trl)
CONFIGS |= {ORPOConfig: orpo, CPOConfig: cpo, GKDConfig: gkd}
"""The modules of TRL's own."""


def trainer_of(case: Case, folder: str) -> GRPOTrainer:
    usual = {"model": "qwen2", "reward_funcs": "scorer", "train_dataset": texts}
    made = {
        name: value() if name in LAZY and callable(value) else value for name, value in {**usual, **case.given}.items()
    }
    if callable(made["reward_funcs"]) and made["reward_funcs"].__name__ == "<lambda>":
        made["reward_funcs"] = made["reward_funcs"]()
    sizes = {"per_device_train_batch_size": 3, "num_generations": 3, "max_completion_length": 8}
    args = GRPOConfig(**{"output_dir": folder, "learning_rate": 0.1, "report_to": "none", **sizes, **case.args})
    return GRPOTrainer(args=args, **made)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.test}-{case.of}".strip("-"))
def test_a_test_of_trl(case, dry, tmp_path):
    """A dry run passes, or the error is the one that TRL's test expects, or it names what is refused."""
    verdict = "refused" if case.of in CASES_REFUSED.get(case.test, ()) else VERDICTS[case.test]
    assert case.refused or verdict in ("the same", "different"), "a test that is refused says how"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not case.refused:
            trainer_of(case, str(tmp_path / "out")).train()
            return
        with pytest.raises((ValueError, RuntimeError), match=case.refused):
            trainer_of(case, str(tmp_path / "out")).train()


def test_most_tests_that_have_the_same_meaning_are_here():
    tried = {case.test for case in CASES}
    assert tried <= VERDICTS.keys()
    # in tests/unit/algorithms, and in test_runs.py
    by_units = {"compute_entropy_mask", "get_off_policy_mask", "evaluate_with_eval_dataset"}
    missing = {
        test
        for test, verdict in VERDICTS.items()
        if verdict == "the same" and not any(test.startswith(one) for one in by_units)
    } - tried
    assert not missing


def test_the_versions_are_the_ones_of_the_page_and_arguments_are_those_that_trl_has():
    assert {name: version(name) for name in VERSIONS} == VERSIONS
    for ours, of in CONFIGS.items():
        theirs = {one.name: one for one in fields(getattr(of, ours.NAME))}
        assert theirs.keys() == ours.KNOWN.keys()
        for name, argument in ours.KNOWN.items():
            default = theirs[name].default
            if default is not MISSING and name not in ("lr_scheduler_type", "optim", "logging_strategy", "report_to"):
                assert argument.default in (default, getattr(default, "value", default)), name


def test_the_sampler_of_trl_gives_as_many_steps(dry, tmp_path):
    """17 rows, 4 prompts a step, three epochs: TRL's sampler leaves out the rows that fill no batch."""
    from trl.trainer.utils import RepeatSampler

    passes = len(RepeatSampler(range(17), mini_repeat_count=4, batch_size=4, repeat_count=1)) // 16
    args = GRPOConfig(str(tmp_path / "o"), per_device_train_batch_size=16, num_generations=4, num_train_epochs=3)
    trainer = GRPOTrainer("qwen2", length, args, texts())
    trainer.train()
    assert trainer.state.max_steps == 3 * passes == 12
