"""Causal attention over a packed row, for the layers that run without Transformer Engine.

On GPUs a row in bf16 is one kernel call (varlen.py). Other rows are padded: sequences of similar length share one
kernel call. Causality hides the padding on the right, so no mask is needed, and a row of 256 short answers takes a few
kernel calls instead of 256. With a sliding window of W tokens, only the first W queries of a sequence are computed like
this. The others are cut into blocks of W queries, each with the 2 W - 1 keys that its queries can see, so that the cost
grows with the length times W. Sequences that share the prompt of another one see its tokens there: the kernel calls of
such a prompt have its keys before the sequences' own. Rotary embeddings are applied here too, with positions that
restart at each sequence, because Megatron's own code for packed rows loops over the sequences. Everything that depends
only on the lengths is computed once per micro-batch (`PackedSequences`) and shared by all layers.

With context parallelism a rank has a part of each sequence, and `context.py` computes the attention.

Invariants (tests/unit/actor): output and gradients equal plain attention, sequence by sequence.

Shape letters: T packed tokens, S sequences, P blocks of a row (a block is a whole sequence or a part of one), B blocks
of one kernel call, L queries and K keys of each of them, N query heads, G key-value heads, D head size, R the rotated
dims of a head, W the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_rl.actor import platform
from megatron_rl.actor.context import ContextRank, RingPlan, plan_ring, ring_attention
from megatron_rl.actor.delta_net import DeltaPlan, plan_delta
from megatron_rl.actor.dot_product import dot_product_attention
from megatron_rl.actor.exchange import HeadExchange, plan_exchange
from megatron_rl.actor.packing import RoutedRow, SharedPrompts
from megatron_rl.actor.rotary import AxialPositions, rotation
from megatron_rl.actor.sinks import attend_with_sinks
from megatron_rl.actor.tower import SeenImages
from megatron_rl.actor.varlen import VarlenRow, attend_varlen, plan_varlen
from megatron_rl.types import LatentAttention, ModelShape, Scaling, SoftmaxAttention

MAX_PADDING = 0.2
"""The largest share of padded queries in one kernel call."""


@dataclass(frozen=True, slots=True)
class AttentionBlocks:
    """Blocks of similar length that share one kernel call."""

    query_BL: Tensor
    """int64: the packed position of every query. Padding repeats the last position of its block."""
    key_BK: Tensor
    """int64: the packed position of every key."""
    mask_LK: Tensor | None
    """True where a query sees a key. None: the keys are the queries' own positions, and a query sees those up to
    itself."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    cos_T: Tensor
    """float32, [T, 1, R]; `sin_T` too."""
    sin_T: Tensor
    calls: tuple[AttentionBlocks, ...] = ()
    unpad_T: Tensor | None = None
    """int64: the index of each packed position among the queries of all calls, padding included."""
    ring: RingPlan | None = None
    """The plan of the ring takes the place of `calls` with context parallelism."""
    varlen: VarlenRow | None = None
    """The row takes the place of `calls` where one kernel call does all of it."""


@dataclass
class PackedSequences(PackedSeqParams):
    """What the layers need to know about one packed row. Megatron passes the object on to each of them unchanged.
    Transformer Engine's attention reads Megatron's own fields, and ours the plans."""

    full: AttentionPlan | None = None
    """The plan of the layers that see all earlier tokens. Transformer Engine's layers need it for the angles of latent
    attention, and of models that see images."""
    sliding: AttentionPlan | None = None
    """The plan of the layers with a sliding window, if the model has any."""
    routed: RoutedRow | None = None
    """What the rank's routers know of the tokens that they see, if the model has experts."""
    delta: DeltaPlan | None = None
    """The plan of the layers with linear attention, if the model has any; and `exchange` with context parallelism."""
    exchange: HeadExchange | None = None
    images: SeenImages | None = None
    """What the tower has computed for the rank's tokens, on the first pipeline stage."""


def can_share_prompts(shape: ModelShape, fused: bool, context_size: int) -> bool:
    """Whether these layers let sequences see a prompt that another one holds. What the others would need:

    Linear attention: a prompt would be a sequence of its own, from whose last state and last convolved tokens all its
    answers start, and their gradients would be added up there. The kernels for GPUs would run twice a layer.
    Context parallelism: in each turn of the ring a rank's chunks of an answer would also see the chunks of the prompt
    that it holds. A chunk's work would then depend on its prompt, and another division of the row would balance it.
    Transformer Engine: it would get the keys of varlen.py and a causal mask that ends at each sequence's last key.
    Our angles would take the place of Megatron's, whose positions begin at 0 in each sequence.
    """
    return not fused and context_size == 1 and not shape.has_linear_attention


def packed_sequences(
    lengths_S: Tensor,
    shape: ModelShape,
    fused: bool,
    context: ContextRank | None = None,
    shared: SharedPrompts | None = None,
    varlen: bool = False,
    position_3T: Tensor | None = None,
) -> PackedSequences:
    """What the layers need to know about a packed row.

    Args:
        lengths_S: the lengths of the sequences in their order, on the CPU.
        fused: whether the layers are Transformer Engine's.
        context: the rank's place in its context group; None: it has all tokens of the row.
        shared: the prompts that sequences share; only for layers that `can_share_prompts`.
        varlen: whether attention is one kernel call for the whole row (varlen.py), without a context group.
        position_3T: the positions of a row with images.
    """
    turns = None if position_3T is None or shape.vision is None else AxialPositions(position_3T, shape.vision.axes)
    if not fused:

        def plan(block: SoftmaxAttention | LatentAttention) -> AttentionPlan:
            turned, scaling, window = (lengths_S, block.rotary_dim, block.rope.theta), block.rope.scaling, block.window
            if varlen and context is None:
                angles = _rotation_of(*turned, scaling, None, shared, turns)
                return AttentionPlan(*angles, varlen=plan_varlen(lengths_S, window, shared))
            plan = plan_attention(*turned, scaling=scaling, window=window, context=context, shared=shared)
            if turns is None:
                return plan
            cos_T, sin_T = _rotation_of(*turned, scaling, context, shared, turns)
            return replace(plan, cos_T=cos_T, sin_T=sin_T)

        sliding = next((one for one in shape.attentions if isinstance(one, SoftmaxAttention) and one.window), None)
        linear = shape.has_linear_attention
        return PackedSequences(
            qkv_format="thd",
            full=plan(shape.attention),
            sliding=plan(sliding) if sliding else None,
            delta=plan_delta(lengths_S) if linear else None,
            exchange=plan_exchange(lengths_S, context) if linear and context is not None else None,
        )
    starts = F.pad(lengths_S.cumsum(0), (1, 0)).to(device=platform.device(), dtype=torch.int32)
    longest = int(lengths_S.max())
    own = None
    if not (attention := shape.attention).is_rotated_by_megatron or shape.vision is not None:
        turned, rope = (lengths_S, attention.rotary_dim), attention.rope
        own = AttentionPlan(*_rotation_of(*turned, rope.theta, rope.scaling, context, turns=turns))
    return PackedSequences(
        qkv_format="thd",
        full=own,
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def plan_attention(
    lengths_S: Tensor,
    rotary_dim: int,
    theta: float,
    *,
    scaling: Scaling | None = None,
    window: int | None = None,
    context: ContextRank | None = None,
    shared: SharedPrompts | None = None,
) -> AttentionPlan:
    """The plan of the attention layers for one row.

    Args:
        rotary_dim: the number of dims of a head that are rotated.
        window: the number of tokens that a token sees, itself included; None means all before it.
        context: see `packed_sequences`, like `shared`.
    """
    device = platform.device()
    cos_T, sin_T = _rotation_of(lengths_S, rotary_dim, theta, scaling, context, shared)
    if context is not None:
        return AttentionPlan(cos_T, sin_T, ring=plan_ring(lengths_S, context, window))
    starts_S = F.pad(lengths_S.cumsum(0), (1, 0))
    calls, unpad_T, offset = [], torch.empty(int(starts_S[-1]), dtype=torch.int64), 0
    for first_P, length_P, reach, prompt in _blocks(starts_S[:-1], lengths_S, window, shared):
        for members in _group_by_length(length_P):
            first_B1, length_B1 = first_P[members, None], length_P[members, None]
            column_L = torch.arange(int(length_B1.max()))
            query_BL = first_B1 + torch.minimum(column_L, length_B1 - 1)
            real_BL = column_L < length_B1
            unpad_T[query_BL[real_BL]] = offset + real_BL.flatten().nonzero().squeeze(1)
            offset += query_BL.numel()
            key_BK, mask_LK = query_BL, None
            if reach is not None:
                column_K = torch.arange(-len(prompt) or 1 - reach, len(column_L))
                key_BK = first_B1 + torch.minimum(column_K, length_B1 - 1)
                key_BK[:, : len(prompt)] = prompt
                back_LK = column_L[:, None] - column_K
                mask_LK = ((back_LK >= 0) & (back_LK < reach)).to(device)
            calls.append(AttentionBlocks(query_BL.to(device), key_BK.to(device), mask_LK))
    return AttentionPlan(cos_T, sin_T, tuple(calls), unpad_T.to(device))


def _rotation_of(
    lengths_S: Tensor,
    rotary_dim: int,
    theta: float,
    scaling: Scaling | None,
    context: ContextRank | None,
    shared: SharedPrompts | None = None,
    turns: AxialPositions | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine for the tokens of the row that the rank has, [T, 1, R] each. Positions restart at each
    sequence."""
    if turns is None:
        starts_S = lengths_S.cumsum(0) - lengths_S
        position_T = torch.arange(int(lengths_S.sum())) - torch.repeat_interleave(starts_S, lengths_S)
        if shared is not None:
            position_T += torch.repeat_interleave(shared.length_S, lengths_S)
    else:
        position_T = turns.position_3T
    if context is not None:
        position_T = position_T[..., context.part(lengths_S)]
    cos_T, sin_T = rotation(position_T, rotary_dim, theta, scaling, turns.axes if turns else ())
    return cos_T.to(platform.device()), sin_T.to(platform.device())


def _blocks(
    first_S: Tensor, length_S: Tensor, window: int | None, shared: SharedPrompts | None
) -> Iterator[tuple[Tensor, Tensor, int | None, Tensor]]:
    """(packed position of the first query, number of queries) of blocks [P] that are alike: how many tokens a query
    sees, if it sees tokens before its block, and the packed positions of these if they are the last ones of a prompt
    and not the ones right before the block."""
    nothing, far = torch.empty(0, dtype=torch.int64), window or int(length_S.sum())
    head_S, alone_S = length_S.clamp(max=far), torch.ones(len(length_S), dtype=torch.bool)
    if shared is not None:
        alone_S = shared.length_S == 0
    yield first_S[alone_S], head_S[alone_S], None, nothing
    if shared is not None:
        for start in shared.start_S[~alone_S].unique().tolist():  # type: ignore[no-untyped-call]  # it has no types
            mine_S = ~alone_S & (shared.start_S == start)
            length = int(shared.length_S[mine_S][0])
            prompt = torch.arange(start + max(0, length + 1 - far), start + length)
            yield first_S[mine_S], head_S[mine_S], far, prompt
    if window is not None:
        yield *_tails(length_S, window), window, nothing


def _tails(lengths_S: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """(packed position of the first query, number of queries) of every block after the first W tokens of a sequence."""
    num_S = (lengths_S - 1) // window
    owner_P = torch.repeat_interleave(torch.arange(len(lengths_S)), num_S)
    index_P = torch.arange(len(owner_P)) - torch.repeat_interleave(num_S.cumsum(0) - num_S, num_S)
    ends_S = lengths_S.cumsum(0)
    first_P = (ends_S - lengths_S)[owner_P] + window * (index_P + 1)
    return first_P, (ends_S[owner_P] - first_P).clamp(max=window)


def _group_by_length(length_P: Tensor) -> list[Tensor]:
    """The indices of the blocks, longest first, in groups that hold at most MAX_PADDING of padding."""
    if not len(length_P):
        return []
    order = torch.argsort(length_P, descending=True, stable=True)
    lengths = length_P[order].tolist()
    cuts, first, tokens = [0], 0, 0
    for i, length in enumerate(lengths):
        tokens += length
        if tokens < (1 - MAX_PADDING) * lengths[first] * (i - first + 1):
            cuts.append(i)
            first, tokens = i, length
    return list(torch.tensor_split(order, cuts[1:]))


class PackedAttention(torch.nn.Module):
    """The module `core_attention` of a Megatron layer: from query, key and value of a packed row to the heads'
    outputs."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **unused: object
    ) -> None:
        super().__init__()
        assert config.attention_dropout == 0, "packed attention has no dropout"
        self.softmax_scale = softmax_scale
        self.slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.register_parameter("softmax_offset", None)
        if config.softmax_type == "learnable":
            num_heads = config.num_attention_heads // parallel_state.get_tensor_model_parallel_world_size()
            sinks = torch.zeros(num_heads, dtype=config.params_dtype, device=platform.device())
            self.softmax_offset = torch.nn.Parameter(sinks)
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        packed_seq_params: PackedSequences,
        **unused: object,
    ) -> Tensor:
        """
        Args:
            query: [T, N, D], before rotation.
            key: [T, G, D], before rotation.
            value: [T, G, D].

        Returns:
            [T, N * D].
        """
        plan = packed_seq_params.sliding if self.slides else packed_seq_params.full
        assert plan is not None, "a row has the plans of all its layers"
        cos_T, sin_T = plan.cos_T.to(query.dtype), plan.sin_T.to(query.dtype)
        rotated_T = rotate(torch.cat((query, key), 1), cos_T, sin_T)
        num_heads = query.shape[1], key.shape[1]
        query, key = rotated_T.split(num_heads, 1)  # type: ignore[no-untyped-call]  # it has no types
        return attend(query, key, value, plan, self.softmax_scale, self.softmax_offset)


class GatedSelfAttention(SelfAttention):
    """Megatron's self-attention with a gate of its output. If several ranks share a KV head, Megatron gives each rank
    its query heads, but the gates of all heads that attend to the KV head."""

    def get_query_key_value_tensors(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        query, key, value, gate = super().get_query_key_value_tensors(*arguments, **options)
        if gate.shape[2] > query.shape[2]:
            sharing = gate.shape[2] // query.shape[2]
            gate = gate.chunk(sharing, 2)[self.pg_collection.tp.rank() % sharing]
        return query, key, value, gate


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    scale: float | None = None,
    sink_N: Tensor | None = None,
) -> Tensor:
    """
    Args:
        query: [T, N, D], rotated.
        key: [T, G, D], rotated.
        value: [T, G, D].
        scale: the factor of the scores; None means 1 / sqrt(D).
        sink_N: the sinks of the heads (sinks.py), if there are any.

    Returns:
        [T, N * D].
    """
    if plan.ring is not None:
        return ring_attention(query, key, value, plan.ring, scale, sink_N)
    if plan.varlen is not None:
        return attend_varlen(query, key, value, plan.varlen, scale, sink_N).flatten(1)
    num_heads, num_groups, head_dim = query.shape[1], key.shape[1], query.shape[2]
    qkv_T = torch.cat((query, key, value), 1)
    outputs = []
    for blocks in plan.calls:
        if blocks.mask_LK is None:
            qkv, sizes = _gather(qkv_T, blocks.query_BL), (num_heads, num_groups, num_groups)
            q, k, v = qkv.split(sizes, dim=1)  # type: ignore[no-untyped-call]  # it has no types
        else:
            q = _gather(qkv_T[:, :num_heads], blocks.query_BL)
            k, v = _gather(qkv_T[:, num_heads:], blocks.key_BK).chunk(2, dim=1)
        if sink_N is not None:
            out = attend_with_sinks(q, k, v, sink_N, blocks.mask_LK, scale)
        else:
            out = dot_product_attention(q, k, v, blocks.mask_LK, scale)
        outputs.append(out.transpose(1, 2).reshape(-1, num_heads * head_dim))
    assert plan.unpad_T is not None, "only a ring has none"
    return torch.cat(outputs).index_select(0, plan.unpad_T)


def _gather(x_T: Tensor, position_BL: Tensor) -> Tensor:
    """Returns [B, heads, L, D]."""
    return x_T.index_select(0, position_BL.flatten()).view(*position_BL.shape, *x_T.shape[1:]).transpose(1, 2)


def rotate(x_T: Tensor, cos_T: Tensor, sin_T: Tensor) -> Tensor:
    """Rotate the two halves of the first R dims of each head. The others stay.

    Args:
        x_T: [T, heads, D].
        cos_T: [T, 1, R], like `sin_T`.
    """
    if cos_T.shape[-1] < x_T.shape[-1]:
        first, rest = x_T.tensor_split([cos_T.shape[-1]], -1)
        return torch.cat((rotate(first, cos_T, sin_T), rest), -1)
    first, second = x_T.chunk(2, dim=-1)
    return x_T * cos_T + torch.cat((-second, first), -1) * sin_T
