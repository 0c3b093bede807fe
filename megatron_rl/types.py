"""The data types that all packages share. They are plain values and compute nothing but their own derived numbers.

A prompt has a group of samples, and a sample consists of tokens. An array with one entry for each token is indexed by
the token that it describes: entry t of `logp_rollout` is log p(ids[t] | ids[:t]), so entry 0 means nothing. Nothing
here imports torch.

Shape letters: S samples, L the length of one sample, K reward functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

Phase = Literal["training", "pushing", "generating"]
"""What the GPUs of a run do. Where trainers and engines share them, a phase decides who has the memory: while training
the trainers have all, while pushing both have their weights, while generating the engines have all."""
HOLDS: dict[str, dict[Phase, tuple[str, ...]]] = {
    "trainer": {"training": ("weights", "optimizer", "gradients"), "pushing": ("weights",), "generating": ()},
    "critic": {"training": ("weights", "optimizer", "gradients"), "pushing": (), "generating": ()},
    "engine": {"training": (), "pushing": ("weights",), "generating": ("weights", "kv_cache")},
}
"""What a rank has on a GPU that it shares, in each phase. A critic's weights are never pushed. The engine's parts are
vLLM's tags."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, which takes the place of the dense MLP."""

    num_experts: int
    num_active: int
    """The number of routed experts that process each token."""
    ffn_size: int
    """The hidden size of one routed expert."""
    shared_ffn_size: int = 0
    """The hidden size of all shared experts together, which process every token; 0 means no shared expert."""
    first_dense_layers: int = 0
    """The number of layers before the first mixture. They have a dense MLP of `ModelShape.ffn_size`."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """The function that turns the router's logits over all experts into weights."""
    normalised: bool = True
    """Whether the weights of the active experts are divided by their sum."""
    num_groups: int = 1
    """The number of equal groups of experts. The active experts are chosen from the best `num_active_groups` of them
    (DeepSeek-V3, arXiv:2412.19437)."""
    num_active_groups: int = 1
    scaling_factor: float = 1.0
    """The factor of the active experts' weights, which is applied after the normalisation."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): low-rank projections make q, k and v."""

    query_rank: int
    """The rank of q's projection; 0 means that q is projected directly."""
    kv_rank: int
    """The rank of the common projection of k and v."""
    nope_dim: int
    """The part of each head's q and k that is not rotated, in dimensions."""
    rope_dim: int
    """The part of each head's q, and of the one k that all heads share, that is rotated, in dimensions."""
    value_dim: int
    """The dimension of each head's v."""


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's scaling of the rotary frequencies (arXiv:2407.21783): long wavelengths are stretched, and short ones
    are kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN's scaling of the rotary frequencies (arXiv:2309.00071)."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """The factor of cos and sin. None means that it follows from mscale and mscale_all_dim, or is 0.1 ln(factor) + 1
    where these are 0."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    """If it is not 0, the scale of the softmax is also multiplied by (0.1 mscale_all_dim ln(factor) + 1)^2, as in
    DeepSeek's models."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder model, as its Hugging Face config.json gives them. Properties that all checkpoints of a
    family share (biases, the position of the norms) are in the table of the family, `layout.FAMILIES[shape.family]`."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """The dimension of one head. It can differ from hidden_size / num_heads (Qwen3-32B has 64 heads x 128, and a hidden
    size of 5120)."""
    ffn_size: int
    vocab_size: int
    rope_theta: float
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    experts: Experts | None = None
    latent: LatentAttention | None = None
    """If it is given, it takes the place of num_kv_heads and head_dim."""
    sliding_window: int | None = None
    """The number of tokens, including itself, that a token attends to in the layers of `sliding_layers`."""
    sliding_layers: tuple[int, ...] = ()
    """The indices of the layers with a sliding window."""
    rope_scaling: Llama3Rope | YarnRope | None = None
    """The scaling of the rotary frequencies in the layers outside `sliding_layers`. A window is too short to need
    it."""
    value_head: bool = False
    """Whether the model ends with one number for each token, a value, in place of the logits of the next one."""

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has the mixture of experts instead of the dense MLP."""
        return self.experts is not None and layer >= self.experts.first_dense_layers


@dataclass(frozen=True, slots=True)
class Mesh:
    """The number of parts into which a model is split along each axis, and which rank holds which part. The order of
    the ranks is Megatron-Core's `tp-cp-ep-dp-pp`.

    The world size is tensor x context x data x pipeline. The rank along the tensor axis changes fastest, then context,
    data and pipeline. For the experts the same ranks of a stage have other axes: expert_tensor changes fastest, then
    expert, then tensor x context x data / (expert_tensor x expert) replicas.

    Example: with tensor 2, data 4 and expert 4, ranks 0 and 1 share the first quarter of the experts, and ranks 2 and 3
    share the second quarter.

    Raises:
        ValueError: the sizes do not fit together.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    """The number of ranks over which the experts of a layer are distributed."""
    expert_tensor: int | None = None
    """The number of ranks over which each expert is split. None means the same number as `tensor`, which is Megatron's
    default; 1 is usual for small experts."""
    virtual: int = 1
    """The number of model chunks in each stage, for the interleaved schedule."""
    layers: tuple[int, ...] | Literal["auto"] | None = None
    """The number of layers in each chunk, in the order of depth: chunk 0 of every stage, then chunk 1 of every stage.
    None means that all chunks have the same number. A recipe replaces `auto` by numbers as soon as it knows the
    model."""

    def __post_init__(self) -> None:
        ways = (self.tensor, self.pipeline, self.data, self.context, self.expert, self.virtual, self.expert_ways)
        if min(ways) < 1:
            raise ValueError(f"{self}: every size must be at least 1")
        if self.stage_size % (self.expert * self.expert_ways):
            raise ValueError(
                f"{self}: tensor x context x data = {self.stage_size} is not a multiple of expert x expert_tensor = "
                f"{self.expert} x {self.expert_ways}; set expert_tensor to 1, or change the sizes"
            )
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(f"{self}: virtual stages need a pipeline of at least 2; set virtual to 1")
        if isinstance(self.layers, tuple) and len(self.layers) != self.num_chunks:
            raise ValueError(f"{self}: layers must have {self.num_chunks} entries, one for each chunk")

    @property
    def stage_size(self) -> int:
        """The number of ranks in a pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pipeline

    @property
    def expert_ways(self) -> int:
        """`expert_tensor`, with None replaced by its default."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def num_chunks(self) -> int:
        return self.pipeline * self.virtual

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """The (tensor, pipeline, data) rank of a global rank."""
        return rank % self.tensor, rank // self.stage_size, rank // (self.tensor * self.context) % self.data

    def context_rank(self, rank: int) -> int:
        return rank // self.tensor % self.context

    def expert_coordinates(self, rank: int) -> tuple[int, int, int]:
        """The (expert_tensor, expert, expert data) rank of a global rank inside its stage."""
        within = rank % self.stage_size
        return (
            within % self.expert_ways,
            within // self.expert_ways % self.expert,
            within // self.expert_ways // self.expert,
        )

    def layer_range(self, num_layers: int, stage: int, chunk: int = 0) -> range:
        """The layers of the model that a chunk holds.

        Args:
            num_layers: the number of layers of the whole model.

        Raises:
            ValueError: the number of chunks does not divide the number of layers, or `layers` does not add up to it.
        """
        layers = self.layers
        assert layers != "auto", "the recipe should have replaced `auto`"
        if layers is None:
            if num_layers % self.num_chunks:
                raise ValueError(
                    f"the model has {num_layers} layers, which policy.parallel.pipeline={self.pipeline} does not divide"
                    + (f" into {self.virtual} chunks a stage" if self.virtual > 1 else "")
                    + "; set policy.parallel.layers to auto, or to the number of layers of each"
                )
            layers = (num_layers // self.num_chunks,) * self.num_chunks
        elif sum(layers) != num_layers or min(layers) < 0:
            raise ValueError(f"the chunks {layers} hold {sum(layers)} layers, the model has {num_layers}")
        depth = chunk * self.pipeline + stage
        start = sum(layers[:depth])
        return range(start, start + layers[depth])


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, with its tokens."""

    uid: str
    """A readable name of the prompt's row: `gsm8k_train.jsonl:17`."""
    token_ids: tuple[int, ...]
    messages: tuple[Mapping[str, str], ...] | str
    """The source of the prompt: chat turns, or plain text. Reward functions receive it as `prompts`."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row (`ground_truth`, `dataset`, ...), which the verifiers receive."""
    thought_budgets: tuple[int, ...] = ()
    """The budget of each answer's thought in tokens, which the asking gives it; empty: that of
    `config.ThinkingBudget.of_row`."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one sample, beginning with the prompt. Tokens are never made again from text; text is only made
    from tokens.

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
    """uint8 [R, layers, K]: the K experts that the engine chose in every layer for the first R <= L tokens, when it
    computed the keys and values that the last token saw. Layers without experts have any numbers. None if the engine
    did not tell."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A score, or an abstention with its reason. A crash or a time-out is never the score 0."""

    score: float | None
    """The score of one reward, or the weighted sum of all rewards; None means an abstention."""
    reason: str = ""
    parts: tuple[float | None, ...] = ()
    """If `score` is the weighted sum, the score of each configured reward, not weighted; None where it abstained."""
    shaped: float | None = None
    """The score after algorithm.shaping; None if no shaping was applied."""
    failed: bool = False
    """True if the reward could not score the answer; False if it gave a score or chose to abstain."""
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What a reward reports about the answer, as `<name of the reward>/<column>` and a value of JSON."""

    @property
    def reward(self) -> float | None:
        """The number that advantages are computed from: the shaped score if there is one, otherwise the score."""
        return self.score if self.shaped is None else self.shaped


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """What the engines are asked for: the answers to one prompt.

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
    """What the seeds of the answers are made of, together with `run.seed`. The same seed and weights give the same
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
    """What gave it. Each kind is normalised separately, so that one with a large scale does not hide the others."""
    value: float


class Branch(NamedTuple):
    """The end of a passage, from which other answers go on."""

    sample: int
    """The number of the sample within its group."""
    passage: int
    """The number of the passage within the sample's thought."""


FROM_PROMPT = Branch(-1, -1)
"""The end of the prompt, before all thoughts of a group."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What the driver knows about the turns of one answer, if there is `rollout.environment`."""

    num_turns: int
    """The number of the model's turns."""
    last_turn: int
    """The index in `Tokens` of the first token of the last turn."""
    num_tool_errors: int = 0
    """The number of calls of tools that gave an error."""
    step_s: float = 0.0
    """The seconds in which the model waited for the environment."""
    fault: str = ""
    """Why the environment failed, so that nothing can be said about the answer; empty if it did not."""


@dataclass(slots=True)
class Sample:
    """What the driver knows about one answer. The tokens are in the payload of its group."""

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
    """The largest number of tokens that its thought was to have; None if there was no budget."""
    oldest_version: int = -1
    """The oldest version of the weights that sampled one of its actions; -1 if it has none."""
    token_rewards: tuple[TokenReward, ...] = ()
    """Rewards at single tokens, in the order of their positions, which estimators of one number for each token use."""
    episode: Episode | None = None
    """The turns of the answer; None if there is no environment."""
    beam: int = 0
    """The rank of its item among the beams of its thought, 0 for the most probable one; 0 without beam search. The
    samples of a thought are adjacent, and the thought's tokens are actions of the one with rank 0 alone."""
    num_item_tokens: int = 0
    """The number of its last tokens that are an item, which beam search has found; 0: it has none."""
    branch: Branch | None = None
    """The passage of another answer from which it goes on, if it only tells what this passage is worth
    (`rollout.prefix_values.rollouts`); None for an answer. Samples with a branch are behind all others of their group,
    and leave it when they have been verified."""
    is_probe: bool = False
    """Whether it is a right answer that was forced after a branch, so that the trainer tells its log-prob
    (`rollout.prefix_values.by`). Only the tokens of the right answer are its actions."""
    verdict: Verdict | None = None
    """The verifier's verdict; None before the verification."""

    @property
    def num_new_tokens(self) -> int:
        """The number of its response's tokens that are not those of the best beam of its thought."""
        return self.num_item_tokens if self.beam else self.length - self.num_prompt_tokens


@dataclass(slots=True)
class Group:
    """All answers to one prompt."""

    prompt: Prompt
    samples: list[Sample]
    payload: Any
    """list[Tokens], one for each sample (those of samples that have left the group may follow), or a reference to this
    list (a Ray object), which the trainer ranks and the verifier resolve. Tokens do not pass through the driver."""
    version: int
    """The version of the weights with which the generation began; `Tokens.version` gives the one of each token."""
    probes: Sequence[Sample] = ()
    """Right answers after the passages of the samples (`Sample.is_probe`). Their tokens are in the payload, behind
    those of the samples that the group began with."""


def give_verdicts(groups: Iterable[Group], verdicts: Iterable[Sequence[Verdict]]) -> None:
    """Set the verdict of every sample.

    Args:
        verdicts: those of each group's samples.
    """
    for group, given in zip(groups, verdicts, strict=True):
        for sample, verdict in zip(group.samples, given, strict=True):
            sample.verdict = verdict


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one step in the order of their groups, as far as planning needs them. The arrays have one entry
    for each sample; the tokens are in the payloads."""

    names: Sequence[str]
    """[S]: the name of each sample for error messages."""
    group_of: np.ndarray
    """int64 [S]: the index of the sample's group."""
    index_in_group: np.ndarray
    """int64 [S]: the index of the sample in the payload of its group."""
    lengths: np.ndarray
    """int64 [S]: the number of tokens in prompt and response together."""
    num_actions: np.ndarray
    """int64 [S]: the number of tokens that the policy sampled, or of a supervised row's completion."""
    payloads: Sequence[Any]
    """The tokens of each group; see `Group.payload`."""
    version: int
    """The version of the weights that the step begins with."""

    @classmethod
    def of_groups(cls, groups: Sequence[Group], version: int) -> Batch:
        samples = [sample for group in groups for sample in group.samples]
        sizes = [len(group.samples) for group in groups]
        return cls(
            names=[f"{group.prompt.uid}, answer {i}" for group in groups for i in range(len(group.samples))],
            group_of=np.repeat(np.arange(len(groups)), sizes),
            index_in_group=np.concatenate([np.arange(n) for n in sizes]) if sizes else np.zeros(0, np.int64),
            lengths=np.array([sample.length for sample in samples], np.int64),
            num_actions=np.array([sample.num_actions for sample in samples], np.int64),
            payloads=[group.payload for group in groups],
            version=version,
        )

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[str, Tokens]], version: int) -> Batch:
        """The batch of a supervised step: each row, a name and its tokens, is a group of its own."""
        return cls(
            names=[name for name, _ in rows],
            group_of=np.arange(len(rows)),
            index_in_group=np.zeros(len(rows), np.int64),
            lengths=np.array([len(tokens.ids) for _, tokens in rows], np.int64),
            num_actions=np.array([tokens.action_mask.sum() for _, tokens in rows], np.int64),
            payloads=[[tokens] for _, tokens in rows],
            version=version,
        )


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


@dataclass(frozen=True, slots=True)
class Scores:
    """What the advantages of a batch are estimated from. The arrays have one entry for each sample."""

    group_of: np.ndarray
    """int64 [S]: the index of the sample's group."""
    lengths: np.ndarray
    """int64 [S]: the number of tokens in prompt and response together."""
    num_actions: np.ndarray
    """int64 [S]: the number of tokens that the policy sampled."""
    is_cut: np.ndarray
    """bool [S]: whether the length budget ended the answer."""
    rewards: np.ndarray
    """float64 [S]: the shaped rewards; NaN where every reward abstained."""
    reward_parts: np.ndarray | None = None
    """float64 [S, K]: the separate scores of the K reward functions; NaN where one abstained."""
    reward_weights: np.ndarray | None = None
    """float64 [K]: the weights of the reward functions in `rewards`."""
    greedy_rewards: np.ndarray | None = None
    """float64 [S]: the reward of the greedy answer to the sample's prompt; NaN where every reward abstained on it."""
    token_rewards: TokenRewards | None = None
    """The rewards at single tokens, besides `rewards`."""
    token_kinds: Sequence[str] = ()
    """[N]: the kind of each of `token_rewards`; see `TokenReward.kind`."""
    thought_of: np.ndarray | None = None
    """int64 [S]: the index of the sample's thought, which it shares with the other beams of a search."""
    num_item_tokens: np.ndarray | None = None
    """int64 [S]: see `Sample.num_item_tokens`."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What an estimator gives the samples of a batch."""

    advantages: np.ndarray
    """float64 [S]: the advantage that all action tokens of a sample share."""
    active: np.ndarray
    """bool [S]: whether the sample has a gradient. Zero-signal groups and abstentions have none."""
    token_rewards: TokenRewards | None = None
    """The rewards from which the ranks compute an advantage for each token, which is added to `advantages`; None if the
    estimator gives one number for each sample."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one data-parallel rank gets of a step. The arrays have one entry for each of its N samples."""

    minibatches: tuple[tuple[tuple[int, ...], ...], ...]
    """`minibatches[i][m]` are the samples of micro-batch m in optimizer step i, as indices into the arrays."""
    denominators: tuple[Denominators, ...]
    """One entry for each optimizer step; they are those of all ranks together."""
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
    payloads: Sequence[Any]
    """The tokens of the groups that the samples belong to; see `Group.payload`."""
    payload_of: np.ndarray
    """int64 [N]: the index of the payload of the sample's group."""
    index_in_group: np.ndarray
    """int64 [N]: the index of the sample in that payload."""
    token_rewards: TokenRewards | None = None
    """The samples' part of `Credit.token_rewards`; `TokenRewards.sample` is an index into the arrays."""
    values: Any = None
    """The critic's values at the tokens of each sample, float32 [L] by `index`, or references to them; None if there is
    no critic."""

    def tokens(self, sample: int) -> Tokens:
        """The tokens of a sample, once the payloads are at hand."""
        tokens: Tokens = self.payloads[self.payload_of[sample]][self.index_in_group[sample]]
        return tokens


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


Metrics = dict[str, float]
