"""What both sides agree on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from small_models import changed, model

from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.bridge.vllm_loaders import CopyRecorder
from megatron_rl.layout import Engines
from megatron_rl.types import Mesh

SHAPE = model("qwen3", 2, 32, 4, 2, 16, 64, 40, 128)
SETUP = BridgeSetup(SHAPE, Mesh(tensor=2, data=2), False, Engines(2, 2), "float32", "127.0.0.1", 1)


def test_it_travels_as_json():
    assert BridgeSetup.from_dict(json.loads(json.dumps(SETUP.as_dict()))) == SETUP


def test_trainers_come_before_engines():
    assert SETUP.world_size == 8
    assert [SETUP.engine_rank(e, t) for e in range(2) for t in range(2)] == [0, 1, 2, 3]


def test_agreement_tells_models_meshes_and_formats_apart():
    others = [
        replace(SETUP, shape=changed(SHAPE, mlp={"size": 128})),
        replace(SETUP, mesh=Mesh(tensor=1, data=4)),
        replace(SETUP, fused_norms=True),
        replace(SETUP, engines=Engines(4, 1)),
        replace(SETUP, engines=Engines(2, 2, num_chains=1)),
        replace(SETUP, dtype="bfloat16"),
        replace(SETUP, bucket_bytes=1000),
    ]
    assert len({SETUP.agreement, *(other.agreement for other in others)}) == len(others) + 1
    assert replace(SETUP, host="elsewhere", port=2, epoch=1).agreement == SETUP.agreement


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="a bucket and a deadline above 0"):
        replace(SETUP, bucket_bytes=0)
    with pytest.raises(ValueError, match="describe one, engines.num=1"):
        replace(SETUP, folder="/somewhere")


def test_what_a_loader_computes_for_itself_is_not_changed_by_the_recording():
    with CopyRecorder({}, {}, {}, {}, has_turns=False):
        computed = torch.ones(2, 3).to(torch.float64).sum(1, keepdim=True)
    assert computed.dtype == torch.float64 and computed.tolist() == [[3.0], [3.0]]
