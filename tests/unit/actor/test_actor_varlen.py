"""Attention of a whole row by the variable-length kernel. No CPU has it, so its documented semantics in float64 take
its place behind torch's own operators, which check the arguments."""

from __future__ import annotations

import pytest
import torch
from test_actor_attention import THETA, plain_attention

import megatron_rl.actor  # noqa: F401  must come before Megatron, whose import warnings it silences
from megatron_rl.actor.attention import AttentionPlan, attend, plan_attention, rotate
from megatron_rl.actor.dot_product import dot_product_attention
from megatron_rl.actor.packing import SharedPrompts
from megatron_rl.actor.varlen import attend_varlen, plan_varlen


def sequences(query, key, starts, key_starts, is_causal, left, right):
    """The queries, keys and hidden pairs of each sequence. The last query is aligned with the last key."""
    bounds = (x.tolist() for x in (starts, key_starts))
    (first, last), (key_first, key_last) = ((x[:-1], x[1:]) for x in bounds)
    for a, b, c, d in zip(first, last, key_first, key_last, strict=True):
        back = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)
        hidden = back < (0 if is_causal else -right)
        yield slice(a, b), slice(c, d), hidden if is_causal else hidden | (back > left)


def scores_of(query, key, queries, keys, hidden, scale):
    wide = key[keys].double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = torch.einsum("qnd,knd->nqk", query[queries].double(), wide) * scale
    return scores.masked_fill(hidden, -torch.inf)


def forward(
    query, key, value, starts, key_starts, max_q, max_k, dropout, is_causal, debug, *, scale=None,
    window_size_left=None, window_size_right=None, **unused,
):  # fmt: skip
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out, lse = torch.empty_like(query), torch.empty(query.shape[1], len(query))
    rows = sequences(query, key, starts, key_starts, is_causal, window_size_left, window_size_right)
    longest = [0, 0]
    for queries, keys, hidden in rows:
        scores = scores_of(query, key, queries, keys, hidden, scale)
        wide = value[keys].double().repeat_interleave(query.shape[1] // key.shape[1], 1)
        out[queries] = torch.einsum("nqk,knd->qnd", scores.softmax(-1), wide).to(out.dtype)
        lse[:, queries] = scores.logsumexp(-1).float()
        longest = [max(x, y) for x, y in zip(longest, hidden.shape, strict=True)]
    assert longest == [max_q, max_k] and dropout == 0.0
    state = torch.zeros(2, dtype=torch.uint64)
    return out, lse, state, query.new_empty(0), query.new_empty(0)


def backward(
    gradient, query, key, value, out, lse, starts, key_starts, max_q, max_k, dropout, is_causal, state, unused, *,
    scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """It takes the softmax from the log-sum-exp that it is given."""
    scale, sharing = query.shape[-1] ** -0.5 if scale is None else scale, query.shape[1] // key.shape[1]
    of_query, of_key, of_value = (torch.zeros(x.shape, dtype=torch.float64) for x in (query, key, value))
    for queries, keys, hidden in sequences(
        query, key, starts, key_starts, is_causal, window_size_left, window_size_right
    ):
        scores = scores_of(query, key, queries, keys, hidden, scale)
        share = (scores - lse[:, queries, None].double()).exp()
        grad = gradient[queries].double()
        mean = (grad * out[queries].double()).sum(-1).t()[..., None]
        wide_k, wide_v = (x[keys].double().repeat_interleave(sharing, 1) for x in (key, value))
        of_scores = share * (torch.einsum("qnd,knd->nqk", grad, wide_v) - mean) * scale
        of_query[queries] += torch.einsum("nqk,knd->qnd", of_scores, wide_k)
        for whole, part in (
            (of_key, torch.einsum("nqk,qnd->knd", of_scores, query[queries].double())),
            (of_value, torch.einsum("nqk,qnd->knd", share, grad)),
        ):
            whole[keys] += part.unflatten(1, (-1, sharing)).sum(2)
    return tuple(x.to(query.dtype) for x in (of_query, of_key, of_value))


@pytest.fixture(autouse=True)
def kernel():
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield


def by_one_call(q, k, v, lengths, window=None, shared=None, sink_N=None):
    angles = plan_attention(torch.tensor(lengths), q.shape[-1], THETA, shared=shared)
    plan = AttentionPlan(angles.cos_T, angles.sin_T, varlen=plan_varlen(torch.tensor(lengths), window, shared))
    heads = q.shape[1], k.shape[1]
    rotated = rotate(torch.cat((q, k), 1), plan.cos_T, plan.sin_T).split(heads, 1)
    return attend(*rotated, v, plan, sink_N=sink_N)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("num_heads, num_groups", [(4, 2), (3, 3)])
def test_one_call_equals_plain_attention(num_heads, num_groups, window, has_sinks):
    torch.manual_seed(0)
    lengths, head_dim = [5, 1, 20, 2], 8
    q, k, v = (torch.randn(28, n, head_dim).requires_grad_() for n in (num_heads, num_groups, num_groups))
    sink_N = torch.tensor([-90.0, 0.3, 2.0, 90.0][:num_heads]).requires_grad_() if has_sinks else None
    leaves = [q, k, v, *([sink_N] if has_sinks else [])]
    grad = torch.randn(28, num_heads * head_dim)
    out = by_one_call(q, k, v, lengths, window, sink_N=sink_N)
    found = [out, *torch.autograd.grad(out, leaves, grad)]

    exact = [x.detach().double().requires_grad_() for x in leaves]
    sink64 = exact[3] if has_sinks else None
    parts = zip(*(x.split(lengths) for x in exact[:3]), strict=False)
    expected = torch.cat([plain_attention(*part, window, sink_N=sink64) for part in parts])
    for got, want in zip(found, [expected, *torch.autograd.grad(expected, exact, grad.double())], strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-5)  # fp32 against float64


@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_sequences_see_a_shared_prompt_in_one_call(window):
    """As in the padded calls: prompts of 3 and 5 tokens, which the first and the fifth sequence hold."""
    torch.manual_seed(0)
    lengths, start, shared = [5, 4, 1, 7, 6, 2], [0, 0, 0, 0, 17, 17], [0, 3, 3, 0, 0, 5]
    q, k, v = (torch.randn(sum(lengths), heads, 8).requires_grad_() for heads in (4, 2, 2))
    grad, prompts = torch.randn(sum(lengths), 32), SharedPrompts(torch.tensor(start), torch.tensor(shared))
    out = by_one_call(q, k, v, lengths, window, shared=prompts)
    plan = plan_attention(torch.tensor(lengths), 8, THETA, window=window, shared=prompts)
    rotated = rotate(torch.cat((q, k), 1), plan.cos_T, plan.sin_T).split((4, 2), 1)
    padded = attend(*rotated, v, plan)
    found, expected = ([x, *torch.autograd.grad(x, [q, k, v], grad)] for x in (out, padded))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)  # two fp32 kernels


def test_heads_that_the_kernel_does_not_take_are_refused():
    x = torch.randn(3, 1, 12)
    with pytest.raises(ValueError, match="256 dims.*have 12"):
        attend_varlen(x, x, x, plan_varlen(torch.tensor([3])))


def test_no_attention_holds_all_scores():
    """Values of another width than keys have no kernel on a CPU but torch's `math`."""
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="model.dtype to bfloat16"):
        dot_product_attention(x, x, x[..., :4], None)
