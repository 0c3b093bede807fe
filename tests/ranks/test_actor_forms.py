"""Trainers with models whose files hold experts in other forms than the family's table. The same weights in the plain
form give the same bits."""

from __future__ import annotations

from pathlib import Path

import cover
import file_forms
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scenarios import Layout
from shares import TrainSample

from megatron_rl.commands import megatron_to_hf
from megatron_rl.types import Mesh

LAYOUTS = {
    "tp2": Layout(Mesh(tensor=2)),
    "tp2_ep2_whole": Layout(Mesh(tensor=2, expert=2, expert_tensor=1)),
    "dp2_ep2": Layout(Mesh(data=2, expert=2)),
    "pp2_dp2_ep2": Layout(Mesh(pipeline=2, data=2, expert=2)),
}
"""`whole`: experts are not split over TP."""


@pytest.fixture(scope="module")
def forms(folders, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("forms")
    return {form: file_forms.write_form(form, folders["qwen3_moe"], root / form) for form in file_forms.FORMS}


LOGITS = [(form, name) for form in file_forms.FORMS for name in ("tp2", "tp2_ep2_whole", "dp2_ep2")]


@pytest.mark.parametrize("form, name", cover.essential(LOGITS, ("like_gpt_oss", "tp2_ep2_whole")))
def test_logits_have_the_bits_of_the_plain_form(
    trainers, folders, forms, long_samples: list[TrainSample], form: str, name: str
):
    layout = LAYOUTS[name]
    found, wanted = (
        trainers.run(scenario, 2, folder=folder, samples=long_samples, layout=layout)[0][0]
        for scenario, folder in (("form_scenarios.logits", forms[form]), ("logits", folders["qwen3_moe"]))
    )
    assert np.isfinite(wanted).all() and wanted.std() > 0.1
    np.testing.assert_array_equal(found, wanted)


EXPORTS = [(form, "pp2_dp2_ep2") for form in file_forms.FORMS] + [("like_gpt_oss", name) for name in LAYOUTS][:3]


@pytest.mark.parametrize("form, name", cover.essential(EXPORTS, ("like_gpt_oss", "pp2_dp2_ep2")))
def test_export_after_load_gives_the_same_bits(trainers, forms, tmp_path, form: str, name: str):
    layout = LAYOUTS[name]
    trainers.run(
        "form_scenarios.export", layout.mesh.world_size, folder=forms[form], layout=layout, target=tmp_path / "export"
    )
    before, after = (load_file(folder / "model.safetensors") for folder in (forms[form], tmp_path / "export"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.deep
def test_a_trainers_checkpoint_becomes_the_same_files(trainers, forms, tmp_path):
    layout, folder = LAYOUTS["pp2_dp2_ep2"], forms["like_gpt_oss"]
    checkpoint = tmp_path / "step0"
    trainers.run("form_scenarios.save_at_once", 4, folder=folder, layout=layout, checkpoint=checkpoint)
    with file_forms.known():
        assert megatron_to_hf.main([str(checkpoint), str(tmp_path / "saved")]) == 0
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
