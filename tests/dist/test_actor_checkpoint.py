"""Resume is bitwise, a checkpoint is whole or absent, and a broken step changes nothing."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from scenarios import Layout

from megatron_rl.types import Mesh


@pytest.mark.parametrize(
    "layout",
    [
        Layout(Mesh(tensor=2), num_microbatches=2),
        Layout(Mesh(data=2), num_microbatches=2),  # the distributed optimizer
        Layout(Mesh(data=2), num_microbatches=2, dtype="bfloat16"),  # fp32 copies of split weights
        Layout(Mesh(pipeline=2, virtual=2), num_microbatches=2, dtype="bfloat16"),
        Layout(Mesh(context=2), num_microbatches=2, dtype="bfloat16"),
    ],
    ids=["tp2", "dp2", "dp2_bf16", "pp2_bf16", "cp2_bf16"],
)
def test_resume_is_bitwise(trainers, model_folder, samples, tmp_path, layout):
    arguments = dict(folder=model_folder, samples=samples, layout=layout, checkpoint=tmp_path / "step2")
    unbroken = trainers.run("save_and_go_on", 2, **arguments)
    check_resumed(trainers, unbroken, arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step2"]


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(data=2)], ids=["one", "dp2"])
def test_a_resumed_run_uses_its_own_learning_rate_betas_and_decay(trainers, model_folder, samples, tmp_path, mesh):
    """What the checkpoint holds is the moments and the number of updates."""
    arguments = dict(folder=model_folder, samples=samples, layout=Layout(mesh), checkpoint=tmp_path / "step2")
    trainers.run("save_and_go_on", mesh.world_size, **arguments)
    for settings, rate in trainers.run("resume_with_other_settings", mesh.world_size, **arguments):
        assert {(lr, beta1, beta2) for lr, beta1, beta2, _ in settings} == {(0.5, 0.8, 0.7)} and rate == 0.5
        assert {decay for *_, decay in settings} <= {0.3, 0.0}, "norms are not decayed"


def test_a_run_killed_while_saving_resumes_in_fresh_processes(trainers, model_folder, samples, tmp_path):
    layout = Layout(Mesh(tensor=2, data=2), num_microbatches=2)
    arguments = dict(folder=model_folder, samples=samples, layout=layout, checkpoint=tmp_path / "last")
    unbroken = trainers.run("save_and_go_on", 4, **arguments)
    with pytest.raises(AssertionError, match="process 0: it died|onnection|losed"):  # whoever notices first
        trainers.run("die_while_saving", 4, **arguments)
    assert len(list(tmp_path.iterdir())) == 2
    check_resumed(trainers, unbroken, arguments)
    trainers.run("save_and_go_on", 4, **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["last"], "what the killed save left is swept away"


def check_resumed(pool, unbroken, arguments) -> None:
    resumed = pool.run("resume", len(unbroken), **arguments)
    for (mismatch, metrics, parameters), (mismatch2, metrics2, parameters2, extra) in zip(unbroken, resumed):
        assert extra == {"step": 2}
        assert mismatch == mismatch2
        assert metrics == metrics2
        assert parameters.keys() == parameters2.keys()
        for name, parameter in parameters.items():
            assert np.array_equal(parameter, parameters2[name]), name


def test_a_checkpoint_that_does_not_fit_is_refused_by_all(trainers, model_folder, samples, tmp_path):
    layout, checkpoint = Layout(Mesh(tensor=2)), tmp_path / "step2"
    saving = dict(folder=model_folder, samples=samples, layout=layout, checkpoint=checkpoint)
    trainers.run("save_and_go_on", 2, **saving)
    truncated, zeroed, flipped, other = (
        shutil.copytree(checkpoint, tmp_path / name) for name in ("truncated", "zeroed", "flipped", "other")
    )
    whole = (checkpoint / "rank1.weights.pt").read_bytes()
    middle = len(whole) // 2
    (truncated / "rank1.weights.pt").write_bytes(whole[:middle])
    (zeroed / "rank1.weights.pt").write_bytes(whole[:middle] + bytes(1000) + whole[middle + 1000 :])
    state = (checkpoint / "rank0.state.pt").read_bytes()
    one_bit = bytes([state[len(state) // 2] ^ 1])
    (flipped / "rank0.state.pt").write_bytes(state[: len(state) // 2] + one_bit + state[len(state) // 2 + 1 :])
    (other / "extra.json").write_text('{"step": 9}')

    checkpoints = [checkpoint, model_folder, truncated, zeroed, flipped, other]
    arguments = dict(folder=model_folder, checkpoints=checkpoints)
    first, second = trainers.run("load_each", 2, layout=layout, **arguments)
    assert first == second
    assert first[0] == "no error"
    assert "is not a checkpoint" in first[1]
    damaged = ["truncated/rank1.weights.pt", "zeroed/rank1.weights.pt", "flipped/rank0.state.pt", "other/extra.json"]
    for error, name in zip(first[2:], damaged, strict=True):
        assert f"{name} is damaged: it has" in error and "--resume STEP" in error

    (other_mesh, *_), _ = trainers.run("load_each", 2, layout=Layout(Mesh(data=2)), **arguments)
    assert "'tensor': 2" in other_mesh and "Hugging Face export" in other_mesh


def test_a_full_disk_leaves_the_last_checkpoint(trainers, model_folder, samples, tmp_path):
    results = trainers.run(
        "save_on_a_full_disk",
        2,
        folder=model_folder,
        samples=samples,
        layout=Layout(Mesh(tensor=2)),
        checkpoint=tmp_path / "last",
    )
    assert results[0] == results[1]
    error, left, survivor, replaced = results[0]
    assert "rank1.weights.pt" in error and "is the disk full?" in error
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
