"""Checks a checkpoint of any form: every byte against the manifest, every tensor against the family's table, and, if
asked, every tensor's bits against another checkpoint of any form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megatron_rl.convert import forms
from megatron_rl.convert.head import head_tensors
from megatron_rl.convert.source import Source, bits, check_copies, open_checkpoint, same_bits
from megatron_rl.convert.target import TargetTensor, Tick, blocks, check_file
from megatron_rl.convert.tensor_files import Maps
from megatron_rl.convert.work import Report, Workers
from megatron_rl.models import FAMILIES


@dataclass(frozen=True, slots=True)
class Verified:
    form: str
    family: str
    num_tensors: int
    """The number of Hugging Face tensors; each is covered exactly once."""
    num_bytes: int
    """The bytes of these tensors."""
    num_files: int
    """The number of files whose bytes equal the manifest's; 0 for a folder without a manifest."""
    num_copies: int
    """The number of repeated rectangles that have the bits of the first one."""
    num_ignored: int
    """The number of tensors that the model does not need."""
    num_compared: int
    """The number of tensors whose bits equal the other checkpoint's; a multi-token head that both have counts too."""


class Verification:
    """The tasks that check a checkpoint. Creating it already accounts for every tensor; `run` reads the bytes."""

    def __init__(self, folder: Path, against: Path | None = None):
        """
        Raises:
            ValueError: headers or manifest show a fault; the error names file and tensor.
        """
        self.source = open_checkpoint(folder)
        self.tensors = [self.source.tensor(described, None) for described in forms.hf_tensors(self.source.shape)]
        self.entries = self.source.manifest["files"] if self.source.manifest else {}
        self._maps = Maps({})  # it checks nothing: separate tasks compare the files with the manifest's checksums
        self._tasks: list[Callable[[Tick], None]] = [
            partial(check_file, folder / name, entry) for name, entry in self.entries.items()
        ]
        self._tasks.append(partial(check_copies, self.source, self._maps))
        self.num_work_bytes = sum(entry["bytes"] for entry in self.entries.values())
        self.num_compared = 0
        if against:
            self._compare_with(open_checkpoint(against, tower=bool(self.source.shape.tower)))

    def run(self, num_workers: int, report: Report) -> Verified:
        """
        Raises:
            ValueError: some bytes are wrong; the error names file and tensor of the first fault found.
        """
        workers = Workers(num_workers)
        tasks = self._tasks
        workers.run(lambda i: tasks[i](workers.tick), range(len(tasks)), lambda i, result: None, report)
        return Verified(
            form=self.source.form,
            family=self.source.shape.family,
            num_tensors=len(self.tensors),
            num_bytes=sum(tensor.num_bytes for tensor in self.tensors),
            num_files=len(self.entries),
            num_copies=len(self.source.copies),
            num_ignored=len(self.source.ignored),
            num_compared=self.num_compared,
        )

    def _compare_with(self, other: Source) -> None:
        mine, theirs = self.source, other
        for one, pair in ((mine, theirs), (theirs, mine)):
            if one.shape.multi_token and pair.head:
                pair.take_head()
            elif one.shape.multi_token and not pair.shape.multi_token:  # it was left out by choice
                one.shape = one.shape.served
        self.tensors = [mine.tensor(described, None) for described in forms.hf_tensors(mine.shape)]
        text, other_text = (replace(one.shape, vision=None) for one in (mine, theirs))
        if text != other_text or mine.shape.tower != theirs.shape.tower:
            raise ValueError(f"{mine.folder} and {theirs.folder} are different models: {mine.shape}, {theirs.shape}")
        for tensor, described in zip(self.tensors, forms.hf_tensors(other.shape), strict=True):
            self._add(tensor, other.tensor(described, None))
        both = [name for name in mine.head if name in theirs.head]  # where one has none, it was left out by choice
        family = FAMILIES[mine.shape.family]
        heads = (head_tensors({name: one.head[name] for name in both}, family, None) for one in (mine, theirs))
        for tensor, pair in zip(*heads, strict=True):
            self._add(tensor, pair)

    def _add(self, tensor: TargetTensor, pair: TargetTensor) -> None:
        if tensor.dtype != pair.dtype:
            raise ValueError(
                f"{_files(tensor)}: tensor {tensor.name} is {tensor.dtype}, but in {_files(pair)} it is {pair.dtype}"
            )
        self._tasks.append(partial(_compare, tensor, pair, self._maps))
        self.num_work_bytes += tensor.num_bytes
        self.num_compared += 1


def _compare(mine: TargetTensor, theirs: TargetTensor, maps: Maps, tick: Tick) -> None:
    start = 0
    for a, b in zip(blocks(mine, maps), blocks(theirs, maps), strict=True):
        if not same_bits(a, b):
            row = start + int((bits(a) != bits(b)).view(len(a), -1).any(1).nonzero()[0])
            raise ValueError(
                f"{_files(mine)}: tensor {_named(mine)} differs from the one in {_files(theirs)}, first in row {row}"
            )
        start += len(a)
        tick(a.nbytes)


def _named(tensor: TargetTensor) -> str:
    held = tensor.parts[0].source.view if tensor.parts else None
    return f"{tensor.name} (in {held.name})" if held else tensor.name


def _files(tensor: TargetTensor) -> str:
    return " and ".join(sorted({str(part.source.path) for part in tensor.parts}))
