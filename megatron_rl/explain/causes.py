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
from megatron_rl.types import Picture

LARGE = 10.0
"""A number is unusual if it is this many times the median of the others."""
MANY_TOKENS = 3.0
"""An answer is long if it has this many times the median number of tokens."""
DIFFERENT = 0.01
"""A mismatch of this many nats for a token is no rounding of fp32."""


def causes(step: ExplainedStep) -> list[str]:
    """What is odd about a step; empty if nothing that is known is."""
    return [sentence for look in LOOKS for sentence in look(step)]


def asks_for_older_weights(step: ExplainedStep) -> bool:
    """Whether trainer and engine differ so much in a step that older weights are worth a pass: an engine that has
    missed a push does not know it. With a lag the weights differ anyway."""
    name = "mismatch/mean_abs"
    mismatch, usual = step.logged(name) or 0.0, step.usual(name)
    return not step.max_lag and (mismatch > DIFFERENT or (usual is not None and mismatch > max(1e-5, LARGE * usual)))


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


def _other_weights(step: ExplainedStep) -> Iterator[str]:
    """An engine with a damaged weight, or one that has missed a push and does not know it: the log-probs of nearly all
    tokens of its answers are not the trainer's. Rare tokens that round move only some tokens.

    With two engines half of the answers are odd, so that the median of the answers would say nothing. The answers fall
    into two sets with a gap between them.
    """
    if not step.is_exact or step.max_lag:
        return
    trained = [answer for answer in step.answers if "logp" in answer.numbers and answer.rollout.num_actions]
    if len(trained) < 4:
        return
    ranked = sorted(trained, key=lambda answer: answer.value("mismatch"))
    means = np.array([answer.value("mismatch") for answer in ranked])
    cut = _gap(means)
    near, odd = ranked[:cut], ranked[cut:]
    if means[cut:].mean() <= DIFFERENT or (not near and means[0] <= DIFFERENT):
        return
    spread = float(np.median([(one.distance[one.tokens.action_mask] > DIFFERENT).mean() for one in odd]))
    if spread <= 0.5 or (not near and np.median(means) <= 10 * DIFFERENT):
        return
    found = _stale_version(step, odd)
    if found is not None:
        version, distance = found
        yield (
            f"a stale engine: {len(odd)} of {len(trained)} answers have the log-probs of the weights of version "
            f"{version} in place of {step.number}, within {distance:.1g} nats; from the ones of version {step.number} "
            f"they differ by {means[cut:].mean():.2g} nats ({_names(odd)}){_engines(odd, near)}"
        )
    elif not near:
        yield (
            f"all engines differ from the trainer, by {np.median(means):.2g} nats for a token: other weights, "
            "another temperature or another precision"
        )
    else:
        versions = sorted(step.earlier)
        tried = f"; no weights of the versions {versions[0]} to {versions[-1]} fit them either" if versions else ""
        yield (
            f"an engine with other weights: in {len(odd)} of {len(trained)} answers trainer and engine differ at "
            f"{spread:.0%} of the tokens, by {means[cut:].mean():.2g} nats ({_names(odd)}); the others agree within "
            f"{means[:cut].max():.1g}{tried}{_engines(odd, near)}. bridge.verify: true compares all weights at each "
            "sync; if it finds no difference, they change later: suspect the memory of the engine's machine"
        )


def _gap(values: np.ndarray) -> int:
    """The number of values below the widest gap in sorted values, which is a factor of LARGE or more; 0 if there is no
    such gap. What is below the resolution of fp32 counts as equal."""
    floored = np.maximum(values, 1e-6)
    ratios = floored[1:] / floored[:-1]
    return int(ratios.argmax()) + 1 if len(ratios) and ratios.max() >= LARGE else 0


def _stale_version(step: ExplainedStep, odd: Sequence[ExplainedAnswer]) -> tuple[int, float] | None:
    """The older version of the weights that gave the answers' log-probs, with the mean distance; None if none did."""
    now = float(np.mean([answer.value("mismatch") for answer in odd]))
    fits = {
        version: float(
            np.mean([one.distance_to(logp[one.index]).sum() / max(1, one.rollout.num_actions) for one in odd])
        )
        for version, logp in step.earlier.items()
        if all(one.index in logp for one in odd)
    }
    best = min(fits, key=lambda version: fits[version], default=None)
    return None if best is None or fits[best] > now / LARGE else (best, fits[best])


def _engines(odd: Sequence[ExplainedAnswer], near: Sequence[ExplainedAnswer]) -> str:
    """The engines that gave the odd answers, and whether all of their answers are odd."""
    if any(answer.engine is None for answer in odd):
        return "; which engine gave an answer was not recorded"
    names = sorted({answer.engine for answer in odd if answer.engine is not None})
    also = {answer.engine for answer in near} & set(names)
    told = f"engine {names[0]}" if len(names) == 1 else f"the engines {', '.join(map(str, names))}"
    logs = ", ".join(f"logs/engine_{name}.log" for name in names[:3])
    return f"; {told} gave them{' and others that agree' if also else ''} ({logs})"


def _untrained_tokens(step: ExplainedStep) -> Iterator[str]:
    untrained = np.array(step.untrained, np.int32)
    places = [(answer, answer.tokens.ids[answer.tokens.action_mask]) for answer in _trained(step)]
    found = [(answer, ids[np.isin(ids, untrained)]) for answer, ids in places]
    found = [(answer, ids) for answer, ids in found if len(ids)]
    if not found:
        return
    answers, counted = [answer for answer, _ in found], Counter(int(i) for _, ids in found for i in ids)
    sampled = f"{len(found)} of {len(places)} answers sampled" if len(found) > 1 else f"{answers[0].name} sampled"
    most = [f"{token} ({count} times)" if count > 1 else str(token) for token, count in counted.most_common(5)]
    rest = f" and {len(counted) - 5} others" if len(counted) > 5 else ""
    yield (
        f"a token that training has never moved: {sampled} the token {', '.join(most)}{rest}, whose embedding is "
        "almost 0, so that the gradient of the first norm is nearly unbounded there; forbid it with "
        "rollout.sampling.forbid" + (f" ({_names(answers)})" if len(found) > 1 else "")
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
    names: dict[tuple[Sequence[int], Sequence[Picture], str], list[str]] = {}
    for group in step.groups:
        prompt = group[0].prompt
        columns = str(prompt.columns) if group[0].rollout.episode else ""  # they make the task of an environment
        names.setdefault((prompt.token_ids, prompt.pictures, columns), []).append(prompt.uid)
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
    _other_weights,
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
