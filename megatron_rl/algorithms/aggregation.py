"""How token losses become one number: a weight for each sample, fixed before micro-batching.

Every aggregation is a weighted sum over action tokens whose weights depend on counts alone. They are made here from
the whole mini-batch, before any packing, split over ranks or rejection, so that a loss is their plain sum wherever
its tokens stand. Invariant: the weights of a mini-batch's action tokens sum to 1, seq-mean-token-sum and
seq-mean-token-sum-norm apart, and do not depend on anything but the counts.

Shape letters: S samples of the batch.
"""

from __future__ import annotations

import numpy as np

from megatron_rl.types import Batch, MicrobatchPlan


def sample_weights(mode: str, num_actions: np.ndarray, group_of: np.ndarray, length: int | None = None) -> np.ndarray:
    """What each action token of a sample is multiplied by, float64 [S]; the samples are one whole mini-batch.

    Args:
        mode: `algorithm.loss_agg_mode`.
        num_actions: int [S]. A sample without actions counts as a sample and has the weight 0.
        group_of: int [S], the prompt of each sample.
        length: the constant L of seq-mean-token-sum-norm.

    Example: samples of 1 and 3 action tokens, one prompt.
        token-mean 1/4, 1/4; seq-mean-token-sum 1/2, 1/2; seq-mean-token-mean 1/2, 1/6; prompt-mean 1/4, 1/4.
    """
    num_actions = np.asarray(num_actions, np.float64)
    ones, num_samples = np.ones(len(num_actions)), len(num_actions)
    match mode:
        case "token-mean":
            divisors = ones * num_actions.sum()
        case "seq-mean-token-sum":
            divisors = ones * num_samples
        case "seq-mean-token-mean":
            divisors = num_samples * num_actions
        case "seq-mean-token-sum-norm":
            if not length:
                raise ValueError("seq-mean-token-sum-norm needs its constant length, algorithm.loss_agg_tokens")
            divisors = ones * num_samples * length
        case "prompt-mean":
            prompts, owner = np.unique(group_of, return_inverse=True)
            divisors = len(prompts) * np.bincount(owner, num_actions, len(prompts))[owner]
        case _:
            raise ValueError(f"unknown loss_agg_mode {mode!r}")
    weights = np.zeros(num_samples)
    np.divide(1.0, divisors, out=weights, where=num_actions > 0)
    return weights


def loss_weights(batch: Batch, plan: MicrobatchPlan, mode: str, length: int | None = None) -> np.ndarray:
    """`sample_weights` of every mini-batch of a plan, float64 [S]; 0 for samples in none."""
    weights = np.zeros(len(batch.lengths))
    for minibatch in plan.minibatches:
        samples = np.array(sorted(s for rank in minibatch for micro in rank for s in micro), np.int64)
        weights[samples] = sample_weights(mode, batch.num_actions[samples], batch.group_of[samples], length)
    return weights
