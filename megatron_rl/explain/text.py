"""An explanation as text for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_rl.algorithms.advantages import why_untrained
from megatron_rl.explain.episodes import bad_episodes, wrong_turns
from megatron_rl.explain.search import FoundSpan
from megatron_rl.explain.step import LOGGED, STORED, ExplainedAnswer, ExplainedStep
from megatron_rl.observe.records import explained_file
from megatron_rl.types import Gradient, Tokenizer

NUM_ANSWERS, NUM_TOKENS, NUM_CONTEXT = 5, 5, 6
"""The numbers of answers and of tokens that are shown, and the number of tokens before and after such a token."""


@dataclass(frozen=True, slots=True)
class Explanation:
    step: ExplainedStep
    metric: str
    state: str
    """The weights that the step was computed with."""
    is_exact: bool
    """Whether these are the weights that the step began with."""
    gradient: Gradient | None
    """The whole step's gradient; None if the metric is another one."""
    found: Sequence[FoundSpan]
    """What `search.largest_tokens` found."""
    causes: Sequence[str]


def show(told: Explanation, tokenizer: Tokenizer, console: Console) -> None:
    """Print an explanation."""

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style), soft_wrap=True)

    step = told.step
    name = LOGGED[told.metric]
    logged, usual = step.logged(name), step.usual(name)
    say(f"step {step.number}: {name} {_number(logged)}, median of the steps before {_number(usual)}", "bold")
    say(f"computed with {told.state}", "bright_black")
    if told.gradient is not None:
        _show_gradient(told, tokenizer, say)
    elif told.metric == "grad_norm":
        say(f"the step trained nothing: {why_untrained(step.records.get(step.number, {}))}")
    else:
        _show_answers(told, console)
    bad = bad_episodes(step.answers)
    for answer in bad[:NUM_ANSWERS]:
        say(f"an answer that went wrong, one of {len(bad)}: {describe_answer(answer, step.num_updates)}")
        for turn in wrong_turns(answer):
            say(f"  {turn}")
    with_others = "" if told.is_exact else ", with other weights than the run's"
    say("what is odd about this step:" if told.causes else f"nothing that is known to be odd was found{with_others}")
    if told.metric in STORED:
        say("(without trainers only a part is looked for; --metric grad_norm looks for all)", "bright_black")
    for cause in told.causes:
        say(f"  - {cause}", "yellow")


def _show_gradient(told: Explanation, tokenizer: Tokenizer, say: Any) -> None:
    assert told.gradient is not None
    norm = told.gradient.norm
    say(f"gradient norm {norm:,.6g}, by parts of the model:")
    total = sum(told.gradient.squares.values()) or 1.0
    for group, square in sorted(told.gradient.squares.items(), key=lambda item: -item[1])[:NUM_TOKENS]:
        row = ""
        for token, largest in list(told.gradient.rows.get(group, {}).items())[:1]:
            row = f", {largest / square:.1%} of it in the row of {_shown(tokenizer, token)}" if square else ""
        say(f"  {square / total:7.2%}  {group}{row}")
    tokens = [one for one in told.found if one.is_token][:NUM_TOKENS]
    if not tokens:
        say(f"the search ended after {len(told.found)} passes, before it reached single tokens")
    else:
        say("the tokens with the largest gradients of their own (norm of the token's loss alone):")
    answers = {answer.index: answer for answer in told.step.answers}
    for one in tokens:
        answer, place = answers[one.part.samples[0]], one.part.start
        say(f"  {one.gradient.norm:10.4g}  {describe_token(answer, place, tokenizer)}")
    samples = [one for one in told.found if len(one.part.samples) == 1 and one.part.start == 0]
    for one in samples[:NUM_ANSWERS]:
        answer = answers[one.part.samples[0]]
        say(f"  {one.gradient.norm:10.4g}  the whole of {describe_answer(answer, told.step.num_updates)}")


def describe_answer(answer: ExplainedAnswer, num_updates: int = 1) -> str:
    """
    Args:
        num_updates: the number of the step's updates. If it is 1, the answer's update is not named.
    """
    verdict = answer.rollout.verdict
    reward = "no score" if verdict.reward is None else f"reward {verdict.reward:g}"
    reason = f" ({verdict.reason})" if verdict.reason else ""
    size = f"{answer.rollout.num_response_tokens} tokens"
    kind = "advantage" if "advantage" not in answer.numbers else "mean advantage"
    trained = f"{kind} {answer.advantage:.4g}" if np.isfinite(answer.advantage) else "not trained"
    if answer.updates and num_updates > 1:
        numbers = " and ".join(str(update + 1) for update in answer.updates)
        trained += f", in update{'s' * (len(answer.updates) > 1)} {numbers} of {num_updates}"
    return f"{answer.name}: {size}, {reward}{reason}, {trained}"


def describe_token(answer: ExplainedAnswer, place: int, tokenizer: Tokenizer) -> str:
    """A token with its numbers and its neighbours."""
    ids = answer.tokens.ids
    before = tokenizer.decode(ids[max(0, place - NUM_CONTEXT) : place].tolist(), skip_special_tokens=False)
    after = tokenizer.decode(ids[place + 1 : place + 1 + NUM_CONTEXT].tolist(), skip_special_tokens=False)
    logp, engine = answer.numbers["logp"][place], answer.tokens.logp_rollout[place]
    return (
        f"{answer.name}, token {place - answer.rollout.num_prompt_tokens + 1} of {answer.rollout.num_response_tokens}: "
        f"{_shown(tokenizer, int(ids[place]))} in {before!r} _ {after!r}: log-prob {logp:.4g} (engine {engine:.4g}), "
        f"version {answer.tokens.version[place]}, advantage {answer.advantage_at(place):.4g}"
    )


def _show_answers(told: Explanation, console: Console) -> None:
    """The answers with the largest values of a metric, and with the smallest if it can be negative."""
    table = Table(title=f"answers by {told.metric}", title_justify="left", box=None)
    for column in ("value", "answer"):
        table.add_column(column)
    valued = [(answer.value(told.metric), answer) for answer in told.step.answers]
    known = sorted((pair for pair in valued if np.isfinite(pair[0])), key=lambda pair: -pair[0])
    shown = known[:NUM_ANSWERS] + known[NUM_ANSWERS:][-NUM_ANSWERS:]
    for value, answer in shown:
        table.add_row(f"{value:.4g}", Text(describe_answer(answer, told.step.num_updates)))
    console.print(table)


def _shown(tokenizer: Tokenizer, token: int) -> str:
    return f"token {token} {tokenizer.decode([token], skip_special_tokens=False)!r}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.4g}"


def as_json(told: Explanation) -> dict[str, Any]:
    """Everything that was found, in JSON's types."""
    gradient = told.gradient
    return {
        "step": told.step.number,
        "metric": told.metric,
        "state": told.state,
        "is_exact": told.is_exact,
        "causes": list(told.causes),
        "gradient": None if gradient is None else {"norm": gradient.norm, "squares": gradient.squares},
        "rows": {} if gradient is None else {g: {str(t): x for t, x in r.items()} for g, r in gradient.rows.items()},
        "found": [
            {
                "samples": list(one.part.samples),
                "start": one.part.start,
                "stop": one.part.stop,
                "norm": one.gradient.norm,
            }
            for one in told.found
        ],
        "episodes": [
            {"uid": answer.prompt.uid, "index": answer.number, "turns": wrong_turns(answer)}
            for answer in bad_episodes(told.step.answers)
        ],
        "samples": [_sample(answer) for answer in told.step.answers],
    }


def _sample(answer: ExplainedAnswer) -> dict[str, Any]:
    response = slice(answer.rollout.num_prompt_tokens, answer.rollout.length)
    return {
        "uid": answer.prompt.uid,
        "index": answer.number,
        "advantage": answer.advantage if np.isfinite(answer.advantage) else None,
        "updates": list(answer.updates),
        "tokens": {name: np.round(x[response], 6).tolist() for name, x in answer.numbers.items()},
    }


def write(told: Explanation, folder: Path) -> Path:
    """Write the explanation into the run's folder, where the report finds it."""
    path = explained_file(folder, told.step.number)
    path.parent.mkdir(exist_ok=True)
    if told.metric != "grad_norm" and path.exists():  # it has the same numbers of tokens, and what the search found
        return path
    path.write_text(json.dumps(as_json(told)), encoding="utf-8")
    return path
