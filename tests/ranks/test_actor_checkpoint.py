"""Resume is bitwise, a checkpoint is whole or absent, and a broken step changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import cover
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scenarios import Layout

from megatron_rl.commands import megatron_to_hf, verify_checkpoint
from megatron_rl.config.policy import LoraConfig
from megatron_rl.convert import target
from megatron_rl.convert.forms import hub_tensors
from megatron_rl.convert.source import open_checkpoint
from megatron_rl.convert.tensor_files import Maps
from megatron_rl.models.adapters import is_adapter
from megatron_rl.types import Mesh

BITWISE = {
    "tp2": Layout(Mesh(tensor=2), num_microbatches=2),
    "dp2": Layout(Mesh(data=2), num_microbatches=2),  # the distributed optimizer
    "dp2_bf16": Layout(Mesh(data=2), num_microbatches=2, dtype="bfloat16"),  # fp32 copies of split weights
    "pp2_bf16": Layout(Mesh(pipeline=2, virtual=2), num_microbatches=2, dtype="bfloat16"),
    "cp2_bf16": Layout(Mesh(context=2), num_microbatches=2, dtype="bfloat16"),
}


@pytest.mark.parametrize("name", cover.essential(BITWISE, "tp2"))
def test_resume_is_bitwise(trainers, model_folder, samples, tmp_path, name):
    layout = BITWISE[name]
    arguments = dict(folder=model_folder, samples=samples, layout=layout, checkpoint=tmp_path / "step2")
    unbroken = trainers.run("save_and_go_on", 2, **arguments)
    check_resumed(trainers, unbroken, arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step2"]


@pytest.mark.parametrize("mesh", cover.essential([Mesh(), Mesh(data=2)], Mesh()), ids=["one", "dp2"])
def test_a_resumed_run_uses_its_own_learning_rate_betas_and_decay(trainers, model_folder, samples, tmp_path, mesh):
    """What the checkpoint holds is the moments and the number of updates."""
    arguments = dict(folder=model_folder, samples=samples, layout=Layout(mesh), checkpoint=tmp_path / "step2")
    trainers.run("save_and_go_on", mesh.world_size, **arguments)
    for settings, rate in trainers.run("resume_with_other_settings", mesh.world_size, **arguments):
        assert {(lr, beta1, beta2) for lr, beta1, beta2, _ in settings} == {(0.5, 0.8, 0.7)} and rate == 0.5
        assert {decay for *_, decay in settings} <= {0.3, 0.0}, "norms are not decayed"


@pytest.mark.deep
def test_a_run_killed_while_saving_resumes_in_fresh_processes(trainers, model_folder, samples, tmp_path):
    layout = Layout(Mesh(pipeline=2), num_microbatches=2)
    arguments = dict(folder=model_folder, samples=samples, layout=layout, checkpoint=tmp_path / "last")
    unbroken = trainers.run("save_and_go_on", 2, **arguments)
    with pytest.raises(AssertionError, match="process 0: it died|onnection|losed"):  # whoever notices first
        trainers.run("die_while_saving", 2, fresh=True, **arguments)
    assert len(list(tmp_path.iterdir())) == 2
    check_resumed(trainers, unbroken, arguments)
    trainers.run("save_and_go_on", 2, **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["last"], "what the killed save left is swept away"


def check_resumed(pool, unbroken, arguments) -> None:
    resumed = pool.run("resume", len(unbroken), **arguments)
    for (mismatch, metrics, parameters), (mismatch2, metrics2, parameters2, extra) in zip(
        unbroken, resumed, strict=True
    ):
        assert extra == {"step": 2}
        assert mismatch == mismatch2
        assert metrics == metrics2
        assert parameters.keys() == parameters2.keys()
        for name, parameter in parameters.items():
            assert np.array_equal(parameter, parameters2[name]), name


KILLED = Layout(Mesh(data=2), num_microbatches=2)


@pytest.fixture(scope="module")
def each_update(trainers, model_folder, samples, tmp_path_factory):
    """Run updates that save after every one, while they train; returns the metrics of rank 0."""

    def run(checkpoints: Path, updates: int, **more) -> list:
        arguments = dict(folder=model_folder, samples=samples, layout=KILLED, checkpoints=checkpoints)
        return trainers.run("save_each_update", 2, fresh=True, **arguments, updates=updates, **more)[0]

    return run


@pytest.fixture(scope="module")
def without_a_kill(each_update, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    metrics = each_update(folder, 80)
    assert {path.name for path in folder.iterdir()} == {str(update) for update in range(1, 81)}
    return metrics


@pytest.mark.deep
@pytest.mark.parametrize("kill", range(20) if cover.everything else (3, 9, 15))
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(each_update, without_a_kill, tmp_path, kill):
    """The newest checkpoint resumes bit for bit, and at most one more was begun."""
    with pytest.raises(AssertionError, match="it died|onnection|losed"):
        each_update(tmp_path, 10_000, dies_after_s=0.05 + 0.05 * kill)
    steps = sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
    assert len(list(tmp_path.iterdir())) <= len(steps) + 1
    newest = steps[-1] if steps else 0
    if newest <= 78:  # on a much faster machine there are more
        assert each_update(tmp_path, 2, resume_at=newest) == without_a_kill[newest : newest + 2]


CHANGES = {
    "dp2-tp2pp2": (Layout(Mesh(data=2), num_microbatches=2), Layout(Mesh(tensor=2, pipeline=2), num_microbatches=2)),
    "pp4-tp2dp2": (Layout(Mesh(pipeline=4), num_microbatches=2), Layout(Mesh(tensor=2, data=2), num_microbatches=2)),
    "tp2cp2-pp2vpp2dp2": (
        Layout(Mesh(tensor=2, context=2), num_microbatches=2, dtype="bfloat16"),
        Layout(Mesh(pipeline=2, virtual=2, data=2), num_microbatches=2, dtype="bfloat16"),
    ),
    "pp2dp2-one": (Layout(Mesh(pipeline=2, data=2), dtype="bfloat16"), Layout(dtype="bfloat16")),
}


OTHER_MESHES = [(change, ties) for change in CHANGES for ties in ("untied", "tied")]
OF_OTHER_MESHES = [("dp2-tp2pp2", "untied")]


@pytest.mark.parametrize("change, ties", cover.essential(OTHER_MESHES, *OF_OTHER_MESHES))
def test_a_run_resumes_on_another_mesh(trainers, request, samples, tmp_path, change, ties):
    """What the other mesh has read and writes again is the same to the bit, and so the next loss is the same up to the
    order of sums."""
    saved, other = CHANGES[change]
    folder = request.getfixturevalue("tied_model_folder" if ties == "tied" else "model_folder")
    first, again = tmp_path / "first", tmp_path / "again"
    arguments = dict(folder=folder, samples=samples, checkpoint=first)
    unbroken = trainers.run("save_and_go_on", saved.mesh.world_size, layout=saved, **arguments)
    trainers.run("load_and_save", other.mesh.world_size, folder=folder, layout=other, checkpoint=first, target=again)
    assert everything(first) == everything(again)
    _, resumed, _, extra = trainers.run("resume", other.mesh.world_size, layout=other, **arguments)[0]
    assert extra == {"step": 2}
    relative = 1e-5 if saved.dtype == "float32" else 0.02  # of bf16 every order of sums rounds differently
    assert resumed[0]["loss"] == pytest.approx(unbroken[0][1][0]["loss"], rel=relative, abs=1e-6)
    assert resumed[0]["lr"] == unbroken[0][1][0]["lr"]


MIXTURES = {
    "mixtral": {},
    "deepseek_v3": dict(router_bias_update_rate=0.01),
    "qwen3_5_moe": dict(lora=LoraConfig(rank=3, alpha=7)),
}
"""More keys of `policy`. The adapters are also those of the four projections that are one weight of Megatron."""


@pytest.mark.deep
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_resume_on_another_mesh(trainers, folders, long_samples, tmp_path, name):
    first, again = tmp_path / "first", tmp_path / "again"
    saved = Layout(Mesh(tensor=2, data=2, expert=4, expert_tensor=1), num_microbatches=2)
    other = Layout(Mesh(data=2, expert=2), num_microbatches=2)
    settings = dict(folder=folders[name], checkpoint=first, **MIXTURES[name])
    arguments = dict(samples=long_samples, **settings)
    unbroken = trainers.run("save_and_go_on", 4, layout=saved, **arguments)
    trainers.run("load_and_save", 2, layout=other, target=again, **settings)
    assert everything(first) == everything(again)
    _, resumed, *_ = trainers.run("resume", 2, layout=other, **arguments)[0]
    assert resumed[0]["loss"] == pytest.approx(unbroken[0][1][0]["loss"], rel=1e-5, abs=1e-6)


def everything(checkpoint: Path) -> dict[tuple[str, str], bytes]:
    """The bytes of each HF tensor, of its fp32 copy and of its moments."""
    kinds = {
        tensor["kind"]
        for entry in json.loads((checkpoint / "manifest.json").read_text())["files"].values()
        for tensor in entry.get("tensors", {}).values()
    }
    assert kinds >= {"weights", "exp_avg", "exp_avg_sq"}
    found = {}
    for kind in kinds:
        source = open_checkpoint(checkpoint, kind, adapters=True)
        maps = Maps(source.checksums)
        for described in hub_tensors(source.shape):
            if described.name not in source.regions:
                is_bias = kind != "weights" and described.name.endswith("e_score_correction_bias")
                assert is_bias or source.shape.adapters and not is_adapter(described.name)
                continue
            blocks = target.blocks(source.tensor(described, None), maps)
            found[kind, described.name] = b"".join(bytes(target.as_bytes(block)) for block in blocks)
    moments = [content for (kind, _), content in found.items() if kind == "exp_avg_sq"]
    assert all(any(content) for content in moments), "Adam has no moment of some tensor"
    return found


def test_the_converter_reads_what_the_trainer_writes(trainers, model_folder, samples, tmp_path):
    """The ranks' own export is what `megatron-rl convert to-hf` makes of the checkpoint."""
    layout, checkpoint = Layout(Mesh(tensor=2, data=2), num_microbatches=2), tmp_path / "step2"
    trainers.run("save_and_go_on", 4, folder=model_folder, samples=samples, layout=layout, checkpoint=checkpoint)
    trainers.run("export", 4, folder=model_folder, layout=layout, target=tmp_path / "ranks", checkpoint=checkpoint)
    assert megatron_to_hf.main([str(checkpoint), str(tmp_path / "hf")]) == 0
    assert verify_checkpoint.main([str(checkpoint)]) == 0
    of_ranks, converted = (load_file(tmp_path / name / "model.safetensors") for name in ("ranks", "hf"))
    before = load_file(model_folder / "model.safetensors")
    assert of_ranks.keys() == converted.keys() == before.keys()
    for name, tensor in of_ranks.items():
        assert torch.equal(tensor, converted[name]) and not torch.equal(tensor, before[name]), name


def test_a_changed_byte_anywhere_is_refused_by_the_name_of_its_file(trainers, model_folder, samples, tmp_path):
    layout, checkpoint = Layout(Mesh(tensor=2)), tmp_path / "step2"
    saving = dict(folder=model_folder, samples=samples, layout=layout, checkpoint=checkpoint)
    trainers.run("save_and_go_on", 2, **saving)
    rng, damaged = np.random.default_rng(0), {}
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        size = path.stat().st_size
        for place in {0, size - 1, *rng.integers(0, size, 6).tolist()}:
            copy = shutil.copytree(checkpoint, tmp_path / f"damaged_{len(damaged)}")
            name = path.relative_to(checkpoint)
            content = bytearray((copy / name).read_bytes())
            content[place] ^= 1 << int(rng.integers(8))
            (copy / name).write_bytes(content)
            damaged[copy] = name
    truncated, absent = (shutil.copytree(checkpoint, tmp_path / name) for name in ("truncated", "absent"))
    (truncated / "__1_0.distcp").write_bytes((checkpoint / "__1_0.distcp").read_bytes()[:-7])
    (absent / "__1_0.distcp").unlink()
    damaged |= {truncated: Path("__1_0.distcp"), absent: Path("__1_0.distcp")}
    first, second = trainers.run("load_each", 2, folder=model_folder, layout=layout, checkpoints=[*damaged])
    assert first == second
    for error, name in zip(first, damaged.values(), strict=True):
        assert name.name in error and "--resume STEP" in error, name


@pytest.mark.deep
def test_a_checkpoint_of_something_else_is_refused(trainers, model_folder, tied_model_folder, samples, tmp_path):
    saved, checkpoint = Layout(Mesh(tensor=2)), tmp_path / "step2"
    saving = dict(folder=model_folder, samples=samples, layout=saved, checkpoint=checkpoint)
    trainers.run("save_and_go_on", 2, **saving)
    [[whole, foreign]] = trainers.run(
        "load_each", 1, folder=model_folder, layout=Layout(), checkpoints=[checkpoint, model_folder]
    )
    assert whole == "no error" and "is not a checkpoint" in foreign
    [[other_model]] = trainers.run("load_each", 1, folder=tied_model_folder, layout=Layout(), checkpoints=[checkpoint])
    assert "was written with shape" in other_model and "Hugging Face export" in other_model
    other = Layout(dtype="bfloat16")
    [[other_dtype]] = trainers.run("load_each", 1, folder=model_folder, layout=other, checkpoints=[checkpoint])
    assert "was written with dtype float32" in other_dtype


def test_a_full_disk_leaves_the_last_checkpoint(trainers, model_folder, samples, tmp_path):
    results = trainers.run(
        "save_on_a_full_disk",
        2,
        fresh=True,
        folder=model_folder,
        samples=samples,
        layout=Layout(Mesh(tensor=2)),
        checkpoint=tmp_path / "last",
    )
    assert results[0] == results[1]
    refused, error, left, survivor, replaced = results[0]
    assert "and its disk has 1,000 free; is the disk full?" in refused
    assert "__1_0.distcp" in error and "is the disk full?" in error
    assert left == ["last"]
    assert survivor == {"step": 1}
    assert replaced == {"step": 3}


def test_broken_input_on_one_rank_is_refused_by_all(trainers, model_folder, samples):
    results = trainers.run("refuse", 2, folder=model_folder, samples=samples, layout=Layout(Mesh(data=2)))
    for errors, unchanged, recovered in results:
        assert errors == results[0][0]
        assert samples[-1].name in errors["rollout"] and "not finite" in errors["rollout"]
        assert samples[-1].name in errors["gradient"]
        assert samples[0].name in errors["vocabulary"] and "tokenizer" in errors["vocabulary"]
        assert samples[0].name in errors["unequal"]
        assert unchanged
        assert np.isfinite(recovered["grad_norm"]) and recovered["grad_norm"] > 0


def test_sequence_parallelism_refuses_an_alignment_that_is_no_multiple_of_tp(trainers, model_folder, samples):
    errors = trainers.run("misalign", 2, folder=model_folder, samples=samples, layout=Layout(Mesh(tensor=2)))
    assert errors[0] == errors[1]
    assert "alignment 1 is not a multiple of 2, which policy.parallel requires" in errors[0]
