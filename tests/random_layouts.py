"""Random models of every family, meshes and engines, whose sizes divide as they must."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from hypothesis import strategies as st
from numbered import SHAPES
from small_models import changed

from megatron_rl.layout import Engines, Links
from megatron_rl.types import Mesh, ModelShape

FAMILY_SHAPES = [SHAPES[name] for name in sorted(SHAPES)]


@st.composite
def shapes(draw) -> ModelShape:
    """Models with other sizes. Heads, FFNs and experts divide by 8, the number of KV heads divides 8, and the other
    sizes need not divide by anything."""
    shape = draw(st.sampled_from(FAMILY_SHAPES))
    kv = draw(st.sampled_from([1, 2, 4, 8]))
    num_layers, heads = draw(st.integers(4, 6)), 8 * draw(st.integers(1, 2))
    sizes = dict(num_heads=heads, num_kv_heads=kv, head_dim=4 * draw(st.integers(1, 2)))
    shape = changed(shape, attention=sizes, mlp={"size": 8 * draw(st.integers(1, 3))})
    if shape.mixture:
        experts = dict(num_experts=4 * draw(st.integers(2, 3)), ffn_size=8 * draw(st.integers(1, 2)))
        shape = changed(shape, mlp=experts)
    return replace(
        shape,
        layers=shape.layers[:num_layers],
        hidden_size=draw(st.integers(1, 9)),
        vocab_size=draw(st.integers(3, 200)),
        output=draw(st.sampled_from(("own", "embedding"))),
    )


@st.composite
def served(draw, engines: Engines) -> ModelShape:
    """Models that the engines can hold: where q and k are normalised over all heads, a KV head is on one rank or on
    all; with sinks it is on one."""
    shape = draw(shapes()).served  # without a multi-token head
    kv = shape.attention.num_kv_heads
    if shape.attention.sinks or (shape.attention.norms == "full" and kv > 1):
        return changed(shape, attention={"num_kv_heads": max(kv, engines.tensor)})
    return shape


def enlarged(shape: ModelShape) -> ModelShape:
    """The model made so large that a row is a small part of what a rank sends. Planning takes no longer."""
    names = ("head_dim", "query_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim", "size", "ffn_size")
    names += ("shared_ffn_size",)

    def larger(block: Any) -> Any:
        sizes = {field.name: 32 * getattr(block, field.name) for field in fields(block) if field.name in names}
        return replace(block, **sizes)

    layers = tuple(replace(one, attention=larger(one.attention), mlp=larger(one.mlp)) for one in shape.layers)
    return replace(shape, layers=layers, hidden_size=128 * shape.hidden_size, vocab_size=1600 * shape.vocab_size)


@st.composite
def meshes(draw, shape: ModelShape) -> Mesh:
    """Meshes with every kind of replica, and with stages and virtual stages of any length, 0 included."""
    # Of other models several ranks may share a KV head.
    kv, whole_heads = shape.attention.num_kv_heads, shape.attention.norms == "full"
    tensor = draw(st.sampled_from([n for n in (1, 2, 4) if kv % n == 0 or not whole_heads]))
    context, data = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    chunks, pipeline, virtual = draw(st.sampled_from([(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 2, 2)]))
    ends = sorted(draw(st.integers(0, shape.num_layers)) for _ in range(chunks - 1))
    layers = tuple(b - a for a, b in zip([0, *ends], [*ends, shape.num_layers], strict=True))
    ways = [(e, t) for e in (1, 2, 4) for t in (1, 2, 4) if tensor * context * data % (e * t) == 0]
    expert, expert_tensor = draw(st.sampled_from(ways)) if shape.mixture else (1, None)
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
