"""The log-probs of rows under the reference model, which losses of preferences compare with.

The reference model is the one that a run begins with, so its log-probs are computed once, before the first step, by the
policy itself. They are kept in a file that is named by a digest of everything that they depend on, and that other runs
of the same model and rows, with another loss or beta, and a resumed run find. Scores of a run that is stopped meanwhile
are kept in its folder.

Invariant (tests/unit/loop): a row has the same number with the file, without it, and after a stop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

from megatron_rl.config.schema import DpoRunConfig
from megatron_rl.loop.heldout import score_rows
from megatron_rl.models.peft import base_digest
from megatron_rl.ports import Policy
from megatron_rl.types import ModelShape, StepBatch, TrainingRow

FOLDER = "reference"
"""The folder of the files, beside the runs."""
CHUNK_TOKENS = 2**21
"""The number of tokens that are scored at a time. After each chunk its scores are written."""


def with_reference(
    config: DpoRunConfig,
    shape: ModelShape,
    policy: Policy,
    rows: Sequence[TrainingRow],
    is_resumed: bool,
    tell: Callable[[str], None],
) -> list[TrainingRow]:
    """The rows with their log-probs under the reference model. If these are not known yet, the policy computes them,
    so it must have the weights that the run begins with.

    Args:
        is_resumed: the policy has no such weights.
        tell: is called with a sentence about the progress, and may raise an exception to stop.

    Raises:
        ValueError: a resumed run does not find them.
    """
    num_samples = sum(len(row.samples) for row in rows)
    digest = _digest(config, shape, rows)
    path, partial = config.run.folder / FOLDER / f"{digest}.f64", config.run_folder / f"reference_{digest}.partial"
    logp = _read(path)
    if len(logp) != num_samples:
        if is_resumed:
            raise ValueError(
                f"{path} is missing, which has the reference model's log-probs of the rows, and the trained weights "
                "cannot compute them again. The rows, the model or their paths may have changed; bring back what was "
                "there, or begin a run with another run.name"
            )
        logp = _scored(config, shape, policy, rows, partial, tell)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial, path)
    remaining = iter(logp.tolist())
    return [replace(row, logp_reference=tuple(next(remaining) for _ in row.samples)) for row in rows]


def _scored(
    config: DpoRunConfig,
    shape: ModelShape,
    policy: Policy,
    rows: Sequence[TrainingRow],
    partial: Path,
    tell: Callable[[str], None],
) -> np.ndarray:
    """float64, one number for each sample. The file `partial` has them, too."""
    known, done = _read(partial), 0
    for chunk in _chunks(rows):
        size = sum(len(row.samples) for row in chunk)
        tell(f"the reference model scores the rows: {done:,} of {sum(len(row.samples) for row in rows):,} answers")
        if len(known) < done + size:
            scores = score_rows(config, shape, policy, StepBatch.of_rows(chunk, version=0))
            known = np.concatenate([known[:done], scores])
            partial.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                file.write(known.tobytes())
                file.flush()
                os.fsync(file.fileno())
        done += size
    return known


def _chunks(rows: Sequence[TrainingRow]) -> list[list[TrainingRow]]:
    """The rows in chunks of about CHUNK_TOKENS tokens, in their order."""
    chunks: list[list[TrainingRow]] = []
    num_tokens = CHUNK_TOKENS
    for row in rows:
        if num_tokens >= CHUNK_TOKENS:
            chunks.append([])
            num_tokens = 0
        chunks[-1].append(row)
        num_tokens += sum(len(tokens.ids) for tokens in row.samples)
    return chunks


def _read(path: Path) -> np.ndarray:
    """float64: the numbers of a file, empty if there is none. A number that was not written whole is left out."""
    if not path.is_file():
        return np.zeros(0)
    data = path.read_bytes()
    return np.frombuffer(data[: len(data) // 8 * 8], np.float64)


def _digest(config: DpoRunConfig, shape: ModelShape, rows: Sequence[TrainingRow]) -> str:
    """The digest of everything that the log-probs depend on: weights, data type, and tokens."""
    state = blake2b(digest_size=16)
    state.update(base_digest(config.model.weights or config.model.path).encode() + config.model.dtype.encode())
    state.update(repr(shape.base).encode())
    if lora := config.policy.lora:  # a run may begin with adapters
        state.update(repr((lora.base, lora.alpha, lora.start and base_digest(lora.start))).encode())
    for row in rows:
        for tokens in row.samples:
            state.update(tokens.ids.tobytes() + tokens.action_mask.tobytes())
    return state.hexdigest()
