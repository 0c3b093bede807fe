"""What a family's rows say of its layers. A row is recognised by its parameter of Megatron, which has one name in all
families; the names of checkpoints differ."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from megatron_rl.models.rule import Rule
from megatron_rl.types import Attention, Layer, Mlp

ROUTER_BIAS = "mlp.router.expert_bias"


class Traits:
    """Properties of a family that follow from its rows."""

    __slots__ = ()
    attention: tuple[Rule, ...]
    linear: tuple[Rule, ...]
    dense: tuple[Rule, ...]
    mixture: tuple[Rule, ...]

    def is_float32(self, name: str) -> bool:
        """Whether trainer and engine hold an HF tensor, or Megatron's parameter, in float32 for every model.dtype."""
        return any(rule.float32 for rule in self._rules_of(name))

    def is_sent_as_float32(self, hf_name: str) -> bool:
        """Whether the engine holds an HF tensor in float32 for every dtype of the model."""
        return any(rule.is_sent_as_float32 for rule in self._rules_of(hf_name))

    def has_negated_exp(self, name: str) -> bool:
        """Whether the engine holds -exp(x) of a parameter of Megatron, or of an HF tensor."""
        return any(rule.negated_exp for rule in self._rules_of(name))

    def _rules_of(self, name: str) -> list[Rule]:
        return [r for r in self.rules if name.endswith(tuple(f".{n}" for n in (r.megatron, *(t.name for t in r.hf))))]

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rows of all kinds of layers."""
        return (*self.attention, *self.linear, *self.dense, *self.mixture)

    def is_router_bias(self, hf_name: str) -> bool:
        """Whether an HF tensor is the bias of a router: it has no gradient, and float32 in every form."""
        names = [tensor.name for rule in self.rules if rule.megatron == ROUTER_BIAS for tensor in rule.hf]
        return any(hf_name.endswith(f".{name}") for name in names)

    def layer(self, attention: Attention, mlp: Mlp) -> Layer:
        """A layer of these blocks, with what rows say of them. If a row has a condition, the block says it already."""
        dims = {rule.megatron: rule.hf[0].dims for rule in self.rules}
        chosen = {rule.megatron for rule in self.rules if rule.when is not None}
        of = "self_attention."
        traits: dict[tuple[str, str], dict[tuple[str, ...], Any]] = {
            ("norms", f"{of}q_layernorm.weight"): {("head",): "head", ("q",): "full"},
            ("qkv_bias", f"{of}linear_qkv.bias"): {("q",): True},
            ("output_bias", f"{of}linear_proj.bias"): {("hidden",): True},
            ("gated", f"{of}linear_qkv.weight"): {("q_and_gate", "hidden"): True},
            ("sinks", f"{of}core_attention.softmax_offset"): {("heads",): True},
            ("router_bias", ROUTER_BIAS): {("experts",): True},
            ("linear_bias", "mlp.router.bias"): {("experts",): True},
        }

        def complete(block: Any) -> Any:
            known = {field.name: field.default for field in fields(block)}
            found = {
                trait: values.get(dims.get(row, ()), known[trait])
                for (trait, row), values in traits.items()
                if trait in known and row not in chosen
            }
            return replace(block, **found)

        zero_centred = any(rule.zero_centred for rule in self.rules)
        after, before = ("post_mlp_layernorm.weight" in dims, "pre_mlp_layernorm.weight" in dims)
        return Layer(complete(attention), complete(mlp), after, after and before, zero_centred)
