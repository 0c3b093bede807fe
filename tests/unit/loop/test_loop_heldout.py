"""The loss of held-out rows of supervised training."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.config.load import validate
from megatron_rl.config.schema import SftRunConfig
from megatron_rl.loop.heldout import heldout_loss
from megatron_rl.models import read_shape
from megatron_rl.types import Tokens


def row(num_given: int, num_trained: int) -> Tokens:
    size = num_given + num_trained
    empty = np.zeros(size, np.float32)
    return Tokens(np.ones(size, np.int32), np.arange(size) >= num_given, empty, np.full(size, -1, np.int32))


class Scores:
    """A policy that gives each trained token of a sample of n tokens the log-prob -n."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas

    def score(self, shares):
        assert len(shares) == self.replicas
        found = {}
        for share in shares:
            for index, tokens in zip(share.index, share.tokens, strict=True):
                found[int(index)] = -float(len(tokens.ids) * tokens.action_mask.sum())
        return found


@pytest.mark.parametrize("replicas", [1, 2])
def test_it_is_the_mean_over_all_trained_tokens(tmp_path, replicas):
    (tmp_path / "config.json").write_text(CONFIG)
    given = {"run": {"name": "x", "steps": 1}, "model": {"path": str(tmp_path)}, "sft": {"rows": "rows.jsonl"}}
    config = validate(SftRunConfig, given | {"policy": {"parallel": {"data": replicas}}})
    rows = [("a", row(2, 3)), ("b", row(1, 1)), ("c", row(4, 6))]
    metrics = heldout_loss(config, read_shape(tmp_path), Scores(replicas), rows, 0)
    assert metrics == {"eval/loss": (3 * 5 + 1 * 2 + 6 * 10) / 10, "eval/tokens": 10.0}


CONFIG = """{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "rope_theta": 10000.0,
"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
"intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
"tie_word_embeddings": false}"""
