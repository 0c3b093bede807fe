from __future__ import annotations

import json
from typing import get_args

from megatron_rl.algorithms import token_advantages
from megatron_rl.algorithms.advantages import ESTIMATORS, TOKEN_ESTIMATORS
from megatron_rl.algorithms.losses import LOSSES, SELECTIONS
from megatron_rl.algorithms.shaping import SHAPINGS
from megatron_rl.commands import algorithms as tool
from megatron_rl.config.advantages import AdvantageConfig, GaeAdvantage, OptimalTokenBaselineAdvantage
from megatron_rl.config.losses import LossConfig
from megatron_rl.config.shaping import ShapingConfig


def members(union) -> set[type]:
    return set(get_args(get_args(union)[0]))


def test_everything_that_can_be_configured_is_registered_and_the_reverse():
    assert members(LossConfig) == set(LOSSES)
    assert members(ShapingConfig) == set(SHAPINGS)
    assert members(AdvantageConfig) == set(ESTIMATORS) | set(TOKEN_ESTIMATORS)
    assert set(TOKEN_ESTIMATORS) == {
        *token_advantages.ESTIMATORS,
        GaeAdvantage,
        OptimalTokenBaselineAdvantage,
    }


def test_what_the_tool_prints_has_every_loss_with_its_formula(capsys):
    assert tool.main([]) in (0, None)
    printed = capsys.readouterr().out
    for loss in LOSSES:
        formula = loss.formula.replace("|", r"\|")
        assert f"| `{loss.model_fields['kind'].default}` | {formula} | {loss.source} |" in printed


def test_only_losses_that_choose_tokens_have_a_selection():
    assert {loss for loss in LOSSES if loss.chooses_tokens} == set(SELECTIONS)


def test_the_last_line_of_json_is_one_object(capsys):
    assert tool.main(["--json"]) in (0, None)
    tables = {table["key"]: table for table in json.loads(capsys.readouterr().out.splitlines()[-1])["tables"]}
    kinds = [entry["kind"] for entry in tables["algorithm.loss"]["entries"]]
    assert kinds[0] == "dual_clip" and len(kinds) == len(LOSSES)
