"""The recurrence of Mamba-2 against a slow one in float64, written from the definition, and against transformers'."""

from __future__ import annotations

import re

import cover
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from leaks import lasting
from numbered import SHAPES
from small_models import changed
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

import megatron_rl.actor  # noqa: F401  must come before Megatron, whose import warnings it silences
from megatron_rl.actor.attention import can_share_prompts, packed_sequences, rotate
from megatron_rl.actor.delta_net import CHUNK, causal_convolution, plan_delta
from megatron_rl.actor.inspection import group_of
from megatron_rl.actor.mamba import state_space, write_negated_exp
from megatron_rl.models import megatron_shards
from megatron_rl.models.multi_token import is_of_head
from megatron_rl.types import Mesh, Rope
from megatron_rl.types.mamba import NO_ATTENTION, Mamba2

GROUPS, HEADS, STATE, SIZE = 2, 4, 5, 3


def inputs(num_tokens, seed=0, dtype=torch.float64):
    """C, B, x, d, A and D; some decays forget nearly everything, others nearly nothing."""
    torch.manual_seed(seed)
    c, b = (torch.randn(num_tokens, GROUPS, STATE, dtype=dtype) for _ in range(2))
    x = torch.randn(num_tokens, HEADS, SIZE, dtype=dtype)
    step = torch.rand(num_tokens, HEADS, dtype=dtype).pow(4) * 2
    rate, skip = -torch.rand(HEADS, dtype=dtype) * 6, torch.randn(HEADS, dtype=dtype)
    return [one.requires_grad_() for one in (c, b, x, step, rate, skip)]


def recurrence(c, b, x, step, rate, skip):
    """One sequence, one token after another, one head after another."""
    heads = []
    for head in range(HEADS):
        group, state, outputs = head * GROUPS // HEADS, torch.zeros(STATE, SIZE, dtype=x.dtype), []
        for t in range(len(x)):
            state = (step[t, head] * rate[head]).exp() * state + torch.outer(b[t, group], step[t, head] * x[t, head])
            outputs.append(c[t, group] @ state + skip[head] * x[t, head])
        heads.append(torch.stack(outputs))
    return torch.stack(heads, 1)


def values_and_gradients(function, arguments):
    out = function(*arguments)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), arguments)]


def of_sequences(lengths, function=recurrence):
    """A function of one sequence for each one of a packed row."""

    def of_row(c, b, x, step, rate, skip):
        rows = zip(*(one.split(lengths) for one in (c, b, x, step)), strict=True)
        return torch.cat([function(*parts, rate, skip) for parts in rows])

    return of_row


def check(lengths, chunk, dtype, tolerance, seed=0):
    plan = plan_delta(torch.tensor(lengths), chunk)
    arguments = inputs(sum(lengths), seed)
    expected = values_and_gradients(of_sequences(lengths), arguments)
    given_in = [x.detach().to(dtype).requires_grad_() for x in arguments]
    found = values_and_gradients(lambda *row: state_space(*row, plan), given_in)
    # The gradients of a step are differences of large terms, so errors are measured against the whole tensor. The one
    # of a rate is a sum of such differences over all tokens.
    for got, want, times in zip(found, expected, (1, 1, 1, 1, 1, 10, 1), strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).norm() <= times * tolerance * want.norm()


AT_CHUNKS = [1, 2, 7, 8, 9, 15, 16, 17, 31]


@settings(max_examples=cover.examples(24), deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(AT_CHUNKS) | st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 99))
def test_values_and_gradients_are_those_of_the_recurrence(lengths, seed):
    check(lengths, 8, torch.float64, 1e-10, seed)
    check(lengths, 8, torch.float32, 1e-5, seed)


@pytest.mark.parametrize("lengths", cover.essential([[63], [64], [65], [130, 3, 64]], [130, 3, 64]), ids=str)
def test_at_the_size_of_real_chunks(lengths):
    check(lengths, CHUNK, torch.float64, 1e-10)
    check(lengths, CHUNK, torch.float32, 1e-5)


def test_values_and_gradients_are_those_of_transformers():
    lengths = [70, 1, 64]
    arguments = inputs(sum(lengths), dtype=torch.float32)

    def of_transformers(c, b, x, step, rate, skip):
        return mamba2_chunk_scan(x[None], step[None], rate, b[None], c[None], chunk_size=64, D=skip)[0]

    plan = plan_delta(torch.tensor(lengths))
    found = values_and_gradients(lambda *row: state_space(*row, plan), arguments)
    expected = values_and_gradients(of_sequences(lengths, of_transformers), arguments)
    for got, want in zip(found, expected, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


def test_no_state_goes_over_a_boundary():
    """The last sequence's numbers are the same bits whatever stands before it in the row."""
    row, other = ([x.detach() for x in inputs(29, seed)] for seed in (0, 1))
    changed = [torch.cat((b[:20], a[20:])) for a, b in zip(row[:4], other[:4], strict=True)]
    plan = plan_delta(torch.tensor([20, 9]), 8)
    before, after = (state_space(*one, *row[4:], plan) for one in (row[:4], changed))
    assert torch.equal(before[20:], after[20:]) and not torch.equal(before[:20], after[:20])
    channels = torch.randn(29, 6), torch.randn(29, 6)
    weight, bias = torch.randn(6, 4), torch.randn(6)
    joined = torch.cat((channels[1][:20], channels[0][20:]))
    before, after = (causal_convolution(x, weight, plan, bias) for x in (channels[0], joined))
    assert torch.equal(before[20:], after[20:]) and not torch.equal(before[:20], after[:20])


@pytest.mark.parametrize("lengths", [[1], [2, 1, 3, 9], [30]], ids=str)
def test_the_convolution_is_torchs_for_each_sequence(lengths):
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(*extents, dtype=torch.float64, requires_grad=True) for extents in ((sum(lengths), 6), (6, 4), (6,))
    )

    def of_torch(x, weight, bias):
        padded = [F.pad(part.T[None], (3, 0)) for part in x.split(lengths)]
        return torch.cat([F.silu(F.conv1d(one, weight[:, None], bias, groups=6))[0].T for one in padded])

    plan = plan_delta(torch.tensor(lengths))
    found = values_and_gradients(lambda x, weight, bias: causal_convolution(x, weight, plan, bias), [x, weight, bias])
    for got, want in zip(found, values_and_gradients(of_torch, [x, weight, bias]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_bf16_is_computed_in_fp32():
    c, b, x, step, rate, skip = (one.detach() for one in inputs(40))
    row = [*(one.bfloat16() for one in (c, b, x)), step.float(), rate.float(), skip.bfloat16()]
    plan = plan_delta(torch.tensor([40]))
    exact = state_space(*(one.double() for one in row), plan)
    found = state_space(*row, plan)
    assert found.dtype == torch.bfloat16 and (found.double() - exact).norm() < 2**-8 * exact.norm()


def test_prompts_are_not_shared_and_angles_are_empty():
    """A row has the plans of linear attention, and attention without rotation has no angles."""
    shape = changed(SHAPES["nemotron_h"], attention={"rope": Rope(1e4, share=0.0)})
    assert not can_share_prompts(shape, fused=False, context_size=1)
    row = packed_sequences(torch.tensor([3, 5]), shape, fused=False)
    assert row.delta is not None and row.full.cos_T.shape == (8, 1, 0)
    query = torch.randn(8, 2, 4)
    assert torch.equal(rotate(query, row.full.cos_T, row.full.sin_T), query)


def test_the_multiplications_are_what_torch_counts():
    """Of whole chunks, and with the two projections."""
    mamba, hidden, length = Mamba2(2, 4, key_size=24, value_size=20, convolution=4), 48, 4 * CHUNK
    steps, rates = torch.rand(length, 4), -torch.rand(4)
    plan = plan_delta(torch.tensor([length]))
    with lasting(), FlopCounterMode(display=False) as counter:
        projected = torch.randn(length, hidden) @ torch.randn(hidden, mamba.sizes()["mamba_input"])
        _, x, b, c, _ = projected.split([80, 80, 48, 48, 4], 1)
        groups = [one.view(length, 2, 24) for one in (c, b)]
        out = state_space(*groups, x.view(length, 4, 20), steps, rates, torch.ones(4), plan)
        out.flatten(1) @ torch.randn(80, hidden)
    assert 2 * length * mamba.multiplications(hidden) == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("name", SHAPES)
def test_every_parameter_of_a_family_is_a_part_that_explain_names(name):
    shards = [one for one in megatron_shards(SHAPES[name], Mesh(), 0) if not is_of_head(one.local_name)]
    found = {group_of(one.local_name, one.hf_name) for one in shards}
    first = "attention" if SHAPES[name].layers[0].attention != NO_ATTENTION else "mlp"
    assert {"embedding", "norms", f"layer 0 {first}"} <= found
    assert all(
        re.fullmatch(r"embedding|norms|output layer|layer \d+ (attention|mlp|experts|router)", one) for one in found
    )


def test_a_rectangle_of_the_rates_is_sent_as_vllm_holds_it():
    """vLLM's loader computes -exp(x) of the whole parameter; a sender writes only its rectangle."""
    log, out = torch.tensor([0.0, 2.0, 3.0, 4.0]).log1p(), torch.zeros(2)
    write_negated_exp(log, ((1, 3),), out)
    torch.testing.assert_close(out, torch.tensor([-3.0, -4.0]))
    assert torch.equal(out, (-torch.exp(log.float()))[1:3])
