"""Checkpoints of the trainer: one file a rank, a manifest, and a rename that makes them real.

The format is the mesh's own: it holds each rank's tensors as they lie in memory, so that a resumed run
continues bit for bit, and it loads on the same mesh only. The portable form of the weights is the Hugging
Face export (weights.py). All ranks must see the same file system. The files are pickles: load only what you
trust.

Invariants (tests/dist): the folder exists whole or not at all, whatever fails; every rank raises when one
does.
"""

from __future__ import annotations

import json
import pickle
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from megatron_rl.actor.agreement import Agreement
from megatron_rl.convert.work import sync

FORMAT = 2
MANIFEST = "manifest.json"


def save(folder: Path, identity: dict, state: dict, extra: dict, agreement: Agreement) -> None:
    """Write this rank's `state`; rank 0 adds the manifest and `extra`."""
    with atomic_folder(folder, agreement) as temporary, agreement.on_errors():
        _write(temporary / f"rank{agreement.rank}.pt", state)
        if agreement.rank == 0:
            _write(temporary / "extra.pt", extra)
            versions = {name: version(name) for name in ("torch", "megatron-core")}
            manifest = {"format": FORMAT, **identity, "versions": versions}
            write_text(temporary / MANIFEST, json.dumps(manifest, indent=2))


def load(folder: Path, identity: dict, agreement: Agreement) -> tuple[dict, dict]:
    """This rank's state and rank 0's extra.

    Raises:
        ValueError: no checkpoint, a damaged one, or one of another mesh, model or format.
    """
    with agreement.on_errors():
        _check(folder, identity)
        state = _read(folder / f"rank{agreement.rank}.pt")
        extra = _read(folder / "extra.pt")
    return state, extra


def _check(folder: Path, identity: dict) -> None:
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} is no checkpoint: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}); resume from an older checkpoint") from error
    if manifest.get("format") != FORMAT:
        found = manifest.get("format")
        raise ValueError(f"{folder} has the checkpoint format {found}, this version reads {FORMAT}")
    for key, mine in json.loads(json.dumps(identity)).items():  # JSON has no tuples
        if manifest.get(key) != mine:
            raise ValueError(
                f"{folder} was written with {key} {manifest.get(key)}, this run has {mine}. A checkpoint "
                f"resumes as it was written; to change this, start from its Hugging Face export"
            )


@contextmanager
def atomic_folder(folder: Path, agreement: Agreement) -> Iterator[Path]:
    """A temporary folder beside `folder`, renamed to it when all ranks have left the block without an error
    and removed otherwise. An older folder of the name is replaced."""
    token = agreement.gather(uuid.uuid4().hex[:8])[0]
    temporary = folder.with_name(f"{folder.name}.tmp-{token}")
    leads = agreement.rank == 0
    try:
        with agreement.on_errors():
            if leads:
                for stale in folder.parent.glob(f"{folder.name}.tmp-*"):  # of a process that was killed
                    shutil.rmtree(stale)
                temporary.mkdir(parents=True)
        yield temporary
        with agreement.on_errors():
            if leads:
                _publish(temporary, folder)
    finally:
        if leads:
            shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, folder: Path) -> None:
    sync(temporary)
    old = temporary.with_name(temporary.name + "-old")
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, value: Any) -> None:
    try:
        torch.save(value, path)
        sync(path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"cannot write {path}: {reason}; is the disk full? The last checkpoint is untouched"
        ) from error


def _read(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"cannot read {path}: {reason}; resume from an older checkpoint") from error


def write_text(path: Path, text: str) -> None:
    path.write_text(text)
    sync(path)
