"""Each health rule of the metrics speaks for a run that it is meant for, once, and keeps silent for a healthy one."""

from __future__ import annotations

import os

import pytest

from megatron_rl.config.health import MEANINGS
from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.loop.health.rules import RULES, Health

HEALTHY = {
    "grad_norm": 0.6,
    "entropy": 1.2,
    "reward/mean": 0.4,
    "reward/right/signal": 0.8,
    "reward/brief/signal": 0.2,
    "length/response_cut": 0.1,
    "length/thought_cut": 0.1,
    "length/duplicates": 0.02,
    "mismatch/mean_abs": 2e-6,
    "on_policy/ratio_error": 0.0,
    "lag/mean": 1.2,
    "rollout/idle": 0.3,
    "stream/running": 8.0,
    "environment/tool_calls": 0.5,
}


class Screen:
    def __init__(self, before=()):
        self.told, self.before = [], list(before)

    def recorded(self, last):
        return self.before[-last:]

    def warn(self, message, rule=None, step=None):
        self.told.append((rule, message, step))


TOOLS = {"thinking": None, "environment": {"kind": "tools", "paths": ["my_tools.py:multiply"]}}


def config(max_lag=2, checkpoint=None, rollout=TOOLS, rounding="nearest"):
    return validate(
        GrpoRunConfig,
        {
            "run": {"name": "x", "steps": 9},
            "model": {"path": "m"},
            "data": {"train": "r.jsonl"},
            "policy": {"optimizer": {"rounding": rounding}},
            "rollout": {"max_lag": max_lag, **rollout},
            "checkpoint": checkpoint or {},
        },
    )


def run(records, **changes):
    """The warnings of a run with these metrics, and the steps that jump."""
    screen = Screen()
    health = Health(screen, config(**changes))
    for step, record in enumerate(records):
        health.look(step, record)
    jumps = [(step, message) for rule, message, step in screen.told if rule == "jump"]
    return [(rule, message) for rule, message, _ in screen.told if rule != "jump"], jumps


def steps(count, **changes):
    return [HEALTHY | changes for _ in range(count)]


def test_a_healthy_run_is_told_nothing():
    """The numbers move by half of themselves, as in a run that learns."""
    records = [
        {n: v * (1 + 0.5 * ((7 * s + i) % 5 - 2) / 2) for i, (n, v) in enumerate(HEALTHY.items())} for s in range(60)
    ]
    assert run(records) == ([], [])


@pytest.mark.parametrize(
    ("rule", "changes", "num_steps", "said"),
    [
        ("length", {"length/response_cut": 0.62}, 3, "62% of the answers end at rollout.max_response_tokens"),
        ("thoughts", {"length/thought_cut": 0.7}, 3, "the thinking budget ends 70% of the reasoning"),
        ("duplicates", {"length/duplicates": 0.4}, 1, "40% of the answers of 64 tokens or more equal another"),
        ("mismatch", {"mismatch/mean_abs": 3e-3}, 1, "trainer and engine differ by 3.0e-03 nats"),
        ("ratio", {"on_policy/ratio_error": 0.2}, 1, "the ratio of the policy to itself differs from 1 by 0.2"),
        ("untrained_tokens", {"tokens/untrained": 0.001}, 1, "0.001 of the sampled tokens have embeddings that no"),
        ("lag", {"lag/mean": 2.0}, 5, "the answers are as old as rollout.max_lag = 2 allows"),
        ("no_calls", {"environment/tool_calls": 0.0}, 5, "no answer of the last 5 steps has called a tool"),
        ("idle_engines", {"rollout/idle": 0.9}, 5, "the engines have nothing to do for 90% of the time"),
        ("one_reward", {"reward/right/signal": 0.99, "reward/brief/signal": 0.01}, 5, "the reward right makes 99%"),
    ],
)
def test_a_rule_speaks_once_and_not_before_its_steps(rule, changes, num_steps, said):
    before = steps(20)
    assert run([*before, *steps(num_steps - 1, **changes)])[0] == []
    [(told, message)] = run([*before, *steps(num_steps + 5, **changes)])[0]
    assert told == rule and message.startswith(said)
    again = [*before, *steps(num_steps, **changes), *steps(25), *steps(num_steps, **changes)]
    assert [one for one, _ in run(again)[0]] == [rule, rule], "it may be told again after it has held"


def test_only_a_run_with_tools_must_call_them():
    game = TOOLS | {"environment": {"kind": "class", "path": "my_games.py:Guess"}}
    for rollout in ({}, game):
        assert run(steps(20, **{"environment/tool_calls": 0.0}), rollout=rollout)[0] == []


def test_an_entropy_that_falls_without_a_gain():
    constant = [HEALTHY | {"entropy": 1.2 * 0.8**s} for s in range(30)]
    [(rule, message)] = run(constant)[0]
    assert rule == "entropy" and "the mean reward was 0.4 in every step, so it is no reward" in message
    falls = [one | {"reward/mean": 0.4 - 0.01 * (s % 2)} for s, one in enumerate(constant)]
    [(rule, message)] = run(falls)[0]
    assert rule == "entropy" and "has fallen from" in message and "algorithm.entropy" in message
    estimated = [
        {("logp/mean" if n == "entropy" else n): (-v if n == "entropy" else v) for n, v in one.items()} for one in falls
    ]
    assert [rule for rule, _ in run(estimated)[0]] == ["entropy"], "the log-probs of the sampled tokens estimate it"
    gains = [one | {"reward/mean": 0.4 + 0.01 * s} for s, one in enumerate(falls)]
    assert run(gains)[0] == []


def test_weights_that_stand_still_while_the_reward_does():
    still = [HEALTHY | {"update_changed": 0.004, "reward/mean": 0.4 - 0.01 * (s % 2)} for s in range(20)]
    [(rule, message)] = run(still)[0]
    assert rule == "still_weights" and "gives 0.40% of the weights other bits, and" in message
    assert run([one | {"reward/mean": 0.4 + 0.01 * s} for s, one in enumerate(still)])[0] == [], "it learns"
    assert run([one | {"update_changed": 0.03} for one in still])[0] == []
    assert run(still, rounding="dithered")[0] == [], "the mean of the weights moves"


def test_a_held_out_accuracy_that_falls_below_its_interval():
    """As in a run whose policy was destroyed while the rewards of its older answers looked well."""

    def evaluated(accuracy, low, high):
        return HEALTHY | {"eval/accuracy": accuracy, "eval/accuracy_low": low, "eval/accuracy_high": high}

    good, fine, bad = evaluated(0.87, 0.84, 0.9), evaluated(0.82, 0.79, 0.85), evaluated(0.5, 0.46, 0.54)
    assert run([*steps(9), good, *steps(9), fine, *steps(9)])[0] == [], "the intervals meet"
    [(rule, message)] = run([*steps(9), good, *steps(9), fine, *steps(9), bad, *steps(2)])[0]
    assert rule == "evaluation" and "the held-out accuracy is 0.500, and it was 0.870" in message
    assert run([HEALTHY | {"eval/reward_mean": 0.2}] * 3)[0] == []


def test_steps_that_are_done_again_count_once():
    """A policy that was lost goes on from an earlier step."""
    cut = [HEALTHY | {"length/response_cut": 0.62, "step": step} for step in (7, 8, 8, 8)]
    screen = Screen()
    health = Health(screen, config())
    for record in cut:
        health.look(record["step"], record)
    assert screen.told == [], "the rule needs three steps in a row"
    health.look(9, cut[0] | {"step": 9})
    assert [rule for rule, _, _ in screen.told] == ["length"]


def test_a_gradient_norm_that_jumps():
    [(step, message)] = run([*steps(20), HEALTHY | {"grad_norm": 3344.0}, *steps(3)])[1]
    assert step == 20 and message == "the gradient norm is 3,344, 5,573 times its median over the last 20 steps"
    assert run([*steps(3), HEALTHY | {"grad_norm": 3344.0}])[1] == [], "three steps have no usual norm"
    assert run([*steps(20), HEALTHY | {"grad_norm": 6.0}])[1] == []


def test_a_synchronous_run_has_no_rules_of_lags():
    assert run(steps(9, **{"lag/mean": 0.0}), max_lag=0)[0] == []
    assert run(steps(9, **{"lag/mean": 0.0, "rollout/idle": 0.9}), max_lag=0)[0] == [], "active sampling"


def test_memory_that_grows_and_a_disk_that_fills():
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    name = "memory/verifier_resident_bytes"
    leak = [HEALTHY | {name: 0.1 * machine + 0.005 * machine * s} for s in range(40)]
    [(rule, message)] = run(leak)[0]
    assert rule == "memory" and message.startswith("the largest process of the role verifier has grown by")
    assert run([HEALTHY | {name: 0.5 * machine} for s in range(40)])[0] == [], "large, and stays so"
    kept = [HEALTHY | {"memory/trainer_gpu_bytes_before/training": 1e9 * s} for s in range(12)]
    [(rule, message)] = run(kept)[0]
    assert rule == "memory" and "what the engines keep on a GPU" in message
    free = "machine/disk_free_bytes"
    [(rule, message)] = run([HEALTHY | {free: 100e9 - 2e9 * s} for s in range(11)])[0]
    assert rule == "disk" and "has 80.0 GB left, and is full in about 40 steps" in message
    assert run([HEALTHY | {free: 1000e9 - 2e9 * s} for s in range(11)])[0] == []


def test_a_disk_that_checkpoints_fill_once_and_numbers_that_are_0_are_no_fault():
    """The first checkpoints take room, until the oldest one is deleted."""
    free = "machine/disk_free_bytes"
    stairs = [800e9, 800e9, 700e9, 700e9, 600e9, 600e9, *[500e9] * 30]
    checkpoint = {"every": 2, "keep": 2}
    assert run([HEALTHY | {free: value} for value in stairs], checkpoint=checkpoint)[0] == []
    [(rule, message)] = run([*steps(6, **{"mismatch/mean_abs": 0.0}), *steps(1, **{"mismatch/mean_abs": 2e-4})])[0]
    assert rule == "mismatch" and message.startswith("trainer and engine differ by 2.0e-04 nats for a token: log-probs")
    assert run(steps(20, entropy=0.0))[0] == []


def test_every_rule_has_a_meaning():
    assert RULES.keys() <= MEANINGS.keys()
