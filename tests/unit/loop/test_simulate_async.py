"""The simulator of engines and trainer: cases that can be computed by hand, and laws that hold for any lengths."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.tools.simulate_async import Costs, Job, main, simulate

EVEN = Job(
    costs=Costs(slots=4, fixed_s=1.0, per_answer_s=0.5),
    num_engines=1,
    prompts=2,
    samples=2,
    lengths=np.full(64, 10),
    trainer_s=lambda lengths: 7.0,
)


def test_a_batch_of_equal_answers_by_hand():
    """Four answers of 10 tokens take 10 steps of 1 + 4 x 0.5 = 3 s, and the trainer 7 s."""
    for max_lag in (None, 0):
        result = simulate(EVEN, max_lag, num_steps=3, warm_up=1)
        assert result["seconds_per_step"] == pytest.approx(37.0)
        assert result["tokens_per_s"] == pytest.approx(40 / 37)
        assert result["slots_in_use"] == pytest.approx(30 / 37) and result["trainer_busy"] == pytest.approx(7 / 37)


def test_with_lag_the_slower_side_sets_the_pace():
    result = simulate(EVEN, 1, num_steps=3, warm_up=1)
    assert result["seconds_per_step"] == pytest.approx(30.0) and result["slots_in_use"] == pytest.approx(1.0)
    assert result["lags"] == {"1": 1.0}
    slow_trainer = replace(EVEN, trainer_s=lambda lengths: 50.0)
    result = simulate(slow_trainer, 1, num_steps=3, warm_up=1)
    assert result["seconds_per_step"] == pytest.approx(50.0) and result["trainer_busy"] == pytest.approx(1.0)


def test_a_push_stops_the_engines_and_the_trainer():
    result = simulate(replace(EVEN, push_s=3.0), 0, num_steps=2, warm_up=1)
    assert result["seconds_per_step"] == pytest.approx(40.0)


def test_context_makes_steps_longer():
    """One answer of 10 tokens after a prompt of 5. The steps of an interval cost as much as its first one."""
    one = replace(EVEN, prompts=1, samples=1, costs=Costs(1, 0.0, 0.0, per_token_s=1.0), prompt_tokens=5)
    result = simulate(replace(one, trainer_s=lambda lengths: 0.0), 0, num_steps=2, warm_up=1)
    assert result["seconds_per_step"] == pytest.approx(50.0)


def test_more_lag_is_never_slower_for_long_tails():
    lengths = np.random.default_rng(0).lognormal(3, 1, 4096).clip(1, 600).astype(int)
    job = Job(Costs(16, 1.0, 0.02), 2, 16, 4, lengths, lambda lengths: 60.0)
    speeds = [simulate(job, max_lag, num_steps=12, warm_up=2)["tokens_per_s"] for max_lag in (None, 0, 1, 2, 4)]
    assert all(later > 0.97 * earlier for earlier, later in zip(speeds, speeds[1:])), "up to the edges of the window"
    assert speeds[-1] > 1.5 * speeds[0]


@pytest.mark.deep
def test_the_command(capsys):
    assert main(["--nodes", "8", "--steps", "1", "--json"]) == 0
    modes = json.loads(capsys.readouterr().out)["8"]
    assert list(modes) == ["max_lag 0", "max_lag 1", "max_lag 4"]
    assert all(row["trainer_nodes"] + row["engine_nodes"] == 8 and row["tokens_per_s"] > 0 for row in modes.values())
