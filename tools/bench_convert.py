"""Measure the conversion of a large random checkpoint in both directions, and compare it with `cp` of the same bytes.

The checkpoint has realistic shapes: those of Qwen3 with a hidden size of 2560, in bf16, with as many layers as fit into
the given size. Source and result stay in the page cache in every run. `cp` leaves its bytes there, but the converter
also checksums them and forces them to the disk; therefore `cp` followed by `sync` is measured too. The measurements
alternate, and the best of several repeats counts. The time of the CPU cores is reported beside the wall time, because
it is more meaningful when other processes use the cores too: `cp` uses one core, the converter one per worker.

The memory is the largest private memory of a worker (RssAnon, without pages of the page cache), sampled while it works.
It includes the memory of Python and torch.

    python tools/bench_convert.py --json
    python tools/bench_convert.py --gigabytes 8 --workers 8 --folder /scratch
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron_rl.convert import (
    Conversion,
    Options,
    carry_out,
    command,
    open_checkpoint,
    smallest_mesh,
    to_hub,
    to_open,
    to_ranks,
)
from megatron_rl.convert.stored import safetensors_header
from megatron_rl.layout import FAMILIES, read_shape

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
QWEN3_235B_BYTES = 235_093_634_560 * 2
"""The bytes of the model in bf16."""


def random_checkpoint(folder: Path, num_bytes: int) -> int:
    """Write a random checkpoint of about `num_bytes` and return the number of bytes written."""
    folder.mkdir()
    sizes = []
    for num_layers in (0, 1):
        (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": num_layers}))
        shape = read_shape(folder)
        sizes.append(FAMILIES["qwen3"].num_parameters(shape) * 2)
    num_layers = max(1, round((num_bytes - sizes[0]) / (sizes[1] - sizes[0])))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": num_layers}))
    tensors = FAMILIES["qwen3"].hf_tensors(read_shape(folder))
    noise = torch.randint(-(2**15), 2**15, (2**25,), dtype=torch.int16).numpy().tobytes()
    groups, size = [[]], 0
    for name, extents in tensors.items():
        if groups[-1] and size > num_bytes // 8:
            groups.append([])
            size = 0
        groups[-1].append((name, torch.bfloat16, extents))
        size += torch.Size(extents).numel() * 2
    for i, group in enumerate(groups):
        with (folder / f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors").open("wb") as file:
            file.write(safetensors_header(group))
            for _, _, extents in group:
                left = torch.Size(extents).numel() * 2
                while left:
                    left -= file.write(noise[:left])
    return folder_bytes(folder)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class PrivateMemory:
    """Records the largest RssAnon of each child process inside the block."""

    def __init__(self):
        self.peak_bytes: dict[int, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> PrivateMemory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            for children in Path("/proc/self/task").glob("*/children"):
                for pid in children.read_text().split():
                    try:
                        status = Path(f"/proc/{pid}/status").read_text()
                    except OSError:
                        continue  # the process has ended
                    if found := re.search(r"RssAnon:\s+(\d+) kB", status):
                        now = int(found[1]) * 1024
                        self.peak_bytes[int(pid)] = max(now, self.peak_bytes.get(int(pid), 0))


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """The wall time and the CPU time of a call in seconds. The CPU time includes that of child processes."""
    start, cores = time.perf_counter(), core_seconds()
    call()
    return time.perf_counter() - start, core_seconds() - cores


def core_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def copy(source: Path, target: Path, sync: bool) -> tuple[float, float]:
    def run() -> None:
        subprocess.run(["cp", "-r", str(source), str(target)], check=True)
        if sync:
            subprocess.run(["sync", *map(str, target.rglob("*.*"))], check=True)

    taken = timed(run)
    shutil.rmtree(target)
    return taken


class Measured:
    """The measurements of one direction of conversion and of `cp` of its source."""

    def __init__(self, name: str, source: Path, target: Path, plan: Callable[[], Conversion], num_workers: int):
        self.name, self.source, self.target, self.plan, self.num_workers = name, source, target, plan, num_workers
        self.seconds: dict[str, list[tuple[float, float]]] = {"convert": [], "cp": [], "cp_sync": []}
        self.private_bytes = 0
        self.largest_bytes = 0

    def turn(self) -> None:
        copied = self.target.with_name("copy")
        self.seconds["cp"].append(copy(self.source, copied, sync=False))
        self.seconds["cp_sync"].append(copy(self.source, copied, sync=True))
        shutil.rmtree(self.target, ignore_errors=True)

        def convert() -> None:
            conversion = self.plan()
            self.largest_bytes = max(t.num_bytes for file in conversion.files for t, _ in file.tensors())
            carry_out(conversion, self.target, self.num_workers, lambda done_bytes: None)

        with PrivateMemory() as memory:
            self.seconds["convert"].append(timed(convert))
        self.private_bytes = max(self.private_bytes, *memory.peak_bytes.values())

    def report(self) -> dict[str, float]:
        num_bytes = folder_bytes(self.source)
        best, cores = ({name: min(v[i] for v in values) for name, values in self.seconds.items()} for i in (0, 1))
        return {
            "bytes": num_bytes,
            **{f"{name}_bytes_per_s": num_bytes / seconds for name, seconds in best.items()},
            **{f"{name}_core_s_per_gb": seconds / num_bytes * 1e9 for name, seconds in cores.items()},
            "ratio_to_cp": best["cp"] / best["convert"],
            "ratio_to_cp_sync": best["cp_sync"] / best["convert"],
            "largest_tensor_bytes": self.largest_bytes,
            "private_bytes_per_worker": self.private_bytes,
            "private_bytes_limit": 2 * self.largest_bytes + 300_000_000,
            "qwen3_235b_hours_computed": QWEN3_235B_BYTES / (num_bytes / best["convert"]) / 3600,
        }


def measure(folder: Path, num_bytes: int, num_workers: int, repeats: int) -> dict[str, dict[str, float]]:
    hub, opened, ranks = folder / "hub", folder / "open", folder / "ranks"
    options = Options(max_file_bytes=num_bytes // 8)
    random_checkpoint(hub, num_bytes)
    mesh = smallest_mesh(2, 1, None, pipeline=1)
    directions = [
        Measured("hf_to_open", hub, opened, lambda: to_open(open_checkpoint(hub), options), num_workers),
        Measured("open_to_hf", opened, folder / "back", lambda: to_hub(open_checkpoint(opened), options), num_workers),
        Measured("hf_to_ranks", hub, ranks, lambda: to_ranks(open_checkpoint(hub), mesh, True, options), num_workers),
        Measured("ranks_to_hf", ranks, folder / "back", lambda: to_hub(open_checkpoint(ranks), options), num_workers),
    ]
    for _ in range(repeats):
        for direction in directions:
            direction.turn()
    return {direction.name: direction.report() for direction in directions}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--folder",
        type=Path,
        help="a folder with about five times as many bytes free; default: the system's temporary folder",
    )
    command.add_common(parser)
    given = parser.parse_args(arguments)
    num_bytes = int(given.gigabytes * 1e9)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        free = shutil.disk_usage(folder).free
        if free < 5 * num_bytes:
            raise ValueError(f"{folder} has {free:,} bytes free, but {5 * num_bytes:,} are needed; use --folder")
        report = measure(Path(folder), num_bytes, given.workers, given.repeats)
    if given.json:
        print(json.dumps({"workers": given.workers, "directions": report}))
        return
    print(
        f"{'':12} {'convert':>11} {'cp':>11} {'cp + sync':>11} {'over cp':>8} {'over cp + sync':>15} {'private':>9}",
        end="",
    )
    print(f" {'cores: convert':>15} {'cp':>9}")
    for name, row in report.items():
        rates = (f"{row[f'{what}_bytes_per_s'] / 1e9:.2f} GB/s" for what in ("convert", "cp", "cp_sync"))
        print(
            f"{name:12} {' '.join(f'{rate:>11}' for rate in rates)} {row['ratio_to_cp']:8.2f} "
            f"{row['ratio_to_cp_sync']:15.2f} {row['private_bytes_per_worker'] / 1e6:6.0f} MB"
            f" {row['convert_core_s_per_gb']:10.2f} s/GB {row['cp_core_s_per_gb']:4.2f} s/GB"
        )
    hours = report["hf_to_open"]["qwen3_235b_hours_computed"], report["open_to_hf"]["qwen3_235b_hours_computed"]
    print(
        f"computed from these rates, not measured: Qwen3-235B (470 GB) would take {hours[0]:.2f} h to Megatron-Core "
        f"and {hours[1]:.2f} h back"
    )


if __name__ == "__main__":
    sys.exit(command.run(main, None))
