"""How the losses of tokens become one number: by a weight for each sample, fixed before micro-batching.

Every aggregation is a weighted sum over action tokens, and the weights depend only on counts. They are computed here
from the whole mini-batch, before packing, the split over ranks and rejection. The loss is then a plain sum over tokens,
wherever they are. Invariant: the weights depend only on the counts, and for all aggregations but seq-mean-token-sum and
seq-mean-token-sum-norm the weights of a mini-batch's action tokens add up to 1.

Shape letters: S samples of the batch.
"""

from __future__ import annotations

import numpy as np

from megatron_rl.types import MicrobatchPlan, StepBatch


def sample_weights(
    mode: str,
    num_actions: np.ndarray,
    group_of: np.ndarray,
    length: int | None = None,
    answer_of: np.ndarray | None = None,
) -> np.ndarray:
    """The factor of the loss of each action token of a sample, float64 [S]. The samples are one whole mini-batch.

    Args:
        mode: `algorithm.loss_agg_mode`.
        num_actions: int [S], the action tokens of each sample. A sample without any counts as a sample, and its weight
            is 0.
        group_of: int [S], the prompt of each sample.
        length: the constant L of seq-mean-token-sum-norm.
        answer_of: int [S], the answer that each sample is a part of; an answer is one sequence. None: each is one.

    Example: samples of 1 and 3 action tokens to one prompt.
        token-mean 1/4, 1/4; seq-mean-token-sum 1/2, 1/2; seq-mean-token-mean 1/2, 1/6; prompt-mean 1/4, 1/4.
    """
    num_actions = np.asarray(num_actions, np.float64)
    answers, owner = np.unique(np.arange(len(num_actions)) if answer_of is None else answer_of, return_inverse=True)
    ones, num_answers = np.ones(len(num_actions)), len(answers)
    sizes = np.bincount(owner, num_actions, num_answers)[owner]
    match mode:
        case "token-mean":
            divisors = ones * num_actions.sum()
        case "seq-mean-token-sum":
            divisors = ones * num_answers
        case "seq-mean-token-mean":
            divisors = num_answers * sizes
        case "seq-mean-token-sum-norm":
            if not length:
                raise ValueError("seq-mean-token-sum-norm needs a constant length; set algorithm.loss_agg_tokens")
            divisors = ones * num_answers * length
        case "prompt-mean":
            prompts, owner = np.unique(group_of, return_inverse=True)
            divisors = len(prompts) * np.bincount(owner, num_actions, len(prompts))[owner]
        case _:
            raise ValueError(f"unknown loss_agg_mode {mode!r}")
    weights = np.zeros(len(num_actions))
    np.divide(1.0, divisors, out=weights, where=num_actions > 0)
    return weights


def loss_weights(batch: StepBatch, plan: MicrobatchPlan, mode: str, length: int | None = None) -> np.ndarray:
    """`sample_weights` for every mini-batch of a plan, float64 [S]; 0 for samples that are in no mini-batch."""
    weights = np.zeros(len(batch.lengths))
    for minibatch in plan.minibatches:
        samples = np.array(sorted(s for rank in minibatch for micro in rank for s in micro), np.int64)
        answer_of = None if batch.answer_of is None else batch.answer_of[samples]
        weights[samples] = sample_weights(mode, batch.num_actions[samples], batch.group_of[samples], length, answer_of)
    return weights
