"""The sizes of a model. Nothing here imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal


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
    clamp: float | None = None
    """The bound c of gpt-oss's gated unit: (up + 1) g sigmoid(1.702 g), where g is the gate, at most c, and up is
    between -c and c. None: the unit is silu(gate) up."""
    shared_gate: bool = False
    """Whether each token has a gate for the output of the shared expert."""


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
class DeltaNet:
    """Linear attention with a gated delta rule (Gated Delta Networks, Yang et al. 2024, arXiv:2412.06464). Each value
    head has a state of `key_size` x `value_size` numbers in place of keys and values of all tokens."""

    num_key_heads: int
    """The number of heads of q and k. Each of them belongs to `num_value_heads / num_key_heads` value heads."""
    num_value_heads: int
    key_size: int
    """The size of one key, and of one query."""
    value_size: int
    """The size of one value."""
    convolution: int
    """The number of tokens that the convolution over q, k and v sees, itself included."""
    interleaved: bool
    """Whether the rows of the input projections are ordered by key head. If not, all q come first, then all k, and so
    on."""

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_size

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_size

    @property
    def state_numbers(self) -> int:
        """The numbers of the states of one layer."""
        return self.num_value_heads * self.key_size * self.value_size


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
    truncate: bool = True
    """Whether the ends of the interpolation are rounded outwards to indices of frequencies."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): next to a frozen weight W [out, in] of a linear layer
    there are A [rank, in] and B [out, rank], and the layer computes W x + scale B A x. With rank 16 and alpha 32 the
    scale is 2, and a layer of 5120 x 5120 has 163,840 trained numbers in place of 26 million."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    """The linear layers that have adapters, by the last part of their name in the checkpoint, such as `q_proj`. Empty
    means all of them."""
    rank_stabilised: bool = False
    """Whether the scale is alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732) in place of alpha / rank."""
    base: Literal["unquantised", "fp8"] = "unquantised"
    """How the trainer holds the frozen weights of linear layers: in the model's dtype, or in fp8 blocks."""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


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
    """The scaling of the rotary frequencies in the layers outside `sliding_layers`, and in some families
    (`layout.families.windows`) in these too. A window itself is too short to need it."""
    rotary_share: float = 1.0
    """The share of each head's dims that are rotated, which are its first ones (0.5 in GLM-4.5)."""
    optional: tuple[Literal["qkv_bias", "head_norms"], ...] = ()
    """What the model has of that, in families whose checkpoints differ in it (GLM-4.5): biases of q, k and v, and norms
    of each head's q and k."""
    delta: DeltaNet | None = None
    """The linear attention of `linear_layers`."""
    linear_layers: tuple[int, ...] = ()
    """The indices of the layers with linear attention. The others have `num_heads` heads of softmax attention."""
    value_head: bool = False
    """Whether the model ends with one number for each token, a value, in place of the logits of the next one."""
    adapters: Adapters | None = None
    """What is trained in place of the weights; None means the weights themselves."""
    multi_token: bool = False
    """Whether the head that predicts the token after the next one is a part of the model, and is trained. Its layer has
    the parts that a layer after the last one would have."""

    @property
    def base(self) -> ModelShape:
        """The model without adapters."""
        return replace(self, adapters=None)

    @property
    def rotary_dim(self) -> int:
        """The number of dims of a head that are rotated."""
        return self.latent.rope_dim if self.latent else int(self.head_dim * self.rotary_share)

    @property
    def served(self) -> ModelShape:
        """The model that an engine has: without a multi-token head."""
        return replace(self, multi_token=False)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has the mixture of experts instead of the dense MLP."""
        return self.experts is not None and layer >= self.experts.first_dense_layers

    def kind(self, layer: int) -> tuple[bool, bool]:
        """Equal for layers of equal parts: whether a layer has the mixture, and whether it has linear attention."""
        return self.has_experts(layer), layer in self.linear_layers
