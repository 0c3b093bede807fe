"""The metrics of an evaluation: accuracies over prompts with several answers each, and how sure they are.

Invariants (tests/unit/loop): pass@k is the mean over all subsets of k answers, or over the first k beams of each
thought; an accuracy lies within its interval.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb, sqrt
from statistics import fmean, variance

from megatron_rl.config.reward import datasets_of
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.loop.beams import thoughts_of
from megatron_rl.loop.rollouts import verdicts_of
from megatron_rl.types import Group, Metrics, Rollout, Verdict

Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution, for intervals of 95 %."""


def describe_heldout(config: GrpoRunConfig, groups: Sequence[Group]) -> Metrics:
    """The metrics of an evaluation from the verified groups of the held-out prompts.

    `eval/accuracy` is the share of right answers, which is also called pass@1 or mean@n. `eval/pass@k`, for powers of 2
    up to the number of answers, is the share of prompts with a right one among k answers, and `eval/maj@n` the share of
    prompts whose most frequent final answer is right. They leave out answers that no deciding reward scored, and
    prompts with fewer than k scored answers. Each accuracy has the bounds of its interval, `_low` and `_high`. With
    `rollout.beams` the items of each thought are a ranking: see `_describe_rankings`.
    """
    samples, verdicts = [sample for group in groups for sample in group.answers], verdicts_of(groups)
    scores = [verdict.score for verdict in verdicts if verdict.score is not None]
    describe = _describe_answers if config.rollout.beams is None else _describe_rankings
    return describe(config, groups) | {
        "eval/reward_mean": fmean(scores),
        "eval/num_samples": float(len(samples)),
        "eval/abstained": float(len(samples) - len(scores)),
        "eval/response_mean": fmean(sample.num_response_tokens for sample in samples),
        **_by_dataset(groups),
    }


def _by_dataset(groups: Sequence[Group]) -> Metrics:
    """The mean reward and length of each data set, if the rows have the column `dataset` with several."""
    of_sets: dict[str, list[Group]] = {}
    for group in groups:
        for name in datasets_of(group.prompt.columns):
            of_sets.setdefault(name, []).append(group)
    metrics: Metrics = {}
    for name, own in of_sets.items() if len(of_sets) > 1 else ():
        scores = [verdict.score for verdict in verdicts_of(own) if verdict.score is not None]
        if scores:
            metrics[f"eval/dataset/{name}/reward_mean"] = fmean(scores)
        lengths = [sample.num_response_tokens for group in own for sample in group.answers]
        metrics[f"eval/dataset/{name}/response_mean"] = fmean(lengths)
    return metrics


def _describe_answers(config: GrpoRunConfig, groups: Sequence[Group]) -> Metrics:
    num = config.eval.samples_per_prompt
    sizes = [2**i for i in range(1, num.bit_length())]
    answers = [verdicts_of([group]) for group in groups]
    return describe_decided([decide(config, verdicts) for verdicts in answers], num, sizes)


def describe_decided(
    decided: Sequence[Sequence[tuple[bool, str | None]]], num_answers: int, sizes: Sequence[int]
) -> Metrics:
    """`eval/accuracy`, `eval/pass@k` for each k of `sizes`, and `eval/maj@n`, each with its interval.

    Args:
        decided: for each prompt, whether each scored answer is right, and its final answer; see `decide`.
        num_answers: n, the number of answers to each prompt.
    """
    right = [[is_right for is_right, _ in answers] for answers in decided if answers]
    metrics: Metrics = {}
    if right:
        flat = [one for answers in right for one in answers]
        metrics |= accuracy("eval/accuracy", fmean(flat), [fmean(answers) for answers in right], len(flat))
    for k in sizes:
        if passed := [pass_at_k(len(answers), sum(answers), k) for answers in right if len(answers) >= k]:
            metrics |= accuracy(f"eval/pass@{k}", fmean(passed), passed, len(passed) * num_answers)
    if num_answers > 1 and any(final is not None for answers in decided for _, final in answers):
        voted = [majority(answers) for answers in decided if answers]
        metrics |= accuracy(f"eval/maj@{num_answers}", fmean(voted), voted, len(voted))
    return metrics


def _describe_rankings(config: GrpoRunConfig, groups: Sequence[Group]) -> Metrics:
    """The metrics of rankings, as means over the thoughts.

    `eval/accuracy` is the share of thoughts whose first item is right. For powers of 2 up to `rollout.beams.width`,
    `eval/pass@k` is the share of thoughts with a right item among the first k, and `eval/recall@k` the share of
    all right items of the row that are among the first k. The second one needs the number of these items, which the
    deciding reward reports as `num_relevant` (`log_extra`). Thoughts with an item that no deciding reward scored are
    left out.
    """
    hits = [[hits for samples in thoughts_of(group) if (hits := _hits(config, samples))] for group in groups]
    hits = [of_group for of_group in hits if of_group]
    metrics: Metrics = {}
    if not hits:
        return metrics
    assert config.rollout.beams is not None, "there are rankings"
    sizes = [2**i for i in range(config.rollout.beams.width.bit_length())]
    for k in sizes:
        passed = [[float(any(is_right for is_right, _ in one[:k])) for one in of_group] for of_group in hits]
        flat = [value for values in passed for value in values]
        name = "eval/accuracy" if k == 1 else f"eval/pass@{k}"
        metrics |= accuracy(name, fmean(flat), [fmean(values) for values in passed], len(flat))
    counted = [one for of_group in hits for one in of_group if one[0][1]]
    for k in sizes if counted else []:
        metrics[f"eval/recall@{k}"] = fmean(sum(is_right for is_right, _ in one[:k]) / one[0][1] for one in counted)
    return metrics


def _hits(config: GrpoRunConfig, samples: Sequence[Rollout]) -> list[tuple[bool, int]]:
    """Whether each item of a thought is right, in the order of their ranks, and the number of right items of its row; 0
    if no reward has reported it. An empty list if an item was not scored."""
    verdicts = [sample.verdict for sample in samples]
    right = right_answers(config, verdicts)
    if len(right) < len(samples):
        return []
    names = [f"{config.rewards[i].label}/num_relevant" for i in config.deciding_rewards]
    relevant = [next((v.details[name] for name in names if name in v.details), 0) for v in verdicts]
    return list(zip(right, relevant, strict=True))


def decide(config: GrpoRunConfig, verdicts: Sequence[Verdict]) -> list[tuple[bool, str | None]]:
    """Whether each answer is right, and its final answer, if the reward has found one. The first deciding reward
    (`eval.verifier`) that scored an answer decides: a score of 1 or more is right. Answers that no such reward scored
    are left out."""
    decided = []
    for verdict in verdicts:
        index = next((i for i in config.deciding_rewards if verdict.parts[i] is not None), None)
        if index is not None:
            part = verdict.parts[index]
            assert part is not None
            decided.append((part >= 1, verdict.details.get(f"{config.rewards[index].label}/final_answer")))
    return decided


def right_answers(config: GrpoRunConfig, verdicts: Sequence[Verdict]) -> list[bool]:
    """Whether each answer is right; see `decide`."""
    return [is_right for is_right, _ in decide(config, verdicts)]


def pass_at_k(num: int, num_right: int, k: int) -> float:
    """The share of the subsets of k among `num` answers that hold a right one: 1 - C(num - right, k) / C(num, k), which
    is an unbiased estimate of pass@k (Chen et al. 2021, arXiv:2107.03374)."""
    return 1 - comb(num - num_right, k) / comb(num, k)


def majority(decided: Sequence[tuple[bool, str | None]]) -> float:
    """Whether the most frequent final answer is right, as 1 or 0: maj@n, or self-consistency (Wang et al. 2022,
    arXiv:2203.11171). Of several that are equally frequent each has the same chance. Without any final answer it is 0.

    Args:
        decided: whether each answer is right, and its final answer; None has no vote.
    """
    votes = Counter(final for _, final in decided if final is not None)
    if not votes:
        return 0.0
    first = max(votes.values())
    winners = [final for final, count in votes.items() if count == first]
    return fmean(fmean(is_right for is_right, final in decided if final == winner) for winner in winners)


def interval(mean: float, values: Sequence[float], num_answers: int) -> tuple[float, float]:
    """The 95 % interval of an accuracy. It is Wilson's score interval (1927), which also holds near 0 and 1, for the
    number of independent answers that would give the variance that is seen between the prompts: the answers to one
    prompt are alike (the design effect, Kish 1965).

    Args:
        mean: the accuracy.
        values: the accuracy of each prompt, between 0 and 1.
        num_answers: the number of all answers, which are independent at best.
    """
    spread = variance(values) / len(values) if len(values) > 1 else 0.0
    size = min(mean * (1 - mean) / spread, num_answers) if spread else len(values)
    centre, scale = mean + Z**2 / (2 * size), 1 + Z**2 / size
    width = Z * sqrt(mean * (1 - mean) / size + Z**2 / (4 * size**2))
    return max(0.0, (centre - width) / scale), min(1.0, (centre + width) / scale)


def accuracy(name: str, mean: float, values: Sequence[float], num_answers: int) -> Metrics:
    """An accuracy with the bounds of its interval (`interval`)."""
    low, high = interval(mean, values, num_answers)
    return {name: mean, f"{name}_low": low, f"{name}_high": high}
