"""Log-probs and entropies over real ranks that share the vocabulary, against log_softmax on the whole rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch


# 33 of 64 columns on two ranks; 20 of 64 on four: two ranks hold nothing but padding.
@pytest.mark.parametrize("world_size, vocab_size, forbidden", [(1, 64, ()), (2, 33, (31, 32)), (4, 20, (3,))])
@pytest.mark.parametrize("num_tokens", [40, 0])
def test_values_and_gradients_equal_log_softmax(trainers, world_size, vocab_size, forbidden, num_tokens):
    rng = np.random.default_rng(1)
    hidden_TH = rng.normal(0, 1.5, (num_tokens, 16)).astype(np.float32)
    weight_VH = rng.normal(0, 1, (64, 16)).astype(np.float32)
    allowed = [v for v in range(vocab_size) if v not in forbidden]
    target_T = rng.choice(allowed, num_tokens)
    grad_2T = rng.normal(size=(2, num_tokens)).astype(np.float32)

    hidden = torch.from_numpy(hidden_TH).double().requires_grad_()
    weight = torch.from_numpy(weight_VH).double().requires_grad_()
    log_p = (hidden @ weight[allowed].T / 0.7).log_softmax(-1)
    column_T = torch.tensor([allowed.index(v) for v in target_T.tolist()], dtype=torch.int64)
    expected = log_p.gather(1, column_T[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)
    torch.autograd.backward(expected, torch.from_numpy(grad_2T).double().unbind())

    results = trainers.run(
        "logprobs",
        world_size,
        hidden_TH=hidden_TH,
        weight_VH=weight_VH,
        target_T=target_T,
        grad_2T=grad_2T,
        vocab_size=vocab_size,
        temperature=0.7,
        forbidden=forbidden,
    )
    # fp32: logits up to 30 / 0.7, sums of sixteen, are exact to 1e-5, and gradients are sums of forty.
    for values, grad_hidden, _ in results:
        np.testing.assert_allclose(values, [x.detach().numpy() for x in expected], atol=2e-5)
        np.testing.assert_allclose(grad_hidden, hidden.grad.numpy(), atol=1e-4)
    grad_weight = np.concatenate([grad for _, _, grad in results])
    np.testing.assert_allclose(grad_weight, weight.grad.numpy(), atol=1e-4)
    assert not grad_weight[vocab_size:].any() and not grad_weight[list(forbidden)].any()


def test_gradients_that_lie_in_columns_are_summed_over_the_ranks(trainers):
    mine = np.arange(6, dtype=np.float32).reshape(3, 2).T
    for rank, (ours, megatrons) in enumerate(trainers.run("gradient_in_columns", 2)):
        np.testing.assert_array_equal(ours, 2 * mine + 10)
        # If this fails, Megatron sums them too, and actor/gradient_sum.py is not needed.
        np.testing.assert_array_equal(megatrons, mine + 10 * rank)
