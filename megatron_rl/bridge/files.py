"""Weights as files in a folder that both sides can see, for engines that no connection reaches.

FOLDER/version-00000003/trainer-0-engine-1-message-0.safetensors holds the rectangles of one message. The mark
FOLDER/version-00000003/trainer-0-engine-1.complete is written when all messages of this pair are on the disk. A
receiver waits for the marks of all its senders before it writes a byte, so a trainer that dies cannot leave it with
half a version. The last two versions stay in the folder. Any number of engines may read the same files.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.bridge.line import WRITTEN, Acknowledgement, Deadline, Header, Part
from megatron_rl.bridge.messages import Message, Stretch
from megatron_rl.bridge.setup import BridgeSetup

POLL_S = 0.02
"""How often a receiver looks for marks: a network file system cannot report new files."""
KEPT_VERSIONS = 2


class FileLine:
    """What both ends have in common."""

    memory = torch.device("cpu")

    def __init__(self, setup: BridgeSetup, source: int, destination: int) -> None:
        assert setup.folder is not None
        self._folder, self._name = Path(setup.folder), f"trainer-{source}-engine-{destination}"
        self._digest, self._version = setup.transfer_plan.digest, -1

    def agree(self, packs: Sequence[bool]) -> list[bool]:
        """Each end may have stretches of its own, because nobody answers. A reader has no more than a bucket of them at
        a time."""
        return [True] * len(packs)

    def close(self) -> None:
        """Nothing is open."""

    @property
    def _mark(self) -> Path:
        return self._of(self._version) / f"{self._name}.complete"

    def _of(self, version: int) -> Path:
        return self._folder / f"version-{version:08}"

    def _path(self, message: Message) -> Path:
        return self._of(self._version) / f"{self._name}-message-{message.number}.safetensors"


class FileOutlet(FileLine):
    near = False

    def begin(self, version: int, deadline: Deadline) -> None:
        self._version = version
        self._of(version).mkdir(parents=True, exist_ok=True)
        self._mark.unlink(missing_ok=True)  # an earlier life of the run may have left it

    def post(self, stretch: Stretch, parts: Iterable[Part]) -> None:
        """
        Raises:
            OSError: the disk is full; the message names the file.
        """
        for message, (header, content) in zip(stretch.messages, parts, strict=True):
            self._save(message, header, content)

    def _save(self, message: Message, header: Header, content: Tensor) -> None:
        parts = dict(zip(_names(message), message.parts(content), strict=True))
        path, sums = self._path(message), header.checksum
        try:
            save_file(parts, path, {"version": str(header.version), "plan": self._digest, "checksum": json.dumps(sums)})
            _sync(path)
        except (OSError, SafetensorError) as error:
            raise OSError(f"{path}: cannot be written, {error}") from error

    def acknowledgement(self, stretch: Stretch, deadline: Deadline) -> Acknowledgement:
        """A message is sent when it is on the disk."""
        return Acknowledgement(WRITTEN, self._version, stretch.number)

    def finish(self, version: int, deadline: Deadline) -> None:
        self._mark.touch()
        _sync(self._mark)
        _sync(self._mark.parent)
        for folder in self._folder.glob("version-*"):
            if int(folder.name.removeprefix("version-")) <= version - KEPT_VERSIONS:
                shutil.rmtree(folder, ignore_errors=True)  # all trainer ranks delete, in any order


class FileInlet(FileLine):
    near = True

    def begin(self, version: int, deadline: Deadline) -> None:
        """
        Raises:
            RuntimeError: the sender did not finish before the deadline.
        """
        self._version = version
        while not self._mark.exists():
            if deadline.over:
                raise RuntimeError(f"{self._mark} did not come within the deadline; does the trainer still run?")
            time.sleep(POLL_S)

    def expect(self, stretch: Stretch, rooms: Sequence[Tensor]) -> None:
        """All files are there already."""

    def take(self, stretch: Stretch, deadline: Deadline) -> list[Part]:
        """
        Raises:
            RuntimeError: a file is missing, damaged, or of another plan.
        """
        return [self._load(message) for message in stretch.messages]

    def _load(self, message: Message) -> Part:
        path = self._path(message)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                parts = [file.get_tensor(name) for name in _names(message)]
        except (OSError, SafetensorError) as error:
            raise RuntimeError(f"{path}: {error}; push this version again") from error
        if metadata["plan"] != self._digest:
            raise RuntimeError(
                f"{path} was written by plan {metadata['plan']}, the engine has {self._digest}; give trainer and "
                "engine the same model, meshes and dtype"
            )
        sums = json.loads(metadata["checksum"])
        header = Header(int(metadata["version"]), message.number, 0, tuple(sums) if sums else None)
        return header, torch.cat([part.view(-1).view(torch.uint8) for part in parts])

    def acknowledge(self, stretch: Stretch, acknowledgement: Acknowledgement) -> None:
        """The sender does not wait for acknowledgements."""

    def finish(self, version: int, deadline: Deadline) -> None:
        """The sender waits for nothing."""


def _names(message: Message) -> list[str]:
    """One name for each copy: a message may hold two copies of one parameter."""
    return [f"{number}:{copy.destination_name}" for number, copy in enumerate(message.copies)]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
