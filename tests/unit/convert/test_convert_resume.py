"""A tool that is killed or interrupted leaves no target folder, and the next run continues where it stopped."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from folders import write, write_folder
from patience import deadline

from megatron_rl.convert import Options, Verification, carry_out, open_checkpoint, to_open, torch_dist
from megatron_rl.convert.work import Workers, _identity
from megatron_rl.processes import descendants

ROOT = Path(__file__).parents[3]
OPTIONS, SMALL_OPTIONS = Options(max_file_bytes=200_000), Options(max_file_bytes=50_000)


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """About 100 MB, which become five hundred files: the conversion takes long enough to be killed."""
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=24, vocab_size=20000)
    return write_folder(tmp_path_factory.mktemp("large") / "hub", "qwen3", torch.bfloat16, **sizes)


@pytest.fixture(scope="module")
def small_hub(tmp_path_factory) -> Path:
    """About 1 MB, which become a dozen files."""
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, vocab_size=2000)
    return write_folder(tmp_path_factory.mktemp("small") / "hub", "qwen3", torch.bfloat16, **sizes)


def journal(target: Path) -> list[dict]:
    path = target.with_name(target.name + ".partial") / "journal.jsonl"
    lines = path.read_text().split("\n")[1:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def start(hub: Path, target: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "megatron_rl", "convert", "to-megatron", hub, target, "--max-file-bytes", "200000"]
    process = subprocess.Popen(
        [*map(str, command), "--workers", "2", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + deadline(60)
    while len(journal(target)) < 20:
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.005)
        assert process.returncode is None and time.monotonic() < end, "the tool ended before the test stopped it"
    return process


def test_what_torch_save_writes_around_a_tensor_does_not_tell_conversions_apart(small_hub, monkeypatch):
    """Some of these bytes differ from process to process, so a run after a kill once wrote everything again."""

    def identity(**options) -> str:
        return _identity(to_open(open_checkpoint(small_hub), Options(max_file_bytes=50_000, **options)))

    first, frame = identity(), torch_dist.archive_frame
    assert identity(dtype="float32") != first
    monkeypatch.setattr(torch_dist, "archive_frame", lambda *of: tuple(bytes(len(part)) for part in frame(*of)))
    assert identity() == first


@pytest.mark.deep
def test_the_run_after_a_kill_writes_only_what_is_missing(hub, tmp_path):
    target = tmp_path / "target"
    process = start(hub, target)
    workers = descendants(psutil.Process(process.pid))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(workers) == 2 and not target.exists()
    finished = journal(target)
    damaged = tmp_path / "target.partial" / finished[0]["file"]
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    times = {e["file"]: os.stat(tmp_path / "target.partial" / e["file"]).st_mtime_ns for e in finished[1:]}
    outcome = write(to_open(open_checkpoint(hub), OPTIONS), target, num_workers=2)
    assert outcome.num_reused == len(finished) - 1, "every finished file but the damaged one is reused"
    assert {name: os.stat(target / name).st_mtime_ns for name in times} == times
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert Verification(target, hub).run(1, lambda done_bytes: None).num_compared
    assert not psutil.wait_procs(workers, timeout=deadline(30))[1], "workers outlive the tool"


@pytest.mark.deep
def test_ctrl_c_is_clean(hub, tmp_path):
    process = start(hub, tmp_path / "target")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=deadline(30))
    assert process.returncode == 130
    assert "the same command continues from there" in errors and "Traceback" not in errors
    partial = tmp_path / "target.partial"
    assert list(tmp_path.iterdir()) == [partial]
    assert not list(partial.rglob("*.unfinished"))
    assert {entry["file"] for entry in journal(tmp_path / "target")} <= {
        str(p.relative_to(partial)) for p in partial.rglob("*")
    }


def stop_after_five(hub: Path, target: Path) -> list[str]:
    """The files that a conversion had finished when it was stopped."""

    def give_up(done_bytes: int) -> None:
        if len(journal(target)) >= 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out(to_open(open_checkpoint(hub), SMALL_OPTIONS), target, 1, give_up)
    finished = [entry["file"] for entry in journal(target)]
    assert len(finished) >= 5
    return finished


def test_the_run_after_a_stop_reuses_what_is_whole(small_hub, tmp_path):
    target = tmp_path / "target"
    damaged, *whole = stop_after_five(small_hub, target)
    path = tmp_path / "target.partial" / damaged
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert write(to_open(open_checkpoint(small_hub), SMALL_OPTIONS), target).num_reused == len(whole)
    assert Verification(target, small_hub).run(1, lambda done_bytes: None).num_compared


def test_another_conversion_of_the_same_name_begins_anew(small_hub, tmp_path):
    target = tmp_path / "target"
    stop_after_five(small_hub, target)
    outcome = write(to_open(open_checkpoint(small_hub), Options(dtype="float32")), target)
    assert outcome.num_reused == 0
    assert {entry.name for entry in target.glob("*.distcp")} == {"__0_0.distcp", "__0_1.distcp"}


def test_two_at_once_are_refused(small_hub, tmp_path):
    conversion, errors = to_open(open_checkpoint(small_hub), SMALL_OPTIONS), []

    def try_too(done_bytes: int) -> None:
        if not errors:
            with pytest.raises(ValueError) as error:
                write(conversion, tmp_path / "target")
            errors.append(str(error.value))

    carry_out(conversion, tmp_path / "target", 1, try_too)
    assert "target.partial is being written by another process" in errors[0]


def test_a_worker_that_dies_is_an_error_and_stops_the_others():
    workers = Workers(2)

    def task(i: int) -> None:
        if i == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            workers.tick(1)

    with pytest.raises(ValueError, match="a worker process died"):
        workers.run(task, [0, 1], lambda i, result: None, lambda done_bytes: None)


def test_progress_ends_at_all_bytes(small_hub, tmp_path):
    conversion, seen = to_open(open_checkpoint(small_hub)), []
    carry_out(conversion, tmp_path / "target", 2, seen.append)
    assert seen == sorted(seen) and seen[-1] == conversion.num_bytes


class WaitsForAThread:
    """Its destructor would hang in a fork, which has no threads of its parent; here it says where it runs."""

    def __init__(self, folder: Path) -> None:
        self.cycle, self.folder = self, folder

    def __del__(self) -> None:
        (self.folder / str(os.getpid())).touch()


def test_garbage_of_the_process_is_not_collected_in_its_workers(tmp_path):
    gc.collect()
    gc.disable()
    try:
        WaitsForAThread(tmp_path)
        finished = []
        Workers(1).run(lambda i: gc.collect(), [0, 1], lambda i, result: finished.append(i), lambda num_bytes: None)
        assert sorted(finished) == [0, 1] and not list(tmp_path.iterdir())
    finally:
        gc.enable()
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]
