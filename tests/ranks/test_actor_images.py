"""Images: the log-probs and the gradient of rows with several and no images are transformers' in every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import cover
import numpy as np
import pytest
import torch
from image_models import IMAGE_TOKEN, MODELS, drawing, row, write_model
from test_actor_experts import as_saved
from test_actor_gradients import numbers_of
from transformers_models import open_model

from megatron_rl.config.policy import ParallelConfig
from megatron_rl.data.pictures import Pictures
from megatron_rl.tools.bench.compare_layouts import parse_layout, relative

LAYOUTS = {
    "qwen2_5_vl": ("tp2-cp2", "tp2", "pp2-vpp2", "dp2"),
    "qwen3_vl": ("tp2-cp2", "tp2", "pp2", "cp2", "dp2", "tp2-pp2", "pp2-cp2"),
    "qwen3_vl_moe": ("dp2-ep2", "tp2", "tp2-dp2-ep2", "pp2-cp2"),
}
assert LAYOUTS.keys() == MODELS.keys()
CASES = [(kind, layout) for kind, layouts in LAYOUTS.items() for layout in layouts]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """(the folder, the rows, the gradient in float64 by transformers, the loss) of each model"""
    return cache(lambda kind: world(tmp_path_factory.mktemp(kind) / "model", kind))


def world(folder, kind):
    write_model(folder, kind)
    model = open_model(folder, torch.float64, experts_implementation="eager")
    pictures = Pictures(folder, folder / "images")
    one, two = drawing(20, 31, 0), drawing(9, 40, 1)
    parts = [[3, one, 9], [5, 7], [2, one, 4, two, 20], [1, two, two, 6], [30, 12], [9, one, 5]]
    rows = [row(pictures, part, seed) for seed, part in enumerate(parts)]
    rows += [answered(rows[-1], seed) for seed in range(3)]
    model.requires_grad_(True)
    model.model.visual.requires_grad_(False)
    num_tokens, loss = sum(int(one.action_mask.sum()) for one in rows), 0.0
    for one in rows:
        ids = torch.from_numpy(one.ids.astype(np.int64))[None]
        images = {}
        if one.pictures:
            patches = np.concatenate([pictures.patches(picture) for picture in one.pictures])
            grids = [[1, picture.num_rows, picture.num_columns] for picture in one.pictures]
            images = dict(pixel_values=torch.from_numpy(patches).double(), image_grid_thw=torch.tensor(grids))
            images["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        logp = model(input_ids=ids, **images).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        loss = loss - logp[torch.from_numpy(one.action_mask[1:])].sum() / num_tokens
    loss.backward()
    gradient = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient |= as_saved(name.replace("model.language_model.", "model."), parameter.grad.numpy(), kind)
    return folder, rows, gradient, loss.item()


def answered(tokens, seed):
    """Another answer to the same prompt, which both have in common in a row."""
    ids, is_action = tokens.ids.copy(), tokens.action_mask
    ids[is_action] = np.random.default_rng(seed).integers(0, IMAGE_TOKEN, is_action.sum())
    return replace(tokens, ids=ids)


@pytest.mark.parametrize("kind", cover.essential(LAYOUTS, "qwen3_vl"))
def test_one_process_has_the_gradient_of_transformers(trainers, worlds, kind):
    folder, rows, expected, loss = worlds(kind)
    ((own_loss, _, found),) = numbers_of(trainers, folder, rows, ParallelConfig(), 2)
    assert own_loss == pytest.approx(loss, abs=1e-5)
    assert found.keys() - expected.keys() <= {"lm_head.weight"} and expected.keys() <= found.keys()
    for key in expected:
        assert relative(found[key], expected[key]) < 2e-5, key


@pytest.mark.parametrize(("kind", "layout"), cover.essential(CASES, ("qwen3_vl", "tp2-cp2")))
def test_the_gradient_does_not_depend_on_the_layout(trainers, worlds, kind, layout):
    folder, rows, expected, _ = worlds(kind)
    found = numbers_of(trainers, folder, rows, parse_layout(layout), 2)[0][2]
    for key in expected:
        assert relative(found[key], expected[key]) < 2e-5, key
