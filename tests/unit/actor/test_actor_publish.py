"""One folder replaces another: whenever the process is killed, the name belongs to one complete folder."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import textwrap

import pytest

KILLED = """
    import os, signal, sys
    from pathlib import Path
    from megatron_rl.actor import folders

    def kill(*arguments, **options):
        os.kill(os.getpid(), signal.SIGKILL)

    new, old = Path(sys.argv[1]), Path(sys.argv[2])
    where = sys.argv[3]
    if where == "before":
        folders._exchange = kill
    else:
        folders.shutil.rmtree = kill
    folders.publish(new, old)
"""


@pytest.mark.parametrize(("where", "survivor"), [("before", "old"), ("after", "new")])
def test_a_kill_leaves_a_whole_folder_under_the_name(tmp_path, where, survivor):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    command = [sys.executable, "-c", textwrap.dedent(KILLED), tmp_path / "new", tmp_path / "old", where]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert (tmp_path / "old" / "content").read_text() == survivor


def test_a_file_system_that_cannot_exchange_gets_renames(tmp_path, monkeypatch):
    from megatron_rl.actor import folders

    class Libc:
        def renameat2(self, *arguments):
            folders.ctypes.set_errno(errno.EINVAL)
            return -1

    monkeypatch.setattr(folders.ctypes, "CDLL", lambda *arguments, **options: Libc())
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    folders.publish(tmp_path / "new", tmp_path / "old")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old" / "content").read_text() == "new"
