"""Checkpoints of the trainer: two files per rank and a manifest, in a folder that gets its name when it is complete.

A checkpoint holds each rank's tensors as they are in memory, so that a resumed run continues bit for bit. It therefore
loads only on the mesh that wrote it. The portable form of the weights is the Hugging Face export (weights.py;
tools/export_checkpoint.py makes it from any checkpoint). All ranks must see the same file system. Reading
a file runs no code from it.

Invariants (tests/dist): the folder is complete or absent, whatever fails and whenever the process is killed; if one
rank raises, all do; a changed byte is an error that names the file.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import pickle
import shutil
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from megatron_rl.actor.agreement import Agreement
from megatron_rl.convert.work import sync
from megatron_rl.loop.checkpoints import EXTRA

FORMAT = 4
MANIFEST = "manifest.json"
WEIGHTS, STATE = "rank{}.weights.pt", "rank{}.state.pt"
"""The two files of a rank: the weights by Megatron's names, and everything else that the next step depends on."""
CHUNK_BYTES = 2**24
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Constants of linux/fcntl.h and linux/fs.h."""


def save(folder: Path, identity: dict, state: dict, extra: dict, agreement: Agreement) -> None:
    """Write this rank's `state`. Rank 0 adds `extra`, which must consist of JSON's types, and the manifest with every
    file's crc32."""
    with atomic_folder(folder, agreement) as temporary:
        files: dict[str, dict[str, int]] = {}
        with agreement.on_errors():
            parts = {WEIGHTS: state["model"], STATE: {key: value for key, value in state.items() if key != "model"}}
            for pattern, part in parts.items():
                name = pattern.format(agreement.rank)
                files[name] = _write(temporary / name, part)
            if agreement.rank == 0:
                write_text(temporary / EXTRA, json.dumps(extra, indent=1))
                files[EXTRA] = checksum(temporary / EXTRA)
        every = {name: entry for of_rank in agreement.gather(files) for name, entry in of_rank.items()}
        with agreement.on_errors():
            if agreement.rank == 0:
                versions = {name: version(name) for name in ("torch", "megatron-core")}
                manifest = {"format": FORMAT, **identity, "versions": versions, "files": every}
                write_text(temporary / MANIFEST, json.dumps(manifest, indent=2))


def load(folder: Path, identity: dict, agreement: Agreement) -> tuple[dict, dict]:
    """Read this rank's state and rank 0's extra.

    Raises:
        ValueError: the folder is not a checkpoint or is damaged, or another mesh, model or format wrote it.
    """
    state, extra = {}, {}
    with agreement.on_errors():
        manifest = read_manifest(folder)
        _check_identity(folder, manifest, identity)
        state = {"model": read_part(folder, manifest, WEIGHTS.format(agreement.rank))}
        state |= read_part(folder, manifest, STATE.format(agreement.rank))
        _check_bytes(folder / EXTRA, manifest)
        extra = json.loads((folder / EXTRA).read_text())
    return state, extra


def read_manifest(folder: Path) -> dict[str, Any]:
    """
    Raises:
        ValueError: the folder is not a checkpoint or is damaged, or it has another format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} is not a checkpoint: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); resume from another checkpoint: --resume STEP") from error
    if manifest.get("format") != FORMAT:
        found = manifest.get("format")
        raise ValueError(f"{folder} has the checkpoint format {found}, but this version reads format {FORMAT}")
    return manifest


def read_part(folder: Path, manifest: dict[str, Any], name: str, *, mapped: bool = False) -> dict[str, Any]:
    """Read one file of one rank to the CPU.

    Args:
        mapped: map the file instead, so that tensors are read when they are used. The file must outlive them.

    Raises:
        ValueError: the file is missing or damaged.
    """
    path = folder / name
    _check_bytes(path, manifest)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"cannot read {path}: {_first_line(error)}; resume from another checkpoint") from error


def checksum(path: Path) -> dict[str, int]:
    """A file's size and crc32."""
    crc = size = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return {"bytes": size, "crc32": crc}


def _check_bytes(path: Path, manifest: dict[str, Any]) -> None:
    wanted = manifest["files"].get(path.name)
    if wanted is None:
        raise ValueError(f"{path.parent / MANIFEST} is damaged: it does not name {path.name}")
    try:
        found = checksum(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}; resume from another checkpoint: --resume STEP") from error
    if found != wanted:
        raise ValueError(
            f"{path} is damaged: it has {found['bytes']} bytes with the crc32 {found['crc32']:08x}, but the run wrote "
            f"{wanted['bytes']} bytes with {wanted['crc32']:08x}; resume from another checkpoint: --resume STEP"
        )


def _check_identity(folder: Path, manifest: dict[str, Any], identity: dict) -> None:
    for key, mine in json.loads(json.dumps(identity)).items():  # JSON has no tuples
        if manifest.get(key) != mine:
            raise ValueError(
                f"{folder} was written with {key} {manifest.get(key)}, but this run has {mine}. A checkpoint can only "
                f"resume with the same {key}; to change it, start from the checkpoint's Hugging Face export"
            )


@contextmanager
def atomic_folder(folder: Path, agreement: Agreement) -> Iterator[Path]:
    """A temporary folder beside `folder`. It is renamed to `folder` when all ranks have left the block without an
    error, and removed otherwise. It replaces an older folder of that name."""
    token = agreement.gather(uuid.uuid4().hex[:8])[0]
    temporary = folder.with_name(f"{folder.name}.tmp-{token}")
    is_first = agreement.rank == 0
    try:
        with agreement.on_errors():
            if is_first:
                for stale in folder.parent.glob(f"{folder.name}.tmp-*"):  # a process that was killed left it
                    shutil.rmtree(stale)
                temporary.mkdir(parents=True)
        yield temporary
        with agreement.on_errors():
            if is_first:
                _publish(temporary, folder)
    finally:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, folder: Path) -> None:
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


class _Checksummed:
    """A file that computes the crc32 while it is written, so that it need not be read again."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.crc = self.size = 0

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        self.size += memoryview(data).nbytes
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _write(path: Path, value: Any) -> dict[str, int]:
    """Write a file and return its size and crc32."""
    try:
        with path.open("wb") as file:
            written = _Checksummed(file)
            torch.save(value, written)
        sync(path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        raise ValueError(
            f"cannot write {path}: {_first_line(error)}; is the disk full? The last checkpoint is untouched"
        ) from error
    return {"bytes": written.size, "crc32": written.crc}


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def write_text(path: Path, text: str) -> None:
    path.write_text(text)
    sync(path)
