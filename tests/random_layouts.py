"""Random models of every family, meshes and engines, whose sizes divide as they must."""

from __future__ import annotations

from dataclasses import astuple, replace

from hypothesis import strategies as st
from numbered import SHAPES

from megatron_rl.layout import Engines, Links
from megatron_rl.models import FAMILIES
from megatron_rl.types import LatentAttention, Mesh, ModelShape

FAMILY_SHAPES = [SHAPES[name] for name in sorted(SHAPES)]


@st.composite
def shapes(draw) -> ModelShape:
    """Models with other sizes. Heads, FFNs and experts divide by 8, the number of KV heads divides 8, and the other
    sizes need not divide by anything."""
    shape = draw(st.sampled_from(FAMILY_SHAPES))
    kv = draw(st.sampled_from([1, 2, 4, 8]))
    changes = dict(
        num_layers=draw(st.integers(4, 6)),
        hidden_size=draw(st.integers(1, 9)),
        num_kv_heads=kv,
        num_heads=8 * draw(st.integers(1, 2)),
        head_dim=4 * draw(st.integers(1, 2)),
        ffn_size=8 * draw(st.integers(1, 3)),
        vocab_size=draw(st.integers(3, 200)),
        tied_embeddings=draw(st.booleans()),
    )
    if shape.experts:
        num_experts, ffn_size = 4 * draw(st.integers(2, 3)), 8 * draw(st.integers(1, 2))
        changes["experts"] = replace(shape.experts, num_experts=num_experts, ffn_size=ffn_size)
    return replace(shape, **changes)


@st.composite
def served(draw, engines: Engines) -> ModelShape:
    """Models that the engines can hold: where q and k are normalised over all heads, a KV head is on one rank or on
    all; with sinks it is on one."""
    shape = draw(shapes()).served  # without a multi-token head
    if FAMILIES[shape.family].sinks:
        return replace(shape, num_kv_heads=max(shape.num_kv_heads, engines.tensor))
    if FAMILIES[shape.family].qk_norm(shape) == "full" and shape.num_kv_heads > 1:
        return replace(shape, num_kv_heads=max(shape.num_kv_heads, engines.tensor))
    return shape


def enlarged(shape: ModelShape) -> ModelShape:
    """The model made so large that a row is a small part of what a rank sends. Planning takes no longer."""
    factor = 32
    changes = dict(
        hidden_size=128 * shape.hidden_size,
        head_dim=factor * shape.head_dim,
        ffn_size=factor * shape.ffn_size,
        vocab_size=1600 * shape.vocab_size,
    )
    if experts := shape.experts:
        sizes = dict(ffn_size=factor * experts.ffn_size, shared_ffn_size=factor * experts.shared_ffn_size)
        changes["experts"] = replace(experts, **sizes)
    if shape.latent:
        changes["latent"] = LatentAttention(*(factor * size for size in astuple(shape.latent)))
    return replace(shape, **changes)


@st.composite
def meshes(draw, shape: ModelShape) -> Mesh:
    """Meshes with every kind of replica, and with stages and virtual stages of any length, 0 included."""
    whole_heads = FAMILIES[shape.family].qk_norm(shape) == "full"  # of the others several ranks may share a KV head
    tensor = draw(st.sampled_from([n for n in (1, 2, 4) if shape.num_kv_heads % n == 0 or not whole_heads]))
    context, data = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    chunks, pipeline, virtual = draw(st.sampled_from([(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 2, 2)]))
    ends = sorted(draw(st.integers(0, shape.num_layers)) for _ in range(chunks - 1))
    layers = tuple(b - a for a, b in zip([0, *ends], [*ends, shape.num_layers], strict=True))
    ways = [(e, t) for e in (1, 2, 4) for t in (1, 2, 4) if tensor * context * data % (e * t) == 0]
    expert, expert_tensor = draw(st.sampled_from(ways)) if shape.experts else (1, None)
    return Mesh(
        tensor,
        pipeline,
        data,
        context=context,
        virtual=virtual,
        layers=layers,
        expert=expert,
        expert_tensor=expert_tensor,
    )


@st.composite
def engines(draw) -> Engines:
    num = draw(st.integers(1, 4))
    return Engines(
        num,
        draw(st.sampled_from([1, 2, 4, 8])),
        draw(st.sampled_from([1, 2, 3])),
        draw(st.booleans()),
        draw(st.none() | st.integers(1, num)),
    )


links = st.builds(
    lambda sizes, colocated: Links(*sizes, colocated=colocated),
    st.sampled_from([(1, None), (2, 1), (4, None), (4, 2), (3, None)]),
    st.booleans(),
)
