"""A record of the tokens of unfinished answers, outside the engine's process.

If an engine dies, or loses its answers in a failed push, another engine reads the record and goes on from the tokens
that the answers had. The record is a file. An engine appends one row to it for each token of a step.

Invariants (tests/unit/rollout): after SIGKILL the file has the tokens of every step but the last one, which may be
missing; the file does not grow with the length of a run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs

ROW = np.dtype([("answer", "<i8"), ("token", "<i4"), ("version", "<i4"), ("logp", "<f4")])
MAX_SAMPLES = 2**20
"""The most samples of one group. The number of an answer is the ticket of its group times this, plus its own."""
MAX_BYTES = 2**26
"""A larger file is rewritten, without the groups that are complete."""


class Progress:
    """The record that one engine writes. All calls but `done` come from one thread."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._max_bytes = path, max_bytes
        self._file = path.open("wb", buffering=0)
        self._size = 0
        self._answer_of: dict[str, int] = {}
        """The number of the answer of every request that is recorded, by vLLM's name of the request."""
        self._done: set[int] = set()
        """The tickets of the groups that were completed since the file was last rewritten."""

    def begin(self, request: str, ticket: int, sample: int) -> None:
        """Record the tokens of a request from now on.

        Args:
            request: vLLM's internal name of the request.
            ticket: names the group; see `Engine.answer`.
        """
        self._answer_of[request] = ticket * MAX_SAMPLES + sample

    def write(self, outputs: EngineCoreOutputs) -> None:
        """Record the tokens of one step."""
        version = int(outputs.weight_version or -1)
        rows = []
        for output in outputs.outputs:
            answer = self._answer_of.get(output.request_id)
            if answer is None:
                continue
            logp = output.new_logprobs.logprobs
            rows += [(answer, token, version, logp[i][0]) for i, token in enumerate(output.new_token_ids)]
            if output.finish_reason is not None:
                del self._answer_of[output.request_id]
        if rows:
            self._size += self._file.write(np.array(rows, ROW).tobytes())
        if self._size > self._max_bytes:
            self._write_anew()

    def forget(self, ticket: int | None = None) -> None:
        """Forget the requests of a group, or of all groups, because they were aborted. Their rows stay."""
        kept = {} if ticket is None else {r: a for r, a in self._answer_of.items() if a // MAX_SAMPLES != ticket}
        self._answer_of = kept

    def done(self, ticket: int) -> None:
        """Note that a group is complete: the driver has its answers."""
        self._done.add(ticket)

    def _write_anew(self) -> None:
        done, self._done = self._done, set()
        rows = _rows(self.path)
        left = rows[~np.isin(rows["answer"] // MAX_SAMPLES, list(done))]
        new = self.path.with_suffix(".new")
        new.write_bytes(left.tobytes())
        new.replace(self.path)
        self._file.close()
        self._file = self.path.open("ab", buffering=0)
        self._size = left.nbytes
        self._max_bytes = max(self._max_bytes, 2 * self._size)


def recorded(paths: Sequence[Path], ticket: int, sample: int) -> np.ndarray:
    """ROW [N]: the tokens of an answer in the records of the engines that have worked on it, in the order of these
    engines."""
    answer = ticket * MAX_SAMPLES + sample
    found = [_by_answer(path, path.stat().st_size).get(answer) for path in paths if path.exists()]
    return np.concatenate([np.zeros(0, ROW), *(rows for rows in found if rows is not None)])


@lru_cache(maxsize=4)
def _by_answer(path: Path, size: int) -> Mapping[int, np.ndarray]:
    """The rows of each answer. The size is the file's: a file that has grown is read again."""
    rows = _rows(path)
    rows = rows[np.argsort(rows["answer"], kind="stable")]
    answers, starts = np.unique(rows["answer"], return_index=True)
    return dict(zip(answers.tolist(), np.split(rows, starts[1:]), strict=True)) if len(rows) else {}


def _rows(path: Path) -> np.ndarray:
    """The complete rows of a file, whose writer may have been killed."""
    data = path.read_bytes()
    return np.frombuffer(data, ROW, count=len(data) // ROW.itemsize)


def remove_records(folder: Path) -> None:
    """Remove the records of all engines of a run."""
    for path in [*folder.glob("*.tokens"), *folder.glob("*.new")]:
        path.unlink(missing_ok=True)
    if folder.is_dir():
        os.rmdir(folder)
