"""A step of two thoughts with two beams each, by hand: from the beams to the advantage of every token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_models import model

from megatron_rl.actor.packing import pack
from megatron_rl.algorithms.outcomes import grpo
from megatron_rl.algorithms.token_advantages import token_advantages
from megatron_rl.algorithms.whitening import one_rank
from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.loop.rollouts import describe
from megatron_rl.loop.shares import batch_of, plan_step
from megatron_rl.rollout.program import Completion, Transcript
from megatron_rl.rollout.programs.beams import Beam, as_rollouts
from megatron_rl.types import Group, Prompt, Rollouts, Verdict

SHAPE = model("qwen3", 1, 8, 2, 2, 4, 8, 64)
DELIMITER, PREFIX = (3,), (4,)
PROMPT = [11, 12]


def thought(ids: list[int], forced: tuple[int, ...]) -> Transcript:
    transcript = Transcript()
    transcript.sampled(Completion(ids, [-0.5] * len(ids), [0] * len(ids), False))
    transcript.force(forced)
    return transcript


def beam(*ids: int) -> Beam:
    return Beam(ids, (-0.25,) * len(ids), (0,) * len(ids))


@pytest.fixture
def group() -> Group:
    """The first thought has sampled its delimiter, that of the second one is forced. One item of four is right."""
    first = as_rollouts(PROMPT, thought([21, 22, 3], PREFIX), DELIMITER, 8, [beam(31, 32), beam(31, 33)])
    second = as_rollouts(PROMPT, thought([23], (*DELIMITER, *PREFIX)), DELIMITER, 1, [beam(41, 42), beam(41, 43)])
    answers = [*first, *second]
    samples = [
        replace(sample, verdict=Verdict(score, parts=(score,)))
        for (sample, _), score in zip(answers, (1.0, 0.0, 0.0, 0.0), strict=True)
    ]
    return Group(Prompt("row 1", tuple(PROMPT), ""), samples, [tokens for _, tokens in answers], 0)


def config(**estimator) -> GrpoRunConfig:
    rollout = {
        "prompts_per_step": 1,
        "samples_per_prompt": 2,
        "max_prompt_tokens": 8,
        "max_response_tokens": 16,
        "thinking": {"thought_tokens": 8, "response_tokens": 3},
        "beams": {"width": 2, "prefix": ["+"], "catalogue": "items.json"},
    }
    return validate(
        GrpoRunConfig,
        {
            "run": {"name": "x", "steps": 1},
            "model": {"path": "nowhere"},
            "data": {"train": "rows"},
            "rollout": rollout,
            "balance": {"max_tokens_per_microbatch": 24},
            "algorithm": {"adv_estimator": {"kind": "two_stage", "std": "none"} | estimator},
        },
    )


def advantages(group: Group, cfg: GrpoRunConfig) -> tuple[dict[int, list[float]], list[float]]:
    """The advantage of every token of each sample, 0 where there is no action; and the weight of every packed token."""
    shares, _ = plan_step(cfg, SHAPE, batch_of(cfg, Rollouts([group], None, {}), 0))
    [[share]] = shares.policy
    [micros] = pack(share)
    columns, _ = token_advantages([micro.columns for micro in micros], cfg.algorithm, 0.0, one_rank)
    order = iter(share.index[list(sample for micro in share.minibatches[0] for sample in micro)].tolist())
    found, weights = {}, []
    for column in columns:
        weights += column.weight_T[column.action_mask_T].tolist()
        for slot in column.sample_T.unique().tolist():
            sample = next(order, None)
            if sample is None:  # the padding
                continue
            own = column.sample_T == slot
            row, mask = column.advantage_T[own].tolist(), column.action_mask_T[own].tolist()
            size = len(group.payload[sample].ids)
            # Entry t of a column is the token that position t predicts.
            found[sample] = [0.0] + [row[t - 1] if mask[t - 1] else 0.0 for t in range(1, size)]
            assert not any(mask[size - 1 :]), "padding is no action"
    return found, weights


def test_masks_and_advantages_token_by_token(group):
    """The thoughts are worth .5 and 0, so .25 and -.25; the items of the first are worth .5 and -.5 to it."""
    first, second, third, fourth = group.payload
    assert first.ids.tolist() == [11, 12, 21, 22, 3, 4, 31, 32]
    assert [tokens.action_mask.astype(int).tolist() for tokens in group.payload] == [
        [0, 0, 1, 1, 1, 0, 1, 1],
        [0, 0, 0, 0, 0, 0, 1, 1],
        [0, 0, 1, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 1, 1],
    ]
    found, weights = advantages(group, config())
    assert found == {
        0: [0, 0, 0.25, 0.25, 0.25, 0, 0.5, 0.5],
        1: [0, 0, 0, 0, 0, 0, -0.5, -0.5],
        2: [0, 0, -0.25, 0, 0, 0, 0],
        3: [0, 0, 0, 0, 0, 0, 0],
    }
    # 5 + 2 + 3 + 2 action tokens; the forced and the shared ones do not count.
    assert weights == pytest.approx([1 / 12] * 12)
    found, _ = advantages(group, config(thought="max"))
    assert found[0] == [0, 0, 0.5, 0.5, 0.5, 0, 0.5, 0.5] and found[2] == [0, 0, -0.5, 0, 0, 0, 0]


def test_lengths_count_each_thought_once(group):
    metrics = describe([group])
    assert metrics["length/thought_mean"] == 1.5 and metrics["length/thought_cut"] == 0.5
    assert metrics["rollout/num_samples"] == 4 and metrics["length/answer_mean"] == pytest.approx((3 + 2 + 2 + 2) / 4)


def gradients(group: Group, masks, token_advantages) -> dict[tuple[int, ...], np.ndarray]:
    """The gradient of the sum of advantage x log-prob for a policy with its own logits after each context."""
    logits: dict[tuple[int, ...], torch.Tensor] = {}
    total = torch.zeros((), dtype=torch.float64)
    for tokens, mask, row in zip(group.payload, masks, token_advantages, strict=True):
        ids = tokens.ids.tolist()
        for t in np.flatnonzero(mask):
            here = logits.setdefault(tuple(ids[:t]), torch.zeros(64, dtype=torch.float64, requires_grad=True))
            total = total + row[t] * here.log_softmax(-1)[ids[t]]
    total.backward()
    return {context: here.grad.numpy() for context, here in logits.items()}


def test_the_thought_has_a_gradient_where_one_group_of_its_items_gives_none(group):
    """If each beam carried the thought with the advantage of its item within the thought, these would cancel out."""
    thoughts = [tuple(PROMPT), (*PROMPT, 21), (*PROMPT, 21, 22)]
    found, _ = advantages(group, config())
    ours = gradients(group, [tokens.action_mask for tokens in group.payload], [found[i] for i in range(4)])
    assert ours[thoughts[1]][22] == pytest.approx(0.25 * (1 - 1 / 64))
    assert ours[thoughts[0]][21] == pytest.approx(0.25 * (1 - 1 / 64) + 0.25 / 64)  # the other thought's 23 too
    assert all(np.abs(ours[context]).max() > 0.2 for context in thoughts)

    items = grpo(np.array([1.0, 0.0, 0.0, 0.0]), np.array([0, 0, 1, 1]), "none")
    carried = [group.payload[i - i % 2].action_mask for i in range(4)]
    theirs = gradients(group, carried, [np.full(8, items[i]) for i in range(4)])
    assert all(np.abs(theirs[context]).max() == 0 for context in thoughts)
    context = (*PROMPT, 21, 22, 3, 4, 31)
    np.testing.assert_allclose(ours[context], theirs[context], err_msg="the items' gradients are the same")
