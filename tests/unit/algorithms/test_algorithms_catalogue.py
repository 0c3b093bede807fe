from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

from megatron_rl.algorithms import token_advantages
from megatron_rl.algorithms.advantages import ESTIMATORS, TOKEN_ESTIMATORS
from megatron_rl.algorithms.catalogue import markdown
from megatron_rl.algorithms.losses import LOSSES
from megatron_rl.algorithms.shaping import SHAPINGS
from megatron_rl.config.advantages import AdvantageConfig, GaeAdvantage, ShapingConfig
from megatron_rl.config.losses import LossConfig
from megatron_rl.tools import algorithms as tool

ROOT = Path(__file__).parents[3]


def members(union) -> set[type]:
    return set(get_args(get_args(union)[0]))


def test_everything_that_can_be_configured_is_registered_and_the_reverse():
    assert members(LossConfig) == set(LOSSES)
    assert members(ShapingConfig) == set(SHAPINGS)
    assert members(AdvantageConfig) == set(ESTIMATORS) | set(TOKEN_ESTIMATORS)
    assert set(TOKEN_ESTIMATORS) == {*token_advantages.ESTIMATORS, GaeAdvantage}


def test_the_readme_has_the_table_that_the_tool_prints(capsys):
    assert tool.main([]) in (0, None)
    printed = capsys.readouterr().out
    assert printed.strip() == markdown().strip()
    assert (ROOT / "megatron_rl/algorithms/README.md").read_text().rstrip().endswith(printed.strip())


def test_the_last_line_of_json_is_one_object(capsys):
    assert tool.main(["--json"]) in (0, None)
    tables = {table["key"]: table for table in json.loads(capsys.readouterr().out.splitlines()[-1])["tables"]}
    kinds = [entry["kind"] for entry in tables["algorithm.loss"]["entries"]]
    assert kinds[0] == "dual_clip" and len(kinds) == len(LOSSES)
