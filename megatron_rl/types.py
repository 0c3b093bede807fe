"""The nouns that every room shares: values, no behaviour beyond their own arithmetic.

prompt > group > sample > token. Per-token arrays are indexed by the token that they describe: entry t of
`logp_rollout` is log p(ids[t] | ids[:t]), so entry 0 means nothing. Nothing here imports torch.

Shape letters: S samples, L the length of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP."""

    num_experts: int
    num_active: int
    """Routed experts that a token passes."""
    ffn_size: int
    """Of one routed expert."""
    shared_ffn_size: int = 0
    """Of all shared experts together, which every token passes; 0 is none."""
    first_dense_layers: int = 0
    """Layers before the first mixture; they have the dense MLP of `ModelShape.ffn_size`."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): q and kv pass low-rank projections."""

    query_rank: int
    """0: q is projected directly."""
    kv_rank: int
    nope_dim: int
    """Of each head's q and k, without position."""
    rope_dim: int
    """Of each head's q and of the one shared k, rotated."""
    value_dim: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder, as its Hugging Face config.json states them."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Need not be hidden_size / num_heads (Qwen3-32B: 64 heads x 128, hidden 5120)."""
    ffn_size: int
    vocab_size: int
    rope_theta: float
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    experts: Experts | None = None
    latent: LatentAttention | None = None
    """Takes the place of num_kv_heads and head_dim."""
    sliding_window: int | None = None
    """Tokens, its own included, that a token sees in the layers of `sliding_layers`."""
    sliding_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Mesh:
    """How many ways a model is split. World size = tensor x pipeline x data; ranks run tensor first
    (fastest), then data, then pipeline: Megatron-Core's order `tp-cp-ep-dp-pp`."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(tensor, pipeline, data) rank of a global rank."""
        tensor, rest = rank % self.tensor, rank // self.tensor
        return tensor, rest // self.data, rest % self.data


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, already in the model's tokens."""

    uid: str
    """Names the row for people: `gsm8k_train.jsonl:17`."""
    token_ids: tuple[int, ...]
    messages: tuple[Mapping[str, str], ...] | str
    """What the prompt was made of: chat turns, or plain text. Reward functions see it as `prompts`."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the row (`ground_truth`, `dataset`, ...), handed to the verifiers."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one sample, prompt first: token in, token out, text is only ever derived from them.

    Example, a prompt of 3 tokens, a thought cut at 2 by the budget, the forced delimiter, 2 answer tokens:
        ids           [11 12 13 | 21 22 | 3 | 31 32]
        action_mask   [ 0  0  0 |  1  1 | 0 |  1  1]
        logp_rollout  [ 0  0  0 | -.7 -.1 | 0 | -.3 -.2]
        version       [-1 -1 -1 |  4  4 | -1 |  4  4]
    """

    ids: np.ndarray
    """int32 [L]"""
    action_mask: np.ndarray
    """bool [L]: True where the policy sampled the token. Forced tokens and the prompt are no actions."""
    logp_rollout: np.ndarray
    """float32 [L]: the engine's log-prob of each action at the sampling temperature, 0 elsewhere."""
    version: np.ndarray
    """int32 [L]: the weights that sampled each action, -1 elsewhere."""


@dataclass(slots=True)
class Sample:
    """What the driver knows of one answer; its tokens are in its group's payload."""

    length: int
    """Prompt and response, in tokens."""
    num_prompt_tokens: int
    num_actions: int
    """Sum of the action mask."""
    num_thought_tokens: int
    """Response tokens before the first closing delimiter; 0 when there is none."""
    finish: str
    """`stop`: the model ended its answer; `length`: a budget cut it."""
    thought_cut: bool = False
    """The thinking budget closed the thought."""
    reward: float | None = None
    """None: not verified yet, or every verifier abstained."""
    reward_parts: tuple[float | None, ...] = ()
    """Of each configured reward alone, unweighted."""
    shaped_reward: float | None = None
    """`reward` after algorithm.shaping: what the estimator sees."""


@dataclass(slots=True)
class Group:
    """All answers to one prompt."""

    prompt: Prompt
    samples: list[Sample]
    payload: Any
    """list[Tokens], one a sample, or a reference to it (a Ray object) that the trainer ranks and the
    verifier resolve: tokens do not pass through the driver."""
    version: int
    """The weights that sampled the group."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A score, or an abstention with its reason; a crash or a time-out is never the score 0."""

    score: float | None
    reason: str = ""
    parts: tuple[float | None, ...] = ()
    """Where `score` is a weighted sum: its terms, unweighted."""
    shaped: float | None = None
    """The score after algorithm.shaping; None where there is none."""


@dataclass(slots=True)
class Batch:
    """One step's samples, flattened in group order. Arrays are [S] and small: the driver holds numbers,
    the groups hold references to the tokens."""

    groups: Sequence[Group]
    group_of: np.ndarray
    """int64 [S]: index into groups."""
    index_in_group: np.ndarray
    """int64 [S]: index into that group's payload."""
    lengths: np.ndarray
    """int64 [S]"""
    num_actions: np.ndarray
    """int64 [S]"""
    rewards: np.ndarray
    """float64 [S]; NaN where every verifier abstained."""
    version: int
    """The weights that the step begins with."""
    advantages: np.ndarray
    """float64 [S]: every action token of a sample shares it. Filled by the estimator."""
    weights: np.ndarray
    """float64 [S]: what each action token's loss is multiplied by. Filled once the mini-batches are known."""
    active: np.ndarray
    """bool [S]: the sample carries a gradient. Zero-signal groups and abstentions do not."""
    reward_parts: np.ndarray | None = None
    """float64 [S, K]: the scores of the K reward functions, apart; NaN where one abstained."""
    reward_weights: np.ndarray | None = None
    """float64 [K]: their weights in `rewards`."""
    greedy_rewards: np.ndarray | None = None
    """float64 [S]: reward of the greedy answer to the sample's prompt; NaN where it was not verified."""

    @classmethod
    def from_groups(cls, groups: Sequence[Group], version: int) -> Batch:
        samples = [s for g in groups for s in g.samples]
        sizes = [len(g.samples) for g in groups]
        return cls(
            groups=groups,
            group_of=np.repeat(np.arange(len(groups)), sizes),
            index_in_group=np.concatenate([np.arange(n) for n in sizes]) if sizes else np.zeros(0, np.int64),
            lengths=np.array([s.length for s in samples], np.int64),
            num_actions=np.array([s.num_actions for s in samples], np.int64),
            rewards=np.array([_number(s.shaped_reward) for s in samples]),
            version=version,
            advantages=np.zeros(len(samples)),
            weights=np.zeros(len(samples)),
            active=np.ones(len(samples), bool),
            reward_parts=np.array([[_number(part) for part in s.reward_parts] for s in samples], np.float64),
        )


def _number(x: float | None) -> float:
    return np.nan if x is None else x


@dataclass(frozen=True, slots=True)
class Denominators:
    """What every loss term of one optimizer step is divided by: counted over the whole mini-batch and all
    data-parallel ranks, before micro-batching and before any rejection (CONTRACTS: one global denominator)."""

    num_tokens: int
    """Action tokens."""
    num_samples: int


@dataclass(frozen=True, slots=True)
class MicrobatchPlan:
    """Which sample goes where: `minibatches[i][rank][m]` are the sample indices (into the batch) of
    micro-batch m on data-parallel rank `rank` in optimizer step i. Every rank has the same number of
    micro-batches in a step; an empty tuple is an empty micro-batch."""

    minibatches: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    denominators: tuple[Denominators, ...]
    """One an optimizer step."""
    max_tokens: int
    """The cap, alignment padding counted: only a micro-batch of one sample may exceed it, where the configuration
    allows it."""
    alignment: int
    """Every sequence is padded to a multiple of this inside its micro-batch."""
    tokens: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """`tokens[i][rank][m]` of a micro-batch, alignment padding counted."""
    flops: tuple[tuple[tuple[float, ...], ...], ...] = ()
    """`flops[i][rank][m]` of a micro-batch: forward, backward and recomputation."""
    metrics: Mapping[str, float] = field(default_factory=dict)


Metrics = dict[str, float]
RewardFunction = Callable[..., list[float | None]]
"""TRL's contract: f(prompts, completions, completion_ids, **columns) -> list[float | None]."""
