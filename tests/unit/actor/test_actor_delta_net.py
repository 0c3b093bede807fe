"""The gated delta rule against its recurrence in float64, written from the definition, and against transformers'."""

from __future__ import annotations

import cover
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

import megatron_rl.actor  # noqa: F401  must come before Megatron, whose import warnings it silences
from megatron_rl.actor import delta_net, platform
from megatron_rl.actor.delta_net import CHUNK, causal_convolution, gated_delta_rule, plan_delta

NUM_KEYS, NUM_VALUES, KEY, VALUE = 2, 4, 5, 3


def inputs(num_tokens, seed=0, dtype=torch.float64):
    """q, k, v, g and b; some decays forget nearly everything, others nearly nothing."""
    torch.manual_seed(seed)
    q, k = (torch.randn(num_tokens, NUM_KEYS, KEY, dtype=dtype) for _ in range(2))
    v = torch.randn(num_tokens, NUM_VALUES, VALUE, dtype=dtype)
    g = -torch.rand(num_tokens, NUM_VALUES, dtype=dtype).pow(4) * 12
    b = torch.rand(num_tokens, NUM_VALUES, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v, g, b)]


def recurrence(q, k, v, g, b):
    """One sequence, one token after another, one head after another."""
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    heads = []
    for head in range(NUM_VALUES):
        of_key, state, outputs = head * NUM_KEYS // NUM_VALUES, torch.zeros(KEY, VALUE, dtype=v.dtype), []
        for t in range(len(v)):
            state = g[t, head].exp() * state
            update = b[t, head] * (v[t, head] - k[t, of_key] @ state)
            state = state + torch.outer(k[t, of_key], update)
            outputs.append(q[t, of_key] @ state / KEY**0.5)
        heads.append(torch.stack(outputs))
    return torch.stack(heads, 1)


def values_and_gradients(function, arguments):
    out = function(*arguments)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), arguments)]


def of_sequences(lengths):
    """The recurrence of a packed row."""
    return lambda *row: torch.cat([recurrence(*parts) for parts in zip(*(x.split(lengths) for x in row), strict=True)])


def check(lengths, chunk, dtype, tolerance, seed=0):
    plan = plan_delta(torch.tensor(lengths), chunk)
    arguments = inputs(sum(lengths), seed)
    expected = values_and_gradients(of_sequences(lengths), arguments)
    given_in = [x.detach().to(dtype).requires_grad_() for x in arguments]
    found = values_and_gradients(lambda *row: gated_delta_rule(*row, plan), given_in)
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == dtype
        # The gradients of a decay are differences of large terms, so errors are measured against the whole tensor.
        assert (got.double() - want).norm() <= tolerance * want.norm()


AT_CHUNKS = [1, 2, 7, 8, 9, 15, 16, 17, 31]


@settings(max_examples=cover.examples(24), deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(AT_CHUNKS) | st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 99))
def test_values_and_gradients_are_those_of_the_recurrence(lengths, seed):
    check(lengths, 8, torch.float64, 1e-10, seed)
    check(lengths, 8, torch.float32, 1e-5, seed)


@pytest.mark.parametrize("lengths", cover.essential([[63], [64], [65], [130, 3, 64]], [63]), ids=str)
def test_at_the_size_of_real_chunks(lengths):
    check(lengths, CHUNK, torch.float64, 1e-10)
    check(lengths, CHUNK, torch.float32, 1e-5)


def test_values_and_gradients_are_those_of_transformers():
    lengths = [70, 1, 64]
    arguments = inputs(sum(lengths), dtype=torch.float32)

    def of_transformers(q, k, v, g, b):
        repeats = NUM_VALUES // NUM_KEYS
        rows = [q.repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1), v, g, b]
        parts = zip(*(x.split(lengths) for x in rows), strict=True)
        outs = [torch_chunk_gated_delta_rule(*(x[None] for x in p), use_qk_l2norm_in_kernel=True)[0] for p in parts]
        return torch.cat([out[0] for out in outs])

    plan = plan_delta(torch.tensor(lengths))
    found = values_and_gradients(lambda *row: gated_delta_rule(*row, plan), arguments)
    for got, want in zip(found, values_and_gradients(of_transformers, arguments), strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


def test_no_state_goes_over_a_boundary():
    """The last sequence's numbers are the same bits whatever stands before it in the row."""
    lengths, row = [20, 9], [x.detach() for x in inputs(29)]
    changed = [torch.cat((other.detach()[:20], x[20:])) for other, x in zip(inputs(29, seed=1), row, strict=True)]
    plan = plan_delta(torch.tensor(lengths), 8)
    before, after = (gated_delta_rule(*one, plan) for one in (row, changed))
    assert torch.equal(before[20:], after[20:]) and not torch.equal(before[:20], after[:20])
    channels = torch.randn(29, 6), torch.randn(29, 6)
    weight = torch.randn(6, 4)
    joined = torch.cat((channels[1][:20], channels[0][20:]))
    before, after = (causal_convolution(x, weight, plan) for x in (channels[0], joined))
    assert torch.equal(before[20:], after[20:]) and not torch.equal(before[:20], after[:20])


@pytest.mark.parametrize("lengths", [[1], [2, 1, 3, 9], [30]], ids=str)
def test_the_convolution_is_torchs_for_each_sequence(lengths):
    torch.manual_seed(0)
    x = torch.randn(sum(lengths), 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)

    def of_torch(x, weight):
        padded = [F.pad(part.T[None], (3, 0)) for part in x.split(lengths)]
        return torch.cat([F.silu(F.conv1d(one, weight[:, None], groups=6))[0].T for one in padded])

    plan = plan_delta(torch.tensor(lengths))
    found = values_and_gradients(lambda *row: causal_convolution(*row, plan), [x, weight])
    for got, want in zip(found, values_and_gradients(of_torch, [x, weight]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_bf16_is_computed_in_fp32():
    arguments = [x.detach().bfloat16() for x in inputs(40)]
    arguments[3] = arguments[3].float()  # the layer computes decays in fp32
    plan = plan_delta(torch.tensor([40]))
    exact = gated_delta_rule(*(x.double() for x in arguments), plan)
    found = gated_delta_rule(*arguments, plan)
    assert found.dtype == torch.bfloat16 and (found.double() - exact).norm() < 2**-8 * exact.norm()


def test_a_row_of_short_answers_has_few_steps():
    plan = plan_delta(torch.tensor([10] * 200 + [130]))
    assert plan.counts == (201, 1, 1) and plan.token_PC.shape == (203, CHUNK)
    assert plan_delta(torch.tensor([3, 5])).token_PC.tolist() == [[3, 4, 5, 6, 7], [0, 1, 2, 8, 8]]


def test_a_gpu_needs_kernels(monkeypatch):
    monkeypatch.setattr(delta_net, "HAS_KERNELS", False)
    delta_net.require_kernels()
    monkeypatch.setattr(platform, "HAS_CUDA", True)
    with pytest.raises(ValueError, match="install fla-core"):
        delta_net.require_kernels()
    monkeypatch.setattr(delta_net, "HAS_KERNELS", True)
    delta_net.require_kernels()
