from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_rl.actor  # noqa: F401  must come before Megatron, whose import warnings it silences
from megatron_rl.actor import attention, sinks
from megatron_rl.actor.attention import MAX_PADDING, PackedAttention, PackedSequences, attend, plan_attention, rotate
from megatron_rl.actor.latent import LatentCoreAttention
from megatron_rl.actor.norm import Norm
from megatron_rl.actor.packing import SharedPrompts

THETA = 10000.0


def plain_attention(q, k, v, window, rotary_dim=None, sink_N=None):
    """The attention of one sequence in float64, written from the definition; q is [L, N, D], k and v are [L, G, D]. The
    first `rotary_dim` dims of a head are rotated, or all. The softmax of a head has its sink as one more score."""
    length, num_heads, head_dim = q.shape
    rotary_dim = rotary_dim or head_dim
    frequency = THETA ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def rotate(x):
        a, b = x[..., : rotary_dim // 2], x[..., rotary_dim // 2 : rotary_dim]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., rotary_dim:]), -1)

    q, k = rotate(q), rotate(k)
    heads = []
    for head in range(num_heads):
        group = head * k.shape[1] // num_heads
        scores = q[:, head] @ k[:, group].T / head_dim**0.5
        hidden = torch.ones(length, length).triu(1).bool()
        if window is not None:
            hidden |= torch.ones(length, length).tril(-window).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
        if sink_N is not None:
            scores = torch.cat((scores, sink_N[head].expand(length, 1)), -1)
        heads.append(scores.softmax(-1)[:, :length] @ v[:, group])
    return torch.cat(heads, -1)


@pytest.mark.parametrize("window", [None, 1, 5, 7, 64])
@pytest.mark.parametrize("num_heads, num_groups", [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("lengths", [[1], [7, 7, 7], [5, 1, 40, 2, 3, 38, 1, 17]], ids=str)
def test_output_and_gradients_equal_plain_attention(lengths, num_heads, num_groups, window):
    torch.manual_seed(0)
    num_tokens, head_dim = sum(lengths), 8
    heads = (num_heads, num_groups, num_groups)
    q, k, v = (torch.randn(num_tokens, n, head_dim).requires_grad_() for n in heads)
    grad = torch.randn(num_tokens, num_heads * head_dim)
    full = plan_attention(torch.tensor(lengths), head_dim, THETA)
    sliding = plan_attention(torch.tensor(lengths), head_dim, THETA, window=window)
    slides = {} if window is None else dict(window_size=(window - 1, 0), window_attn_skip_freq=[0, 1])
    packed = PackedSequences(qkv_format="thd", full=full, sliding=sliding)
    out = PackedAttention(_config(**slides), layer_number=2)(q, k, v, None, packed_seq_params=packed)
    out.backward(grad)

    q64, k64, v64 = (x.detach().double().requires_grad_() for x in (q, k, v))
    parts = zip(*(x.split(lengths) for x in (q64, k64, v64)), strict=False)
    expected = torch.cat([plain_attention(*part, window) for part in parts])
    expected.backward(grad.double())
    for got, want in ((out, expected), (q.grad, q64.grad), (k.grad, k64.grad), (v.grad, v64.grad)):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-5)  # fp32 against float64


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("num_heads, num_groups", [(4, 2), (3, 3)])
def test_sinks_take_their_share_of_the_softmax(num_heads, num_groups, window, on_gpu, monkeypatch):
    """Some are far below all scores, some far above. What GPUs compute is the same."""
    if on_gpu:
        monkeypatch.setattr(sinks, "attend_with_sinks", sinks.attend_to_key)
        monkeypatch.setattr(attention, "attend_with_sinks", sinks.attend_to_key)
    torch.manual_seed(0)
    lengths, head_dim = [5, 1, 20, 2], 8
    heads = (num_heads, num_groups, num_groups)
    q, k, v = (torch.randn(28, n, head_dim).requires_grad_() for n in heads)
    sink_N = torch.tensor([-90.0, 0.3, 2.0, 90.0][:num_heads]).requires_grad_()
    grad = torch.randn(28, num_heads * head_dim)
    plan = plan_attention(torch.tensor(lengths), head_dim, THETA, window=window)
    rotated = rotate(torch.cat((q, k), 1), plan.cos_T, plan.sin_T).split(heads[:2], 1)
    out = attend(*rotated, v, plan, sink_N=sink_N)
    out.backward(grad)

    q64, k64, v64, sink64 = (x.detach().double().requires_grad_() for x in (q, k, v, sink_N))
    parts = zip(*(x.split(lengths) for x in (q64, k64, v64)), strict=False)
    expected = torch.cat([plain_attention(*part, window, sink_N=sink64) for part in parts])
    expected.backward(grad.double())
    pairs = ((out, expected), (q.grad, q64.grad), (k.grad, k64.grad), (v.grad, v64.grad), (sink_N.grad, sink64.grad))
    for got, want in pairs:
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-5)  # fp32 against float64
    assert sink64.grad.abs().max() > 0.1


@pytest.mark.parametrize("rotary_dim", [2, 4, 6, 8])
def test_the_first_dims_of_each_head_are_rotated(rotary_dim):
    torch.manual_seed(0)
    lengths = [5, 1, 9]
    q, k, v = (torch.randn(15, heads, 8).requires_grad_() for heads in (4, 2, 2))
    grad = torch.randn(15, 32)
    packed = PackedSequences(qkv_format="thd", full=plan_attention(torch.tensor(lengths), rotary_dim, THETA))
    out = PackedAttention(_config(), layer_number=1)(q, k, v, None, packed_seq_params=packed)
    out.backward(grad)

    q64, k64, v64 = (x.detach().double().requires_grad_() for x in (q, k, v))
    parts = zip(*(x.split(lengths) for x in (q64, k64, v64)), strict=False)
    expected = torch.cat([plain_attention(*part, None, rotary_dim) for part in parts])
    expected.backward(grad.double())
    for got, want in ((out, expected), (q.grad, q64.grad), (k.grad, k64.grad), (v.grad, v64.grad)):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-5)  # fp32 against float64


def with_prompts(q, k, v, lengths, prompts, window, sink_N=None):
    """`plain_attention` of the sequences of a row, each with the prompt that it shares."""
    expected, first = [], 0
    for length, begin, count in zip(lengths, prompts.start_S.tolist(), prompts.length_S.tolist(), strict=True):
        seen = [*range(begin, begin + count), *range(first, first + length)]
        expected.append(plain_attention(q[seen], k[seen], v[seen], window, sink_N=sink_N)[count:])
        first += length
    return torch.cat(expected)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 6, 64])
def test_sequences_see_a_shared_prompt_where_another_one_holds_it(window, has_sinks):
    """Two prompts of 3 and 5 tokens. The first sequence holds 3 + 2 tokens, and sequences of 4, 1 and 9 share its
    prompt; the fourth one is alone, the fifth holds 5 + 1 tokens, and the sixth, of 2, shares its prompt."""
    torch.manual_seed(0)
    lengths = [5, 4, 1, 7, 6, 2, 9]
    prompts = SharedPrompts(torch.tensor([0, 0, 0, 0, 17, 17, 0]), torch.tensor([0, 3, 3, 0, 0, 5, 3]))
    q, k, v = (torch.randn(sum(lengths), heads, 8).requires_grad_() for heads in (4, 2, 2))
    sink_N = torch.tensor([-90.0, 0.3, 2.0, 90.0]).requires_grad_() if has_sinks else None
    grad, leaves = torch.randn(sum(lengths), 32), [q, k, v, *([sink_N] if has_sinks else [])]
    plan = plan_attention(torch.tensor(lengths), 8, THETA, window=window, shared=prompts)
    rotated = rotate(torch.cat((q, k), 1), plan.cos_T, plan.sin_T).split((4, 2), 1)
    out = attend(*rotated, v, plan, sink_N=sink_N)

    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = with_prompts(*exact[:3], lengths, prompts, window, exact[3] if has_sinks else None)
    found = zip(
        (out, *torch.autograd.grad(out, leaves, grad)),
        (expected, *torch.autograd.grad(expected, exact, grad.double())),
        strict=True,
    )
    for got, want in found:
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-5)  # fp32 against float64


@pytest.mark.parametrize("value_dim", [5, 8, 11])
def test_latent_attention_has_a_scale_and_a_width_of_the_value_of_its_own(value_dim):
    torch.manual_seed(0)
    lengths, num_heads, scale = [5, 1, 9], 3, 0.7
    q, k, v = (torch.randn(15, num_heads, dim).requires_grad_() for dim in (8, 8, value_dim))
    grad = torch.randn(15, num_heads * value_dim)
    packed = PackedSequences(qkv_format="thd", full=plan_attention(torch.tensor(lengths), 4, THETA))
    out = LatentCoreAttention(_config(), softmax_scale=scale)(q, k, v, None, packed_seq_params=packed)
    out.backward(grad)

    q64, k64, v64 = (x.detach().double().requires_grad_() for x in (q, k, v))
    sequence = torch.repeat_interleave(torch.tensor(lengths))
    hidden = (sequence[:, None] != sequence) | torch.ones(15, 15).triu(1).bool()
    scores = torch.einsum("qnd,knd->nqk", q64, k64) * scale
    expected = torch.einsum("nqk,knd->qnd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v64).flatten(1)
    expected.backward(grad.double())
    for got, want in ((out, expected), (q.grad, q64.grad), (k.grad, k64.grad), (v.grad, v64.grad)):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-5)  # fp32 against float64


def test_only_the_layers_with_a_window_slide():
    config = _config(window_size=(4, 0), window_attn_skip_freq=[1, 1, 0])
    assert [PackedAttention(config, layer_number=n).slides for n in (1, 2, 3)] == [True, True, False]
    assert not PackedAttention(_config(), layer_number=1).slides


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=40), st.none() | st.integers(1, 80))
def test_the_plan_holds_every_token_once_and_little_padding(lengths, window):
    plan = plan_attention(torch.tensor(lengths), 8, THETA, window=window)
    flat = torch.cat([blocks.query_BL.flatten() for blocks in plan.calls])
    assert flat[plan.unpad_T].tolist() == list(range(sum(lengths)))
    for blocks in plan.calls:
        real = sum(len(set(row.tolist())) for row in blocks.query_BL)
        assert real >= (1 - MAX_PADDING) * blocks.query_BL.numel()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=20), st.integers(1, 80))
def test_a_window_costs_less_than_its_square_beyond_it(lengths, window):
    """A query is computed with fewer than 2 W keys."""
    for blocks in plan_attention(torch.tensor(lengths), 8, THETA, window=window).calls:
        assert blocks.key_BK.shape[1] < 2 * window + (blocks.mask_LK is None)


@pytest.mark.parametrize("shape", [(6, 1, 16), (6, 1, 2, 16)], ids=str)
def test_norm_equals_torch(shape):
    torch.manual_seed(0)
    x, grad = torch.randn(shape), torch.randn(shape)
    norm = Norm(_config(), 16, eps=1e-5)
    norm.weight.data.uniform_(0.5, 1.5)
    x1, x2 = x.clone().requires_grad_(), x.double().requires_grad_()
    weight = norm.weight.detach().double().requires_grad_()
    y1, y2 = norm(x1), torch.nn.functional.rms_norm(x2, (16,), weight, 1e-5)
    y1.backward(grad)
    y2.backward(grad.double())
    for got, want in ((y1, y2), (x1.grad, x2.grad), (norm.weight.grad, weight.grad)):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)  # fp32 against float64


def test_bf16_norm_is_computed_in_fp32():
    x = (torch.randn(64, 16) * 100).bfloat16()
    norm = Norm(_config(params_dtype=torch.bfloat16), 16, eps=1e-5)
    want = torch.nn.functional.rms_norm(x.float(), (16,), None, 1e-5).bfloat16()
    assert torch.equal(norm(x), want)


def _config(**changes) -> TransformerConfig:
    return TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, attention_dropout=0.0, **changes)
