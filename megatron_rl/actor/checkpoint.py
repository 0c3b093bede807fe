"""Checkpoints of the trainer, which any mesh can resume: the converter's open form of Megatron-Core's checkpoints.

A checkpoint is written while training continues (`Saving`). Each rank writes one file, with what no other rank writes:
its share of the weights, of their fp32 copies and of the optimizer's moments, as rectangles of the open form's tensors
(`convert/pieces.py`). A rank that resumes reads the rectangles that its own parameters need. The folder also has the
states of the random generators, which only the same mesh restores, and `extra.json`. All ranks must see the same file
system. Reading a file runs no code from it. Megatron-Core's own writer raises on a rank without psutil, and the other
ranks then wait for ever.

Invariants (tests/ranks): the folder is complete or absent after any failure and any kill of the process; if one rank
raises, all do; a changed byte is an error that names the file; a run resumes bit for bit on the same mesh, and on
another mesh with the same weights and moments.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_rl.actor.agreement import Agreement
from megatron_rl.actor.folders import begin_folder, first_line, publish, write, write_safetensors, writing
from megatron_rl.actor.optimizer.fill import Target, fill
from megatron_rl.convert import forms, hub, manifest, torch_dist
from megatron_rl.convert.forms import Chunk
from megatron_rl.convert.head import head_tensors, open_head
from megatron_rl.convert.manifest import WEIGHTS
from megatron_rl.convert.pieces import Piece
from megatron_rl.convert.source import open_checkpoint
from megatron_rl.convert.target import check_frame
from megatron_rl.convert.tensor_files import Maps
from megatron_rl.convert.work import sync
from megatron_rl.loop.checkpoints import EXTRA
from megatron_rl.models import FAMILIES, Shard
from megatron_rl.models.hub import HEAD
from megatron_rl.models.shards import extents
from megatron_rl.types import Mesh, ModelShape

log = logging.getLogger(__name__)

FORMAT = 5
OTHER_FORMAT = "resume with the version of megatron_rl that wrote it, or start a new run from an export of it"
CHECKSUM = "manifest.crc32"
"""The file with the crc32 of the manifest, as hexadecimal digits."""
TENSORS, RANDOM = "__{}_0.distcp", "rank{}.random.pt"
"""The files of a rank."""
WRITTEN, FAILED = "rank{}.written", "rank{}.failed"
"""The files that say that a rank has written its files, with their entries in the manifest, and that it could not."""


class Part(NamedTuple):
    """A rectangle that a rank writes."""

    kind: str
    """`weights`, or a part of the optimizer's state; manifest.WEIGHTS names them."""
    piece: Piece
    value: Tensor


class Identity(NamedTuple):
    """What a checkpoint says about its model. A trainer that loads it must have the same shape and dtype, and the same
    kind of optimizer. With another mesh it resumes too, but without the states of the random generators."""

    shape: ModelShape
    dtype: str
    optimizer: str
    """The kind. A checkpoint that was written when there was one kind does not say it; it is Adam's."""
    mesh: Mesh
    base: str = ""
    """The digest of the base model of adapters (`models.peft.base_digest`), which is not in the checkpoint."""


class State(NamedTuple):
    """The state that belongs to no parameter."""

    num_updates: int
    random: dict[str, Any] | None
    """The states of this rank's random generators; None if another mesh wrote the checkpoint."""
    extra: dict[str, Any]  # JSON's types; of rank 0
    loss_scale: Mapping[str, float] | None = None  # `LossScale.state`, of a model in float16


class FromHub(NamedTuple):
    """The Hugging Face folder of configuration and tokenizer, and what becomes of its multi-token head."""

    folder: Path
    multi_token: Literal["drop", "keep", "train"]


class Saving:
    """A checkpoint that is being written. All ranks must make it and finish it together.

    The state is copied to CPU memory before the constructor returns. A thread writes the copies, so the rank can go on
    training. When the files of all ranks are there, the thread of rank 0 writes the manifest and gives the folder its
    name. The ranks find each other's files in the folder, because only one thread of a rank may use its process groups.
    """

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        parts: Iterable[Part],
        state: State,
        from_hub: FromHub,
        agreement: Agreement,
    ) -> None:
        """
        Args:
            parts: what this rank writes.
            state: everything else; its `extra` comes from rank 0.

        Raises:
            ValueError: the folder cannot be made, or the disk has too little space.
        """
        self._folder, self._identity, self._state, self._from_hub = folder, identity, state, from_hub
        self._agreement = agreement
        self._open_tensors = {chunk.tensor.name: chunk for chunk in forms.open_chunks(identity.shape)}
        copies = [_copy(part, self._open_tensors[part.piece.tensor]) for part in parts]
        random = torch_dist.archive(state.random)
        self._temporary = begin_folder(folder, agreement)
        needed = sum(agreement.gather(sum(copy.data.nbytes for copy in copies)))
        try:
            with agreement.on_errors():
                free = shutil.disk_usage(folder.parent).free
                if agreement.rank == 0 and free < needed:
                    raise ValueError(
                        f"the checkpoint {folder} has {needed:,} bytes, and its disk has {free:,} free; is the disk "
                        f"full? The last checkpoint is untouched"
                    )
        except ValueError:
            self._remove()
            raise
        self._failure: Exception | None = None
        self._is_given_up = threading.Event()
        self._has_written = threading.Event()
        """This rank has written its own files, or failed to."""
        self._thread = threading.Thread(target=self._work, args=(copies, random), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether this rank has nothing more to do; on rank 0, whether the folder has its name. Also true after a
        failure."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until the folder has its name.

        Raises:
            ValueError: a rank could not write, for example because the disk is full. An older folder is kept.
        """
        self._has_written.wait()
        try:
            self._raise_failure()
            self._thread.join()
            self._raise_failure()
        finally:
            self._is_given_up.set()
            self._thread.join()
            self._remove()

    def _raise_failure(self) -> None:
        with self._agreement.on_errors():
            if isinstance(self._failure, (ValueError, OSError)):
                raise self._failure
            if self._failure:  # a defect, which ends all ranks as a wrong disk does
                error = f"{type(self._failure).__name__}: {self._failure}"
                raise ValueError(
                    f"rank {self._agreement.rank} could not write the checkpoint {self._folder} ({error}); its "
                    f"log has the traceback, and the last checkpoint is untouched"
                ) from self._failure

    def _work(self, copies: Sequence[_Copy], random: bytes) -> None:
        rank = self._agreement.rank
        try:
            name, files = TENSORS.format(rank), {}
            files[name] = _write_copies(self._temporary / name, copies)
            name = RANDOM.format(rank)
            files[name] = write(self._temporary / name, random)
            # The others must not find the file before it is whole.
            unfinished = self._temporary / f"{WRITTEN.format(rank)}.unfinished"
            write(unfinished, json.dumps(files).encode())
            unfinished.rename(self._temporary / WRITTEN.format(rank))
            self._has_written.set()
            if rank == 0 and (of_all := self._wait_for_all()):
                self._write_rest(of_all)
                publish(self._temporary, self._folder)
        except Exception as error:  # `finish` raises it on all ranks
            log.exception("rank %d cannot write the checkpoint", rank)
            self._failure = error
            with suppress(OSError):  # so that rank 0 need not wait for the end of the run
                (self._temporary / FAILED.format(rank)).touch()
        finally:
            self._has_written.set()

    def _wait_for_all(self) -> dict[str, Any] | None:
        """The entries of all ranks' files, or None if a rank failed or the checkpoint was given up."""
        files: dict[str, Any] = {}
        for rank in range(self._agreement.size):
            path, pause_s = self._temporary / WRITTEN.format(rank), 0.01
            while not path.exists():
                if self._is_given_up.wait(pause_s) or any(self._temporary.glob(FAILED.format("*"))):
                    return None
                pause_s = min(1.5 * pause_s, 0.5)
            files |= json.loads(path.read_text())
            path.unlink()
        return files

    def _write_rest(self, files: dict[str, Any]) -> None:
        """Write what rank 0 writes for all."""
        small = {EXTRA: json.dumps(self._state.extra, indent=1).encode()}
        shape, dtype, (folder, choice) = self._identity.shape, self._identity.dtype, self._from_hub
        stored = open_head(folder, shape)
        told = folder, dtype, shape.value_head, choice != "drop" if stored else None, shape.vision is not None
        small |= {f"hf/{name}": content for name, content in hub.companions(*told).items()}
        small |= _torch_dist_files(shape, files, self._open_tensors, TENSORS.format(self._agreement.size))
        files |= {name: write(self._temporary / name, content) for name, content in small.items()}
        if stored and choice == "keep":
            head = head_tensors(stored, FAMILIES[shape.family], None)
            files[f"hf/{HEAD}"] = write_safetensors(self._temporary / "hf" / HEAD, head)
        _write_manifest(self._temporary, self._identity, self._state, files)

    def _remove(self) -> None:
        if self._agreement.rank == 0:
            shutil.rmtree(self._temporary, ignore_errors=True)


class _Copy(NamedTuple):
    """The archive of a part, and what the manifest says about it."""

    before: bytes
    data: memoryview
    after: bytes
    described: dict[str, Any]


def _copy(part: Part, chunk: Chunk) -> _Copy:
    kind, piece, value = part
    before, after = torch_dist.archive_frame(value.dtype, extents(torch_dist.place_of(chunk, piece.box)[1]))
    copied = torch.empty(value.shape, dtype=value.dtype)
    copied.copy_(value)
    dtype = str(value.dtype).removeprefix("torch.")
    described = {"kind": kind, "tensor": piece.tensor, "box": piece.box, "dtype": dtype}
    return _Copy(before, copied.view(-1).view(torch.uint8).numpy().data, after, described)


def _write_copies(path: Path, copies: Sequence[_Copy]) -> dict[str, Any]:
    """Write the archives of a rank's parts; returns the file's entry in the manifest."""
    frame, position, tensors = 0, 0, {}
    with writing(path), path.open("wb") as file:
        for before, data, after, described in copies:
            for content in (before, data, after):
                file.write(content)
            frame = zlib.crc32(after, zlib.crc32(before, frame))
            sums = {"start": position + len(before), "bytes": data.nbytes, "crc32": f"{zlib.crc32(data):08x}"}
            tensors[f"{described['kind']} {described['tensor']} {described['box']}"] = described | sums
            position += len(before) + data.nbytes + len(after)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": position, "crc32": f"{frame:08x}", "tensors": tensors}


def _torch_dist_files(
    shape: ModelShape, files: Mapping[str, Any], chunks: Mapping[str, Chunk], states_file: str
) -> dict[str, bytes]:
    """The files that Megatron-Core wants in addition to the tensors."""
    entries = []
    for file, described in files.items():
        for values in described.get("tensors", {}).values():
            chunk, dtype = chunks[values["tensor"]], getattr(torch, values["dtype"])
            size, box = torch_dist.place_of(chunk, tuple(map(tuple, values["box"])))
            before, after = torch_dist.archive_frame(dtype, extents(box))
            place = file, values["start"] - len(before), len(before) + values["bytes"] + len(after)
            key = chunk.key if values["kind"] == WEIGHTS else f"optimizer.state.{values['kind']}.{chunk.key}"
            entries.append(torch_dist.Entry(key, size, box, dtype, place))
    keys, length = torch_dist.empty_states(chunks.values()), len(torch_dist.EMPTY_STATE)
    states = {key: (states_file, i * length, length) for i, key in enumerate(keys)}
    small = torch_dist.small_files(forms.are_layers_alike(shape))
    return small | {
        states_file: torch_dist.EMPTY_STATE * len(keys),
        ".metadata": torch_dist.metadata(entries, states),
    }


def _write_manifest(folder: Path, identity: Identity, state: State, files: dict[str, Any]) -> None:
    training = {
        "format": FORMAT,
        "dtype": identity.dtype,
        "optimizer": identity.optimizer,
        "mesh": asdict(identity.mesh),
        "base": identity.base,
        "num_updates": state.num_updates,
        **({"loss_scale": state.loss_scale} if state.loss_scale else {}),
        "versions": {name: version(name) for name in ("torch", "megatron-core")},
    }
    text = manifest.describe(manifest.OPEN, identity.shape, None, True, files, training=training)
    write(folder / manifest.NAME, text)
    write(folder / CHECKSUM, f"{zlib.crc32(text):08x}".encode())
    sync(folder / "hf")


@torch.no_grad()
def load(
    folder: Path, identity: Identity, targets: Sequence[Target], shards: Iterable[Shard], agreement: Agreement
) -> State:
    """Load a checkpoint's tensors into the targets. Padding rows that it lacks become zeros.

    Args:
        shards: the shards of the rank's parameters.

    Raises:
        ValueError: the folder is no checkpoint or damaged, or one of another model, dtype, format or kind of optimizer.
    """
    state = State(0, None, {})
    with agreement.on_errors():
        fields = read_manifest(folder)
        _check_identity(folder, fields, identity)
        by_name: dict[str, list[Shard]] = {}
        for shard in shards:
            by_name.setdefault(shard.local_name, []).append(shard)
        try:
            for kind in dict.fromkeys(target.kind for target in targets):
                source = open_checkpoint(folder, kind, fields, adapters=True)
                maps = Maps(source.checksums)
                for target in targets:
                    if target.kind == kind:
                        fill(target, by_name[target.local_name], source, maps)
            tensors = [(name, entry) for name, entry in fields["files"].items() if "tensors" in entry]
            for name, entry in tensors[agreement.rank :: agreement.size]:
                check_frame(folder / name, entry)
            state = _read_state(folder, fields, identity, agreement.rank)
        except (ValueError, OSError) as error:
            raise ValueError(f"{error}. Otherwise resume from another checkpoint: --resume STEP") from error
    return state


def _read_state(folder: Path, fields: dict[str, Any], identity: Identity, rank: int) -> State:
    training, random = fields["training"], None
    if training["mesh"] == _as_json(identity.mesh):
        path = folder / RANDOM.format(rank)
        try:
            random = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} is damaged: {first_line(error)}") from error
    return State(training["num_updates"], random, manifest.read_json(folder / EXTRA), training.get("loss_scale"))


def read_manifest(folder: Path) -> dict[str, Any]:
    """
    Raises:
        ValueError: the folder is not a checkpoint or is damaged, or it has another format.
    """
    path, checksum = folder / manifest.NAME, folder / CHECKSUM
    if not path.is_file():
        raise ValueError(
            f"{folder} is not a checkpoint, it has no {manifest.NAME}; resume from another one: --resume STEP"
        )
    content = path.read_bytes()
    if not checksum.is_file() and b'"training"' not in content:
        raise ValueError(f"{folder} is no checkpoint of the format {FORMAT}, which this version reads; {OTHER_FORMAT}")
    if not checksum.is_file() or checksum.read_bytes() != f"{zlib.crc32(content):08x}".encode():
        raise ValueError(
            f"{path} or {CHECKSUM} beside it is damaged or was changed; resume from another checkpoint: --resume STEP"
        )
    try:
        fields: dict[str, Any] = json.loads(content)
        manifest.check(fields, with_training=True)
    except ValueError as error:  # its checksum is right, so somebody has changed both
        raise ValueError(f"{path} has another form: {error}; resume from another checkpoint: --resume STEP") from error
    if (found := fields["training"]["format"]) != FORMAT:
        raise ValueError(f"{folder} has the checkpoint format {found}; this version reads {FORMAT}; {OTHER_FORMAT}")
    return fields


def _check_identity(folder: Path, fields: dict[str, Any], identity: Identity) -> None:
    shape, training, kind = manifest.saved_shape(folder, fields), fields["training"], manifest.optimizer_kind(fields)
    saved = Identity(shape, training["dtype"], kind, identity.mesh, training.get("base", ""))
    for key, found, value in zip(Identity._fields, saved, identity, strict=True):
        if found != value:
            raise ValueError(
                f"{folder} was written with {key} {found}, but this run has {value}. A checkpoint can only resume with "
                f"the same {key}; to change it, start from the checkpoint's Hugging Face export"
            )


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(asdict(value)))  # JSON has no tuples
