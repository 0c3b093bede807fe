"""Every command that takes a path tells which file cannot be used, in one line and without Python's own words."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from megatron_rl.__main__ import COMMANDS, main

TAKE_A_PATH = (
    *(f"{recipe} PATH --dry-run" for recipe in ("grpo", "ppo", "sft", "dpo", "reward-model")),
    "init PATH/below.yaml",
    "size-run PATH",
    "plan-sync --model PATH",
    "reasoning-gym-rows leg_counting --config PATH --out OUT",
    "filter-difficulty PATH --out OUT",
    "pairs PATH --out OUT",
    "generate PATH --out OUT --steps 1",
    *(f"{view} PATH" for view in ("watch", "report", "step-times")),
    "explain PATH --step 3",
    "evaluate PATH PATH",
    "export PATH OUT",
    *(f"convert {way} PATH OUT" for way in ("to-megatron", "to-hf", "from-gguf")),
    "convert verify PATH",
    "merge PATH PATH OUT",
    "push-weights PATH http://localhost:1",
    "from-verl PATH",
    "family PATH",
)
NEEDS_MORE = {"convert from-gguf"}
"""What is told first is that libraries are not installed."""
WITHOUT_PATH = {"demo", "demo-real", "doctor", "config", "metrics", "algorithms", "gpu-day"}


def test_no_command_is_forgotten():
    named = {" ".join(words.split()[:2]) if words.startswith("convert") else words.split()[0] for words in TAKE_A_PATH}
    assert named | WITHOUT_PATH == set(COMMANDS)


@pytest.fixture
def own_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("words", TAKE_A_PATH)
def test_what_is_no_file_of_the_command_is_named(words, tmp_path, capfd, own_environment):
    binary, folder, around = tmp_path / "binary.yaml", tmp_path / "folder", tmp_path / "around"
    binary.write_bytes(b"\xff\xfe\x00")
    folder.mkdir()
    around.symlink_to(around)
    for path in (tmp_path / "missing", folder, binary, binary / "below", around):
        if words.startswith("init") and path in (tmp_path / "missing", folder):
            continue  # it would write there
        given = [word.replace("PATH", str(path)).replace("OUT", str(tmp_path / "out")) for word in words.split()]
        try:
            status = main(given)
        except SystemExit as ended:
            status = ended.code
        printed = "".join(capfd.readouterr())
        assert status in (1, 2) and not re.search(r"Traceback|\[Errno|codec", printed), printed
        assert path.name in printed.rpartition("error:")[2] or " ".join(given[:2]) in NEEDS_MORE, printed
        assert not (tmp_path / "out").exists()
