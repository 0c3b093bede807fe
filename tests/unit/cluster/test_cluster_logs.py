"""The log of a process keeps its beginning and its end, and never grows without bound."""

from __future__ import annotations

import re
import subprocess
import sys
import time

from patience import deadline

from megatron_rl.cluster import process
from megatron_rl.cluster.process import shorten


def test_the_middle_of_a_long_log_is_left_out_and_counted(tmp_path):
    path = tmp_path / "verifier.log"
    with path.open("ab", buffering=0) as file:
        file.write(b"the beginning" + b"x" * 67)
        shorten(path, 100)
        assert path.stat().st_size == 80
        file.write(b"y" * 500 + b"the first end")
        shorten(path, 100)
        first = path.read_bytes()
        file.write(b"z" * 200 + b"the second end")
    shorten(path, 100)
    whole = 80 + 500 + 13
    assert first == b"the beginning" + b"x" * 12 + b"\n[%d bytes of output were left out here]\n" % (whole - 50) + (
        b"y" * 12 + b"the first end"
    )
    said = re.fullmatch(
        rb"the beginningx{12}\n\[(\d+) bytes of output were left out here\]\nz{11}the second end", path.read_bytes()
    )
    assert said and int(said[1]) == whole + 214 - 50


def test_a_process_that_prints_without_end_has_a_short_log(tmp_path):
    """Its own output, and what a program that it has started prints."""
    path = tmp_path / "verifier.log"
    script = """
import os, sys
from pathlib import Path
from megatron_rl.cluster.process import begin_process
begin_process(Path(sys.argv[1]), "verifier")
for _ in range(20):
    os.write(1, b"a reward prints" * (1 << 16))
os.system("echo at the end")
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE) as printing:
        end = time.monotonic() + deadline(120)
        while not (path.exists() and path.stat().st_size < process.MAX_LOG_BYTES and b"left out" in path.read_bytes()):
            assert time.monotonic() < end and printing.poll() is None
            time.sleep(0.02)
    text = path.read_text()
    assert (
        "verifier is process" in text and text.endswith("at the end\n") and "bytes of output were left out here" in text
    )


def test_what_a_process_makes_at_its_start_is_not_searched_for_garbage():
    code = (
        "import gc\nfrom megatron_rl.processes import starting\n"
        "with starting():\n    kept = [[] for _ in range(1000)]\n    inside = gc.isenabled()\n"
        "searched = {id(one) for one in gc.get_objects()}\n"
        "print(inside, gc.isenabled(), any(id(one) in searched for one in kept))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True", "False"], done.stderr


def test_half_a_character_is_logged_also_where_rays_streams_refuse_it(tmp_path):
    """A message that cannot be written raises in the process that logs it, and would end a verifier."""
    path = tmp_path / "verifier.log"
    script = """
import logging, sys
from pathlib import Path
from ray._private.utils import open_log
from megatron_rl.cluster.process import begin_process
sys.stdout, sys.stderr = (open_log(number, unbuffered=True, closefd=False) for number in (1, 2))
begin_process(Path(sys.argv[1]), "verifier")
half = chr(0xD800)
print("printed", half)
try:
    raise ValueError(half)
except ValueError:
    logging.getLogger("megatron_rl.verifiers").exception("logged %s", half)
"""
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    text = path.read_text()
    assert "printed \\ud800\n" in text and "logged \\ud800\n" in text and "ValueError: \\ud800\n" in text
    assert "Logging error" not in text
