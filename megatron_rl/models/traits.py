"""The properties of a family's layers that follow from its rows. A row is recognised by its parameter of Megatron,
which has one name in all families; the names of checkpoints differ."""

from __future__ import annotations

from typing import Literal

from megatron_rl.models.rule import Rule
from megatron_rl.types import ModelShape

ROUTER_BIAS = "mlp.router.expert_bias"


class Traits:
    """Properties of a family that follow from its rows."""

    __slots__ = ()
    attention: tuple[Rule, ...]
    linear: tuple[Rule, ...]
    dense: tuple[Rule, ...]
    mixture: tuple[Rule, ...]

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rows of all kinds of layers."""
        return (*self.attention, *self.linear, *self.dense, *self.mixture)

    def qk_norm(self, shape: ModelShape) -> Literal["none", "head", "full"]:
        """How q and k are normalised. `head`: each head alone; `full`: all heads together; `none`: not at all."""
        known: dict[tuple[str, ...] | None, Literal["head", "full"]] = {("head",): "head", ("q",): "full"}
        # Latent attention has a norm of this name, of the compressed queries.
        return known.get(self._dims("self_attention.q_layernorm.weight", shape), "none")

    def qkv_bias(self, shape: ModelShape) -> bool:
        return self._dims("self_attention.linear_qkv.bias", shape) is not None

    @property
    def gated_attention(self) -> bool:
        """Whether the projection to q also gives gates of the heads' outputs: each head's rows are [q ; gate]."""
        return self._dims("self_attention.linear_qkv.weight") == ("q_and_gate", "hidden")

    @property
    def sinks(self) -> bool:
        """Whether each head's softmax has one more logit, which is learnt and has no value (arXiv:2309.17453)."""
        return self._dims("self_attention.core_attention.softmax_offset") is not None

    @property
    def linear_bias(self) -> bool:
        """Whether every linear layer of attention and MLP has a bias, and the router too."""
        return self._dims("self_attention.linear_proj.bias") is not None

    @property
    def zero_centred_norms(self) -> bool:
        """Whether the weights of norms are stored minus 1, but not of the norms of linear attention's outputs."""
        return any(rule.zero_centred for rule in self.rules)

    @property
    def post_norm(self) -> bool:
        """Whether the norms are after attention and MLP, before the residual sum, instead of in front of them."""
        return self._dims("post_mlp_layernorm.weight") is not None

    @property
    def router_bias(self) -> bool:
        """Whether the router adds a bias to the scores when it chooses experts. The bias is updated from the experts'
        load, not by a gradient (arXiv:2408.15664)."""
        return self._dims(ROUTER_BIAS) is not None

    def is_router_bias(self, hf_name: str) -> bool:
        """Whether an HF tensor is the bias of a router: it has no gradient, and float32 in every form."""
        names = [tensor.name for rule in self.rules if rule.megatron == ROUTER_BIAS for tensor in rule.hf]
        return any(hf_name.endswith(f".{name}") for name in names)

    def _dims(self, megatron: str, shape: ModelShape | None = None) -> tuple[str, ...] | None:
        """The dims of the first HF tensor of a parameter of a layer, in one model or, without `shape`, in any model."""
        rules = [rule for rule in self.rules if shape is None or rule.when(shape)]
        return next((rule.hf[0].dims for rule in rules if rule.megatron == megatron), None)
