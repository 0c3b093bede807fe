"""GPUs that are taken, and drivers that are too old, as `nvidia-smi` and torch tell them; a script stands in for
`nvidia-smi`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.commands.gpus import (
    GpuMemoryNow,
    GpuUser,
    driver,
    fault_of,
    fault_of_memory,
    parse_gpus,
    parse_users,
    total_bytes,
    why_no_gpu,
)
from megatron_rl.tools.bench.gpu_day import command as gpu_day

FREE = "GPU-aa, 0, 81559, 81020"
TAKEN = "GPU-aa, 0, 81559, 12000"
USERS = "GPU-aa, 4242, python3, 66000\nGPU-bb, 17, other, 10"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a program of this name first on PATH, which answers its first calls with the given GPUs, and later ones with
    the last of them."""

    def install(*gpus: str, users: str = "", status: int = 0) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        for number, text in enumerate(gpus):
            (folder / f"gpus_{number}").write_text(text + "\n")
        (folder / "users").write_text(users + "\n")
        (folder / "calls").write_text("0")
        program = folder / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\ncd {folder}\necho "$@" >> arguments\ncase $1 in\n'
            "*compute-apps*) cat users;;\n*driver*) echo 580.159.04;;\n"
            f"*) n=$(cat calls); [ -e gpus_$((n+1)) ] && echo $((n+1)) > calls; cat gpus_$n;;\nesac\nexit {status}\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=":")

    return install


def test_a_gpu_that_others_use_is_told_with_its_users():
    [gpu] = parse_gpus([TAKEN.split(", ")])
    assert fault_of(gpu, parse_users([line.split(", ") for line in USERS.splitlines()])) == (
        "GPU 0 has only 12.6 of 85.5 GB free, used by 4242 python3 (69.2 GB); end what uses it, or choose another GPU "
        "with CUDA_VISIBLE_DEVICES."
    )
    assert "and nvidia-smi names no process (it may be in another container); end" in fault_of(gpu, [])
    assert fault_of(parse_gpus([FREE.split(", ")])[0], []) == ""
    assert fault_of(GpuMemoryNow("x", 0, 100, 90), []) == "" != fault_of(GpuMemoryNow("x", 0, 100, 89), [])


def test_what_nvidia_smi_leaves_out_is_no_fault():
    assert parse_gpus([["GPU-aa", "0", "[N/A]", "[N/A]"], ["no devices were found"]]) == []
    assert parse_users([["GPU-aa", "7", "a", "b", "[N/A]"]]) == [GpuUser("GPU-aa", 7, "a, b", None)]


@pytest.mark.parametrize(
    ("cuda", "installed", "said", "expected"),
    [
        (None, "580.1", "", "is a build for CPUs; install a CUDA build of torch"),
        ("13.0", "535.104", "old", "needs driver 580 or newer, and the driver is 535.104; update the driver, or"),
        ("12.8", "", "no libcuda", "nvidia-smi names no driver (no libcuda); install the driver, or start the"),
        ("13.0", "580.159", "error 802", "although driver 580.159 is installed: error 802; see nvidia-smi"),
        ("13.0", "580.159", "", "CUDA_VISIBLE_DEVICES may hide it; see nvidia-smi"),
    ],
)
def test_the_sentence_about_a_torch_without_gpus(cuda, installed, said, expected):
    sentence = why_no_gpu(cuda, installed, said)
    assert sentence.startswith("torch finds no GPU here") and expected in sentence


def test_the_program_is_asked_about_these_gpus(nvidia_smi, tmp_path):
    nvidia_smi(TAKEN, users=USERS)
    assert fault_of_memory(["0"]).startswith("GPU 0 has only 12.6 of 85.5 GB free, used by 4242 python3 (69.2 GB);")
    assert total_bytes(["0"]) == 81559 * 2**20 and driver() == "580.159.04"
    assert "--format=csv,noheader,nounits --id=0" in (tmp_path / "bin" / "arguments").read_text()


def test_memory_that_comes_back_is_waited_for(nvidia_smi):
    nvidia_smi(TAKEN, FREE)
    assert fault_of_memory([], patience_s=60.0) == ""


def test_a_program_that_fails_tells_no_fault(nvidia_smi):
    nvidia_smi(TAKEN, status=9)
    assert fault_of_memory([]) == "" and total_bytes([]) is None and driver() == ""


def test_a_part_on_a_gpu_that_is_taken_ends_with_the_sentence(nvidia_smi, tmp_path, monkeypatch):
    nvidia_smi(TAKEN, users=USERS)
    monkeypatch.setattr(gpu_day, "FREED_S", 0.0)
    found = tmp_path / "found.json"
    gpu_day.measure("machine", "cuda", gpu_day.DayKind(), found)
    content = json.loads(found.read_text())
    assert content["numbers"] == {} and content["problems"] == [fault_of_memory(["0"])]


def test_nothing_begins_on_a_gpu_that_is_taken(nvidia_smi, tmp_path, monkeypatch, capsys):
    nvidia_smi(TAKEN)
    monkeypatch.setattr(gpu_day, "fault_of_torch", str)
    assert gpu_day.main(["--out", str(tmp_path / "day"), "--device", "cuda"]) == 2
    assert "GPU 0 has only 12.6 of 85.5 GB free" in capsys.readouterr().err and not Path(tmp_path / "day").exists()
