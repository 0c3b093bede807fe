"""The reference of the metrics. The end-to-end tests compare it with the metrics of their runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.commands import metrics as tool
from megatron_rl.observe.metric_names import SECTIONS, meaning

ROOT = Path(__file__).parents[3]


def test_the_document_is_what_the_command_prints(capsys):
    assert tool.main(["--markdown"]) == 0
    assert (ROOT / "docs/metrics.md").read_text() == capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reward/brevity/mean", "the mean score of one reward, without its weight"),
        ("reward/mean", "the mean reward of the answers: the weighted sum of all rewards, after shaping"),
        ("eval/pass@8_low", None),
        ("time/generate_s", "seconds of a phase"),
        ("critic/grad_norm", "the metric of this name of the critic's update"),
    ],
)
def test_a_name_that_the_run_gives_has_a_meaning(name, said):
    found = meaning(name)
    assert found is not None and (said is None or found.startswith(said))


def test_other_names_have_none():
    assert meaning("rewards/mean") is None and meaning("loss_") is None


def test_a_name_is_told_once():
    names = [name for section in SECTIONS.values() for name in section]
    assert len(names) == len(set(names))


def test_the_command_finds_names_by_a_word(capsys):
    assert tool.main(["mismatch"]) == 0
    assert "mismatch/max_abs" in capsys.readouterr().out
    assert tool.main(["reward/mine/mean"]) == 0 and "without its weight" in capsys.readouterr().out
    assert tool.main(["mismatched"]) == 2 and "prints all" in capsys.readouterr().err
