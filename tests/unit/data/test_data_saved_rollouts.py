from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.data.saved_rollouts import path_of, read_step, write_step
from megatron_rl.types import Group, Prompt, Rollout, Rollouts, Tokens, Verdict


def groups_and_tokens(with_routes: bool = False):
    generator = np.random.default_rng(0)
    groups, payloads = [], []
    for uid, prompt, lengths in (("a:1", (5, 6), (4, 7)), ("b:2", (8,), (3, 2))):
        samples, tokens = [], []
        for length in lengths:
            ids = np.array([*prompt, *generator.integers(0, 99, length - len(prompt))], np.int32)
            mask = np.arange(length) >= len(prompt)
            logp = np.where(mask, generator.normal(size=length), 0).astype(np.float32)
            routes = generator.integers(0, 4, (length - 1, 2, 2)).astype(np.uint8) if with_routes else None
            tokens.append(Tokens(ids, mask, logp, np.where(mask, 3, -1).astype(np.int32), routes))
            verdict = Verdict(0.25, "why", (0.25, None), details={"judge/why": [1, "x"]})
            samples.append(Rollout(length, len(prompt), int(mask.sum()), 0, "stop", oldest_version=3, verdict=verdict))
        messages = ({"role": "user", "content": "é"},) if uid == "a:1" else "plain"
        groups.append(Group(Prompt(uid, prompt, messages, {"ground_truth": [1, None]}), samples, None, 3))
        payloads.append(tokens)
    return groups, payloads


@pytest.mark.parametrize("with_routes", [False, True])
def test_what_is_read_equals_what_was_written(tmp_path, with_routes):
    groups, payloads = groups_and_tokens(with_routes)
    greedy = np.array([0.5, 0.5, np.nan, np.nan])
    write_step(tmp_path, 7, Rollouts(groups, greedy, {"rollout/num_samples": 4.0}), iter(payloads), {})
    saved = read_step(tmp_path, 7)
    np.testing.assert_array_equal(saved.greedy_rewards, greedy)
    assert saved.metrics == {"rollout/num_samples": 4.0}
    assert [(g.prompt, g.rollouts, g.version) for g in saved.groups] == [(g.prompt, g.rollouts, 3) for g in groups]
    for group, tokens in zip(saved.groups, payloads, strict=True):
        for given, expected in zip(group.payload, tokens, strict=True):
            for name in ("ids", "action_mask", "logp_rollout", "version", "routes"):
                one, other = getattr(given, name), getattr(expected, name)
                assert (one is None and other is None) or (one.dtype == other.dtype and np.array_equal(one, other))
    assert [path.name for path in tmp_path.iterdir()] == ["step_000007.groups"], "no partial file stays"


def test_a_file_that_was_cut_anywhere_is_refused(tmp_path):
    groups, payloads = groups_and_tokens()
    write_step(tmp_path, 0, Rollouts(groups, None, {}), payloads, {})
    whole = path_of(tmp_path, 0).read_bytes()
    for size in range(0, len(whole), 7):
        path_of(tmp_path, 0).write_bytes(whole[:size])
        with pytest.raises(ValueError, match="rollout.dump"):
            read_step(tmp_path, 0)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path_of(tmp_path, 0).write_bytes(flipped)
    with pytest.raises(ValueError, match="was cut off or changed"):
        read_step(tmp_path, 0)


def test_a_missing_step_is_told(tmp_path):
    with pytest.raises(ValueError, match="step 0: it has no step"):
        read_step(tmp_path, 0)
    groups, payloads = groups_and_tokens()
    for step in (3, 4):
        write_step(tmp_path, step, Rollouts(groups, None, {}), payloads, {})
    with pytest.raises(ValueError, match="step 5.*steps 3 to 4"):
        read_step(tmp_path, 5)


def test_a_renamed_file_and_other_settings_are_refused(tmp_path):
    groups, payloads = groups_and_tokens()
    settings = {"rewards": {"a": 1.0}, "algorithm.shaping": [{"kind": "overlong"}]}
    write_step(tmp_path, 3, Rollouts(groups, None, {}), payloads, settings)
    assert len(read_step(tmp_path, 3, settings).groups) == 2
    with pytest.raises(ValueError, match=r"was written with rewards {'a': 1.0}, but this run has {'b': 1.0}; give it"):
        read_step(tmp_path, 3, settings | {"rewards": {"b": 1.0}})
    path_of(tmp_path, 3).rename(path_of(tmp_path, 4))
    with pytest.raises(ValueError, match="step_000004.groups.*step 3"):
        read_step(tmp_path, 4)
