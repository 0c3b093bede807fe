"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) over a packed row, in plain PyTorch, in the place of Megatron's
self-attention.

A head has a state S, a matrix of the sizes of B and of x. With the step size d, the rate A < 0 of the head, and B and C
of its group, each token changes and reads it, and D x goes past it:

    S_t = exp(d_t A) S_t-1 + B_t (d_t x_t)^T        y_t = S_t^T C_t + D x_t

The tokens of a chunk do this together (section 6 of the paper). With c_i = A (d_1 + .. + d_i) inside the chunk and the
state S before it, y_i = exp(c_i) S^T C_i + sum_{j<=i} exp(c_i - c_j) (C_i B_j) d_j x_j + D x_i. Only the states are
computed one chunk after another, in the steps of delta_net.py. No state and no convolution goes over a boundary of
sequences. The same code runs on GPUs, where it has not been run.

Megatron-Core's own layer needs libraries for GPUs. This one has its names: one projection of the input to the gate z,
x, B, C and d; a short convolution with a bias over x, B and C; the recurrence; a norm of y silu(z) over the heads of
each group; a projection. TP splits the groups, and each rank holds the rows, channels and numbers of its own ones. With
context parallelism a rank computes a part of its groups for whole sequences (exchange.py). `A_log` is float32 for every
dtype of the model, as in vLLM.

Invariants (tests/unit/actor, tests/ranks): values and gradients equal the recurrence in float64, sequence by sequence;
logits and whole gradients equal transformers' in every layout.

Shape letters: T packed tokens, P chunks of C tokens, G groups, H heads, R = H / G, N the size of B and of C, X the size
of x of a head, F channels, W the width of the convolution.
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
from megatron_rl.actor.delta_net import DeltaPlan, causal_convolution
from megatron_rl.models import Box, slices
from megatron_rl.types.mamba import Mamba2


def write_negated_exp(log: Tensor, box: Box, out: Tensor) -> None:
    """Write -exp of a rectangle of a parameter, as vLLM computes it while it loads, into a tensor of its extents."""
    out.copy_(-torch.exp(log[slices(box)].float()))


class MambaMixer(torch.nn.Module):
    """The module `self_attention` of a layer."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        mamba: Mamba2,
        pg_collection: ProcessGroupCollection,
        **unused: object,
    ) -> None:
        super().__init__()
        self.mamba, group = mamba, pg_collection.tp
        self.num_groups, self.num_heads = mamba.num_key_heads // group.size(), mamba.num_value_heads // group.size()
        common: dict[str, Any] = dict(config=config, bias=False, skip_bias_add=True, is_expert=False, tp_group=group)
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            mamba.sizes()["mamba_input"],
            init_method=config.init_method,
            gather_output=False,
            tp_comm_buffer_name="fc1",
            **common,
        )
        channels = mamba.channels // group.size()
        place: dict[str, Any] = dict(device=platform.device(), dtype=config.params_dtype)
        self.conv1d = torch.nn.Conv1d(
            channels, channels, mamba.convolution, groups=channels, **place
        )  # its forward is never called
        self.dt_bias = torch.nn.Parameter(torch.ones(self.num_heads, **place))
        self.A_log = torch.nn.Parameter(torch.zeros(self.num_heads, **place))
        self.D = torch.nn.Parameter(torch.ones(self.num_heads, **place))
        self.norm = GroupNorm(config, self.num_heads * mamba.value_size, self.num_groups)
        for split in (self.conv1d.weight, self.conv1d.bias, self.dt_bias, self.A_log, self.D, self.norm.weight):
            assert split is not None
            set_tensor_model_parallel_attributes(split, is_parallel=True, dim=0, stride=1)
        self.out_proj = RowParallelLinear(
            mamba.value_width,
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
        width = self.num_heads * self.mamba.value_size
        gate, inputs = torch.split(projected.squeeze(1), [width, projected.shape[-1] - width], -1)
        of_groups, own = self._by_group(inputs), slice(0, self.num_groups)
        if exchange is not None:
            of_groups, count = exchange.to_heads(of_groups), self.num_groups // exchange.context.size
            own = slice(exchange.context.rank * count, (exchange.context.rank + 1) * count)
        out = self._groups(of_groups, own, plan)
        if exchange is not None:
            out = exchange.to_tokens(out)
        output, _ = self.out_proj(self.norm(out.flatten(1), gate).unsqueeze(1))
        return output, None

    @property
    def _sizes(self) -> list[int]:
        """The channels of x, B and C of a group."""
        ratio = self.num_heads // self.num_groups
        return [ratio * self.mamba.value_size, self.mamba.key_size, self.mamba.key_size]

    def _by_group(self, inputs: Tensor) -> Tensor:
        """[T, G, R X + 2 N + R] from the rows behind the gate: x, B, C and the step sizes of each group."""
        sizes = [*self._sizes, self.num_heads // self.num_groups]
        parts = torch.split(inputs, [self.num_groups * size for size in sizes], 1)
        return torch.cat([torch.unflatten(part, 1, (self.num_groups, -1)) for part in parts], -1)

    def _groups(self, of_groups: Tensor, own: slice, plan: DeltaPlan) -> Tensor:
        """The outputs of the heads of some groups for whole sequences, [T, heads, X].

        Args:
            of_groups: see `_by_group`, of these groups.
            own: the interval of the groups.
        """
        size, ratio = self.mamba.value_size, self.num_heads // self.num_groups
        heads = slice(own.start * ratio, own.stop * ratio)
        channels, steps = torch.split(of_groups, [sum(self._sizes), ratio], -1)
        assert self.conv1d.bias is not None
        weight, bias = (self._by_channel(x, own) for x in (self.conv1d.weight.squeeze(1), self.conv1d.bias))
        convolved = causal_convolution(channels.flatten(1), weight, plan, bias)
        x, b, c = torch.split(convolved.view(channels.shape), self._sizes, -1)
        x = x.reshape(len(x), -1, size)
        work = torch.promote_types(x.dtype, torch.float32)
        step = F.softplus(steps.flatten(1).to(work) + self.dt_bias[heads].to(work))
        return state_space(c, b, x, step, -self.A_log[heads].to(work).exp(), self.D[heads], plan)

    def _by_channel(self, x: Tensor, own: slice) -> Tensor:
        """The rows of the convolution of some groups, in the order of `_by_group`: [channels, ...]."""
        parts = torch.split(x, [self.num_groups * size for size in self._sizes])
        return torch.cat([torch.unflatten(part, 0, (self.num_groups, -1))[own] for part in parts], 1).flatten(0, 1)


class GroupNorm(torch.nn.Module):
    """RMSNorm of the heads of each group together, after a multiplication by the SiLU of a gate."""

    def __init__(self, config: TransformerConfig, width: int, num_groups: int) -> None:
        super().__init__()
        self.eps, self.num_groups = config.layernorm_epsilon, num_groups
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=config.params_dtype, device=platform.device()))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        work = torch.promote_types(x.dtype, torch.float32)
        gated = torch.unflatten(x.to(work) * F.silu(gate.to(work)), -1, (self.num_groups, -1))
        normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        weighted: Tensor = normed.flatten(-2) * self.weight
        return weighted.to(x.dtype)


def state_space(
    c_TGN: Tensor, b_TGN: Tensor, x_THX: Tensor, step_TH: Tensor, rate_H: Tensor, skip_H: Tensor, plan: DeltaPlan
) -> Tensor:
    """The outputs y of all heads, [T, H, X] in the dtype of x. The state has at least float32.

    Args:
        c_TGN, b_TGN: group g belongs to the heads g R .. (g + 1) R - 1.
        step_TH: d, above 0, like the rate in at least float32.
        rate_H: A.
        skip_H: D.
    """
    work, num_groups, size = step_TH.dtype, b_TGN.shape[1], x_THX.shape[-1]

    def chunked(x_T: Tensor, *heads: int) -> Tensor:
        """[P, *heads, C, ...]; zeros behind the last token of a sequence, which write nothing and decay nothing."""
        x_T = F.pad(x_T, (0, 0) * (x_T.dim() - 1) + (0, 1))
        x_PC = x_T.index_select(0, plan.token_PC.flatten()).view(*plan.token_PC.shape, *heads, *x_T.shape[2:])
        return x_PC.movedim(1, 1 + len(heads)).to(work).contiguous()

    heads = num_groups, x_THX.shape[1] // num_groups
    query_PGCN, key_PGCN = chunked(c_TGN, num_groups), chunked(b_TGN, num_groups)
    value_PGRCX = chunked(x_THX.to(work) * step_TH[..., None], *heads)
    total = chunked(step_TH * rate_H, *heads).cumsum(-1)  # c
    later = torch.ones(2 * (total.shape[-1],), dtype=torch.bool, device=total.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    inside = (between * (query_PGCN @ key_PGCN.mT)[:, :, None]) @ value_PGRCX
    left = (total[..., -1:] - total).exp()[..., None]  # what is left at the chunk's end
    # The heads of a group lie next to each other in the columns of its states.
    written = key_PGCN.mT @ (left * value_PGRCX).movedim(2, 3).flatten(-2)
    written_PGNRX = torch.unflatten(written, -1, (-1, size))
    end = total[:, :, None, :, -1:].exp()

    state, first, states = written_PGNRX.new_zeros(plan.counts[0], *written_PGNRX.shape[1:]), 0, []
    for count in plan.counts:
        now = slice(first, first + count)
        states.append(state[:count])
        state = torch.addcmul(written_PGNRX[now], end[now], state[:count])
        first += count
    read = torch.unflatten(query_PGCN @ torch.cat(states).flatten(-2), -1, (-1, size))
    out_PGCRX = inside.movedim(2, 3) + total.movedim(2, 3).exp()[..., None] * read
    out_PC = out_PGCRX.movedim(1, 2).reshape(-1, *x_THX.shape[1:])
    return torch.addcmul(out_PC.index_select(0, plan.place_T), x_THX, skip_H[:, None]).to(x_THX.dtype)
