"""The requests to the engines and their results. These are plain values and compute nothing but their own derived
numbers.

A prompt has a group of rollouts, and a rollout consists of tokens. An array with one entry for each token is indexed by
the token that it describes: entry t of `logp_rollout` is log p(ids[t] | ids[:t]), so entry 0 means nothing.

Shape letters: L the number of tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_rl.types.vision import Picture


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, with its tokens.

    Example: the row `{"prompt": "1 + 2 =", "ground_truth": "3"}` in line 17 of a file is
    `Prompt("sums.jsonl:17", (5, 14, 6, 15), "1 + 2 =", {"ground_truth": "3"})`, if it has four tokens.
    """

    uid: str
    """A readable name of the prompt's row: `gsm8k_train.jsonl:17`."""
    token_ids: tuple[int, ...]
    messages: tuple[Mapping[str, str], ...] | str
    """The source of the prompt: chat turns, or plain text. Reward functions receive it as `prompts`."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row (`ground_truth`, `dataset`, ...), which the verifiers receive."""
    thought_budgets: tuple[int, ...] = ()
    """The budget of each answer's thought in tokens, set with the request; empty means
    `config.ThinkingBudget.of_row`."""
    pictures: tuple[Picture, ...] = ()
    """The images whose tokens are among `token_ids`, in order."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What model and environment have said in an answer, for reward functions.

    Example: `turns` of an answer that calls a tool are
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": "It is 3."}
    """

    turns: tuple[Mapping[str, Any], ...]
    """The model's turns with their thoughts, and the observations as the model read them, as chat turns."""
    opening: str = ""
    """What the environment appended to the last turn of the prompt."""
    state: Mapping[str, Any] | None = None
    """The attributes of the environment's object when the answer was complete, as far as JSON has them; None if there
    is no object."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one rollout, beginning with the prompt. Text is made from tokens, and tokens are never made from
    text again.

    Example: a prompt of 3 tokens, a thought that the budget cut after 2 tokens, the forced delimiter, and an answer of
    2 tokens:
        ids           [11 12 13 | 21 22 | 3 | 31 32]
        action_mask   [ 0  0  0 |  1  1 | 0 |  1  1]
        logp_rollout  [ 0  0  0 | -.7 -.1 | 0 | -.3 -.2]
        version       [-1 -1 -1 |  4  4 | -1 |  4  4]
    """

    ids: np.ndarray
    """int32 [L]"""
    action_mask: np.ndarray
    """bool [L]: True where the policy sampled the token. The prompt and forced tokens are no actions."""
    logp_rollout: np.ndarray
    """float32 [L]: the engine's log-prob of each action at the sampling temperature; 0 elsewhere."""
    version: np.ndarray
    """int32 [L]: the version of the weights that sampled each action; -1 elsewhere."""
    routes: np.ndarray | None = None
    """uint8, or uint16 with more than 256 experts, [R, layers, K]: the K experts that the engine chose in every layer
    for the first R <= L tokens, when it computed the keys and values that the last token saw. Layers without experts
    have any numbers. None if the engine did not tell."""
    conversation: Conversation | None = None
    """What was said in several turns; None if there is no environment."""
    logp_teacher: np.ndarray | None = None
    """float32 [L]: the log-prob of each action by the row's teacher; 0 elsewhere. None if engines scored for none."""
    pictures: tuple[Picture, ...] = ()
    """The images whose tokens are among `ids`, in order."""


LARGEST_SCORE = 3.4e38
"""What float32 holds. Sums and squares of larger numbers would not be finite, and no step could train on them."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A score, or an abstention with its reason. A crash or a time-out is never the score 0.

    Example: two rewards with the weights 1 and 0.5 give 1 and 0.4. The verdict on the answer is
    `Verdict(1.2, parts=(1.0, 0.4))`. If the second one abstains, it is `Verdict(1.0, parts=(1.0, None))`.
    """

    score: float | None
    """The score of one reward, or the weighted sum of all rewards; None means an abstention."""
    reason: str = ""
    parts: tuple[float | None, ...] = ()
    """If `score` is the weighted sum, the score of each configured reward, not weighted; None where it abstained."""
    shaped: float | None = None
    """The score after algorithm.shaping; None if no shaping was applied."""
    repeated: Mapping[int, float] = field(default_factory=dict, hash=False)
    """The share of the answer's n-grams of token ids that stand in it before, by n, for the shaping `repetition`."""
    failed: bool = False
    """True if the reward could not score the answer; False if it gave a score or chose to abstain."""
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What a reward reports about the answer, as `<name of the reward>/<column>` and a value of JSON."""

    @property
    def reward(self) -> float | None:
        """The number that advantages are computed from: the shaped score if there is one, otherwise the score."""
        return self.score if self.shaped is None else self.shaped


NOT_JUDGED = Verdict(None, "the answer has not been judged")
"""The verdict on an answer before the verifiers have seen it."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request to the engines: the answers to one prompt.

    Example: the third prompt of step 5 in a run with `run.seed: 1` and 4 prompts a step is
    `GroupRequest(22, prompt, num_samples=8, seed=(1048581, 2))`: its place in the stream of prompts is 5 x 4 + 2, and
    1048581 is 2**20 + 5.
    """

    number: int
    """The name of the group until it is handed out. A group that is trained on has its place in the stream of prompts,
    counted from 0. All others, of evaluations and baselines, have numbers below 0: they get no rewards of passages, and
    are not written into the journal."""
    prompt: Prompt
    num_samples: int
    seed: tuple[int, ...]
    """The source of the answers' seeds, together with `run.seed`. The same seed and weights give the same
    answers."""
    is_greedy: bool = False
    """Whether the most probable tokens are taken, for the baseline of the estimator `remax`."""


UTILITY = "utility"
"""The kind of the rewards of a thought's passages (`rollout.prefix_values`)."""


class TokenReward(NamedTuple):
    """A reward at one token of a sample."""

    position: int
    """The token's index in `Tokens`. At a token that is no action it counts for the last action before it."""
    kind: str
    """The source of the reward. Each kind is normalised separately, so that one with a large scale does not hide the
    others."""
    value: float


class Branch(NamedTuple):
    """The end of a passage, where other answers continue."""

    sample: int
    """The number of the rollout within its group."""
    passage: int
    """The number of the passage within the rollout's thought."""


FROM_PROMPT = Branch(-1, -1)
"""The end of the prompt, before all thoughts of a group."""


TOOL_ERRORS = ("unclosed", "malformed", "unknown_tool", "arguments", "raised", "timed_out")
"""Why a call of a tool gave an error: it was not closed, or cannot be read; there is no such tool; the arguments do not
fit its schema; it raised an exception, or took too long."""


@dataclass(frozen=True, slots=True)
class Episode:
    """The driver's record of the turns of one answer, if there is `rollout.environment`."""

    num_turns: int
    """The number of the model's turns; of a later conversation the turns that no earlier one has."""
    last_turn: int
    """The index in `Tokens` of the first token of the last turn."""
    tool_errors: tuple[str, ...] = ()
    """The kind of each call of a tool that gave an error, see TOOL_ERRORS."""
    step_s: float = 0.0
    """The time that the model waited for the environment, in seconds."""
    fault: str = ""
    """Why the environment failed, so that the answer cannot be judged; empty if it did not fail."""
    num_tool_calls: int = 0
    conversation: int = 0
    """The number of the conversation of an answer, whose conversations are adjacent: an agent's, or the parts of an
    answer whose history the chat template changes. 0 if the answer is one conversation."""
    continues: bool = False
    """Whether the answer continues in the next conversation, which begins with a changed history. The verdict on that
    one holds for both."""
    thoughts: tuple[int, ...] = ()
    """The number of reasoning tokens of each turn that its budget did not cut, if the turns have budgets."""
    num_abandoned: int = 0
    """The number of an agent's calls whose answers nobody waited for any more; they are left out."""
    num_failed: int = 0
    """The number of earlier attempts at the answer whose environment failed; they are left out."""
    host: str = ""
    """The machine where the environment failed, if it did."""
    num_retried: int = 0
    """The number of an agent's calls that it asked once more and went on from the later answer; the earlier ones are
    left out."""
    patches: tuple[int, ...] = ()
    """The number of patches of each image of the conversation, the prompt's first."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer, without its tokens, which are in the payload of its group.

    Example: the answer whose `Tokens` are shown above, judged right:
        Rollout(length=8, num_prompt_tokens=3, num_actions=4, num_thought_tokens=2, finish="stop", thought_cut=True,
                thought_budget=2, oldest_version=4, verdict=Verdict(1.0, parts=(1.0,)))
    """

    length: int
    """The number of tokens in prompt and response together."""
    num_prompt_tokens: int
    num_actions: int
    """The number of tokens that the policy sampled."""
    num_thought_tokens: int
    """The number of sampled tokens before the first delimiter. If there is no delimiter, all tokens of an answer with a
    budget are a thought, and none of an answer without."""
    finish: str
    """`stop` if the model ended its answer, `length` if a budget cut it."""
    thought_cut: bool = False
    """Whether the thinking budget ended the thought."""
    thought_budget: int | None = None
    """The budget of its thought, in tokens; None if there was no budget."""
    oldest_version: int = -1
    """The oldest version of the weights that sampled one of its actions; -1 if it has none."""
    token_rewards: tuple[TokenReward, ...] = ()
    """Rewards at single tokens, in the order of their positions, for estimators that give each token an advantage."""
    episode: Episode | None = None
    """The turns of the answer; None if there is no environment."""
    beam: int = 0
    """The rank of its item among the beams of its thought, 0 for the most probable one; 0 without beam search. The
    rollouts of a thought are adjacent, and the thought's tokens are actions of the one with rank 0 alone."""
    num_item_tokens: int = 0
    """The number of its last tokens that form an item found by beam search; 0 means that it has no item."""
    digest: int = 0
    """The CRC-32 of its response's tokens, by which equal answers are found; 0 if nobody has computed it."""
    branch: Branch | None = None
    """The passage that it continues, if it belongs to `Group.continuations`; None for an answer."""
    verdict: Verdict = NOT_JUDGED

    @property
    def begins_answer(self) -> bool:
        """Whether it is an answer, or the first conversation of one."""
        return self.episode is None or self.episode.conversation == 0

    @property
    def num_response_tokens(self) -> int:
        return self.length - self.num_prompt_tokens

    @property
    def num_new_tokens(self) -> int:
        """The number of its response's tokens that the best beam of its thought does not have."""
        return self.num_item_tokens if self.beam else self.num_response_tokens


@dataclass(frozen=True, slots=True)
class Group:
    """All answers to one prompt."""

    prompt: Prompt
    rollouts: Sequence[Rollout]
    payload: Sequence[Any]
    """[rollouts]: the `Tokens` of each rollout, or references to them, which trainer ranks and verifiers resolve.
    Tokens do not pass through the driver."""
    version: int
    """The version of the weights at the start of generation; `Tokens.version` gives the version of each token."""
    continuations: Group | None = None
    """Rollouts that only serve to compute the values of passages (`rollout.prefix_values`): answers that continue from
    the ends of passages, until they are judged, or right answers appended there, until the trainer has computed their
    log-probs. The trainer does not train on them. None means that there are none."""
    engines: Sequence[int] = ()
    """The index of the engine that ended each rollout; empty if nobody has recorded it, as in older files."""

    @property
    def num_answers(self) -> int:
        return sum(rollout.begins_answer for rollout in self.rollouts)

    @property
    def answers(self) -> list[Rollout]:
        """One rollout for each answer, for statistics. Of an answer with several conversations it is the first one with
        the sampled tokens and the turns of all, and the finish of the last one."""
        found: list[list[Rollout]] = []
        for rollout in self.rollouts:
            if rollout.begins_answer:
                found.append([])
            found[-1].append(rollout)
        return [parts[0] if len(parts) == 1 else _joined(parts) for parts in found]

    def judged(self, verdicts: Sequence[Verdict]) -> Group:
        """The group whose rollouts have these verdicts."""
        rollouts = [replace(one, verdict=given) for one, given in zip(self.rollouts, verdicts, strict=True)]
        return replace(self, rollouts=rollouts)


def _joined(parts: Sequence[Rollout]) -> Rollout:
    """The conversations of an answer as one rollout."""
    num_actions, episodes = sum(part.num_actions for part in parts), [part.episode for part in parts if part.episode]
    return replace(
        parts[0],
        length=parts[0].num_prompt_tokens + num_actions,
        num_actions=num_actions,
        num_thought_tokens=sum(part.num_thought_tokens for part in parts),
        thought_cut=any(part.thought_cut for part in parts),
        thought_budget=sum(budgets) if (budgets := [b for p in parts if (b := p.thought_budget) is not None]) else None,
        finish=parts[-1].finish,
        episode=replace(
            episodes[0],
            num_turns=sum(episode.num_turns for episode in episodes),
            tool_errors=tuple(kind for episode in episodes for kind in episode.tool_errors),
            num_tool_calls=sum(episode.num_tool_calls for episode in episodes),
            step_s=sum(episode.step_s for episode in episodes),
            thoughts=tuple(size for episode in episodes for size in episode.thoughts),
            fault=next((episode.fault for episode in episodes if episode.fault), ""),
            num_failed=max(episode.num_failed for episode in episodes),
        ),
    )


class Tokenizer(Protocol):
    """The conversion of tokens to text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...
