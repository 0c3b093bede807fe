"""The mixture that DeepSeek-V3 began with (arXiv:2412.19437), and Kimi-K2 and GLM-4.5 have too: sigmoid scores, a bias
that balances the choice of experts, shared experts, and dense first layers.

The router's bias has no gradient; it is a parameter in HF and vLLM and a float32 buffer in Megatron
(`router.expert_bias`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.models.config_values import flag, number, size
from megatron_rl.models.families.rows import mixture_rows
from megatron_rl.models.multi_token import MultiTokenHead, head_rows
from megatron_rl.models.rule import HfTensor, Rule
from megatron_rl.models.splits import COLUMNS, REPLICATED, ROWS
from megatron_rl.types import Mixture, ModelShape

ROUTER_BIAS_ROW = Rule(
    REPLICATED,
    hf=(HfTensor("mlp.gate.e_score_correction_bias", ("experts",)),),
    megatron="mlp.router.expert_bias",
    float32=True,  # its updates are so small that bfloat16 would round them away
)
BIASED_MIXTURE = (
    *mixture_rows("mlp", "gate_proj", "up_proj", "down_proj"),
    ROUTER_BIAS_ROW,
    Rule(
        ROWS,
        hf=(
            HfTensor("mlp.shared_experts.gate_proj.weight", ("shared_ffn", "hidden")),
            HfTensor("mlp.shared_experts.up_proj.weight", ("shared_ffn", "hidden")),
        ),
        megatron="mlp.shared_experts.linear_fc1.weight",
        vllm="mlp.shared_experts.gate_up_proj.weight",
    ),
    Rule(
        COLUMNS,
        hf=(HfTensor("mlp.shared_experts.down_proj.weight", ("hidden", "shared_ffn")),),
        megatron="mlp.shared_experts.linear_fc2.weight",
    ),
)
TOKEN_AFTER_NEXT = MultiTokenHead(
    r"model\.layers\.NUM_LAYERS\..*",
    "they are the multi-token head",
    "num_nextn_predict_layers",
    prefix="model.layers.NUM_LAYERS.",
    rows=head_rows("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"),
    copies=(("embed_tokens.weight", "embedding"), ("shared_head.head.weight", "output")),
)
"""The layer after the last one, which predicts the token after the next one (arXiv:2412.19437, section 2.2)."""


def served_in_float32(mixture: Sequence[Rule]) -> tuple[Rule, ...]:
    """The same rows for a class of vLLM that holds the router's weight in float32."""
    return tuple(replace(rule, served_float32=rule.megatron == "mlp.router.weight") for rule in mixture)


def fault_in_float16(shape: ModelShape, dtype: str, device: str) -> str | None:
    """`Family.engine_fault` of a class that does not undo what vLLM's `MoERunner` does in float16: it divides the
    output of the shared experts by the factor of the others."""
    mixture = shape.mixture
    if dtype != "float16" or not mixture or mixture.scaling_factor == 1 or not mixture.shared_ffn_size:
        return None
    return (
        f"model.dtype is float16, in which vLLM adds up the experts of {shape.family} with another factor than "
        f"routed_scaling_factor {mixture.scaling_factor:g}; set it to bfloat16"
    )


def only(config: Mapping[str, Any], **known: Any) -> None:
    """
    Args:
        known: the one value of a key that the family's table describes, which is also its value if it is absent.

    Raises:
        ValueError: config.json has another value.
    """
    for key, value in known.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} is {config[key]!r}; only {value!r} is supported")


def sigmoid_scored(read: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The same `Family.read_config` for routers with sigmoid scores, which Megatron-Core demands of routers with a
    bias."""

    def read_sigmoid(config: Mapping[str, Any]) -> dict[str, Any]:
        only(config, scoring_func="sigmoid")
        found = read(config)
        return found | {"mixture": replace(found["mixture"], score="sigmoid")}

    return read_sigmoid


def read_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The mixture and the layers before it, as `config.Special` has them."""
    only(config, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    num_layers = size(config, "num_hidden_layers")
    dense = size(config, "first_k_dense_replace", least=0, at_most="num_hidden_layers")  # vLLM needs this key, too
    kinds = ["dense"] * dense + ["sparse"] * (num_layers - dense)
    if (config.get("mlp_layer_types") or kinds) != kinds:
        raise ValueError(
            f"mlp_layer_types is {config['mlp_layer_types']}, but first_k_dense_replace is {dense} and "
            f"num_hidden_layers {num_layers}; supported are as many `dense` layers first, and then `sparse` ones"
        )
    ffn_size = size(config, "moe_intermediate_size")
    mixture = Mixture(
        num_experts=size(config, "n_routed_experts"),
        num_active=size(config, "num_experts_per_tok", at_most="n_routed_experts"),
        ffn_size=ffn_size,
        shared_ffn_size=size(config, "n_shared_experts") * ffn_size,
        score="sigmoid",
        normalised=flag(config, "norm_topk_prob", absent=None),
        num_groups=size(config, "n_group"),
        num_active_groups=size(config, "topk_group", at_most="n_group"),
        scaling_factor=number(config, "routed_scaling_factor"),
    )
    if mixture.num_experts % mixture.num_groups:
        raise ValueError(
            f"n_group is {mixture.num_groups}; n_routed_experts, {mixture.num_experts}, must be a multiple of it"
        )
    chosen_from = mixture.num_active_groups * (mixture.num_experts // mixture.num_groups)
    if mixture.num_active > chosen_from:
        raise ValueError(
            f"num_experts_per_tok is {mixture.num_active}, but the topk_group {mixture.num_active_groups} of the "
            f"n_group {mixture.num_groups} groups have {chosen_from} experts together; it must be at most as many"
        )
    return {"mixture": mixture, "dense_layers": dense}
