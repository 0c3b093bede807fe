"""The tokens of samples in Ray's store.

A data-parallel rank trains on some samples of a group, and fetches only these. Ray keeps small objects in the driver,
which sends them to every process that asks; so samples with few tokens share an object with their neighbours.

Invariant (tests/unit/cluster): every sample is in one object, and no object is below LEAST_BYTES unless all samples of
its call together are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import ray

from megatron_rl.types import Tokens

LEAST_BYTES = 100 * 2**10
"""What an object has at least. Ray takes what is smaller, with its head, for small (`max_direct_call_object_size`)."""


class ObjectItem(NamedTuple):
    """Something of a sample in the store."""

    object: ray.ObjectRef
    """Refers to a list."""
    number: int
    """The sample's index in the list."""


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """The payload of a sample."""

    tokens: ObjectItem
    """`Tokens` without routes."""
    routes: ObjectItem | None = None
    """`Tokens.routes`; None if the engines return no routes."""
    teacher: ObjectItem | None = None
    """`Tokens.logp_teacher`; None if there is none."""


def plan_objects(sizes: Sequence[int], most: int) -> list[range]:
    """The samples of each object: as few neighbours as have LEAST_BYTES together, or more of them if there would be
    more than `most` objects.

    Args:
        sizes: the bytes of each sample.
    """
    least = LEAST_BYTES
    while True:
        bounds, size = [0], 0
        for sample, own in enumerate(sizes):
            size += own
            if size >= least:
                bounds.append(sample + 1)
                size = 0
        if bounds[-1] < len(sizes):  # the others are too small for an object of their own
            bounds[max(1, len(bounds) - 1) :] = [len(sizes)]
        if len(bounds) - 1 <= most:
            return [range(a, b) for a, b in pairwise(bounds)]
        least *= 2


def num_objects(num_samples: int, has_routes: bool) -> int:
    """The number of objects that an engine gives for a call that asks for `num_samples`; see `objects_of`."""
    return num_samples * (2 if has_routes else 1)


def objects_of(samples: Sequence[Tokens], num_samples: int, has_routes: bool) -> tuple[list[list[int]], list[Any]]:
    """What an engine leaves in the store of a call: objects with the tokens without their routes, and then objects with
    the routes, if there are any. They are larger than all the rest, and only the trainer and the journal need them.

    Args:
        samples: the answers and their continuations.
        num_samples: how many samples the call asked for.

    Returns:
        The number of samples in each object of the tokens, and of the routes; and the objects. The last ones of each
        are None, because Ray wants the number of objects before there are answers.
    """
    kinds: list[list[Any]] = [[replace(one, routes=None) for one in samples]]
    if has_routes:
        kinds.append([one.routes for one in samples])
    counts: list[list[int]] = []
    objects: list[Any] = []
    for values in kinds:
        plan = plan_objects([_bytes(one) for one in values], num_samples)
        counts.append([len(own) for own in plan])
        objects += [values[own.start : own.stop] for own in plan] + [None] * (num_samples - len(plan))
    return counts, objects


def _bytes(values: Tokens | np.ndarray | None) -> int:
    """The size of tokens without routes, or of routes."""
    if isinstance(values, Tokens):
        return sum(x.nbytes for x in (values.ids, values.action_mask, values.logp_rollout, values.version))
    return 0 if values is None else values.nbytes


def stored(counts: Sequence[Sequence[int]], objects: Sequence[ray.ObjectRef]) -> list[StoredTokens]:
    """The payload of each sample, from what `objects_of` returned."""
    num = len(objects) // len(counts)
    kinds = [
        [
            ObjectItem(reference, i)
            for reference, count in zip(objects[k * num :], own, strict=False)
            for i in range(count)
        ]
        for k, own in enumerate(counts)
    ]
    return [StoredTokens(*items) for items in zip(*kinds, strict=True)]


def fetch_numbers(parts: Iterable[Any]) -> dict[int, np.ndarray]:
    """The numbers at the tokens of samples (`TokenNumbers`), from the references to some parts."""
    return {index: numbers for part in ray.get(list(parts)) for index, numbers in part.items()}


def fetch(payloads: Iterable[Any], timeout_s: float | None = None, with_routes: bool = False) -> list[Tokens]:
    """The tokens of each payload. A payload is `StoredTokens`, or already the tokens of a sample.

    Raises:
        RayError: the tokens are lost, or did not come in time.
    """
    payloads = list(payloads)
    wanted = [item.object for one in payloads for item in _items(one, with_routes).values()]
    references = list(dict.fromkeys(wanted))  # samples may share an object
    fetched = dict(zip(references, ray.get(references, timeout=timeout_s) if references else (), strict=True))

    def tokens_of(payload: Any) -> Tokens:
        items = {name: fetched[item.object][item.number] for name, item in _items(payload, with_routes).items()}
        tokens: Tokens = items.pop("tokens", payload)
        return replace(tokens, **items) if items else tokens

    return [tokens_of(payload) for payload in payloads]


def _items(payload: Any, with_routes: bool) -> dict[str, ObjectItem]:
    """The objects to fetch for a payload: the tokens, and fields of them; empty if they are here already."""
    if not isinstance(payload, StoredTokens):
        return {}
    items = {
        "tokens": payload.tokens,
        "routes": payload.routes if with_routes else None,
        "logp_teacher": payload.teacher,
    }
    return {name: item for name, item in items.items() if item is not None}
