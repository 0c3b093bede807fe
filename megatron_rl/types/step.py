"""A training step, from its answers to the tokens of a rank. These are plain values.

Shape letters: S samples of the step, N samples of a rank or rewards at tokens, K reward functions, L tokens of one
sample. A sample is a rollout, or a supervised row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from megatron_rl.types.mesh import Mesh
from megatron_rl.types.rollouts import Group, Tokens

Metrics = dict[str, float]


class TokenSpan(NamedTuple):
    """Some of the tokens of a step, for `explain`: in each of some samples the tokens [start, stop).

    Example: the first ten tokens of the response of sample 3, whose prompt has five tokens: `TokenSpan((3,), 5, 15)`.
    """

    samples: tuple[int, ...]
    """Their indices in the step."""
    start: int = 0
    stop: int = 2**31


class Gradient(NamedTuple):
    """The gradient of a part of a step's loss.

    Example: a gradient of norm 5, whose part in the embedding has the norm 3 and lies in the row of token 7:
    `Gradient(5.0, {"embedding": 9.0, "norms": 16.0}, {"embedding": {7: 9.0}})`.
    """

    norm: float
    """The L2 norm over the whole model."""
    squares: Mapping[str, float]
    """The squares of the norms of the parts of the model, such as `embedding` and `layer 0 attention`."""
    rows: Mapping[str, Mapping[int, float]]
    """The squares of the norms of the largest rows of `embedding` and `output layer`, by token, the largest first."""


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """Rewards at single tokens of several samples. The arrays have one entry for each of its N rewards, in any order;
    several may be at one token."""

    sample: np.ndarray
    """int64 [N]: the index of the sample."""
    position: np.ndarray
    """int64 [N]: see `TokenReward.position`."""
    value: np.ndarray
    """float64 [N]"""
    kind: Sequence[str] = ()
    """[N]: see `TokenReward.kind`. Empty once the kinds have been added up."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The verified groups of one step."""

    groups: Sequence[Group]
    greedy_rewards: np.ndarray | None
    """float64 [S]: the reward of the greedy answer to each sample's prompt, if the estimator needs it."""
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A row that is trained on without engines: a text, or several that belong together.

    Example: a pair of answers, of which the first one is better: `TrainingRow("pairs.jsonl:3", (chosen, rejected),
    (1, -1))`.
    """

    name: str
    samples: tuple[Tokens, ...]
    labels: tuple[float, ...]
    """One for each sample: 1 if it is liked, -1 if it is not, and 0 otherwise."""
    logp_reference: tuple[float, ...] = ()
    """The log-prob of all actions of each sample together under the reference model, for preferences; 0 if the loss has
    no reference; for reward models the margin of the pair. Empty for supervised rows."""

    @property
    def names(self) -> list[str]:
        """The names of the samples."""
        size = len(self.samples)
        return [f"{self.name}, answer {i}" for i in range(size)] if size > 1 else [self.name]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The samples of one step in the order of their groups, the input of advantage estimators and of planning. The
    arrays have one entry for each sample; the tokens are in the payloads.

    Example: two prompts with two answers each, of 8, 9, 5 and 7 tokens. The policy sampled 5, 6, 3 and 5 of them. The
    last answer was cut, and its reward abstained:
        group_of [0 0 1 1]   lengths [8 9 5 7]   num_actions [5 6 3 5]
        is_cut [F F F T]     rewards [1 0 1 nan]
    """

    names: Sequence[str]
    """[S]: the name of each sample for error messages."""
    group_of: np.ndarray
    """int64 [S]: the index of the sample's group."""
    lengths: np.ndarray
    """int64 [S]: the number of tokens in prompt and response together."""
    num_actions: np.ndarray
    """int64 [S]: the number of tokens that the policy sampled, or of a supervised row's completion."""
    payloads: Sequence[Any]
    """The tokens of each group; see `Group.payload`."""
    version: int
    """The version of the weights that the step begins with."""
    is_cut: np.ndarray
    """bool [S]: whether the length budget ended the answer."""
    rewards: np.ndarray
    """float64 [S]: the shaped rewards; NaN where every reward abstained. Without engines the labels of the rows."""
    reward_parts: np.ndarray | None = None
    """float64 [S, K]: the separate scores of the K reward functions; NaN where one abstained."""
    reward_weights: np.ndarray | None = None
    """float64 [K]: the weights of the reward functions in `rewards`."""
    greedy_rewards: np.ndarray | None = None
    """float64 [S]: the reward of the greedy answer to the sample's prompt; NaN where every reward abstained on it."""
    token_rewards: TokenRewards | None = None
    """The rewards at single tokens, besides `rewards`."""
    answer_of: np.ndarray | None = None
    """int64 [S]: the index of the answer that the sample is a conversation of. Without agents each sample is one."""
    thought_of: np.ndarray | None = None
    """int64 [S]: the index of the sample's thought, which it shares with the other beams of a search."""
    num_item_tokens: np.ndarray | None = None
    """int64 [S]: see `Rollout.num_item_tokens`."""

    @property
    def index_in_group(self) -> np.ndarray:
        """int64 [S]: the index of the sample in the payload of its group."""
        return np.arange(len(self.group_of)) - np.searchsorted(self.group_of, self.group_of)

    @classmethod
    def of_groups(
        cls,
        groups: Sequence[Group],
        version: int,
        reward_weights: np.ndarray | None = None,
        greedy_rewards: np.ndarray | None = None,
    ) -> StepBatch:
        """The batch of some groups."""
        rollouts, sizes = [one for group in groups for one in group.rollouts], [len(group.rollouts) for group in groups]
        verdicts = [one.verdict for one in rollouts]
        given = [(i, reward) for i, one in enumerate(rollouts) for reward in one.token_rewards]
        return cls(
            names=[f"{group.prompt.uid}, answer {i}" for group in groups for i in range(len(group.rollouts))],
            group_of=np.repeat(np.arange(len(groups)), sizes),
            lengths=np.array([one.length for one in rollouts], np.int64),
            num_actions=np.array([one.num_actions for one in rollouts], np.int64),
            payloads=[group.payload for group in groups],
            version=version,
            is_cut=np.array([one.finish == "length" for one in rollouts], bool),
            rewards=numbers(verdict.reward for verdict in verdicts),
            reward_parts=np.array([numbers(verdict.parts) for verdict in verdicts]),
            reward_weights=reward_weights,
            greedy_rewards=greedy_rewards,
            token_rewards=TokenRewards(
                np.array([i for i, _ in given], np.int64),
                np.array([reward.position for _, reward in given], np.int64),
                np.array([reward.value for _, reward in given], np.float64),
                [reward.kind for _, reward in given],
            ),
            answer_of=np.cumsum([one.begins_answer for one in rollouts]) - 1,
            thought_of=np.cumsum([one.beam == 0 for one in rollouts]) - 1,
            num_item_tokens=np.array([one.num_item_tokens for one in rollouts], np.int64),
        )

    @classmethod
    def of_rows(cls, rows: Sequence[TrainingRow], version: int) -> StepBatch:
        """The batch of a step without engines: each row is a group, and its labels are the rewards."""
        sizes = [len(row.samples) for row in rows]
        samples = [sample for row in rows for sample in row.samples]
        return cls(
            names=[name for row in rows for name in row.names],
            group_of=np.repeat(np.arange(len(rows)), sizes),
            lengths=np.array([len(tokens.ids) for tokens in samples], np.int64),
            num_actions=np.array([tokens.action_mask.sum() for tokens in samples], np.int64),
            payloads=[row.samples for row in rows],
            version=version,
            is_cut=np.zeros(len(samples), bool),
            rewards=np.array([label for row in rows for label in row.labels], np.float64),
        )


@dataclass(frozen=True, slots=True)
class AnnotatedBatch(StepBatch):
    """A batch with what teachers, an estimator, or a vision tower take from the rows."""

    teacher_weights: np.ndarray | None = None
    """float64 [S]: the weight of the sample's teacher, 0 if it has none; None without teachers."""
    pass_rates: np.ndarray | None = None
    """float64 [S]: the column `pass_rate` of the sample's row, NaN if it has none; None if no estimator needs it."""
    patches: Sequence[tuple[int, ...]] = ()
    """[S]: the number of patches of each image of the sample; empty without images."""

    @classmethod
    def of(cls, batch: StepBatch, **columns: Any) -> AnnotatedBatch:
        return cls(**{one.name: getattr(batch, one.name) for one in fields(batch)} | columns)


def numbers(values: Iterable[float | None]) -> np.ndarray:
    """float64, with NaN for None."""
    return np.array([np.nan if value is None else value for value in values], np.float64)


class GroupSums(NamedTuple):
    """Where the ranks add up numbers over the answers of a group, separately for each number of an action, in one array
    for the step. Only numbers that two or more answers of the group have are in it.

    Example: a group of answers with 3, 5 and 4 actions has the entries 0 to 3, and one with 2 and 2 actions the entries
    4 and 5: first [0 0 0 4 4], stop [4 4 4 6 6] and size 6. The fifth action of the second answer has no entry.
    """

    first: np.ndarray
    """int64 [S]: the entry of the first actions of the sample's group."""
    stop: np.ndarray
    """int64 [S]: the end of its group's entries."""
    size: int
    """The number of entries of all groups."""


@dataclass(frozen=True, slots=True)
class Credit:
    """The output of an advantage estimator for the samples of a batch.

    Example: `grpo` for two prompts with two answers each, and the rewards 1, 0, 1 and 1. The second group has no
    signal: `Credit(advantages=[0.707, -0.707, 0, 0], active=[True, True, False, False])`.
    """

    advantages: np.ndarray
    """float64 [S]: the advantage that all action tokens of a sample share."""
    active: np.ndarray
    """bool [S]: whether the sample has a gradient. Zero-signal groups and abstentions have none."""
    token_rewards: TokenRewards | None = None
    """The rewards for token advantages, which the ranks compute and add to `advantages`; None if the estimator gives
    one number for each sample."""
    sums: GroupSums | None = None
    """None if the estimator adds up nothing on the ranks."""


class Minibatches(NamedTuple):
    """The mini-batches of an epoch, which have whole groups.

    Example: the groups 0 1 2 3 have the mini-batches 0 1 and 2 3 for `Minibatches(2)`, and for example 0 2 and 1 3 for
    `Minibatches(2, seed=(0, 7, 1))`.
    """

    number: int = 1
    seed: tuple[int, ...] = ()
    """Seeds the permutation of the groups: the run's seed, the step and the epoch. Empty: the order of the step."""


@dataclass(frozen=True, slots=True)
class Share:
    """One data-parallel rank's part of an epoch of a step. The arrays have one entry for each of its N samples.

    Example: two answers with four action tokens each in one micro-batch of one optimizer step, with the mean over its
    tokens as loss: minibatches (((0, 1),),), advantages [0.707, -0.707] and weights [0.125, 0.125].
    """

    minibatches: tuple[tuple[tuple[int, ...], ...], ...]
    """`minibatches[i][m]` are the samples of micro-batch m in optimizer step i, as indices into the arrays."""
    denominators: tuple[Denominators, ...]
    """One entry for each optimizer step, counted over all ranks together."""
    alignment: int
    """Inside its micro-batch every sequence is padded to a multiple of this number of tokens."""
    version: int
    """The version of the weights at the step's start."""
    names: Sequence[str]
    """[N]: the name of each sample for error messages."""
    index: np.ndarray
    """int64 [N]: the sample's index in the step. Index and position together identify a token in every packing."""
    advantages: np.ndarray
    """float64 [N]: the advantage of every action token of the sample."""
    weights: np.ndarray
    """float64 [N]: the factor of each action token's loss; it contains the aggregation and the denominators."""
    tokens: Sequence[Any]
    """[N]: the tokens of each sample, or a reference to them; see `Group.payload`."""
    logp_reference: np.ndarray | None = None
    """float64 [N]: see `TrainingRow.logp_reference`; None if there are none."""
    token_rewards: TokenRewards | None = None
    """The samples' part of `Credit.token_rewards`; `TokenRewards.sample` is an index into the arrays."""
    sums: GroupSums | None = None
    """The samples' part of `Credit.sums`."""
    teacher_weights: np.ndarray | None = None
    """float64 [N]: see `AnnotatedBatch.teacher_weights`; None without teachers."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The numbers at the tokens of each sample that the step has computed already, by the name of the column, such as
    `value` of a critic: float32 [L] by `index`, or references to them."""
    epochs: int = 1
    """The number of times that the step trains on each sample."""


Epochs = Sequence[Sequence[Share]]
"""The share of each data-parallel rank in each epoch of a step: `[epoch][rank]`. An epoch that has the mini-batches of
the one before it is the same object."""


class Shares(NamedTuple):
    """The shares of a step. They have no mini-batch if no sample has a gradient."""

    policy: Epochs
    others: Mapping[str, Epochs] = {}
    """The shares of other models' ranks, such as a critic's, with the same samples."""

    @property
    def num_updates(self) -> int:
        """The largest number of the policy's optimizer steps."""
        return sum(len(shares[0].minibatches) for shares in self.policy)


@dataclass(frozen=True, slots=True)
class TokenNumbers:
    """A number at each token of a step's samples, such as the values of a critic, in parts that different processes
    have computed."""

    parts: Sequence[Any]
    """A reference to each part, which gives float32 [L] by the index of the sample in the step."""
    indices: Sequence[np.ndarray]
    """int64: the samples of each part, by their indices in the step."""

    @classmethod
    def of_replicas(cls, mesh: Mesh, answers: Sequence[Any], indices: Sequence[np.ndarray]) -> TokenNumbers:
        """
        Args:
            answers: what each rank of the mesh returned: a reference from one rank of each data-parallel replica that
                has samples, and None from the others.
            indices: the samples of each replica.
        """
        given = [(mesh.coordinates(rank)[2], answer) for rank, answer in enumerate(answers) if answer is not None]
        return cls([answer for _, answer in given], [indices[replica] for replica, _ in given])

    def needed_by(self, index: np.ndarray) -> list[Any]:
        """The parts that have some of these samples."""
        return [part for part, own in zip(self.parts, self.indices, strict=True) if np.isin(index, own).any()]


@dataclass(frozen=True, slots=True)
class Denominators:
    """The numbers by which the loss terms of one optimizer step are divided. They are counted over the whole mini-batch
    and all data-parallel ranks, before it is cut into micro-batches and before any rejection."""

    num_tokens: int
    """The number of action tokens."""
    num_samples: int


@dataclass(frozen=True, slots=True)
class MicrobatchPlan:
    """The micro-batch of every sample: `minibatches[i][rank][m]` are the indices (into the batch) of the samples of
    micro-batch m on data-parallel rank `rank` in optimizer step i. All ranks have the same number of micro-batches in
    an optimizer step; an empty tuple is an empty micro-batch."""

    minibatches: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    denominators: tuple[Denominators, ...]
    """One entry for each optimizer step."""
    max_tokens: int
    """The largest number of tokens in a micro-batch, alignment padding included. Only a micro-batch of one sample may
    exceed it, if the configuration allows that."""
    alignment: int
    """Inside its micro-batch every sequence is padded to a multiple of this number of tokens."""
    tokens: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """`tokens[i][rank][m]` is the number of tokens of a micro-batch, alignment padding included."""
    flops: tuple[tuple[tuple[float, ...], ...], ...] = ()
    """`flops[i][rank][m]` are the FLOPs of a micro-batch for the forward pass, the backward pass and recomputation."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the run logs about the plan."""
