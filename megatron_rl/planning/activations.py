"""The bytes of activations of a trainer rank: what autograd keeps, and the temporary tensors of the computation.

They are estimates for one kind of layers. Invariant (tests/ranks): they are within 10 % of what autograd saves on the
local layers, with and without recomputation.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import singledispatch
from typing import NamedTuple

from megatron_rl.config.policy import MegatronConfig, ModelConfig, ParallelConfig
from megatron_rl.config.schema import BaseConfig
from megatron_rl.models import FAMILIES, obstacle_to_fused_layers, padded_vocabulary
from megatron_rl.models.adapters import OUTPUT, RANK, A, adapter_rules
from megatron_rl.types import (
    DELTA_CHUNK,
    Attention,
    DeltaNet,
    GatedMlp,
    LatentAttention,
    Layer,
    Mesh,
    Mixture,
    Mlp,
    ModelShape,
    SoftmaxAttention,
)
from megatron_rl.types.mamba import Mamba2, SquaredReluMixture, SquaredReluMlp, is_absent

CHUNK_BYTES = 256 * 2**20
"""The logits of one chunk of the output layer in fp32, as `algorithms.logprobs.CHUNK_BYTES` (which needs torch)."""
TOKEN_BYTES = 2 * 8 + 4 * 4
"""What the log-prob of a token keeps in addition to its hidden state: two indices, and four fp32 numbers."""
CHUNKS = 3
"""The output layer holds the logits of a chunk, their exponentials (for the entropy), and their gradient."""


def has_fused_layers(shape: ModelShape, model: ModelConfig, context: int) -> bool:
    """Whether the layers on GPUs are Transformer Engine's, if it is installed (`actor.model.uses_fused_layers`)."""
    if model.layers != "auto":
        return model.layers == "transformer_engine"
    return model.dtype != "float32" and obstacle_to_fused_layers(shape, context) is None


def trains_fused(config: BaseConfig, shape: ModelShape, context: int) -> bool:
    """Whether the policy's layers are Transformer Engine's. Without GPUs they are local."""
    return config.cluster.gpus_per_trainer > 0 and has_fused_layers(shape, config.model, context)


def kernels_of(shape: ModelShape, dtype: str, *, fused: bool, on_gpus: bool) -> dict[str, str]:
    """Who computes each kind of attention that the layers have."""
    masked = any(block.window or block.sinks for block in shape.attentions)
    softmax = f"torch's, padded, with{'' if masked else 'out'} masks"
    if on_gpus and dtype != "float32":
        softmax = "FlashAttention, one call for a row"
    found = {"attention": "Transformer Engine" if fused else softmax}
    if shape.has_linear_attention:
        has_kernels = on_gpus and shape.has_delta_rule
        linear = "flash-linear-attention's kernels" if has_kernels else "a loop over chunks in PyTorch"
        found["linear attention"] = linear
    return found


def recomputed_modules(model: ModelConfig, megatron: MegatronConfig) -> frozenset[str]:
    """The parts of layers that are computed again in the backward pass: {"full"} for whole layers, otherwise the ones
    that Megatron's selective recomputation names (`recompute_modules` of its TransformerConfig)."""
    settings = megatron.transformer
    modules = settings.get("recompute_modules")
    if model.recompute == "full":
        return frozenset({"full"})
    is_selective = settings.get("recompute_granularity") == "selective"
    return frozenset(modules) if is_selective and isinstance(modules, tuple) else frozenset()


class Kept(NamedTuple):
    """What autograd keeps of a block for each token."""

    elements: float
    """The numbers in the model's dtype."""
    numbers: float = 0.0
    """The numbers in fp32."""


class Plan(NamedTuple):
    """How a rank computes its layers."""

    hidden: int
    mesh: Mesh
    rows: float
    """The rank's share of the tokens between attention and MLP."""
    width: int
    """The bytes of an element."""
    fused: bool
    """The layers are Transformer Engine's: their kernels of norm, activation and rotary embedding keep their inputs
    only, which is an estimate from their descriptions. Otherwise they are Megatron's local layers with the norms and
    the attention of `actor`: every tensor that autograd saves is counted."""
    recomputed: Collection[str]
    """See `recomputed_modules`. Of `core_attn` nothing is saved, because the kernels keep no scores."""


def layer_bytes(
    shape: ModelShape,
    parallel: ParallelConfig,
    layer: Layer,
    width: int,
    *,
    fused: bool,
    recomputed: Collection[str] = (),
) -> float:
    """The bytes that autograd keeps of one layer for its backward pass, for each token of the rank's context-parallel
    part, without recomputation and with an attention kernel that keeps no scores (Korthikanti et al. 2022,
    arXiv:2205.05198, section 4, counts the same for another layer).

    A mixture's tokens are taken to be spread evenly over the experts.

    Args:
        width, fused, recomputed: see `Plan`.
    """
    mesh = parallel.mesh
    rows = 1 / mesh.tensor if parallel.sequence_parallel else 1.0
    plan = Plan(shape.hidden_size, mesh, rows, width, fused, recomputed)
    attention, mlp = _kept(layer.attention, plan), _kept(layer.mlp, plan)
    elements, numbers = attention.elements + mlp.elements, attention.numbers + mlp.numbers
    if layer.norms_on_both_sides:  # the inputs of two norms more
        elements, numbers = elements + 2 * shape.hidden_size * rows, numbers + 2 * rows
    absent = is_absent(layer.attention) + is_absent(layer.mlp)
    elements, numbers = elements - absent * 2 * shape.hidden_size * rows, numbers - absent * rows  # one norm is counted
    if "layernorm" in recomputed:  # the outputs of norms that are not a part of Transformer Engine's linear layers
        unfused = isinstance(layer.attention, LatentAttention) + isinstance(layer.mlp, Mixture)
        elements -= (unfused if fused else 2 - absent) * shape.hidden_size * rows
    return (elements + _adapter_widths(shape, layer, plan)) * width + numbers * 4


@singledispatch
def _kept(block: Attention | Mlp, plan: Plan) -> Kept:
    """What autograd keeps of a block and of the norm in front of it."""
    raise AssertionError(f"{block} is no block of a layer")


@_kept.register
def _(attention: SoftmaxAttention, plan: Plan) -> Kept:
    hidden, mesh, rows = plan.hidden, plan.mesh, plan.rows
    split = 1 / mesh.tensor
    query, key, value = (width * split for width in attention.widths)
    projected = query + key + value
    if mesh.tensor > attention.num_kv_heads:  # ranks share KV heads, and gather q, k and v of all
        key = value = attention.head_dim
        projected = sum(attention.widths)
    if plan.fused:
        # The inputs of two norms, of two blocks, and the residual; q, k, v; q and k before and after their rotation;
        # the output of attention.
        return Kept(5 * hidden * rows + projected + 2 * (query + key) + query)
    # The inputs and outputs of two norms; q, k, v for the kernel; its output, packed and padded; the same unpadded.
    elements = 4 * hidden * rows + query + key + value + 2 * query
    numbers = 2 * rows + attention.num_heads * split
    if attention.gated:  # the gates are a part of the projection; the output before the gate, and its factor
        projected += query
        elements += query
        numbers += query
    if attention.norms == "head":  # the input of k's norm is a view of q, k and v together
        elements += query + projected
        numbers += (query + key) / attention.head_dim
    elif attention.norms == "full":
        elements += query + key
        numbers += 2
    return Kept(elements + _turned(attention, plan, key), numbers)


@_kept.register
def _(attention: LatentAttention, plan: Plan) -> Kept:
    hidden, rows = plan.hidden, plan.rows
    split = 1 / plan.mesh.tensor
    query, key, value = (width * split for width in attention.widths)
    projected = query + key + value
    low = 2 * (attention.query_rank + attention.kv_rank) + attention.rope_dim
    if plan.fused:  # as softmax attention; q, k and v that our rotation ends with, and the output
        elements, numbers = 5 * hidden * rows + projected + value, 0.0
    else:
        elements = 4 * hidden * rows + query + key + value + 2 * query + _turned(attention, plan, key)
        numbers = 2 * rows + attention.num_heads * split
    elements += low * rows
    return Kept(elements - projected if "mla_up_proj" in plan.recomputed else elements, numbers)


def _turned(attention: SoftmaxAttention | LatentAttention, plan: Plan, key: float) -> float:
    """The elements of k, v, cosine and sine that local layers keep in addition."""
    elements = key if plan.mesh.context > 1 else 0.0  # the ring keeps k and v in addition to the rotated q and k
    # In bf16 cosine and sine are rounded in each layer.
    return elements + 2 * attention.head_dim * attention.rope.share if plan.width == 2 else elements


@_kept.register
def _(delta: DeltaNet, plan: Plan) -> Kept:
    """An estimate of fp32 numbers over all heads (actor/delta_net.py): the convolution's inputs once for each of its
    weights, and its output before the SiLU; keys and queries before and after their norms, and decayed for each value
    head; the solution of the triangular system; four square matrices of a chunk for each value head and two for each
    key head; a state for each chunk; what is written; and the output in four steps through norm and gate. On GPUs the
    kernels keep less, which is not counted."""
    channels, heads, chunk = 2 * delta.key_width + delta.value_width, delta.num_value_heads, DELTA_CHUNK
    convolution = channels * (delta.convolution + 1)
    keys = 4 * delta.key_width + 3 * heads * delta.key_size
    squares = (4 * heads + 2 * delta.num_key_heads) * chunk
    values = 3 * delta.value_width + delta.state_numbers / chunk
    kept, split = convolution + keys + squares + values + 4 * delta.value_width, 1 / plan.mesh.tensor
    return Kept(4 * plan.hidden * plan.rows + delta.value_width * split, 2 * plan.rows + kept * split)


@_kept.register
def _(mamba: Mamba2, plan: Plan) -> Kept:
    """fp32 numbers (actor/mamba.py): the convolution's inputs once for each of its weights, and its output before the
    SiLU; B and C; two square matrices of a chunk for each head and one for each group; two copies of a state for each
    chunk; x times its step size, the same decayed, what is read, and the output in five steps through gate and norm.
    In the model's dtype: x, and the input of the last projection."""
    heads, value = mamba.num_value_heads, mamba.value_width
    convolution = mamba.channels * (mamba.convolution + 1)
    squares = (2 * heads + mamba.num_key_heads) * DELTA_CHUNK
    states = 2 * mamba.state_numbers / DELTA_CHUNK
    kept, split = convolution + 2 * mamba.key_width + squares + states + 8 * value, 1 / plan.mesh.tensor
    return Kept(4 * plan.hidden * plan.rows + 2 * value * split, 2 * plan.rows + kept * split)


@_kept.register
def _(mlp: GatedMlp, plan: Plan) -> Kept:
    if "mlp" in plan.recomputed:
        return Kept(0.0)
    return Kept(_in_unit(mlp, plan) * mlp.size * (1 / plan.mesh.tensor))


@_kept.register
def _(mixture: Mixture, plan: Plan) -> Kept:
    """The shared experts, the tokens that are sent to the rank, the inside of the experts for each of them, and the
    router's scores."""
    mesh, mlp, split = plan.mesh, _in_unit(mixture, plan), 1 / plan.mesh.tensor
    if "moe" in plan.recomputed:
        return Kept(0.0)
    shared = 0 if "shared_experts" in plan.recomputed else mixture.shared_ffn_size * mlp * split
    # The local experts also keep the product multiplied by the router's weight.
    mlp += (not plan.fused) - ("moe_act" in plan.recomputed)
    mlp += 2 if mixture.clamp else 0  # the clamped gate and the sigmoid
    tokens = mixture.num_active * mesh.expert_ways  # a token goes to all ranks that share an expert
    elements = tokens * (plan.hidden + mlp * mixture.ffn_size / mesh.expert_ways)
    numbers = 2.0 * mixture.num_experts + 4.0 * mixture.num_active
    return Kept(shared + elements * plan.rows, numbers * plan.rows)


def _in_unit(mlp: Mlp, plan: Plan) -> int:
    """The number of tensors that an MLP keeps of its inner width. A gated unit keeps gate and up, and their product;
    local layers also keep silu of gate, and up a second time. A squared ReLU keeps the ReLU and its square."""
    if isinstance(mlp, SquaredReluMlp | SquaredReluMixture):
        return 2
    return 3 if plan.fused else 5


def mask_bytes(layer: Layer, num_tokens: int) -> float:
    """The bytes of a layer's largest mask, which local layers in fp32 give to torch's attention as numbers (bf16 on
    GPUs needs none): for a window's blocks each query has 2 W - 1 keys, and on GPUs sinks are keys of a whole mask.
    It is counted in the layer that is computed: without recomputation GPUs keep more.

    Args:
        num_tokens: of a micro-batch, which is taken to be one sequence.
    """
    window = layer.attention.window
    if window is not None and window < num_tokens:
        return 4.0 * window * (2 * window - 1)
    return 4.0 * num_tokens * (num_tokens + 1) if layer.attention.sinks else 0.0


def _adapter_widths(shape: ModelShape, layer: Layer, plan: Plan) -> float:
    """The elements that the adapters of a layer keep for each token: A x, which B multiplies. The inputs of the layers
    are counted already; a frozen weight without an adapter does not need them, which is not counted."""
    kept, sizes = 0.0, shape.sizes(layer)
    for rule in adapter_rules(FAMILIES[shape.family].layer_rules(layer), shape.adapters):
        if rule.hf[0].name.endswith(f"{A}.weight"):
            tokens = plan.rows if rule.split.dim == 1 else 1.0
            if rule.per_expert and layer.mixture:
                tokens = plan.rows * layer.mixture.num_active * plan.mesh.expert_ways
            kept += tokens * len(rule.hf) * sizes[RANK]
    return kept


class Activations(NamedTuple):
    """The bytes of activations on one rank of a pipeline stage."""

    kept: float
    """What the backward passes of the micro-batches in flight need."""
    layer: float
    """What the layer that is computed now needs in addition: its gradients, and what is computed again."""
    output: float
    """What the output layer needs on the last stage: chunks of logits, hidden states, the gradient of its weight."""

    @property
    def computing(self) -> float:
        """Layers and output layer are never computed at once."""
        return max(self.layer, self.output)


def passes_in_flight(mesh: Mesh, stage: int) -> list[int]:
    """The chunk of each forward pass whose backward pass is to come, at most.

    With one chunk a stage, a stage of a pipeline of p stages has p - stage micro-batches in flight (one forward, one
    backward). With v chunks it has 2 (p - stage - 1) + (v - 1) p + 1 passes of one chunk in flight (the interleaved
    schedule, Narayanan et al. 2021, arXiv:2104.04473): p of one chunk, then p of the next chunk.
    """
    number = mesh.pipeline - stage
    if mesh.virtual > 1:
        number = 2 * (mesh.pipeline - stage - 1) + (mesh.virtual - 1) * mesh.pipeline + 1
    return [one // mesh.pipeline % mesh.virtual for one in range(number)]


def activations(
    shape: ModelShape,
    parallel: ParallelConfig,
    stage: int,
    num_tokens: int,
    *,
    width: int,
    recomputed: Collection[str],
    fused: bool,
) -> Activations:
    """The activations of an update on a rank of a stage.

    Args:
        num_tokens: the tokens of a micro-batch, of all context-parallel ranks together.
        recomputed: see `recomputed_modules`. Of layers that run forward a second time only the inputs are kept.
        fused: see `Plan`.
    """
    mesh = parallel.mesh
    num_own = num_tokens / mesh.context
    inputs = shape.hidden_size * num_own * width / (mesh.tensor if parallel.sequence_parallel else 1)
    chunks = [
        [shape.layers[n] for n in mesh.layer_range(shape.num_layers, stage, chunk)] for chunk in range(mesh.virtual)
    ]

    def size(layer: Layer, recomputed: Collection[str] = ()) -> float:
        return num_own * layer_bytes(shape, parallel, layer, width, fused=fused, recomputed=recomputed)

    sizes = {layer: size(layer, recomputed) for chunk in chunks for layer in chunk}
    per_chunk = [len(chunk) * inputs if "full" in recomputed else sum(sizes[n] for n in chunk) for chunk in chunks]
    passes = passes_in_flight(mesh, stage)
    kept = sum(per_chunk[chunk] for chunk in passes)
    if mesh.virtual > 1:  # outputs are not freed when they are sent (actor/model.py)
        kept += len(passes) * inputs
    masks = {layer: mask_bytes(layer, num_tokens) for layer in sizes if width == 4 and not fused}
    largest = max((size(layer) + masks.get(layer, 0.0) for layer in sizes), default=0.0)
    output = 0.0
    if stage == mesh.pipeline - 1:
        rows = padded_vocabulary(shape, mesh.tensor) // mesh.tensor
        chunk_bytes = min(CHUNK_BYTES, num_own * rows * 4)
        hidden = shape.hidden_size * num_own * width
        # The input of the last norm; hidden states of all tokens; two indices and four numbers of each token.
        kept += inputs + hidden + TOKEN_BYTES * num_own
        for layer in shape.head_layers:
            # Its layer; the embedding in front of its norm, both normed inputs as one matrix, and the input of the last
            # norm; the model's hidden states, which its norm keeps, and its own. One micro-batch is in flight.
            own = inputs if "full" in recomputed else size(layer, recomputed)
            kept += own + 4 * inputs + 2 * hidden + TOKEN_BYTES * num_own
        if shape.value_head:  # the hidden states again in fp32
            output = hidden + 4 * shape.hidden_size * num_own
        else:
            adapters, rounds = shape.adapters, width < 4
            rank = adapters.rank if adapters and OUTPUT in adapters.targets else 0
            kept += num_own * rank * width  # A x
            # Of the weight, or of an adapter's B, the gradient is summed in fp32 and then rounded. B is copied to fp32.
            gradient = rows * (rank if adapters else shape.hidden_size) * (4 + (width if rounds else 0))
            output = CHUNKS * chunk_bytes + hidden + gradient + (4 * rows * rank if rounds else 0)
    return Activations(kept, (2 if "full" in recomputed else 1) * largest, output)
