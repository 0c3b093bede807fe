"""Names the turn of an answer where it went wrong, by what its environment said.

    turn 2 of 4: raised: 'Error: ValueError: the text is 0 times in f.py, but must be there exactly once'
    turn 3 of 4: the last that it read: 'gk(3, 4) is -1, not 7 [exit status 1]'

Invariant (tests/unit/explain): each planted fault of an answer is told with its turn, and a right answer has none.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.explain.step import ExplainedAnswer
from megatron_rl.types import text_of_turn

NUM_ERRORS, NUM_CHARACTERS = 3, 200


def bad_episodes(answers: Sequence[ExplainedAnswer]) -> list[ExplainedAnswer]:
    """The answers of several turns whose environment failed, or whose reward is below the step's highest one or not
    above 0, the worst first. Of an answer with several conversations it is the last one, which has the verdict."""
    ended = [one for one in answers if one.rollout.episode and not one.rollout.episode.continues]
    rewards = {one.index: one.rollout.verdict.reward for one in ended}
    known = [reward for reward in rewards.values() if reward is not None]
    lost = [one for one in ended if one.rollout.episode and one.rollout.episode.fault]
    below = [one for one in ended if (r := rewards[one.index]) is not None and (r < max(known) or r <= 0)]
    return [*lost, *sorted(below, key=lambda one: rewards[one.index] or 0.0)]


def wrong_turns(answer: ExplainedAnswer) -> list[str]:
    """What went wrong in which turn: the first errors of calls with their kinds, what the model read last, and how the
    answer ended. Turns are counted from 1."""
    episode, said = answer.rollout.episode, answer.tokens.conversation
    if episode is None or said is None:
        return []
    read = list[tuple[int, str]]()
    number = 0
    for turn in said.turns:
        number += turn["role"] == "assistant"
        if turn["role"] != "assistant":
            read.append((number, text_of_turn(turn)))
    errors = [(turn, text) for turn, text in read if text.startswith("Error: ")]
    kinds: Sequence[str] = episode.tool_errors
    if len(kinds) != len(errors):  # a tool's own result has the form of an error, or a turn ended the answer
        kinds = [""] * len(errors)
    found = [
        f"turn {turn} of {number}: {kind or 'an error'}: {_short(text)}"
        for (turn, text), kind in list(zip(errors, kinds, strict=True))[:NUM_ERRORS]
    ]
    if len(errors) > NUM_ERRORS:
        found.append(f"and {len(errors) - NUM_ERRORS} more, the last in turn {errors[-1][0]}")
    if read and read[-1] not in errors[:NUM_ERRORS]:
        found.append(f"turn {read[-1][0]} of {number}: the last that it read: {_short(read[-1][1])}")
    if episode.fault:
        found.append(f"turn {number} of {number}: the environment failed: {_short(episode.fault)}")
    elif answer.rollout.finish == "length":
        found.append(f"turn {number} of {number}: a limit cut the answer")
    elif not read:
        found.append(f"turn {number} of {number} ended the answer without reading anything")
    return found


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= NUM_CHARACTERS else f"{text[:NUM_CHARACTERS]} ...")
