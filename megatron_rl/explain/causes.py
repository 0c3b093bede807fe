"""Looks for known causes of an odd step, each as a sentence with its numbers.

A cause is told if its own numbers are clear. Several may be true, and the first one is the most specific. If there is
none, `explain` says so.

Invariant (tests/unit/explain): each of ten planted causes is named, and a healthy step has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from megatron_rl.explain.step import ExplainedAnswer, ExplainedStep

LARGE = 10.0
"""A number is unusual if it is this many times the median of the others."""
MANY_TOKENS = 3.0
"""An answer is long if it has this many times the median number of tokens."""
DIFFERENT = 0.01
"""A mismatch of this many nats for a token is no rounding of fp32."""


def causes(step: ExplainedStep) -> list[str]:
    """What is odd about a step; empty if nothing that is known is."""
    return [sentence for look in LOOKS for sentence in look(step)]


def _trained(step: ExplainedStep) -> list[ExplainedAnswer]:
    return [answer for answer in step.answers if np.isfinite(answer.advantage)]


def _stale_tokens(step: ExplainedStep) -> Iterator[str]:
    """An engine that missed pushes samples with weights that are too old."""
    oldest = [
        (answer.tokens.version[answer.tokens.action_mask].min(initial=step.number), answer) for answer in step.answers
    ]
    stale = [answer for version, answer in oldest if version < step.number - step.max_lag]
    if stale:
        lags = Counter(step.number - int(version) for version, answer in oldest if version < step.number - step.max_lag)
        yield (
            f"a stale engine: {len(stale)} of {len(step.answers)} answers have tokens of weights that are "
            f"{max(lags)} versions old, and rollout.max_lag allows {step.max_lag} ({_names(stale)})"
        )


def _damaged_engine(step: ExplainedStep) -> Iterator[str]:
    """A damaged weight moves all log-probs of the answers of its engine; rare tokens move only some. Older weights
    would do the same, here or in the engine."""
    if not step.is_exact or step.max_lag:
        return
    trained = [answer for answer in step.answers if "logp" in answer.numbers and answer.rollout.num_actions]
    means = np.array([answer.value("mismatch") for answer in trained])
    if len(means) < 4:
        return
    far = means > max(DIFFERENT, LARGE * np.median(means))
    if not far.any():  # all engines may be damaged
        if np.median(means) > 10 * DIFFERENT:
            yield (
                f"all engines differ from the trainer, by {np.median(means):.2g} nats for a token: other weights, "
                "another temperature or another precision"
            )
        return
    odd = [answer for answer, is_far in zip(trained, far, strict=True) if is_far]
    spread = [float((one.distance[one.tokens.action_mask] > DIFFERENT).mean()) for one in odd]
    if np.median(spread) > 0.5:
        yield (
            f"an engine with other weights: in {len(odd)} of {len(trained)} answers trainer and engine differ at "
            f"{np.median(spread):.0%} of the tokens, by {means[far].mean():.2g} nats ({_names(odd)}); the others agree "
            f"within {np.median(means[~far]):.1g}. Which engine gave an answer is not recorded: set bridge.verify to "
            "true to compare all weights after each push"
        )


def _untrained_tokens(step: ExplainedStep) -> Iterator[str]:
    untrained = set(step.untrained)
    if not untrained:
        return
    for answer in _trained(step):
        own = answer.tokens.ids[answer.tokens.action_mask]
        if found := [int(token) for token in own if int(token) in untrained]:
            yield (
                f"a token that training has never moved: {answer.name} sampled the token {found[0]}, whose embedding "
                "is almost 0, so that the gradient of the first norm is nearly unbounded there; forbid it with "
                "rollout.sampling.forbid"
            )


def _advantage_by_one_reward(step: ExplainedStep) -> Iterator[str]:
    trained = _trained(step)
    sizes = np.array([abs(answer.advantage) for answer in trained])
    if len(sizes) < 4 or sizes.max() <= LARGE * max(float(np.median(sizes)), 1e-12):
        return
    answer = trained[int(sizes.argmax())]
    parts = answer.rollout.verdict.parts
    told = ""
    if len(parts) > 1:
        others = [a.rollout.verdict.parts for a in step.answers if len(a.rollout.verdict.parts) == len(parts)]
        columns = np.array([[np.nan if p is None else abs(p) for p in row] for row in others])
        usual = np.nanmedian(columns, axis=0)
        ratios = [0.0 if p is None else abs(p) / max(u, 1e-12) for p, u in zip(parts, usual, strict=True)]
        worst = int(np.argmax(ratios))
        told = f"; the reward {step.labels[worst]} gave it {parts[worst]:g}, where the median is {usual[worst]:g}"
    yield (
        f"a huge advantage: {answer.name} has {answer.advantage:.4g}, and the median of all is "
        f"{np.median(sizes):.3g}{told}"
    )


def _neighbours_without_score(step: ExplainedStep) -> Iterator[str]:
    for group in step.groups:
        unscored = [answer for answer in group if answer.rollout.verdict.reward is None]
        rest = [answer for answer in group if answer.rollout.verdict.reward is not None]
        if unscored and rest and len(rest) <= max(2, len(group) // 2):
            reason = unscored[0].rollout.verdict.reason
            yield (
                f"answers without a score: {len(unscored)} of {len(group)} answers to {group[0].prompt.uid} have none "
                f"({reason or 'no reason was given'}), so that the advantages of the other {len(rest)} compare few "
                "answers"
            )


def _equal_prompts(step: ExplainedStep) -> Iterator[str]:
    names: dict[tuple[int, ...], list[str]] = {}
    for group in step.groups:
        names.setdefault(tuple(group[0].prompt.token_ids), []).append(group[0].prompt.uid)
    for uids in names.values():
        if len(uids) > 1:
            yield f"equal prompts: {' and '.join(uids[:3])} are the same tokens, so that their answers count double"


def _one_row(step: ExplainedStep) -> Iterator[str]:
    """The answers to one row carry the loss."""
    groups = [[a for a in group if "slope" in a.numbers] for group in step.groups]
    sizes = np.array([sum(float(np.abs(a.numbers["slope"]).sum()) for a in own) for own in groups])
    if len(sizes) < 4 or not sizes.sum():
        return
    worst = int(sizes.argmax())
    if sizes[worst] > LARGE * max(float(np.median(sizes[sizes > 0])), 1e-12):
        yield (
            f"one row: {sizes[worst] / sizes.sum():.0%} of the derivatives of the loss are at the answers to "
            f"{groups[worst][0].prompt.uid}; look at the row, its ground truth and its answers"
        )


def _long_answer(step: ExplainedStep) -> Iterator[str]:
    trained = _trained(step)
    lengths = np.array([answer.rollout.num_response_tokens for answer in trained])
    if len(lengths) < 4:
        return
    usual = float(np.median(lengths))
    for answer in [trained[int(lengths.argmax())]]:
        length = answer.rollout.num_response_tokens
        if length > MANY_TOKENS * usual and length > 32:
            ended = " and was cut" if answer.rollout.finish == "length" else ""
            yield f"a long answer: {answer.name} has {length} tokens{ended}, and the median is {usual:g}"


def _learning_rate(step: ExplainedStep) -> Iterator[str]:
    rate, usual = step.logged("lr"), step.usual("lr")
    if rate and usual and (rate > 3 * usual):
        yield f"the learning rate: it is {rate:.3g} in this step, and {usual:.3g} in the median of the steps before"
    ratio, usual_ratio = step.usual("update_ratio", 3), step.usual("update_ratio", 40)
    if ratio and usual_ratio and ratio > LARGE * usual_ratio:
        yield (
            f"the learning rate: the last updates changed the weights by {ratio:.2g} of their norm, and the ones "
            f"before by {usual_ratio:.2g}"
        )


def _unused_experts(step: ExplainedStep) -> Iterator[str]:
    unused, usual = step.logged("experts/unused"), step.usual("experts/unused")
    load = step.logged("experts/load/max")
    if unused and unused > 0.05 and (usual is None or unused > 1.5 * usual or unused > 0.2):
        yield (
            f"experts without tokens: {unused:.0%} of the experts got none"
            + (f", and the busiest got {load:.1f} times the mean of its layer" if load else "")
            + "; policy.load_balancing_loss or policy.router_bias_update_rate spreads the tokens"
        )


def _names(answers: Sequence[ExplainedAnswer]) -> str:
    more = f" and {len(answers) - 2} more" if len(answers) > 2 else ""
    return "; ".join(answer.name for answer in answers[:2]) + more


LOOKS: Sequence[Callable[[ExplainedStep], Iterator[str]]] = (
    _stale_tokens,
    _damaged_engine,
    _untrained_tokens,
    _advantage_by_one_reward,
    _neighbours_without_score,
    _learning_rate,
    _unused_experts,
    _one_row,
    _long_answer,
    _equal_prompts,
)
"""The most specific first."""
