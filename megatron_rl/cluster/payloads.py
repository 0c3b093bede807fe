"""The tokens of groups in Ray's store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from megatron_rl.types import Tokens


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """The payload of a group."""

    parts: tuple[tuple[ray.ObjectRef, ...], ...]
    """The objects that each engine has given (`objects_of`). Together they are the tokens of the samples, in the order
    of the samples."""


def num_objects(has_routes: bool) -> int:
    """The number of objects of a part; see `objects_of`."""
    return 2 if has_routes else 1


def objects_of(tokens: Sequence[Tokens], has_routes: bool) -> list[Any]:
    """What an engine leaves in the store of some samples of a group: the tokens without their routes, and then the
    routes, if there are any. They are larger than all the rest, and only the trainer and the journal need them."""
    if not has_routes:
        return [tokens]
    return [[replace(one, routes=None) for one in tokens], [one.routes for one in tokens]]


def fetch_numbers(parts: Iterable[Any]) -> dict[int, np.ndarray]:
    """The numbers at the tokens of samples (`TokenNumbers`), from the references to some parts."""
    return {index: numbers for part in ray.get(list(parts)) for index, numbers in part.items()}


def fetch(payloads: Iterable[Any], timeout_s: float | None = None, with_routes: bool = False) -> list[list[Tokens]]:
    """The tokens of each payload. A payload is `StoredTokens`, or already the tokens themselves.

    Raises:
        RayError: the tokens are lost, or did not come in time.
    """
    payloads = list(payloads)
    references = [
        reference
        for payload in payloads
        if isinstance(payload, StoredTokens)
        for part in payload.parts
        for reference in (part if with_routes else part[:1])
    ]
    fetched = iter(ray.get(references, timeout=timeout_s) if references else ())

    def joined(part: tuple[ray.ObjectRef, ...]) -> list[Tokens]:
        tokens: list[Tokens] = next(fetched)
        if not with_routes or len(part) == 1:
            return tokens
        return [replace(one, routes=routes) for one, routes in zip(tokens, next(fetched), strict=True)]

    return [
        [tokens for part in payload.parts for tokens in joined(part)] if isinstance(payload, StoredTokens) else payload
        for payload in payloads
    ]
