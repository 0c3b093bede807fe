"""The journal of verified groups: round trips, cuts, and what is removed."""

from __future__ import annotations

from dataclasses import replace

import cover
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.journal import Journal, JournalWriter, read_journal
from megatron_rl.types import Conversation, Episode, Group, Prompt, Rollout, TokenReward, Tokens, Verdict


def group(number: int, num_samples: int = 2, score: float | None = 0.5) -> Group:
    """Groups with odd numbers have routes, though not of their third sample, and a teacher's log-probs, though not of
    their first."""
    rng = np.random.default_rng(number)
    samples, tokens = [], []
    for i in range(num_samples):
        length = 3 + int(rng.integers(5))
        reason, details = "" if score is not None else "away", {"judge/found": ["2", None, i]}
        verdict = Verdict(score, reason, (score, None), shaped=0.25, failed=score is None, details=details)
        rollout = Rollout(length, 2, length - 2, i, "stop", i == 1, oldest_version=number, verdict=verdict)
        if i == 1:
            rewards = (TokenReward(2, "environment", 0.5), TokenReward(length - 1, "step", -1.0))
            rollout = replace(rollout, token_rewards=rewards, episode=Episode(2, 3, ("raised",), 0.25, "it broke down"))
        samples.append(rollout)
        tokens.append(
            Tokens(
                rng.integers(0, 99, length).astype(np.int32),
                rng.integers(0, 2, length).astype(bool),
                rng.normal(size=length).astype(np.float32),
                rng.integers(-1, 9, length).astype(np.int32),
                rng.integers(0, 256, (length - i, 2, 3)).astype(np.uint8) if number % 2 and i < 2 else None,
                Conversation(({"role": "assistant", "content": "é"},), " now", {"total": 1}) if i == 1 else None,
                rng.normal(size=length).astype(np.float32) if number % 2 and i else None,
            )
        )
    prompt = Prompt(f"rows.jsonl:{number} é", tuple(tokens[0].ids[:2].tolist()), "")
    return Group(prompt, samples, tokens, number, engines=tuple(range(num_samples)) if number % 2 else ())


def same(a: Group, b: Group) -> bool:
    columns = [
        (getattr(x, name), getattr(y, name))
        for x, y in zip(a.payload, b.payload, strict=True)
        for name in ("ids", "action_mask", "logp_rollout", "version", "routes", "logp_teacher")
        if getattr(x, name) is not None or getattr(y, name) is not None
    ]
    numbers = (a.prompt, a.version, a.rollouts, a.engines) == (b.prompt, b.version, b.rollouts, b.engines)
    said = [one.conversation for one in a.payload] == [one.conversation for one in b.payload]
    return numbers and said and all(x.dtype == y.dtype and x.tolist() == y.tolist() for x, y in columns)


def test_what_is_read_is_what_was_written(tmp_path):
    first, second = JournalWriter(tmp_path / "j"), JournalWriter(tmp_path / "j")
    written = {0: group(0), 1: group(1, score=None), 2: group(2, num_samples=1), 7: group(7, num_samples=3)}
    first.write({n: written[n] for n in (0, 1)})
    second.write({2: written[2]})
    first.write({n: written[n] for n in (7, 1)})
    found = read_journal(tmp_path / "j")
    assert sorted(found) == [0, 1, 2, 7]
    assert all(same(found[number], one) for number, one in written.items())
    journal = Journal(tmp_path / "j", max_lag=1)
    journal.resume(3)
    journal.prune(3)
    assert sorted(read_journal(tmp_path / "j")) == [2, 7]
    assert read_journal(tmp_path / "none") == {}


@settings(max_examples=cover.examples(100))
@given(st.data())
def test_a_file_that_was_cut_anywhere_gives_its_whole_records(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cut")
    sizes = []
    writer = JournalWriter(folder)
    for number in range(3):
        writer.write({number: replace(group(number), version=0)})
        [path] = folder.iterdir()
        sizes.append(path.stat().st_size)
    cut = data.draw(st.integers(0, sizes[-1]))
    path.write_bytes(path.read_bytes()[:cut])
    assert sorted(read_journal(folder)) == [number for number, size in enumerate(sizes) if size <= cut]


def test_a_damaged_record_and_what_follows_it_are_not_read(tmp_path):
    writer = JournalWriter(tmp_path)
    writer.write({0: group(0)})
    [path] = tmp_path.iterdir()
    start = path.stat().st_size
    writer.write({number: replace(group(number), version=0) for number in (1, 2)})
    data = bytearray(path.read_bytes())
    data[start + 100] ^= 1
    path.write_bytes(data)
    assert sorted(read_journal(tmp_path)) == [0]


@pytest.mark.parametrize("num", [15, 16, 100])
def test_zeros_that_a_loss_of_power_leaves_end_the_file(tmp_path, num):
    """A head of zeros would be a record of no bytes, and its sum would be right."""
    JournalWriter(tmp_path).write({0: group(0)})
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes() + bytes(num))
    assert sorted(read_journal(tmp_path)) == [0]
