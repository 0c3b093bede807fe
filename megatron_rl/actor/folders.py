"""Folders that are complete or absent after any failure and any kill of the process; and files whose bytes are on the
disk when writing returns."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_rl.actor.agreement import Agreement
from megatron_rl.convert import spans
from megatron_rl.convert.target import TargetTensor, safetensors_file
from megatron_rl.convert.tensor_files import Maps
from megatron_rl.convert.work import sync

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Constants of linux/fcntl.h and linux/fs.h."""


@contextmanager
def atomic_folder(folder: Path, agreement: Agreement) -> Iterator[Path]:
    """A temporary folder next to `folder`. It is renamed to `folder` when all ranks have left the block without an
    error, and removed otherwise. It replaces an older folder of that name."""
    temporary = begin_folder(folder, agreement)
    try:
        yield temporary
        with agreement.on_errors():
            if agreement.rank == 0:
                publish(temporary, folder)
    finally:
        if agreement.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def begin_folder(folder: Path, agreement: Agreement) -> Path:
    """Make a temporary folder next to `folder`."""
    token = agreement.gather(uuid.uuid4().hex[:8])[0]
    temporary = folder.with_name(f"{folder.name}.tmp-{token}")
    with agreement.on_errors():
        if agreement.rank == 0:
            for stale in folder.parent.glob(f"{folder.name}.tmp-*"):  # a process that was killed left it
                shutil.rmtree(stale)
            temporary.mkdir(parents=True)
    return temporary


def publish(temporary: Path, folder: Path) -> None:
    """Give the folder its name in one atomic operation, so that the name always belongs to a complete folder."""
    sync(temporary)
    if folder.exists():
        _exchange(temporary, folder)
        shutil.rmtree(temporary)
    else:
        temporary.rename(folder)
    sync(folder.parent)


def _exchange(a: Path, b: Path) -> None:
    """Exchange the names of two folders of one file system atomically (Linux's renameat2).

    Some network file systems cannot do this; there the names are exchanged by renames. A crash between them leaves the
    older folder under the name `a` with `-old` at its end.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.renameat2(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE):
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(code, os.strerror(code), str(b))
    old = a.with_name(a.name + "-old")
    b.rename(old)
    a.rename(b)
    old.rename(a)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of the file system inside the block, such as a full disk, name the file."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: {first_line(error)}; is the disk full? The last checkpoint is untouched"
        ) from error


def write(path: Path, content: bytes) -> dict[str, Any]:
    """Write a file without tensors and return its entry in the manifest."""
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        sync(path)
    return {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def write_text(path: Path, text: str) -> None:
    path.write_text(text)
    sync(path)


def write_safetensors(path: Path, tensors: list[TargetTensor]) -> dict[str, Any]:
    """Write stored tensors as a file, in blocks; returns its entry in the manifest."""
    file, maps = safetensors_file(path.name, tensors), Maps({})
    (span,) = spans.cut(file, file.num_bytes)
    written = spans.write(path, file, span, set(), maps, lambda num_bytes: None)
    sync(path)
    return spans.entry(file, [written], maps)
