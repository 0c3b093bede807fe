"""Megatron-Core's own settings: those that are passed on, and those that are refused by name."""

from __future__ import annotations

import pytest

from megatron_rl.actor import platform  # noqa: F401  before Megatron: it silences its import
from megatron_rl.actor.megatron_settings import REFUSED, build

from megatron.core.distributed import DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer import OptimizerConfig  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}


def test_a_switch_is_set_beside_our_fields():
    config = build(TransformerConfig, "transformer", SIZES, {"attention_softmax_in_fp32": True})
    assert config.attention_softmax_in_fp32 and config.hidden_size == 8


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"atention_softmax_in_fp32": True}, "has no such field; did you mean attention_softmax_in_fp32?"),
        ({"hidden_size": 16}, "policy.megatron.transformer.hidden_size is set by this project, to 8; leave it out"),
        ({"moe_expert_capacity_factor": 1.0}, "must not be set: the engine drops no token"),
        ({"recompute_granularity": "sometimes"}, "Megatron-Core refuses policy.megatron.transformer"),
    ],
)
def test_what_is_refused_is_named(switches, message):
    with pytest.raises(ValueError, match=message):
        build(TransformerConfig, "transformer", SIZES, switches)


def test_everything_that_is_refused_exists():
    known = {
        name
        for kind in (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
        for name in kind.__dataclass_fields__
    }
    assert REFUSED.keys() <= known
