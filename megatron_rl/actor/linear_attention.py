"""The attention of layers with a gated delta rule (Qwen3-Next, Qwen3.5), in the place of Megatron's self-attention.

Megatron-Core's own layer takes no packed rows, no context parallelism, and needs a library for GPUs. This one has its
names: one fused projection of the input to q, k, v, the gate z, the strength and the decay; a short convolution over q,
k and v; the rule (delta_net.py); a norm of each head's output, gated by z; a projection of all heads.

TP splits the heads, and each rank holds the rows, channels and numbers of its own ones. All heads of all ranks share
the weight of the output's norm, and each rank has the gradient of its heads only, with and without sequence
parallelism. So this gradient is summed over the ranks in the backward pass, and Megatron must not sum it again. With
context parallelism a rank computes a part of its heads for whole sequences (exchange.py), with a part of the weights;
the sum of the gradients over the context group has them all. `A_log` is float32 for every dtype of the model, as in
vLLM.

Invariants (tests/ranks): logits and whole gradients equal transformers' in every layout.

Shape letters: T packed tokens of a context rank, K key heads and V value heads of a tensor-parallel rank, k and v of
them on a context rank, R = V / K, D and E the sizes of a key and of a value, W the width of the convolution.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.actor import platform
from megatron_rl.actor.attention import PackedSequences
from megatron_rl.actor.delta_net import causal_convolution, gated_delta_rule, require_kernels
from megatron_rl.actor.gradient_sum import copied_to_all_ranks
from megatron_rl.actor.norm import rms_norm
from megatron_rl.types import DeltaNet


class DeltaAttention(torch.nn.Module):
    """The module `self_attention` of a layer."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        delta: DeltaNet,
        pg_collection: ProcessGroupCollection,
        **unused: object,
    ) -> None:
        super().__init__()
        require_kernels()
        self.delta, group = delta, pg_collection.tp
        self.num_keys, self.num_values = delta.num_key_heads // group.size(), delta.num_value_heads // group.size()
        common: dict[str, Any] = dict(config=config, bias=False, skip_bias_add=True, is_expert=False, tp_group=group)
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            2 * delta.key_width + 2 * delta.value_width + 2 * delta.num_value_heads,
            init_method=config.init_method,
            gather_output=False,
            tp_comm_buffer_name="fc1",
            **common,
        )
        channels = (2 * delta.key_width + delta.value_width) // group.size()
        place: dict[str, Any] = dict(device=platform.device(), dtype=config.params_dtype)
        self.conv1d = torch.nn.Conv1d(
            channels, channels, delta.convolution, groups=channels, bias=False, **place
        )  # its forward is never called
        self.dt_bias = torch.nn.Parameter(torch.ones(self.num_values, **place))
        self.A_log = torch.nn.Parameter(torch.zeros(self.num_values, **place))
        for split in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(split, is_parallel=True, dim=0, stride=1)
        self.out_norm = GatedNorm(config, delta.value_size)
        self.out_proj = RowParallelLinear(
            delta.value_width,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            tp_comm_buffer_name="fc2",
            **common,
        )

    def forward(
        self, hidden_states: Tensor, *unused: object, packed_seq_params: PackedSequences, **others: object
    ) -> tuple[Tensor, None]:
        """
        Args:
            hidden_states: [T, 1, hidden size], with sequence parallelism [T / TP, 1, hidden size].
            packed_seq_params: the plans of the row; Megatron's other arguments are not used.
        """
        plan, exchange = packed_seq_params.delta, packed_seq_params.exchange
        assert plan is not None, "a row has the plans of all its layers"
        projected, _ = self.in_proj(hidden_states)
        of_heads, gate = self._by_key_head(projected.squeeze(1))
        own = slice(0, self.num_keys)
        if exchange is not None:
            of_heads, count = exchange.to_heads(of_heads), self.num_keys // exchange.context.size
            own = slice(exchange.context.rank * count, (exchange.context.rank + 1) * count)
        out = self._heads(of_heads, own, packed_seq_params)
        if exchange is not None:
            out = exchange.to_tokens(out)
        normed = self.out_norm(out, gate)
        output, _ = self.out_proj(normed.flatten(1).unsqueeze(1))
        return output, None

    def _by_key_head(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """What belongs to each key head: q, k, R values, R strengths, R decays, [T, K, 2 D + R E + 2 R]; and the gate,
        [T, V, E]."""
        delta = self.delta
        ratio = self.num_values // self.num_keys
        values = ratio * delta.value_size
        sizes = [delta.key_size, delta.key_size, values, values], [ratio, ratio]
        widths = [self.num_keys * sum(group) for group in sizes]
        if delta.interleaved:  # each key head's rows follow each other
            qkvz, ba = (torch.unflatten(x, 1, (self.num_keys, -1)) for x in torch.split(projected, widths, 1))
            query, key, value, gate = torch.split(qkvz, sizes[0], -1)
            strength, decay = torch.split(ba, sizes[1], -1)
        else:
            parts = torch.split(projected, [self.num_keys * size for group in sizes for size in group], 1)
            query, key, value, gate, strength, decay = (torch.unflatten(x, 1, (self.num_keys, -1)) for x in parts)
        of_heads = torch.cat((query, key, value, strength, decay), -1)
        return of_heads, gate.reshape(len(gate), self.num_values, delta.value_size)

    def _heads(self, of_heads: Tensor, own: slice, row: PackedSequences) -> Tensor:
        """The outputs of some heads for whole sequences, [T, v, E].

        Args:
            of_heads: see `_by_key_head`, of these heads.
            own: the interval of the key heads.
        """
        assert row.delta is not None, "a row has the plans of all its layers"
        delta, count = self.delta, own.stop - own.start
        ratio = self.num_values // self.num_keys
        values = ratio * delta.value_size
        channels, strength, decay = torch.split(of_heads, [2 * delta.key_size + values, ratio, ratio], -1)
        channels = torch.unflatten(
            causal_convolution(channels.flatten(1), self._kernel(own), row.delta), 1, (count, -1)
        )
        query, key, value = torch.split(channels, [delta.key_size, delta.key_size, values], -1)
        rate, bias = (x.view(self.num_keys, ratio)[own].flatten() for x in (self.A_log, self.dt_bias))
        return gated_delta_rule(
            query,
            key,
            value.reshape(len(value), count * ratio, delta.value_size),
            -rate.float().exp() * F.softplus(decay.flatten(1).float() + bias.float()),
            strength.flatten(1).sigmoid(),
            row.delta,
        )

    def _kernel(self, own: slice) -> Tensor:
        """The weights of the convolution of some key heads, in the order of `_by_key_head`: [channels, W]."""
        widths = [self.num_keys * self.delta.key_size] * 2 + [self.num_values * self.delta.value_size]
        parts = torch.split(self.conv1d.weight.squeeze(1), widths)
        return torch.cat([torch.unflatten(x, 0, (self.num_keys, -1))[own] for x in parts], 1).flatten(0, 1)


class GatedNorm(torch.nn.Module):
    """RMSNorm of each head's output, multiplied by the SiLU of a gate."""

    def __init__(self, config: TransformerConfig, hidden_size: int) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=platform.device()))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        weight = copied_to_all_ranks(self.weight)
        return (rms_norm(x, weight, self.eps) * F.silu(gate.float())).to(x.dtype)
