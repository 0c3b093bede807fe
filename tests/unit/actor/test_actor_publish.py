"""One folder replaces another: whenever the process is killed, the name belongs to one complete folder."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from megatron_rl.actor import folders


def publish_until_killed(new: Path, old: Path, where: str) -> None:
    """In a process of its own, which ends before the exchange of the two folders, or after it."""

    def kill(*arguments, **options):
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "before":
        folders._exchange = kill
    else:
        folders.shutil.rmtree = kill
    folders.publish(new, old)


@pytest.mark.parametrize(("where", "survivor"), [("before", "old"), ("after", "new")])
def test_a_kill_leaves_a_whole_folder_under_the_name(tmp_path, where, survivor):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    arguments = tmp_path / "new", tmp_path / "old", where
    process = multiprocessing.get_context("fork").Process(target=publish_until_killed, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / "old" / "content").read_text() == survivor


def test_a_file_system_that_cannot_exchange_gets_renames(tmp_path, monkeypatch):
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
