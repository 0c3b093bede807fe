"""The FLOPs of vision towers are compared with what torch counts of transformers' modules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from image_models import write_model
from leaks import lasting
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from megatron_rl.actor.tower import build_tower
from megatron_rl.balance.flops import tower_flops
from megatron_rl.models import read_shape
from megatron_rl.types import Picture

SEEN = {"qwen2_5_vl": [(8, 12), (32, 64)], "qwen3_vl": [(8, 12), (32, 32)], "qwen3_5": [(32, 32)]}
"""Rows and columns of patches; windows of Qwen2.5-VL divide them."""


@pytest.mark.deep
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", SEEN)
def test_the_operations_of_a_tower_are_counted(tmp_path, kind, recompute):
    """The pictures are small and the tower's hidden size is 16, so that attention is a large part."""
    write_model(tmp_path, kind)
    shape = read_shape(tmp_path)
    shape = replace(shape, vision=replace(shape.vision, trained=True))
    tower = build_tower(tmp_path, torch.float32, recompute == "full")
    tower.set_attn_implementation("eager")
    pictures = [Picture("", *extents) for extents in SEEN[kind]]
    pixels = shape.tower["visual.patch_embed.proj.weight"][1:]
    with lasting(), FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(False):
        for one in pictures:
            patches = torch.randn(one.num_patches, int(np.prod(pixels)))
            out = tower(patches, grid_thw=torch.tensor([[1, one.num_rows, one.num_columns]]))
            (out.pooler_output.sum() + sum(deep.sum() for deep in getattr(out, "deepstack_features", ()))).backward()
    own = tuple(one.num_patches for one in pictures)
    expected, nothing = tower_flops([own, ()], shape, recompute)
    assert nothing == 0 and expected == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert tower_flops([own], replace(shape, vision=replace(shape.vision, trained=False))).tolist() == [0]
