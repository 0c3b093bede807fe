"""The blocks of a layer. Each one says what its rows are called by, what a mesh divides, and what it costs.

A layer (`model.Layer`) has a block of attention and an MLP. A new kind of block is also a case of models/fused.py,
planning/activations.py and actor/block_settings.py, and rows of a family. Nothing here imports torch.
Invariant (tests/unit/balance): the multiplications agree within 2 % with what torch's FlopCounterMode counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_rl.types.mesh import Division, Mesh
from megatron_rl.types.rope import Rope

DELTA_CHUNK = 64
"""The tokens of a chunk of linear attention, as `actor.delta_net.CHUNK` (which needs torch)."""


@dataclass(frozen=True, slots=True)
class SoftmaxAttention:
    """Attention with heads of q, and with as many or fewer heads of k and v."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """The dimension of one head. It can differ from hidden_size / num_heads (Qwen3-32B has 64 heads x 128, and a hidden
    size of 5120)."""
    rope: Rope
    window: int | None = None
    """The number of tokens, including itself, that a token attends to; None means all before it."""
    norms: Literal["none", "head", "full"] = "none"
    """How q and k are normalised. `head`: each head by itself; `full`: all heads together; `none`: not at all."""
    qkv_bias: bool = False
    output_bias: bool = False
    gated: bool = False
    """Whether the projection to q also gives gates of the heads' outputs: each head's rows are [q ; gate]."""
    sinks: bool = False
    """Whether each head's softmax has one more logit, which is learnt and has no value (arXiv:2309.17453)."""
    scale: float | None = None
    """The factor of the scores; None means 1 / sqrt(head_dim)."""

    is_linear: ClassVar[bool] = False
    is_rotated_by_megatron: ClassVar[bool] = True
    """Whether Megatron rotates q and k where layers are Transformer Engine's. Our modules rotate by themselves."""

    def without_window(self) -> SoftmaxAttention:
        return replace(self, window=None)

    @property
    def rotary_dim(self) -> int:
        """The number of dims of a head that are rotated."""
        return int(self.head_dim * self.rope.share)

    @property
    def widths(self) -> tuple[int, int, int]:
        """The elements of q, k and v of one token over all heads."""
        key = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, key, key

    @property
    def context_width(self) -> int:
        """The elements of a token that context-parallel ranks pass on: k and v."""
        return 2 * self.num_kv_heads * self.head_dim

    def sizes(self) -> dict[str, int]:
        """See `ModelShape.sizes`."""
        query, key, _ = self.widths
        heads = {"head": self.head_dim, "heads": self.num_heads, "kv_heads": self.num_kv_heads}
        return {"q": query, "q_and_gate": 2 * query, "kv": key, **heads}

    def divisions(self, mesh: Mesh) -> list[Division]:
        """Several ranks may share a KV head."""
        kv = Division("KV heads", self.num_kv_heads, mesh.tensor, "tensor")
        heads = Division("attention heads", self.num_heads, mesh.tensor, "tensor")
        return [heads, kv] if mesh.tensor <= self.num_kv_heads else [heads]

    def multiplications(self, hidden: int) -> int:
        """The multiplications of one token in the weights."""
        return hidden * (2 * self.num_heads + 2 * self.num_kv_heads + self.num_heads * self.gated) * self.head_dim

    def scores(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """The multiplications of the scores and of the weighted values for sequences of these lengths."""
        pairs: NDArray[np.float64] = self.num_heads * 2 * self.head_dim * _pairs(tokens, self.window)
        return pairs

    def kept_bytes(self, tokens: Any, tensor: int, width: int) -> Any:
        """The bytes that one rank of an engine keeps of a sequence, for a number of tokens or an array of numbers.
        Ranks share the KV heads, but each has at least one.

        Args:
            width: the bytes of a number.
        """
        seen = tokens if self.window is None else np.minimum(tokens, self.window)
        return seen * (2 * max(self.num_kv_heads // tensor, 1) * self.head_dim) * width


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): low-rank projections make q, k and v."""

    num_heads: int
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
    rope: Rope

    is_linear: ClassVar[bool] = False
    is_rotated_by_megatron: ClassVar[bool] = False
    window: ClassVar[None] = None
    norms: ClassVar[Literal["none"]] = "none"
    """Norms of compressed q and k are always there."""
    gated: ClassVar[bool] = False
    sinks: ClassVar[bool] = False
    qkv_bias: ClassVar[bool] = False
    output_bias: ClassVar[bool] = False

    def without_window(self) -> LatentAttention:
        return self

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """The dimension of each head's q and k."""
        return self.nope_dim + self.rope_dim

    @property
    def rotary_dim(self) -> int:
        """The number of dims of a head that are rotated."""
        return self.rope_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """The elements of q, k and v of one token over all heads."""
        key = self.num_heads * self.head_dim
        return key, key, self.num_heads * self.value_dim

    @property
    def context_width(self) -> int:
        """See `SoftmaxAttention`; v is as wide as k there."""
        return 2 * self.num_kv_heads * self.head_dim

    def sizes(self) -> dict[str, int]:
        """See `ModelShape.sizes`."""
        return {
            "query_rank": self.query_rank,
            "kv_rank": self.kv_rank,
            "kv_down": self.kv_rank + self.rope_dim,
            "q_up": self.num_heads * self.head_dim,
            "kv_up": self.num_heads * (self.nope_dim + self.value_dim),
            "value": self.num_heads * self.value_dim,
        }

    def divisions(self, mesh: Mesh) -> list[Division]:
        return [Division("attention heads", self.num_heads, mesh.tensor, "tensor")]

    def multiplications(self, hidden: int) -> int:
        """The multiplications of one token in the weights."""
        query_width, _, value_width = self.widths
        query = self.query_rank * (hidden + query_width) if self.query_rank else hidden * query_width
        key_and_value = hidden * (self.kv_rank + self.rope_dim)
        key_and_value += self.kv_rank * self.num_heads * (self.nope_dim + self.value_dim)
        return query + key_and_value + value_width * hidden

    def scores(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """The multiplications of the scores and of the weighted values for sequences of these lengths."""
        pairs: NDArray[np.float64] = self.num_heads * (self.head_dim + self.value_dim) * _pairs(tokens, None)
        return pairs

    def kept_bytes(self, tokens: Any, tensor: int, width: int) -> Any:
        """See `SoftmaxAttention`. Every rank keeps the whole low-rank projection."""
        return tokens * (self.kv_rank + self.rope_dim) * width


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

    is_linear: ClassVar[bool] = True
    window: ClassVar[None] = None
    sinks: ClassVar[bool] = False

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

    @property
    def context_width(self) -> int:
        """The elements of a token that context-parallel ranks exchange: inputs and outputs of their heads."""
        return 2 * (self.key_width + self.value_width + self.num_value_heads)

    def sizes(self) -> dict[str, int]:
        """See `ModelShape.sizes`."""
        return {
            "delta_key_heads": self.num_key_heads,
            "delta_key": self.key_width,
            "delta_qkv": 2 * self.key_width + self.value_width,
            "delta_qkvz": 2 * self.key_width + 2 * self.value_width,
            "delta_value": self.value_width,
            "delta_heads": self.num_value_heads,
            "delta_two_heads": 2 * self.num_value_heads,
            "delta_head": self.value_size,
            "convolution": self.convolution,
        }

    def divisions(self, mesh: Mesh) -> list[Division]:
        """Each rank of a context group computes a part of its heads."""
        heads, name = self.num_key_heads, "key heads of linear attention"
        of_rank = f"{name} on a tensor-parallel rank"
        return [
            Division(name, heads, mesh.tensor, "tensor"),
            Division(of_rank, heads // mesh.tensor, mesh.context, "context"),
        ]

    def multiplications(self, hidden: int) -> int:
        """The multiplications of one token in the weights, and in the gated delta rule in whole chunks of C tokens
        (actor/delta_net.py). A key head multiplies each key and each query with the C keys of the chunk. A value head
        solves a triangular system of C rows for keys and values, which is C / 2 of them for each number; it reads the
        state twice and changes it once; and it adds up the C values of the chunk."""
        key, value = self.key_size, self.value_size
        projected = 2 * self.key_width + 2 * self.value_width + 2 * self.num_value_heads
        projections = hidden * (projected + self.value_width)
        of_keys = self.num_key_heads * 2 * DELTA_CHUNK * key
        of_values = DELTA_CHUNK * (key + value) // 2 + 3 * key * value + DELTA_CHUNK * value
        return projections + of_keys + self.num_value_heads * of_values

    def scores(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """None: `multiplications` has them."""
        return np.zeros(np.shape(tokens))

    def kept_bytes(self, tokens: Any, tensor: int, width: int) -> Any:
        """See `SoftmaxAttention`. A state has a matrix for each of the rank's value heads in float32 (vLLM's
        `mamba_ssm_cache_dtype` as the published configurations set it), and the inputs of the convolution that the next
        token needs. vLLM rounds the size of a block of states up to a whole number of blocks of keys and values, which
        is not counted."""
        inputs = (2 * self.key_width + self.value_width) * (self.convolution - 1)
        return (4 * self.state_numbers + width * inputs) / tensor


Attention = SoftmaxAttention | LatentAttention | DeltaNet


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """An MLP of three matrices: down(act(gate(x)) up(x))."""

    size: int
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """`gelu_tanh`: GELU's approximation with tanh (arXiv:1606.08415)."""

    def sizes(self) -> dict[str, int]:
        """See `ModelShape.sizes`."""
        return {"ffn": self.size}

    def divisions(self, mesh: Mesh) -> list[Division]:
        return [Division("FFN size", self.size, mesh.tensor, "tensor")]

    def multiplications(self, hidden: int) -> int:
        """The multiplications of one token."""
        return 3 * hidden * self.size

    def inner_width(self, hidden: int, tensor: int, expert_parallel: bool) -> float:
        """The elements of a token in an engine: gate, up and their product."""
        return 3 * (self.size / tensor)


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts (MoE): a router sends each token to some of them."""

    num_experts: int
    num_active: int
    """The number of routed experts that process each token."""
    ffn_size: int
    """The hidden size of one routed expert."""
    shared_ffn_size: int = 0
    """The hidden size of all shared experts together, which process every token; 0 means no shared expert."""
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
    router_bias: bool = False
    """Whether the router adds a bias to the scores when it chooses experts. The bias is updated from the experts' load,
    not by a gradient (arXiv:2408.15664)."""
    linear_bias: bool = False
    """Whether the router and every matrix of the experts have a bias."""

    def sizes(self) -> dict[str, int]:
        """See `ModelShape.sizes`."""
        return {"experts": self.num_experts, "expert_ffn": self.ffn_size, "shared_ffn": self.shared_ffn_size}

    def divisions(self, mesh: Mesh) -> list[Division]:
        return [
            Division("experts", self.num_experts, mesh.expert, "expert"),
            Division("FFN size of an expert", self.ffn_size, mesh.expert_ways, "expert_tensor"),
            Division("FFN size of the shared experts", self.shared_ffn_size, mesh.tensor, "tensor"),
        ]

    def multiplications(self, hidden: int) -> int:
        """The multiplications of one token."""
        width = self.num_active * self.ffn_size + self.shared_ffn_size
        return hidden * self.num_experts + 3 * hidden * width

    def inner_width(self, hidden: int, tensor: int, expert_parallel: bool) -> float:
        """The elements of a token in an engine: the two buffers of vLLM's Triton kernels
        (`TritonExperts.workspace_shapes`), with a row for each active expert, and an output."""
        inner = self.ffn_size / (1 if expert_parallel else tensor)
        return self.num_active * (max(inner, hidden) + max(2 * inner, hidden)) + hidden


Mlp = GatedMlp | Mixture


def _pairs(tokens: ArrayLike, window: int | None) -> NDArray[np.float64]:
    """The pairs of a query and a key that causal attention computes for sequences of these lengths: half of L x L, or
    with a window of W tokens W pairs for each token after the first W, which makes L^2 / 2 - (L - W)^2 / 2."""
    tokens_S = np.asarray(tokens, np.float64)
    beyond_S = np.maximum(tokens_S - window, 0) if window is not None else 0.0
    pairs_S: NDArray[np.float64] = (tokens_S**2 - beyond_S**2) / 2
    return pairs_S
