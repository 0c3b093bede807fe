"""The gated delta rule over a packed row (Gated Delta Networks, Yang et al. 2024, arXiv:2412.06464), in plain PyTorch.

A head has a state S, a matrix that maps keys to values. With the decay exp(g), the strength b, and q and k of length 1,
each token changes and reads it:

    S_t = exp(g_t) S_t-1 + b_t k_t (v_t - exp(g_t) S_t-1^T k_t)^T        o_t = S_t^T q_t / sqrt(D)

The tokens of a chunk do this together. With c_i = g_1 + .. + g_i inside the chunk, what they write, u_i, solves the
triangular system (the WY form, section 3.3 of the paper)

    u_i + sum_{j<i} b_i exp(c_i - c_j) (k_i k_j) u_j = b_i v_i - b_i exp(c_i) S^T k_i

for the state S before the chunk, and o_i = exp(c_i) S^T q_i + sum_{j<=i} exp(c_i - c_j) (q_i k_j) u_j. Only the states
are computed one chunk after another. The chunks of a row are in the order of these steps: first the first chunk of each
sequence, longest sequence first, then the second chunks, and so on, so each step is one interval of them, and a row of
256 short answers takes as many steps as its longest one. No state and no convolution goes over a boundary of sequences.

On GPUs flash-linear-attention's kernels (the package fla-core) take this code's place, and a model is refused without
them: this loop starts some kernels for each chunk of the longest sequence, in each layer. They have not been run on a
GPU. Triton's interpreter ran fla-core 0.6.0 on a CPU in fp32: values and gradients were within 3e-6 of this code's.

Invariants (tests/unit/actor): values and gradients equal the recurrence in float64, sequence by sequence, for every
length and chunk size; they equal transformers'.

Shape letters: T packed tokens, S sequences, P chunks of C tokens, K key heads, V value heads, R = V / K value heads of
each key head, D and E the sizes of a key and of a value, F channels, W the width of the convolution.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.actor import platform

CHUNK = 64
"""The number of tokens of a chunk; fewer if no sequence of the row is so long."""
EPSILON = 1e-6
"""It is added to the squared length of a query or key before the root, as transformers and its kernels do."""
HAS_KERNELS = importlib.util.find_spec("fla") is not None


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """What depends only on the lengths of a row's sequences; all layers share it."""

    offset_T: Tensor
    """int64: how many tokens of its sequence are before each token."""
    token_PC: Tensor
    """int64: the packed position of each token of a chunk; T where the chunk ends early."""
    place_T: Tensor
    """int64: the place of each packed position among the tokens of all chunks."""
    counts: tuple[int, ...]
    """How many chunks each step has: sequences that have a first chunk, a second chunk, and so on. It never grows."""
    starts_S1: Tensor
    """int64 [S + 1]: where the sequences begin, and the end of the row."""


def plan_delta(lengths_S: Tensor, chunk: int = CHUNK) -> DeltaPlan:
    """
    Args:
        lengths_S: the lengths of the sequences in their order, on the CPU.
        chunk: the largest number of tokens of a chunk.
    """
    device = platform.device()
    chunk = min(chunk, int(lengths_S.max()))
    starts_S1 = F.pad(lengths_S.cumsum(0), (1, 0))
    num_tokens = int(starts_S1[-1])
    order_S = torch.argsort(lengths_S, descending=True, stable=True)
    chunks_S = -(-lengths_S[order_S] // chunk)
    counts = [int((chunks_S > step).sum()) for step in range(int(chunks_S[0]))]
    step_P = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    sequence_P = torch.cat([order_S[:count] for count in counts])
    column_C = torch.arange(chunk)
    within_PC = chunk * step_P[:, None] + column_C
    is_token_PC = within_PC < lengths_S[sequence_P, None]
    token_PC = torch.where(is_token_PC, starts_S1[sequence_P, None] + within_PC, num_tokens)
    place_T = torch.empty(num_tokens, dtype=torch.int64)
    place_T[token_PC[is_token_PC]] = is_token_PC.flatten().nonzero().squeeze(1)
    offset_T = torch.arange(num_tokens) - torch.repeat_interleave(starts_S1[:-1], lengths_S)
    return DeltaPlan(offset_T.to(device), token_PC.to(device), place_T.to(device), tuple(counts), starts_S1.to(device))


def require_kernels() -> None:
    """
    Raises:
        ValueError: the model would run on a GPU without kernels.
    """
    if platform.HAS_CUDA and not HAS_KERNELS:
        raise ValueError(
            "linear attention on GPUs needs the kernels of flash-linear-attention, which are not installed here; "
            "install fla-core with the version of requirements/gpu.lock"
        )


def gated_delta_rule(
    query_TKD: Tensor, key_TKD: Tensor, value_TVE: Tensor, decay_TV: Tensor, strength_TV: Tensor, plan: DeltaPlan
) -> Tensor:
    """The outputs of all heads, [T, V, E] in the value's dtype. The state has at least float32.

    Args:
        query_TKD, key_TKD: of any length; they are normalised here. Key head h belongs to the value heads
            h R .. (h + 1) R - 1.
        decay_TV: the logarithm g of the decay, at most 0.
        strength_TV: b, in (0, 1).
    """
    if HAS_KERNELS and value_TVE.is_cuda:
        return _rule_of_kernels(query_TKD, key_TKD, value_TVE, decay_TV, strength_TV, plan)
    work = torch.promote_types(value_TVE.dtype, torch.float32)
    (num_keys, key_size), (num_values, value_size) = query_TKD.shape[1:], value_TVE.shape[1:]

    def chunked(x_T: Tensor, *heads: int) -> Tensor:
        """[P, *heads, C, ...]; zeros behind the last token of a sequence, which write nothing and decay nothing."""
        x_T = torch.cat((x_T, x_T.new_zeros(1, *x_T.shape[1:])))
        x_PC = x_T.index_select(0, plan.token_PC.flatten()).view(*plan.token_PC.shape, *heads, *x_T.shape[2:])
        return x_PC.movedim(1, 1 + len(heads)).to(work)

    groups = num_keys, num_values // num_keys
    query = chunked(_normalised(query_TKD.to(work)) * key_size**-0.5, num_keys, 1)
    key = chunked(_normalised(key_TKD.to(work)), num_keys, 1)
    value = chunked(value_TVE, *groups)
    strength = chunked(strength_TV, *groups)[..., None]
    total = chunked(decay_TV.to(work), *groups).cumsum(-1)  # c
    later = torch.ones(2 * (total.shape[-1],), dtype=torch.bool, device=total.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()

    system = strength * between * (key @ key.mT)
    wanted = torch.cat((strength * value, strength * total.exp()[..., None] * key), -1)
    # It takes the diagonal for ones, and does not read what is above it.
    written, read = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True).split(
        (value_size, key_size), -1
    )
    scores = between * (query @ key.mT)
    query = query * total.exp()[..., None]
    left = (total[..., -1:] - total).exp()[..., None]  # what is left at the chunk's end
    key, end = (key * left).mT, total[..., -1, None, None].exp()

    state, first, outputs = key.new_zeros(plan.counts[0], *groups, key_size, value_size), 0, []
    for count in plan.counts:
        now, before = slice(first, first + count), state[:count]
        update = written[now] - read[now] @ before
        outputs.append(query[now] @ before + scores[now] @ update)
        state = end[now] * before + key[now] @ update
        first += count
    out_PC = torch.cat(outputs).movedim(3, 1).reshape(-1, num_values, value_size)
    return out_PC.index_select(0, plan.place_T).to(value_TVE.dtype)


def causal_convolution(x_TF: Tensor, weight_FW: Tensor, plan: DeltaPlan, bias_F: Tensor | None = None) -> Tensor:
    """The SiLU of a convolution along each sequence, each channel alone: entry W - 1 of a channel's weights belongs to
    the token itself, entry W - 2 to the one before it. Before its first token a sequence has zeros. [T, F]."""
    if HAS_KERNELS and x_TF.is_cuda and bias_F is None:
        return _convolution_of_kernels(x_TF, weight_FW, plan)
    work = torch.promote_types(x_TF.dtype, torch.float32)
    x, weight = x_TF.to(work), weight_FW.to(work)
    y = x * weight[:, -1] if bias_F is None else torch.addcmul(bias_F.to(work), x, weight[:, -1])
    for back in range(1, min(weight.shape[1], len(x))):
        earlier = F.pad(x[:-back], (0, 0, back, 0)).masked_fill((plan.offset_T < back)[:, None], 0.0)
        y = torch.addcmul(y, earlier, weight[:, -1 - back])
    return F.silu(y).to(x_TF.dtype)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def _rule_of_kernels(
    query_TKD: Tensor, key_TKD: Tensor, value_TVE: Tensor, decay_TV: Tensor, strength_TV: Tensor, plan: DeltaPlan
) -> Tensor:
    """`gated_delta_rule` by flash-linear-attention's kernels."""
    rule: Any = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    out, _ = rule(
        query_TKD.to(value_TVE.dtype)[None],
        key_TKD.to(value_TVE.dtype)[None],
        value_TVE[None],
        g=decay_TV.float()[None],
        beta=strength_TV[None],
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=plan.starts_S1,
    )
    whole: Tensor = out[0]
    return whole


def _convolution_of_kernels(x_TF: Tensor, weight_FW: Tensor, plan: DeltaPlan) -> Tensor:
    """`causal_convolution` by flash-linear-attention's kernel."""
    convolve: Any = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
    out, _ = convolve(x_TF[None], weight=weight_FW, activation="silu", cu_seqlens=plan.starts_S1)
    whole: Tensor = out[0]
    return whole
