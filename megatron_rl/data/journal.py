"""The journal of an asynchronous run: every group that is generated and verified, so that a kill loses none.

A folder has one file for each version of the weights and each writer. A file is a sequence of records: the number of
bytes and the CRC-32 of the record (8 bytes each, little-endian), then the record: a safetensors blob with the tokens,
the engine's choices of experts if it reports them, and the rest as JSON in the metadata. A record at the end of a file
that was cut off by a kill is not read.

The files are not flushed to the disk record by record: a killed process loses nothing, a machine that loses its power
may lose the last seconds.

Invariants (tests/unit/data): what is read equals what was written; a file that was cut at any byte gives its whole
records.
"""

from __future__ import annotations

import json
import re
import secrets
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from megatron_rl.types import Conversation, Episode, Group, Picture, Prompt, Rollout, TokenReward, Tokens, Verdict

HEAD = struct.Struct("<QQ")
NAME = re.compile(r"(\d{6,})_\w+\.groups")
COLUMNS = ("ids", "action_mask", "logp_rollout", "version")


class JournalWriter:
    """Writes groups into files of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._name = folder, secrets.token_hex(4)

    def write(self, groups: Mapping[int, Group]) -> None:
        """Append each group to the file of its version.

        Args:
            groups: by the number of the prompt in the stream of prompts. The payload is the tokens.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        records: dict[int, list[bytes]] = {}
        for number, group in groups.items():
            records.setdefault(group.version, []).append(framed(encode(number, group)))
        for version, parts in records.items():
            with (self._folder / f"{version:06d}_{self._name}.groups").open("ab") as file:
                file.write(b"".join(parts))


class Journal:
    """Gives a resumed run the groups that it had generated before it was killed."""

    def __init__(self, folder: Path, max_lag: int) -> None:
        self._folder, self._max_lag = folder, max_lag
        self.unused: dict[int, Group] = {}
        self._resumed_at: int | None = None
        """The step of the checkpoint, or 0; None before the first checkpoint or the first weight sync."""

    def prune(self, checkpoint: int) -> None:
        """Remove what a checkpoint does not need; if the run begins, everything, because it is of an earlier start."""
        least = 2**62 if self._resumed_at is None else checkpoint - self._max_lag
        self._resumed_at = self._resumed_at or 0
        for version, path in _files(self._folder):
            if version < least:
                path.unlink()

    def resume(self, step: int) -> None:
        """Read the groups for a checkpoint, unless the run goes on in this process."""
        if self._resumed_at is None:
            self.unused, self._resumed_at = read_journal(self._folder), step

    def take(self, number: int, prompt: Prompt, version: int) -> Group | None:
        """A group with its prompt; None if it is not there, or too old for the step of `version`.

        The weights of the versions after the checkpoint are lost: the run trains them again, with other answers. A
        group of these versions counts as one of `version`. Its tokens get the version before the checkpoint, so that
        nobody expects the trainer to give them the same log-probs. The checkpoint's own version is there again.
        """
        kept, last = self.unused.pop(number, None), self._resumed_at or 0
        # An older one is a late group that was requested again and had not finished by then.
        if kept is None or kept.prompt.uid != prompt.uid or kept.version < version - self._max_lag:
            return None
        tokens = [
            replace(t, version=np.where(t.version > last, last - 1, t.version).astype(np.int32)) for t in kept.payload
        ]
        samples = [replace(s, oldest_version=last - 1) if s.oldest_version > last else s for s in kept.rollouts]
        return replace(kept, prompt=prompt, rollouts=samples, payload=tokens, version=min(kept.version, version))


class NoJournal(Journal):
    """Stays empty, for a run whose steps hand out all their groups together."""

    def prune(self, checkpoint: int) -> None:
        pass

    def resume(self, step: int) -> None:
        pass


def read_journal(folder: Path) -> dict[int, Group]:
    """All groups by their numbers. Of groups with the same number, the latest version wins. See `decode`."""
    return dict(decode(blob) for _, path in _files(folder) for blob in read_records(path))


def _files(folder: Path) -> list[tuple[int, Path]]:
    """The files with their versions, the oldest version first."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in found)


def framed(blob: bytes) -> bytes:
    """A record of a file, with its head."""
    return HEAD.pack(len(blob), zlib.crc32(blob)) + blob


def read_records(path: Path) -> Iterator[bytes]:
    """The records of a file without their heads, up to one that is damaged or cut off. Zeros, which a loss of power
    leaves, end the file too; they would be a record of no bytes with the right sum."""
    data, start = path.read_bytes(), 0
    while start + HEAD.size <= len(data):
        size, checksum = HEAD.unpack_from(data, start)
        blob = data[start + HEAD.size : start + HEAD.size + size]
        if not size or len(blob) < size or zlib.crc32(blob) != checksum:
            return
        yield blob
        start += HEAD.size + size


def encode(number: int, group: Group) -> bytes:
    """A group, whose payload is its tokens, as a blob of safetensors."""
    payload: Sequence[Tokens] = group.payload
    columns = {
        name: np.concatenate([getattr(tokens, name) for tokens in payload]) if payload else np.zeros(0)
        for name in COLUMNS
    }
    routed = [None if tokens.routes is None else len(tokens.routes) for tokens in payload]
    if any(length is not None for length in routed):
        columns["routes"] = np.concatenate([tokens.routes for tokens in payload if tokens.routes is not None])
    taught = [tokens.logp_teacher is not None for tokens in payload]
    if any(taught):
        columns["logp_teacher"] = np.concatenate([t.logp_teacher for t in payload if t.logp_teacher is not None])
    rest = {
        "number": number,
        "uid": group.prompt.uid,
        "version": group.version,
        "engines": list(group.engines),
        "samples": [asdict(rollout) for rollout in group.rollouts],
        "lengths": [len(tokens.ids) for tokens in payload],
        "routed": routed,
        "taught": taught,
        "pictures": [[astuple(one) for one in tokens.pictures] for tokens in payload],
        "asked_pictures": len(group.prompt.pictures),
        "conversations": [tokens.conversation and asdict(tokens.conversation) for tokens in payload],
    }
    blob: bytes = save(columns, metadata={"group": json.dumps(rest)})
    return blob


def decode(blob: bytes) -> tuple[int, Group]:
    """The number and the group of a blob. The payload is the tokens, and the prompt has no messages and columns."""
    size = int.from_bytes(blob[:8], "little")
    rest: dict[str, Any] = json.loads(json.loads(blob[8 : 8 + size])["__metadata__"]["group"])
    columns = load(blob)
    cuts = np.cumsum(rest["lengths"])[:-1]
    routes = list(_split(columns.get("routes"), rest["routed"]))
    said = map(_conversation, rest.get("conversations") or [None] * len(routes))  # older files have none
    taught = rest.get("taught") or [False] * len(routes)  # older files have none
    lengths = [length if is_taught else None for length, is_taught in zip(rest["lengths"], taught, strict=True)]
    teacher = list(_split(columns.get("logp_teacher"), lengths))
    seen = [tuple(Picture(*one) for one in own) for own in rest.get("pictures") or [()] * len(routes)]  # as above
    rows = zip(*(np.split(columns[name], cuts) for name in COLUMNS), routes, said, teacher, seen, strict=True)
    rollouts, payload = [_rollout(values) for values in rest["samples"]], [Tokens(*row) for row in rows]
    ids = payload[0].ids[: rollouts[0].num_prompt_tokens].tolist() if rollouts else ()
    asked = seen[0][: rest.get("asked_pictures")] if seen else ()  # an environment's follow; older files have none
    prompt = Prompt(rest["uid"], tuple(ids), "", pictures=asked)
    engines = rest.get("engines", ())  # older files have none
    return rest["number"], Group(prompt, rollouts, payload, rest["version"], engines=tuple(engines))


def _split(joined: np.ndarray | None, lengths: Sequence[int | None]) -> Iterator[np.ndarray | None]:
    """The part of each rollout, of the number of tokens in `lengths`; None if it has none."""
    start = 0
    for length in lengths:
        yield None if length is None or joined is None else joined[start : start + length]
        start += length or 0


def _conversation(values: dict[str, Any] | None) -> Conversation | None:
    return None if values is None else Conversation(**values | {"turns": tuple(values["turns"])})


LISTED = ("tool_errors", "thoughts", "patches")
"""The lists of an episode. Older files have no patches."""


def _rollout(values: dict[str, Any]) -> Rollout:
    verdict, rewards, episode = (values.pop(name) for name in ("verdict", "token_rewards", "episode"))
    values.pop("is_probe", None)  # older files have it
    return Rollout(
        **values,
        token_rewards=tuple(TokenReward(*reward) for reward in rewards),
        episode=Episode(**{**episode, **{key: tuple(episode.get(key, ())) for key in LISTED}}) if episode else None,
        verdict=Verdict(**verdict | {"parts": tuple(verdict["parts"])}),
    )
