"""Disks, folders, packages, time limits and devices that a run cannot have are told before it starts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from run_home import faults, grpo, with_head
from small_models import changed

from megatron_rl.commands.size_run import read
from megatron_rl.models import FAMILIES, read_shape
from megatron_rl.observe.provenance import write_provenance
from megatron_rl.planning.shapes import planned_shape
from megatron_rl.preflight import checks as module
from megatron_rl.preflight import devices, engine_options
from megatron_rl.preflight.checks import preflight
from megatron_rl.rollout import plugins
from megatron_rl.types import DeltaNet
from megatron_rl.types.mamba import Mamba2


def test_a_full_disk_is_told_with_both_numbers(home, monkeypatch):
    """In fp32 a parameter takes 4 bytes of weights and 8 of state."""
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, 10**4))
    [fault] = faults(grpo())
    parameters = FAMILIES["qwen3"].num_parameters(read_shape(Path("model")))
    assert f"has 0.01 MB free, and two checkpoints need {2 * 12 * parameters / 1e6:.2f} MB" in fault


@pytest.mark.parametrize(("choice", "of_head"), [("drop", 0), ("keep", 4), ("train", 12)])
def test_the_disk_has_room_for_a_multi_token_head_too(home, monkeypatch, choice, of_head):
    """One that is kept has 4 bytes of each fp32 number of its files, and one that is trained has a state, too."""
    shape = with_head(home)
    tensors = FAMILIES["qwen3_next"].head_tensors(replace(shape, multi_token=True))
    with_head(home, **tensors)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, 10**4))
    [fault] = faults(grpo(policy={"multi_token": choice}))
    needed = 12 * FAMILIES["qwen3_next"].num_parameters(shape) + of_head * sum(map(prod, tensors.values()))
    assert f"two checkpoints need {2 * needed / 1e6:.2f} MB" in fault


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints/step_000002"])
def test_a_used_run_folder_needs_resume(home, left):
    path = home / "runs" / "adds" / "first" / left
    path.parent.mkdir(parents=True)
    path.mkdir() if "step" in left else path.touch()
    [fault] = faults(grpo())
    assert "--resume auto" in fault
    assert faults(grpo(), resume="auto") == []
    [fault] = faults(grpo(), resume=99)
    assert fault.endswith(f"holds no checkpoint of step 99; it has {[2] if 'step' in left else 'none at all'}")


def test_a_folder_of_something_else_never_becomes_a_runs(home):
    """The run's config.json would take the place of a model's, and its export of what is in `hf`."""
    folder = home / "runs" / "adds" / "first"
    shutil.copytree(home / "model", folder)
    for how in ({}, {"planning": True}, {"resume": "auto"}):
        [fault] = faults(grpo(model={"path": str(folder), "dtype": "float32"}), **how)
        assert fault.startswith("run.name: runs/adds/first has config.json, which is no run's")
    own = write_provenance(home, grpo()).read_text()
    for left in ("hf/config.json", "critic_hf/config.json", "exports/step_000002/a", "manifest.json", "a.distcp"):
        shutil.rmtree(folder)
        (folder / left).parent.mkdir(parents=True)
        (folder / left).touch()
        [fault] = faults(grpo())
        assert f"has {Path(left).parts[0]}, which is no run's" in fault
        (folder / "config.json").write_text(own)
        assert faults(grpo()) == [], "the rest of a run that has written its config.json"
    (folder / "config.json").write_text("")
    assert "has config.json" in faults(grpo(), resume="auto")[0]
    shutil.rmtree(folder)
    for kept in ("logs/driver.log", "lock", "notes.md", "model/config.json", "rows/train.jsonl"):
        (folder / kept).parent.mkdir(parents=True, exist_ok=True)
        (folder / kept).touch()
    assert faults(grpo()) == [], "what a run leaves as it is"


def test_a_run_that_goes_on_needs_room_for_one_more_checkpoint(home, monkeypatch):
    needed = 12 * FAMILIES["qwen3"].num_parameters(read_shape(Path("model")))
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, needed))
    assert "two checkpoints need" in faults(grpo(), resume="auto")[0], "nothing is there yet"
    (home / "runs" / "adds" / "first" / "checkpoints" / "step_000002").mkdir(parents=True)
    assert faults(grpo(), resume="auto") == []
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, needed - 1))
    assert "a further checkpoint needs" in faults(grpo(), resume="auto")[0]


def test_a_tracker_whose_package_is_missing(home, monkeypatch):
    monkeypatch.setattr("megatron_rl.observe.trackers.find_spec", lambda name: None)
    assert "pip install mlflow" in faults(grpo(observe=[{"kind": "mlflow"}]))[0]


def test_less_time_to_start_than_it_takes_is_refused(home):
    """A small model on GPUs: the imports take 20 s, and vLLM 9 s more. DeepSeek-V3's engines read a quarter of it on
    each of their nodes, 1,342 / 4 GB at 2 GB/s."""
    gpus = {"device": "gpu", "gpus_per_node": 8}
    [fault] = faults(grpo(cluster={**gpus, "start_timeout_s": 28}), planning=True)
    assert fault.startswith("cluster.start_timeout_s is 28, but a start is estimated to take 29 s: 20 s of imports")
    assert faults(grpo(cluster={**gpus, "start_timeout_s": 30}), planning=True) == []
    assert faults(grpo(cluster__start_timeout_s=5)) == [], "on CPUs nobody knows"
    [large] = (Path(__file__).parents[3] / "recipes/deepseek_v3").glob("*gspo*.yaml")
    config = read([str(large), "cluster.start_timeout_s=60"])
    [fault] = devices.faults_of_start_timeout(config, planned_shape(config))
    assert "estimated to take 197 s" in fault and "1,342 GB of weights at 2 GB/s" in fault


def test_engines_need_vllm_and_a_plan_does_not(home, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    [fault] = faults(grpo())
    assert fault.startswith("vLLM is not installed") and "tools/setup.sh" in fault
    assert faults(grpo(), planning=True) == []
    delta = DeltaNet(2, 2, 4, 4, convolution=4, interleaved=True)
    linear = changed(read_shape(home / "model"), (0,), attention=delta)
    on_gpus = grpo(cluster__gpus_per_trainer=1, cluster__gpus_per_engine_rank=1)
    [kernels, _] = module._packages(on_gpus, linear, planning=False)
    assert "has linear attention" in kernels and "install fla-core" in kernels
    mamba = changed(linear, (0,), attention=Mamba2(2, 2, 4, 4, convolution=4))
    for config, shape in ((grpo(), linear), (on_gpus, mamba)):
        assert len(module._packages(config, shape, planning=False)) == 1, "neither a CPU nor Mamba-2 needs kernels"
    assert module._packages(on_gpus, linear, planning=True) == []


def test_a_clone_whose_metadata_is_missing_is_named_before_a_run(home, monkeypatch):
    """As on PYTHONPATH alone: vLLM's processes would not find the bridge."""
    assert faults(grpo()) == []
    monkeypatch.setattr(plugins, "entry_points", lambda group: ())
    [fault] = faults(grpo())
    assert fault.startswith("the entry points vllm.general_plugins: megatron_rl_bridge, megatron_rl_rollout are not in")
    assert "pip install --no-deps -e ." in fault
    assert faults(grpo(), planning=True) == []
    assert not any("entry points" in one for one in faults(grpo(rollout__backend="my_rewards:short")))


def test_arguments_that_vllm_does_not_have_are_named_with_the_nearest_ones(home):
    options = {"moe_bakend": "triton", "max-num-batched-tokens": 4096, "zzz": 1, "max_num_seqs_": None}
    first, second, third, _ = told = faults(grpo(rollout__vllm=options), planning=True)
    assert first.startswith(
        "rollout.vllm.moe_bakend: the installed vLLM has no such argument; did you mean moe_backend"
    )
    assert "did you mean max_num_batched_tokens" in second and "vllm.EngineArgs" in third
    assert told == faults(grpo(rollout__vllm=options))


@pytest.mark.deep
def test_values_that_vllm_refuses_are_told_before_a_run(home):
    [fault] = faults(grpo(rollout__vllm={"moe_backend": "tritn", "max_num_batched_tokens": 4096}))
    assert fault.startswith('rollout.vllm.moe_backend: vLLM refuses "tritn": argument --moe-backend: invalid choice')


def test_without_vllm_a_plan_says_that_its_arguments_are_not_checked(home, monkeypatch):
    monkeypatch.setattr(engine_options, "find_spec", lambda name: None)
    notes = []
    assert preflight(grpo(rollout__vllm={"moe_bakend": "triton"}), notes.append, planning=True) == []
    assert notes == ["not checked, because vLLM is not installed here: rollout.vllm"]


def test_training_needs_the_full_distribution(home):
    assert faults(grpo(rollout__sampling={"top_p": 0.9})) == faults(grpo(rollout__sampling={"top_p": 0.9, "top_k": 0}))
    [fault] = faults(grpo(rollout__sampling={"top_k": 20}))
    assert fault.startswith("rollout.sampling: with top_p 1 and top_k 20 ") and fault.endswith("to 1 and top_k to 0")
    assert faults(grpo(rollout__sampling={"temperature": 0.6})) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_data_type_that_this_cpu_multiplies_slowly_is_told(home, monkeypatch, dtype):
    notes = []
    monkeypatch.setattr(module, "MUCH_SLOWER", 0)  # then any CPU is slow
    assert preflight(grpo(model__dtype=dtype), notes.append) == []
    [note] = [note for note in notes if "GFLOP/s" in note]
    assert note.startswith(f"model.dtype is {dtype}") and note.endswith("remove model.dtype, or set float32")
    told = len(notes)
    preflight(grpo(model__dtype="float32"), notes.append)
    preflight(grpo(model__dtype="bfloat16", cluster__gpus_per_trainer=1), notes.append)
    assert not any("GFLOP/s" in note for note in notes[told:])


def test_gpus_need_a_torch_that_can_use_them(home, monkeypatch):
    """The torch of the environment that the run will have: a plan may be made anywhere, and a job may have another."""
    (home / "torch").mkdir()
    version = home / "torch" / "version.py"
    (home / "torch" / "__init__.py").touch()
    version.write_text("cuda: Optional[str] = None\nhip: Optional[str] = None\n")
    gpus = {"cluster__gpus_per_trainer": 1}
    [fault] = faults(grpo(**gpus))
    assert "cluster.gpus_per_trainer is 1)" in fault and "`make gpu-env`" in fault and "cluster.device to cpu" in fault
    assert faults(grpo(**gpus), in_job=True) == faults(grpo(**gpus, slurm={"nodes": 2}), in_job=True) == [fault]
    for other in ({"container": "image.sqsh"}, {"environment": "source venv/bin/activate"}):
        assert faults(grpo(**gpus, slurm=other), in_job=True) == []
        assert faults(grpo(**gpus, slurm=other)) == [fault]
    told: dict[str, list[str]] = {"": [], "image.sqsh": []}
    for container, notes in told.items():
        assert (
            preflight(grpo(**gpus, slurm={"container": container or None}), notes.append, planning=True, in_job=True)
            == []
        )
    assert f"this Python cannot submit the job: {fault}" in told[""]
    assert not any("cannot submit" in note for note in told["image.sqsh"])
    assert faults(grpo(**gpus), planning=True) == faults(grpo()) == []
    version.write_text("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    assert faults(grpo(**gpus)) == []
