from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.algorithms.aggregation import loss_weights, sample_weights
from megatron_rl.config.losses import AGGREGATIONS
from megatron_rl.types import Denominators, Group, MicrobatchPlan, Prompt, Rollout, StepBatch

COUNTS, GROUPS = [1, 3, 4, 0], [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("token-mean", [1 / 8, 1 / 8, 1 / 8, 0]),
        ("seq-mean-token-sum", [1 / 4, 1 / 4, 1 / 4, 0]),
        ("seq-mean-token-mean", [1 / 4, 1 / 12, 1 / 16, 0]),
        ("seq-mean-token-sum-norm", [1 / 40, 1 / 40, 1 / 40, 0]),
        ("prompt-mean", [1 / 8, 1 / 8, 1 / 8, 0]),  # two prompts of four tokens each
    ],
)
def test_golden(mode, weights):
    assert sample_weights(mode, COUNTS, GROUPS, 10).tolist() == pytest.approx(weights)


def test_prompts_count_alike_whatever_their_lengths():
    weights = sample_weights("prompt-mean", [1, 1, 8], [0, 0, 1])
    assert weights.tolist() == [1 / 4, 1 / 4, 1 / 16]


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_nothing_to_weigh(mode):
    assert sample_weights(mode, [], [], 5).tolist() == [] and sample_weights(mode, [0], [0], 5).tolist() == [0]


def test_bad_arguments_say_what_is_missing():
    with pytest.raises(ValueError, match="loss_agg_tokens"):
        sample_weights("seq-mean-token-sum-norm", [1], [0])
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'mean'"):
        sample_weights("mean", [1], [0])


def test_each_mini_batch_has_its_own_denominators():
    groups = [
        Group(Prompt(str(g), (1,), "q"), [Rollout(4, 1, n, 0, "stop") for n in counts], None, 0)
        for g, counts in enumerate([(1, 3), (2, 2), (5, 5)])
    ]
    batch = StepBatch.of_groups(groups, version=0)
    # Samples 4 and 5 are in no mini-batch; each mini-batch lies on two ranks.
    plan = MicrobatchPlan((((((1,),), ((0,),))), (((2,), ()), ((3,), ()))), (Denominators(4, 2),) * 2, 8, 1)
    assert loss_weights(batch, plan, "token-mean").tolist() == [1 / 4] * 4 + [0, 0]
    np.testing.assert_allclose(loss_weights(batch, plan, "seq-mean-token-mean"), [1 / 2, 1 / 6, 1 / 4, 1 / 4, 0, 0])


def test_the_conversations_of_an_answer_are_one_sequence():
    """Answers of 4 and 6 tokens; the second one has conversations of 2 and 4."""
    counts, groups, answers = [4, 2, 4], [0, 0, 0], np.array([0, 1, 1])
    for mode, weights in {
        "token-mean": [0.1, 0.1, 0.1],
        "seq-mean-token-sum": [1 / 2, 1 / 2, 1 / 2],
        "seq-mean-token-mean": [1 / 8, 1 / 12, 1 / 12],
        "seq-mean-token-sum-norm": [1 / 20, 1 / 20, 1 / 20],
    }.items():
        assert sample_weights(mode, counts, groups, 10, answers).tolist() == pytest.approx(weights)
