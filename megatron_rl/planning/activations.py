"""The bytes of activations of a trainer rank: what autograd keeps, and the temporary tensors of the computation.

They are estimates for one kind of layers. Invariant (tests/ranks): they are within 10 % of what autograd saves on the
local layers, with and without recomputation.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from megatron_rl.config.policy import MegatronConfig, ModelConfig, ParallelConfig
from megatron_rl.config.schema import BaseConfig
from megatron_rl.models import FAMILIES, obstacle_to_fused_layers, padded_vocabulary
from megatron_rl.models.adapters import OUTPUT, A, adapter_rules
from megatron_rl.types import Experts, Mesh, ModelShape

CHUNK_BYTES = 256 * 2**20
"""The logits of one chunk of the output layer in fp32, as `algorithms.logprobs.CHUNK_BYTES` (which needs torch)."""
DELTA_CHUNK = 64
"""The tokens of a chunk of linear attention, as `actor.delta_net.CHUNK` (which needs torch)."""
TOKEN_BYTES = 2 * 8 + 4 * 4
"""What the log-prob of a token keeps in addition to its hidden state: two indices, and four fp32 numbers."""
CHUNKS = 3
"""The output layer holds the logits of a chunk, their exponentials (for the entropy), and their gradient."""


def has_fused_layers(shape: ModelShape, model: ModelConfig, context: int) -> bool:
    """Whether the layers on GPUs are Transformer Engine's, if it is installed (`actor.model.uses_fused_layers`)."""
    if model.layers != "auto":
        return model.layers == "transformer_engine"
    return model.dtype == "bfloat16" and obstacle_to_fused_layers(shape, context) is None


def trains_fused(config: BaseConfig, shape: ModelShape, context: int) -> bool:
    """Whether the policy's layers are Transformer Engine's. Without GPUs they are local."""
    return config.cluster.gpus_per_trainer > 0 and has_fused_layers(shape, config.model, context)


def attention_of(shape: ModelShape, dtype: str, *, fused: bool, on_gpus: bool) -> str:
    """Who computes the attention of the layers."""
    if fused:
        return "Transformer Engine"
    if on_gpus and dtype == "bfloat16":
        return "FlashAttention, one call for a row"
    masked = shape.sliding_layers or FAMILIES[shape.family].sinks
    return f"torch's, padded, with{'' if masked else 'out'} masks"


def delta_rule_of(*, on_gpus: bool) -> str:
    """Who computes linear attention."""
    return "flash-linear-attention's kernels" if on_gpus else "a loop over chunks in PyTorch"


def recomputed_modules(model: ModelConfig, megatron: MegatronConfig) -> frozenset[str]:
    """The parts of layers that are computed again in the backward pass: {"full"} for whole layers, otherwise the ones
    that Megatron's selective recomputation names (`recompute_modules` of its TransformerConfig)."""
    settings = megatron.transformer
    modules = settings.get("recompute_modules")
    if model.recompute == "full":
        return frozenset({"full"})
    is_selective = settings.get("recompute_granularity") == "selective"
    return frozenset(modules) if is_selective and isinstance(modules, tuple) else frozenset()


def layer_bytes(
    shape: ModelShape,
    parallel: ParallelConfig,
    layer: int,
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
        width: the bytes of an element.
        fused: the layers are Transformer Engine's: their kernels of norm, activation and rotary embedding keep their
            inputs only, which is an estimate from their descriptions. Otherwise they are Megatron's local layers with
            the norms and the attention of `actor`: every tensor that autograd saves is counted.
        recomputed: see `recomputed_modules`. Of `core_attn` nothing is saved, because the kernels keep no scores.
    """
    mesh = parallel.mesh
    split = 1 / mesh.tensor
    rows = split if parallel.sequence_parallel else 1.0  # of the tokens, between attention and MLP
    hidden, experts = shape.hidden_size, shape.experts
    widths, extra = _attention_widths(shape)
    query, key, value = (width_of_all * split for width_of_all in widths)
    projected = query + key + value
    if shape.latent is None and mesh.tensor > shape.num_kv_heads:  # ranks share KV heads, and gather q, k and v of all
        key = value = shape.head_dim
        projected = sum(widths)
    mixture = experts if shape.has_experts(layer) else None
    numbers = 0.0
    """The fp32 numbers for each token."""
    if fused:
        # The inputs of two norms, of two blocks, and the residual; q, k, v; q and k before and after their rotation;
        # the output of attention.
        elements = 5 * hidden * rows + projected + 2 * (query + key) + query
        if shape.latent:  # q, k and v that our rotation ends with, and the output
            elements = 5 * hidden * rows + projected + value
        mlp = 3  # gate and up, and their product
    else:
        # The inputs and outputs of two norms; q, k, v for the kernel; its output, packed and padded; the same unpadded.
        elements = 4 * hidden * rows + query + key + value + 2 * query
        numbers = 2 * rows + shape.num_heads * split
        mlp = 5  # gate and up, silu of gate, up a second time, and the product
        family = FAMILIES[shape.family]
        norm = family.qk_norm(shape)
        if family.gated_attention:  # the gates are a part of the projection; the output before the gate, and its factor
            projected += query
            elements += query
            numbers += query
        if norm == "head":  # the input of k's norm is a view of q, k and v together
            elements += query + projected
            numbers += (query + key) / shape.head_dim
        elif norm == "full":
            elements += query + key
            numbers += 2
        if mesh.context > 1:  # the ring keeps k and v in addition to the rotated q and k
            elements += key
        if width == 2:  # cosine and sine are rounded in each layer
            elements += 2 * shape.head_dim * shape.rotary_share
    elements += extra * rows
    if layer in shape.linear_layers:
        numbers = 2 * rows + _linear_numbers(shape) * split
        elements = 4 * hidden * rows + (shape.delta.value_width if shape.delta else 0) * split
    if "layernorm" in recomputed:  # the outputs of norms that are not a part of Transformer Engine's linear layers
        elements -= (bool(shape.latent) + bool(mixture) if fused else 2) * hidden * rows
    if "mla_up_proj" in recomputed and shape.latent:
        elements -= projected
    if mixture is None:
        elements += 0 if "mlp" in recomputed else mlp * shape.ffn_size * split
    elif "moe" not in recomputed:
        elements += 0 if "shared_experts" in recomputed else mixture.shared_ffn_size * mlp * split
        # The local experts also keep the product multiplied by the router's weight.
        mlp += (not fused) - ("moe_act" in recomputed)
        of_mixture, more = _mixture_widths(mixture, mesh, hidden, mlp)
        elements, numbers = elements + of_mixture * rows, numbers + more * rows
    return (elements + _adapter_widths(shape, mesh, layer, rows)) * width + numbers * 4


def mask_bytes(shape: ModelShape, layer: int, num_tokens: int) -> float:
    """The bytes of a layer's largest mask, which local layers in fp32 give to torch's attention as numbers (bf16 on
    GPUs needs none): for a window's blocks each query has 2 W - 1 keys, and on GPUs sinks are keys of a whole mask.
    It is counted in the layer that is computed: without recomputation GPUs keep more.

    Args:
        num_tokens: of a micro-batch, which is taken to be one sequence.
    """
    window = shape.sliding_window if layer in shape.sliding_layers else None
    if window is not None and window < num_tokens:
        return 4.0 * window * (2 * window - 1)
    return 4.0 * num_tokens * (num_tokens + 1) if FAMILIES[shape.family].sinks else 0.0


def _adapter_widths(shape: ModelShape, mesh: Mesh, layer: int, rows: float) -> float:
    """The elements that the adapters of a layer keep for each token: A x, which B multiplies. The inputs of the layers
    are counted already; a frozen weight without an adapter does not need them, which is not counted.

    Args:
        rows: the rank's share of the tokens between attention and MLP.
    """
    if shape.adapters is None:
        return 0.0
    kept, experts = 0.0, shape.experts
    for rule in adapter_rules(FAMILIES[shape.family].layer_rules(shape, layer), shape):
        if rule.hf[0].name.endswith(f"{A}.weight"):
            tokens = rows if rule.split.dim == 1 else 1.0
            if rule.per_expert:
                assert experts is not None, "the layer has experts"
                tokens = rows * experts.num_active * mesh.expert_ways
            kept += tokens * len(rule.hf) * shape.adapters.rank
    return kept


def _linear_numbers(shape: ModelShape) -> float:
    """The fp32 numbers that a layer with linear attention keeps for each token over all heads (actor/delta_net.py), an
    estimate: the convolution's inputs once for each of its weights, and its output before the SiLU; keys and queries
    before and after their norms, and decayed for each value head; the solution of the triangular system; four square
    matrices of a chunk for each value head and two for each key head; a state for each chunk; what is written; and the
    output in four steps through norm and gate. On GPUs the kernels keep less, which is not counted."""
    delta = shape.delta
    assert delta is not None, "layers with linear attention have sizes"
    channels, heads, chunk = 2 * delta.key_width + delta.value_width, delta.num_value_heads, DELTA_CHUNK
    convolution = channels * (delta.convolution + 1)
    keys = 4 * delta.key_width + 3 * heads * delta.key_size
    squares = (4 * heads + 2 * delta.num_key_heads) * chunk
    values = 3 * delta.value_width + delta.state_numbers / chunk
    return convolution + keys + squares + values + 4 * delta.value_width


def _mixture_widths(experts: Experts, mesh: Mesh, hidden: int, mlp: int) -> tuple[float, float]:
    """(elements, fp32 numbers) that the routed experts keep for each token of one tensor-parallel rank: the tokens that
    are sent to the rank, `mlp` times an expert's width of each of them, and the router's scores."""
    mlp += 2 if experts.clamp else 0  # the clamped gate and the sigmoid
    tokens = experts.num_active * mesh.expert_ways  # a token goes to all ranks that share an expert
    elements = tokens * (hidden + mlp * experts.ffn_size / mesh.expert_ways)
    return elements, 2.0 * experts.num_experts + 4.0 * experts.num_active


def _attention_widths(shape: ModelShape) -> tuple[tuple[int, int, int], int]:
    """The elements of q, k and v of one token over all heads; and of latent attention's low-rank projections."""
    latent = shape.latent
    if latent is None:
        key = shape.num_kv_heads * shape.head_dim
        return (shape.num_heads * shape.head_dim, key, key), 0
    per_head = latent.nope_dim + latent.rope_dim
    low = 2 * (latent.query_rank + latent.kv_rank) + latent.rope_dim
    return (shape.num_heads * per_head, shape.num_heads * per_head, shape.num_heads * latent.value_dim), low


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

    With one chunk a stage, a stage of a pipeline of p stages has p - stage micro-batches in flight (one forward, one
    backward). With v chunks it has 2 (p - stage - 1) + (v - 1) p + 1 passes of one chunk in flight (the interleaved
    schedule, Narayanan et al. 2021, arXiv:2104.04473): p of one chunk, then p of the next chunk.

    Args:
        num_tokens: the tokens of a micro-batch, of all context-parallel ranks together.
        recomputed: see `recomputed_modules`. Of layers that run forward a second time only the inputs are kept.
        fused: see `layer_bytes`.
    """
    mesh = parallel.mesh
    num_own = num_tokens / mesh.context
    inputs = shape.hidden_size * num_own * width / (mesh.tensor if parallel.sequence_parallel else 1)
    chunks = [mesh.layer_range(shape.num_layers, stage, chunk) for chunk in range(mesh.virtual)]

    def size(layer: int, recomputed: Collection[str] = ()) -> float:
        return num_own * layer_bytes(shape, parallel, layer, width, fused=fused, recomputed=recomputed)

    sizes = {layer: size(layer, recomputed) for chunk in chunks for layer in chunk}
    per_chunk = [len(chunk) * inputs if "full" in recomputed else sum(sizes[n] for n in chunk) for chunk in chunks]
    in_flight = mesh.pipeline - stage
    if mesh.virtual > 1:
        in_flight = 2 * (mesh.pipeline - stage - 1) + (mesh.virtual - 1) * mesh.pipeline + 1
    kept = sum(per_chunk[number // mesh.pipeline % mesh.virtual] for number in range(in_flight))
    if mesh.virtual > 1:  # outputs are not freed when they are sent (actor/model.py)
        kept += in_flight * inputs
    masks = {layer: mask_bytes(shape, layer, num_tokens) for layer in sizes if width == 4 and not fused}
    largest = max((size(layer) + masks.get(layer, 0.0) for layer in sizes), default=0.0)
    output = 0.0
    if stage == mesh.pipeline - 1:
        rows = padded_vocabulary(shape, mesh.tensor) // mesh.tensor
        chunk_bytes = min(CHUNK_BYTES, num_own * rows * 4)
        hidden = shape.hidden_size * num_own * width
        # The input of the last norm; hidden states of all tokens; two indices and four numbers of each token.
        kept += inputs + hidden + TOKEN_BYTES * num_own
        if shape.multi_token:
            # Its layer; the embedding in front of its norm, both normed inputs as one matrix, and the input of the last
            # norm; the model's hidden states, which its norm keeps, and its own. One micro-batch is in flight.
            own = inputs if "full" in recomputed else size(shape.num_layers, recomputed)
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
