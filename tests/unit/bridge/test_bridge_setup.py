"""What both sides agree on, and how a route is cut into messages."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.bridge.setup import BridgeSetup, split_buckets
from megatron_rl.layout import Copy
from megatron_rl.types import Mesh, ModelShape

SHAPE = ModelShape("qwen3", 2, 32, 4, 2, 16, 64, 40, 1e4, 1e-6, 128, False)
SETUP = BridgeSetup(SHAPE, Mesh(tensor=2, data=2), False, 2, 2, "float32", "127.0.0.1", 1)


def test_it_travels_as_json():
    assert BridgeSetup.from_dict(json.loads(json.dumps(SETUP.as_dict()))) == SETUP


def test_trainers_come_before_engines():
    assert SETUP.world_size == 8
    assert [SETUP.engine_rank(e, t) for e in range(2) for t in range(2)] == [0, 1, 2, 3]


def test_agreement_tells_models_meshes_and_formats_apart():
    others = [
        replace(SETUP, shape=replace(SHAPE, ffn_size=128)),
        replace(SETUP, mesh=Mesh(tensor=1, data=4)),
        replace(SETUP, fused_norms=True),
        replace(SETUP, engine_tensor=1),
        replace(SETUP, dtype="bfloat16"),
    ]
    assert len({SETUP.agreement, *(other.agreement for other in others)}) == len(others) + 1
    assert replace(SETUP, host="elsewhere", port=2).agreement == SETUP.agreement


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 12))
def test_buckets_keep_order_and_bound(sizes, bound):
    copies = [Copy("a", ((0, size),), str(i), ((0, size),)) for i, size in enumerate(sizes)]
    buckets = split_buckets(copies, bound)
    assert [copy for bucket in buckets for copy in bucket] == copies
    for bucket in buckets:
        assert len(bucket) == 1 or sum(copy.source_box[0][1] for copy in bucket) <= bound
    for a, b in zip(buckets, buckets[1:]):  # no message is cut before it must be
        assert sum(copy.source_box[0][1] for copy in a) + b[0].source_box[0][1] > bound
