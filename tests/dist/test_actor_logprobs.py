"""Vocabulary-parallel log-probs against log_softmax on the whole row."""

from __future__ import annotations

import numpy as np
import pytest
import torch


# 33 of 64 columns on two ranks; 20 of 64 on four: two ranks hold nothing but padding.
@pytest.mark.parametrize("world_size, vocab_size", [(1, 64), (2, 33), (4, 20)])
def test_value_and_gradient_equal_log_softmax(trainers, world_size, vocab_size):
    rng = np.random.default_rng(1)
    logits_TV = rng.normal(0, 5, (40, 64)).astype(np.float32)
    logits_TV[0] += 1e4  # no overflow
    logits_TV[1, 3] = 80.0  # a certain token
    target_T = rng.integers(0, vocab_size, 40)
    target_T[1] = 3
    grad_T = rng.normal(size=40).astype(np.float32)

    reference_TV = torch.from_numpy(logits_TV.astype(np.float64)).requires_grad_()
    all_logps_TV = (reference_TV[:, :vocab_size] / 0.7).log_softmax(-1)
    logp_T = all_logps_TV[torch.arange(40), torch.from_numpy(target_T)]
    logp_T.backward(torch.from_numpy(grad_T.astype(np.float64)))

    results = trainers.run(
        "logprobs",
        world_size,
        logits_TV=logits_TV,
        target_T=target_T,
        grad_T=grad_T,
        vocab_size=vocab_size,
        temperature=0.7,
    )
    # fp32: logits of 1e4 / 0.7 have a spacing of 1e-3, the other rows are exact to 1e-5.
    for logp, _ in results:
        np.testing.assert_allclose(logp[1:], logp_T.detach().numpy()[1:], atol=2e-5)
        np.testing.assert_allclose(logp[0], logp_T.detach().numpy()[0], atol=5e-3)
    grad_TV = np.concatenate([grad for _, grad in results], 1)
    np.testing.assert_allclose(grad_TV[1:], reference_TV.grad.numpy()[1:], atol=1e-5)
    assert not grad_TV[:, vocab_size:].any()
