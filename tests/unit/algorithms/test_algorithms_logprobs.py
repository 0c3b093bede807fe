"""Log-probs and entropies from hidden states against log_softmax on all logits at once.

Ranks that share a vocabulary are threads here, which meet at a barrier.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from leaks import lasting
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl.algorithms import logprobs
from megatron_rl.algorithms.logprobs import LowRank, VocabularyShard, draft_logprobs, token_logprobs

ROOT = Path(__file__).parents[3]
NUM_TOKENS, HIDDEN, VOCAB_SIZE, TEMPERATURE = 23, 6, 29, 0.7


class Ranks:
    """Collectives of threads: every rank leaves its numbers, all see all. Like an all-reduce they overwrite."""

    def __init__(self, num_ranks: int):
        self.num_collectives = 0
        self.barrier = threading.Barrier(num_ranks, timeout=30)
        self.numbers: list[Tensor | None] = [None] * num_ranks

    def collective(self, rank: int, combine: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def reduce(x: Tensor) -> Tensor:
            self.numbers[rank] = x
            self.num_collectives += rank == 0
            self.barrier.wait()
            combined = combine(torch.stack(self.numbers))
            self.barrier.wait()
            return x.copy_(combined)

        return reduce


def split(hidden_TH, weight_VH, target_T, grads, *, num_ranks, width, forbidden=(), **options):
    """What `num_ranks` ranks of `width` columns each compute: values of every rank, the gradients to hidden summed
    and those to weight concatenated, and the number of collectives."""
    ranks, vocab_size = Ranks(num_ranks), len(weight_VH)
    padded = torch.cat((weight_VH, weight_VH.new_full((num_ranks * width - vocab_size, HIDDEN), 3.0)))

    def run(rank: int):
        first = rank * width
        shard = VocabularyShard(
            num_real=max(0, min(width, vocab_size - first)),
            first=first,
            forbidden_F=torch.tensor([v - first for v in forbidden if first <= v < first + width], dtype=torch.int64),
            max_over_ranks=ranks.collective(rank, lambda x: x.amax(0)),
            sum_over_ranks=ranks.collective(rank, lambda x: x.sum(0)),
        )
        hidden, weight = hidden_TH.clone().requires_grad_(), padded[first : first + width].clone().requires_grad_()
        values = token_logprobs(hidden, weight, target_T, shard, **options)
        backward(values, grads)
        return [x.detach() for x in values if x is not None], hidden.grad, weight.grad

    with ThreadPoolExecutor(num_ranks) as threads:
        results = list(threads.map(run, range(num_ranks)))
    values, grad_hidden, grad_weight = zip(*results, strict=True)
    return values, sum(grad_hidden), torch.cat(grad_weight), ranks.num_collectives


def backward(values, grads) -> None:
    pairs = [(x, grad) for x, grad in zip(values, grads, strict=False) if x is not None and grad is not None]
    torch.autograd.backward(*zip(*pairs, strict=True))


def plain(hidden_TH, weight_VH, target_T, grads, temperature: float = TEMPERATURE, forbidden=()):
    """All logits, log_softmax, autograd: values and gradients."""
    hidden, weight = hidden_TH.clone().requires_grad_(), weight_VH.clone().requires_grad_()
    allowed = [v for v in range(len(weight_VH)) if v not in forbidden]
    log_p = (hidden @ weight[allowed].T / temperature).log_softmax(1)
    column_T = torch.tensor([allowed.index(v) for v in target_T.tolist()])
    values = log_p.gather(1, column_T[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)
    backward(values, grads)
    return [x.detach() for x in values], hidden.grad, weight.grad


def inputs(dtype: torch.dtype = torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator, dtype=torch.float64)
    target = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=generator)
    target[:3] = torch.tensor([0, 14, VOCAB_SIZE - 1])
    grads = torch.randn(2, NUM_TOKENS, generator=generator, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), target, grads


def close(got, expected, tolerance: float) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_by_hand():
    """Logits 0, log 2, log 5 after temperature 2: p = 1/8, 2/8, 5/8."""
    hidden = torch.tensor([[2.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)]], requires_grad=True)
    shard = VocabularyShard(num_real=3)
    logp, entropy, _ = token_logprobs(hidden, weight, torch.tensor([1]), shard, temperature=2.0, also=("entropy",))
    assert logp.item() == pytest.approx(math.log(2 / 8))
    assert entropy.item() == pytest.approx((math.log(8) + 2 * math.log(4) + 5 * math.log(8 / 5)) / 8)
    logp.backward()
    # ([v = 1] - p_v) / 2, times hidden 2 and times the weights
    assert weight.grad.flatten().tolist() == pytest.approx([-1 / 8, 6 / 8, -5 / 8])
    assert hidden.grad.item() == pytest.approx((6 / 8 * math.log(2) - 5 / 8 * math.log(5)) / 2)


@pytest.mark.parametrize("num_real, chunk", [(VOCAB_SIZE, 5), (20, 100), (0, 5)])
def test_an_adapter_is_what_its_product_would_be_in_the_weight(monkeypatch, num_real, chunk):
    """By the chain rule from the gradient of W + scale B A. Of a frozen weight there is none."""
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", chunk * VOCAB_SIZE * 8)
    hidden, weight, target, grads = inputs()
    a, b = torch.randn(3, HIDDEN, dtype=torch.float64), torch.randn(VOCAB_SIZE, 3, dtype=torch.float64)
    merged, theirs, mine = (weight + 0.5 * b @ a).requires_grad_(), *(hidden.clone().requires_grad_() for _ in range(2))
    a, b, target = a.requires_grad_(), b.requires_grad_(), target.clamp(max=max(0, num_real - 1))
    options = dict(temperature=TEMPERATURE, also=("entropy",), mask_T=torch.arange(NUM_TOKENS) % 3 > 0)
    found, mask = [], options["mask_T"] if num_real else torch.zeros(NUM_TOKENS, dtype=torch.bool)
    options["mask_T"] = mask
    for given, states, low_rank in ((merged, theirs, None), (weight, mine, LowRank(a, b, 0.5))):
        values = token_logprobs(states, given, target, VocabularyShard(num_real, low_rank=low_rank), **options)
        backward(values, grads)
        found.append(torch.stack(values[:2]).detach())
    close(found[1], found[0], 1e-13)
    close(mine.grad, theirs.grad, 1e-13)
    close(a.grad, 0.5 * b.detach().T @ merged.grad, 1e-12)
    close(b.grad, 0.5 * merged.grad @ a.detach().T, 1e-12)
    assert not b.grad[num_real:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_whose_b_is_zero_changes_no_bit(dtype):
    hidden, weight, target, _ = inputs(dtype)
    nothing = LowRank(torch.randn(3, HIDDEN, dtype=dtype), torch.zeros(VOCAB_SIZE, 3, dtype=dtype), 2.0)
    shards = VocabularyShard(VOCAB_SIZE), VocabularyShard(VOCAB_SIZE, low_rank=nothing)
    options = dict(temperature=TEMPERATURE, also=("entropy",))
    base, same = (torch.stack(token_logprobs(hidden, weight, target, shard, **options)[:2]) for shard in shards)
    assert torch.equal(base, same)


# 29 columns on one, two and three ranks; 15 + 14 + 0: the last holds nothing but padding.
@pytest.mark.parametrize("num_ranks, width", [(1, 29), (1, 32), (2, 16), (3, 10), (3, 15)])
@pytest.mark.parametrize("chunk", [1, 5, NUM_TOKENS, 100])
@pytest.mark.parametrize("used", ["logp", "entropy", "both"])
def test_equals_log_softmax_for_every_chunk_and_split(monkeypatch, num_ranks, width, chunk, used):
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", chunk * width * 8)
    hidden, weight, target, grads = inputs()
    grads = [grads[0] if used != "entropy" else None, grads[1] if used != "logp" else None]
    expected, grad_hidden, grad_weight = plain(hidden, weight, target, grads)
    options = dict(num_ranks=num_ranks, width=width, temperature=TEMPERATURE, also=("entropy",))
    values, got_hidden, got_weight, num_collectives = split(hidden, weight, target, grads, **options)
    for of_rank in values:
        assert all(torch.equal(a, b) for a, b in zip(of_rank, values[0], strict=True)), "every rank has the same bits"
        close(of_rank, expected, 1e-13)  # float64: sums of some ten terms of order 1
    close(got_hidden, grad_hidden, 1e-13)
    close(got_weight[:VOCAB_SIZE], grad_weight, 1e-13)
    assert not got_weight[VOCAB_SIZE:].any()
    assert num_collectives == 2, "a call exchanges numbers twice, whatever its chunks, and backward never"


# The last rank of three has no token that may be sampled, nor has the last of two, beside padding, any but one.
@pytest.mark.parametrize("num_ranks, width, forbidden", [(1, 29, (4,)), (3, 10, range(20, 29)), (2, 16, range(15, 28))])
def test_forbidden_tokens_have_no_probability_and_no_gradient(monkeypatch, num_ranks, width, forbidden):
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 5 * width * 8)
    hidden, weight, target, grads = inputs()
    target = torch.tensor([v if v not in forbidden else 0 for v in target.tolist()])
    weight[list(forbidden)] *= 1000  # without the rule they would have all of the probability
    expected, grad_hidden, grad_weight = plain(hidden, weight, target, grads * 50, forbidden=forbidden)
    options = dict(num_ranks=num_ranks, width=width, temperature=TEMPERATURE, also=("entropy",), forbidden=forbidden)
    values, got_hidden, got_weight, _ = split(hidden, weight, target, grads * 50, **options)
    for of_rank in values:
        close(of_rank, expected, 1e-13)
    close(got_hidden, grad_hidden, 1e-11)  # fifty times the slopes, and the rest as above
    close(got_weight[:VOCAB_SIZE], grad_weight, 1e-11)
    assert not got_weight[list(forbidden)].any()


@pytest.mark.parametrize("num_ranks, width", [(1, 29), (3, 10)])
def test_mask_leaves_rows_out(num_ranks, width):
    hidden, weight, target, grads = inputs()
    mask = torch.arange(NUM_TOKENS) % 3 == 1
    expected, grad_hidden, grad_weight = plain(hidden, weight, target, grads * mask)
    hidden[~mask] = torch.nan  # never looked at
    options = dict(num_ranks=num_ranks, width=width, temperature=TEMPERATURE, also=("entropy",), mask_T=mask)
    values, got_hidden, got_weight, _ = split(hidden, weight, target, grads, **options)
    for got, x in zip(values[0], expected, strict=True):
        close(got, torch.where(mask, x, 0.0), 1e-13)
    close(got_hidden, grad_hidden, 1e-13)
    close(got_weight[:VOCAB_SIZE], grad_weight, 1e-13)


def test_a_draft_is_right_where_the_target_has_the_largest_logit():
    """The target of every other token is the likeliest one, on one rank and on two."""
    torch.manual_seed(0)
    hidden_TH, weight_VH = torch.randn(NUM_TOKENS, HIDDEN), torch.randn(VOCAB_SIZE, HIDDEN)
    best_T = (hidden_TH @ weight_VH.T).argmax(1)
    is_best_T = torch.arange(NUM_TOKENS) % 2 == 0
    target_T = torch.where(is_best_T, best_T, (best_T + 1) % VOCAB_SIZE)
    mask_T = torch.arange(NUM_TOKENS) % 3 > 0
    ranks, cut = Ranks(2), 17

    def of_rank(rank: int) -> tuple[Tensor, Tensor]:
        rows = weight_VH[rank * cut : (rank + 1) * cut]
        largest, total = (ranks.collective(rank, combine) for combine in (lambda x: x.amax(0), lambda x: x.sum(0)))
        shard = VocabularyShard(len(rows), rank * cut, max_over_ranks=largest, sum_over_ranks=total)
        return draft_logprobs(hidden_TH, rows, target_T, shard, temperature=TEMPERATURE, mask_T=mask_T)

    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(of_rank, range(2))]
    shard = VocabularyShard(VOCAB_SIZE)
    found.append(draft_logprobs(hidden_TH, weight_VH, target_T, shard, temperature=TEMPERATURE, mask_T=mask_T))
    expected, *_ = token_logprobs(hidden_TH, weight_VH, target_T, shard, temperature=TEMPERATURE, mask_T=mask_T)
    for logp_T, is_largest_T in found:
        assert torch.equal(is_largest_T, is_best_T & mask_T)
        torch.testing.assert_close(logp_T, expected)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_tokens", [0, 4])
def test_no_token_at_all_still_has_gradients(num_ranks, num_tokens):
    """An empty micro-batch takes part in backward: other ranks and stages wait for it."""
    hidden, weight, target, grads = inputs()
    mask = torch.zeros(num_tokens, dtype=torch.bool)
    options = dict(num_ranks=num_ranks, width=15 * (3 - num_ranks), temperature=1.0, also=("entropy",), mask_T=mask)
    cut = hidden[:num_tokens], weight, target[:num_tokens], grads[:, :num_tokens]
    values, grad_hidden, grad_weight, _ = split(*cut, **options)
    assert [x.tolist() for x in values[0]] == [[0.0] * num_tokens] * 2
    assert grad_hidden.shape == (num_tokens, HIDDEN) and not grad_hidden.any()
    assert grad_weight.shape == (30, HIDDEN) and not grad_weight.any()


@pytest.mark.parametrize("num_ranks, width", [(1, 29), (3, 15)])
def test_logits_of_ten_thousand(num_ranks, width):
    hidden, weight, target, grads = inputs(torch.float32)
    hidden *= 3000
    exact, grad_hidden, grad_weight = plain(hidden.double(), weight.double(), target, grads)
    assert exact[0].min() < -1e4
    options = dict(num_ranks=num_ranks, width=width, temperature=TEMPERATURE, also=("entropy",))
    values, got_hidden, got_weight, _ = split(hidden, weight, target, grads.float(), **options)
    # fp32 logits of 1e4 have a spacing of 1e-3, and are sums of six; the rows here are not near a tie.
    close(values[0][0].double(), exact[0], 4e-3)
    close(values[0][1].double(), exact[1], 4e-3)
    close(got_hidden.double(), grad_hidden, 1e-2)
    close(got_weight[:VOCAB_SIZE].double() / 3000, grad_weight / 3000, 1e-2)


@pytest.mark.parametrize("also", [("energy",), ("entropy", "energy")], ids=str)
@pytest.mark.parametrize(("num_ranks", "width", "forbidden"), [(1, 29, ()), (3, 10, (1, 13)), (3, 15, ())], ids=str)
def test_energies_are_squared_norms_of_the_gradient_of_the_logits(monkeypatch, num_ranks, width, forbidden, also):
    """Against autograd on all logits; in float32 also for tokens with p near 1, where 1 - 2 p + sum p^2 would only be
    rounding, of 1e-7."""
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 5 * width * 8)
    hidden, weight, target, grads = inputs()
    hidden[8:12] *= 8
    target[8:12] = (hidden[8:12] @ weight.T).argmax(1)
    allowed = [v for v in range(VOCAB_SIZE) if v not in forbidden]
    logits = (hidden @ weight[allowed].T / TEMPERATURE).requires_grad_()
    column = torch.tensor([allowed.index(v) if v in allowed else 0 for v in target.tolist()])
    logits.log_softmax(1).gather(1, column[:, None]).sum().backward()
    mask = torch.tensor([v not in forbidden for v in target.tolist()]) & (torch.arange(NUM_TOKENS) != 5)
    expected = torch.where(mask, logits.grad.square().sum(1), 0.0)
    assert expected[8:12].min() < 1e-6

    def found(hidden, weight):
        options = dict(num_ranks=num_ranks, width=width, forbidden=forbidden, also=also, mask_T=mask)
        slope = grads[0].to(hidden.dtype), None, None
        return split(hidden, weight, target, slope, **options, temperature=TEMPERATURE)

    for one in found(hidden, weight)[0]:
        close(one[-1], expected, 1e-12)
    for one in found(hidden.float(), weight.float())[0]:
        torch.testing.assert_close(one[-1].double(), expected, rtol=0.02, atol=1e-13)


def test_a_token_without_probability():
    hidden, target = torch.ones(2, 1), torch.tensor([2, 0])
    weight = torch.tensor([[0.0], [0.0], [-torch.inf]])
    shard = VocabularyShard(num_real=3)
    logp, entropy, _ = token_logprobs(hidden, weight, target, shard, temperature=1.0, also=("entropy",))
    assert logp.tolist() == pytest.approx([-torch.inf, -math.log(2)])
    assert entropy.tolist() == pytest.approx([math.log(2)] * 2)


def test_a_number_that_is_none_stays_none():
    hidden, weight, target, _ = inputs(torch.float32)
    hidden[4, 0] = torch.nan
    shard = VocabularyShard(num_real=VOCAB_SIZE)
    values = token_logprobs(hidden, weight, target, shard, temperature=1.0, also=("entropy",))
    for x in values[:2]:
        assert x.isnan().nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize("num_ranks, width", [(1, 29), (2, 16)])
def test_bf16_rounds_inputs_and_gradients_alone(monkeypatch, num_ranks, width):
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 5 * width * 4)
    hidden, weight, target, grads = inputs(torch.bfloat16)
    exact, grad_hidden, grad_weight = plain(hidden.double(), weight.double(), target, grads)
    options = dict(num_ranks=num_ranks, width=width, temperature=TEMPERATURE, also=("entropy",))
    values, got_hidden, got_weight, _ = split(hidden, weight, target, grads.float(), **options)
    assert [x.dtype for x in values[0]] == [torch.float32] * 2
    assert got_hidden.dtype == got_weight.dtype == torch.bfloat16
    close(values[0][0].double(), exact[0], 1e-5)  # fp32 keeps logits below 16 / 0.7 to 2e-6
    close(values[0][1].double(), exact[1], 1e-5)
    for got, expected in ((got_hidden, grad_hidden), (got_weight[:VOCAB_SIZE], grad_weight)):
        assert (got.double() - expected).norm() < 0.03 * expected.norm()


def test_chunks_of_bf16_gradients_are_summed_in_fp32(monkeypatch):
    """512 tokens give weight 0 the gradient 1/2 each: bf16 sums stop growing at 128, where 1/2 rounds away."""
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 1)
    hidden = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    shard = VocabularyShard(num_real=2)
    logp, *_ = token_logprobs(hidden, weight, torch.zeros(512, dtype=torch.int64), shard, temperature=1.0)
    logp.sum().backward()
    assert weight.grad.flatten().tolist() == [256.0, -256.0]


@pytest.mark.parametrize("needed", ["hidden", "weight"])
def test_only_needed_gradients_are_computed(needed):
    hidden, weight, target, grads = inputs()
    expected, grad_hidden, grad_weight = plain(hidden, weight, target, [grads[0], None])
    one = {"hidden": hidden, "weight": weight}[needed].requires_grad_()
    with lasting(), Recorder() as recorder:
        logp, entropy, _ = token_logprobs(hidden, weight, target, VocabularyShard(VOCAB_SIZE), temperature=TEMPERATURE)
        logp.backward(grads[0])
    assert entropy is None
    close(one.grad, {"hidden": grad_hidden, "weight": grad_weight}[needed], 1e-13)
    assert recorder.num_products == 3, "the logits twice, and one gradient"


class Recorder(TorchDispatchMode):
    """The largest tensor that an operation made, and the number of matrix products. The first one imports torch's
    compiler, which sets a variable of the environment."""

    largest = 0
    num_products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.num_products += func._schema.name in {"aten::mm", "aten::addmm", "aten::addmm_"}
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.numel())
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_holds_all_logits(monkeypatch, dtype):
    num_tokens, vocab_size, hidden_size, chunk = 300, 200, 4, 10
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", chunk * vocab_size * 4)
    hidden = torch.randn(num_tokens, hidden_size, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab_size, hidden_size, dtype=dtype, requires_grad=True)
    target = torch.randint(vocab_size, (num_tokens,))
    with lasting(), Recorder() as recorder:
        values = token_logprobs(hidden, weight, target, VocabularyShard(vocab_size), temperature=1.0, also=("entropy",))
        sum(x.sum() for x in values[:2]).backward()
    assert recorder.num_products == 4 * num_tokens / chunk, "backward was seen too"
    assert recorder.largest == chunk * vocab_size
    with Recorder() as recorder:
        (hidden @ weight.T).log_softmax(1)
    assert recorder.largest == num_tokens * vocab_size, "the recorder sees what it should"


@pytest.mark.deep
def test_the_benchmark_runs():
    command = [sys.executable, "tools/bench/logprobs.py", "--json", "--repeats", "1"]
    sizes = ["--tokens", "256", "--vocabulary", "4096", "--hidden", "16"]
    done = subprocess.run([*command, *sizes], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["tokens"], report["vocabulary"], report["hidden"]) == (256, 4096, 16)
    assert report["chunked_time_s"] > 0 and report["chunked_peak_bytes"] > 0
    assert report["plain_peak_bytes"] >= 256 * 4096 * 4, "all logits"
    assert report["memory_ratio"] == report["plain_peak_bytes"] / report["chunked_peak_bytes"]
    assert report["time_ratio"] == report["chunked_time_s"] / report["plain_time_s"]
    assert report["largest_difference"] < 1e-4  # fp32 sums of 4096 terms
