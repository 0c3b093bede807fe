"""The tokens of groups in Ray's store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray

from megatron_rl.types import Tokens


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """The payload of a group."""

    parts: tuple[ray.ObjectRef, ...]
    """Each of them is the list[Tokens] that one engine has given. Together they are the tokens of the samples, in the
    order of the samples."""


def fetch(payloads: Iterable[Any], timeout_s: float | None = None) -> list[list[Tokens]]:
    """The tokens of each payload. A payload is `StoredTokens`, or already the tokens themselves.

    Raises:
        RayError: the tokens are lost, or did not come in time.
    """
    payloads = list(payloads)
    references = [part for payload in payloads if isinstance(payload, StoredTokens) for part in payload.parts]
    fetched = iter(ray.get(references, timeout=timeout_s))
    return [
        [tokens for _ in payload.parts for tokens in next(fetched)] if isinstance(payload, StoredTokens) else payload
        for payload in payloads
    ]
