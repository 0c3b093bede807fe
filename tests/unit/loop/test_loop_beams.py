"""The metrics of rankings, by hand."""

from __future__ import annotations

import pytest
from small_ports import config

from megatron_rl.loop.beams import describe_beams, thoughts_of
from megatron_rl.loop.evaluation import describe_heldout
from megatron_rl.types import Group, Prompt, Rollout, Verdict

ROLLOUT = {
    "prompts_per_step": 4,
    "samples_per_prompt": 2,
    "max_prompt_tokens": 8,
    "max_response_tokens": 8,
    "thinking": {"thought_tokens": 3, "response_tokens": 4},
    "beams": {"width": 4, "catalogue": "items.json"},
}
REWARDS = [{"kind": "function", "path": "mine:hit", "name": "hit"}, {"kind": "function", "path": "mine:form"}]


def ranking(*scores: float | None, relevant: int | None = None) -> list[Rollout]:
    """The samples of one thought."""
    details = {} if relevant is None else {"hit/num_relevant": relevant}
    return [
        Rollout(
            9, 4, 5, 2, "stop", beam=rank, num_item_tokens=3,
            verdict=Verdict(score, parts=(score, 0.5), details=details),
        )
        for rank, score in enumerate(scores)
    ]  # fmt: skip


def group(uid: str, *thoughts: list[Rollout]) -> Group:
    return Group(Prompt(uid, (1, 2, 3, 4), "q"), [sample for samples in thoughts for sample in samples], None, 0)


def test_accuracy_pass_and_recall_by_hand():
    cfg = config(rollout=ROLLOUT, rewards=REWARDS, eval={"verifier": "hit", "samples_per_prompt": 2})
    groups = [
        # Two of two right items are found, at ranks 1 and 4; then none.
        group("a", ranking(1, 0, 0, 1, relevant=2), ranking(0, 0, 0, 0, relevant=2)),
        # One of five at rank 2; then a thought with one item only, which is right.
        group("b", ranking(0, 1, 0, 0, relevant=5), ranking(1, relevant=5)),
        group("c", ranking(1, None, 0, 0, relevant=1)),  # one item was not scored
    ]
    metrics = describe_heldout(cfg, groups)
    assert metrics["eval/accuracy"] == 2 / 4
    assert (metrics["eval/pass@2"], metrics["eval/pass@4"]) == (3 / 4, 3 / 4)
    assert metrics["eval/recall@1"] == pytest.approx((1 / 2 + 0 + 0 + 1 / 5) / 4)
    assert metrics["eval/recall@2"] == pytest.approx((1 / 2 + 0 + 1 / 5 + 1 / 5) / 4)
    assert metrics["eval/recall@4"] == pytest.approx((2 / 2 + 0 + 1 / 5 + 1 / 5) / 4)
    assert (metrics["eval/num_samples"], metrics["eval/abstained"]) == (17, 1)
    assert metrics["eval/accuracy_low"] < 0.5 < metrics["eval/accuracy_high"]
    assert "eval/pass@8" not in metrics and "eval/maj@2" not in metrics


def test_without_the_number_of_right_items_there_is_no_recall():
    cfg = config(rollout=ROLLOUT, rewards=REWARDS, eval={"verifier": "hit"})
    metrics = describe_heldout(cfg, [group("a", ranking(0, 1, 0, 0))])
    assert metrics["eval/accuracy"] == 0 and metrics["eval/pass@2"] == 1
    assert not any(name.startswith("eval/recall") for name in metrics)
    nothing = describe_heldout(config(rollout=ROLLOUT, rewards=REWARDS), [group("a", ranking(0, 1, 0, 0))])
    assert "eval/accuracy" not in nothing, "no reward decides"


def test_missing_beams_are_counted():
    """Of four thoughts one is whole, one lost two beams, one lost all, and one was ended by the model."""
    lost = Rollout(9, 4, 3, 2, "length")
    ended = Rollout(9, 4, 5, 5, "stop")
    mixed = group("a", ranking(0, 0, 0, 0), ranking(0, 0), [lost], [ended])
    assert [len(samples) for samples in thoughts_of(mixed)] == [4, 2, 1, 1]
    assert describe_beams([mixed], width=4) == {"beams/ended_thoughts": 1, "beams/missing": 2 + 4}


def test_the_estimator_of_two_stages_needs_beams():
    with pytest.raises(ValueError, match="two_stage.*rollout.beams"):
        config(algorithm={"adv_estimator": {"kind": "two_stage"}})
