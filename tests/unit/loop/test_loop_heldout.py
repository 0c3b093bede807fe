"""Held-out rows of training without engines, and the log-probs of rows under the reference model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron_rl.config.load import validate
from megatron_rl.config.policy import LoraConfig
from megatron_rl.config.schema import DpoRunConfig, SftRunConfig
from megatron_rl.loop import reference
from megatron_rl.loop.heldout import evaluate_rows
from megatron_rl.loop.reference import with_reference
from megatron_rl.models import read_shape
from megatron_rl.types import Tokens, TrainingRow


def row(num_given: int, num_trained: int) -> Tokens:
    size = num_given + num_trained
    empty = np.zeros(size, np.float32)
    return Tokens(np.ones(size, np.int32), np.arange(size) >= num_given, empty, np.full(size, -1, np.int32))


class Scores:
    """A policy that gives each trained token of a sample of n tokens the log-prob -n."""

    def __init__(self, replicas: int = 1, fails_after: int = 99) -> None:
        self.replicas, self.num_calls, self.fails_after = replicas, 0, fails_after

    def score(self, shares):
        assert len(shares) == self.replicas
        self.num_calls += 1
        if self.num_calls > self.fails_after:
            raise KeyboardInterrupt
        found = {}
        for share in shares:
            for index, tokens in zip(share.index, share.tokens, strict=True):
                found[int(index)] = -float(len(tokens.ids) * tokens.action_mask.sum())
        return found


def config_of(tmp_path, kind, section, replicas: int = 1):
    (tmp_path / "config.json").write_text(CONFIG)
    given = {"run": {"name": "x", "steps": 1, "folder": str(tmp_path / "runs")}, "model": {"path": str(tmp_path)}}
    return validate(kind, given | section | {"policy": {"parallel": {"data": replicas}}})


@pytest.mark.parametrize("replicas", [1, 2])
def test_it_is_the_mean_over_all_trained_tokens(tmp_path, replicas):
    config = config_of(tmp_path, SftRunConfig, {"sft": {"rows": "rows.jsonl"}}, replicas)
    rows = [
        TrainingRow(name, (row(*size),), (0.0,)) for name, size in zip("abc", ((2, 3), (1, 1), (4, 6)), strict=True)
    ]
    metrics = evaluate_rows(config, read_shape(tmp_path), Scores(replicas), rows, 0)
    assert metrics == {"eval/loss": (3 * 5 + 1 * 2 + 6 * 10) / 10, "eval/tokens": 10.0}


PAIRS = [
    TrainingRow("a", (row(2, 3), row(2, 1)), (1.0, -1.0)),
    TrainingRow("b", (row(1, 1), row(1, 2)), (1.0, -1.0)),
    TrainingRow("c", (row(4, 6), row(4, 6)), (1.0, -1.0)),
]
LOGP = [(-15.0, -3.0), (-2.0, -6.0), (-60.0, -60.0)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_pairs_have_the_mean_loss_of_a_row_and_an_accuracy(tmp_path, replicas):
    loss = {"kind": "dpo", "beta": 0.5}
    config = config_of(tmp_path, DpoRunConfig, {"dpo": {"rows": "rows.jsonl", "loss": loss}}, replicas)
    rows = [replace(pair, logp_reference=(-14.0, -4.0)) for pair in PAIRS]
    metrics = evaluate_rows(config, read_shape(tmp_path), Scores(replicas), rows, 0)
    margins = [0.5 * (chosen - rejected + 10.0) for chosen, rejected in LOGP]
    assert metrics["eval/loss"] == pytest.approx(np.mean([np.log1p(np.exp(-margin)) for margin in margins]))
    assert metrics["eval/accuracy"] == pytest.approx(2 / 3)
    assert metrics["eval/accuracy_low"] < 2 / 3 < metrics["eval/accuracy_high"]


def test_the_reference_scores_once_for_all_runs_and_continues_after_a_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_TOKENS", 5)  # the pairs have 8, 5 and 20 tokens
    config, shape, told = config_of(tmp_path, DpoRunConfig, {"dpo": {"rows": "rows.jsonl"}}), None, []
    shape = read_shape(tmp_path)
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")

    def scored(policy, config=config, is_resumed=False):
        return with_reference(config, shape, policy, PAIRS, is_resumed, told.append)

    with pytest.raises(ValueError, match="is missing, which has the reference model's log-probs"):
        scored(Scores(), is_resumed=True)
    with pytest.raises(KeyboardInterrupt):
        scored(Scores(fails_after=2))
    remaining = Scores()
    assert [one.logp_reference for one in scored(remaining)] == LOGP and remaining.num_calls == 1
    assert "the reference model scores the rows: 4 of 6 answers" in told
    other = config.model_copy(update={"run": config.run.model_copy(update={"name": "y"})})
    none = Scores(fails_after=0)
    assert [one.logp_reference for one in scored(none, other)] == LOGP
    assert [one.logp_reference for one in scored(none, is_resumed=True)] == LOGP
    (tmp_path / "adapters").mkdir()
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "adapters" / "adapter_model.safetensors")
    for start in (None, tmp_path / "adapters"):
        adapted = config.policy.model_copy(update={"lora": LoraConfig(start=start)})
        with pytest.raises(KeyboardInterrupt):
            scored(Scores(fails_after=0), config.model_copy(update={"policy": adapted}))
        scored(Scores(), config.model_copy(update={"policy": adapted}))
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(KeyboardInterrupt):
        scored(none)


CONFIG = """{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "rope_theta": 10000.0,
"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
"intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
"tie_word_embeddings": false}"""
