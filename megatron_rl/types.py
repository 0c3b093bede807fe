"""The nouns that every room shares: values, no behaviour beyond their own arithmetic.

prompt > group > sample > token. Per-token arrays are indexed by the token that they describe: entry t of
`logp_rollout` is log p(ids[t] | ids[:t]), so entry 0 means nothing. Nothing here imports torch.

Shape letters: S samples, L the length of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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
    score: Literal["softmax", "sigmoid"] = "softmax"
    """What turns the router's logits, over all experts, into weights."""
    normalised: bool = True
    """The weights of the active experts are divided by their sum."""
    num_groups: int = 1
    """Experts are chosen from the best `num_active_groups` of so many equal groups (DeepSeek-V3, arXiv:2412.19437)."""
    num_active_groups: int = 1
    scaling_factor: float = 1.0
    """Of the active experts' weights, after normalisation."""


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
class Llama3Rope:
    """Llama 3.1's frequencies (arXiv:2407.21783): long wavelengths are stretched, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (arXiv:2309.00071)."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Of cos and sin. None: 0.1 ln(factor) + 1, or the two below where they are given."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    """DeepSeek also multiplies the softmax scale by (0.1 mscale_all_dim ln(factor) + 1)^2."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder, as its Hugging Face config.json states them. What all checkpoints of a family
    have in common (biases, the place of the norms) is in the family's table, `layout.FAMILIES[shape.family]`."""

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
    rope_scaling: Llama3Rope | YarnRope | None = None
    """Of the layers outside `sliding_layers`: windows are shorter than the positions that scaling is for."""

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has the mixture in place of the dense MLP."""
        return self.experts is not None and layer >= self.experts.first_dense_layers


@dataclass(frozen=True, slots=True)
class Mesh:
    """How many ways a model is split, and which rank holds which part: Megatron-Core's order `tp-cp-ep-dp-pp`.

    World size = tensor x context x data x pipeline; ranks run tensor first (fastest), then context, data and
    pipeline. The experts see the same ranks of a stage otherwise: expert_tensor first, then expert, then
    tensor x context x data / (expert_tensor x expert) replicas.

    Example, tensor 2, data 4, expert 4: ranks 0 and 1 share experts 0 of 4, ranks 2 and 3 experts 1 of 4.

    Raises:
        ValueError: sizes that do not multiply up.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    """Ways in which the experts of a layer are shared out."""
    expert_tensor: int | None = None
    """Ways in which each expert is split; None: as `tensor`, Megatron's default. 1 is usual for small experts."""
    virtual: int = 1
    """Model chunks of each stage, for the interleaved schedule."""
    layers: tuple[int, ...] | None = None
    """Layers of each chunk in order of depth: chunk 0 of every stage, then chunk 1; None: equally many."""

    def __post_init__(self) -> None:
        ways = (self.tensor, self.pipeline, self.data, self.context, self.expert, self.virtual, self.expert_ways)
        if min(ways) < 1:
            raise ValueError(f"{self}: every size is at least 1")
        if self.stage_size % (self.expert * self.expert_ways):
            raise ValueError(
                f"{self}: tensor x context x data = {self.stage_size} is no multiple of expert x expert_tensor = "
                f"{self.expert} x {self.expert_ways}; an expert_tensor of 1 asks for least"
            )
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(f"{self}: virtual stages need a pipeline of at least 2")
        if self.layers is not None and len(self.layers) != self.num_chunks:
            raise ValueError(f"{self}: layers must name {self.num_chunks} chunks, pipeline x virtual")

    @property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pipeline

    @property
    def expert_ways(self) -> int:
        """`expert_tensor` with its default."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def num_chunks(self) -> int:
        return self.pipeline * self.virtual

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(tensor, pipeline, data) rank of a global rank."""
        return rank % self.tensor, rank // self.stage_size, rank // (self.tensor * self.context) % self.data

    def context_rank(self, rank: int) -> int:
        return rank // self.tensor % self.context

    def expert_coordinates(self, rank: int) -> tuple[int, int, int]:
        """(expert_tensor, expert, expert data) rank of a global rank, inside its stage."""
        within = rank % self.stage_size
        return (
            within % self.expert_ways,
            within // self.expert_ways % self.expert,
            within // self.expert_ways // self.expert,
        )

    def layer_range(self, num_layers: int, stage: int, chunk: int = 0) -> range:
        """The layers of a chunk, of all `num_layers` of the model.

        Raises:
            ValueError: the layers do not divide, or `layers` does not add up to them.
        """
        layers = self.layers
        if layers is None:
            if num_layers % self.num_chunks:
                raise ValueError(
                    f"the model has {num_layers} layers, which policy.parallel.pipeline={self.pipeline} does not divide"
                    + (f" into {self.virtual} chunks a stage" if self.virtual > 1 else "")
                    + "; say how many layers each stage holds"
                )
            layers = (num_layers // self.num_chunks,) * self.num_chunks
        elif sum(layers) != num_layers or min(layers) < 0:
            raise ValueError(f"the chunks {layers} hold {sum(layers)} layers, the model has {num_layers}")
        depth = chunk * self.pipeline + stage
        start = sum(layers[:depth])
        return range(start, start + layers[depth])


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
    """The weights with which its generation began; `Tokens.version` says what sampled each token."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A score, or an abstention with its reason; a crash or a time-out is never the score 0."""

    score: float | None
    reason: str = ""
    parts: tuple[float | None, ...] = ()
    """Where `score` is a weighted sum: its terms, unweighted."""
    shaped: float | None = None
    """The score after algorithm.shaping; None where there is none."""
    failed: bool = False
    """The reward could not score the answer, and did not abstain of its own will."""


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
