"""The items that beam search may find, as a trie of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from megatron_rl.rollout.vocabulary import single_ids

ITEMS = TypeAdapter(
    Annotated[list[Annotated[list[Annotated[str, Field(strict=True)]], Field(min_length=1)]], Field(min_length=1)]
)


class Catalogue:
    """
    Args:
        items: the tokens of each item, of equal number, all items different.
    """

    def __init__(self, items: Sequence[tuple[int, ...]]) -> None:
        self.num_items, self.num_tokens = len(items), len(items[0])
        following: dict[tuple[int, ...], set[int]] = {}
        for item in items:
            for size, token in enumerate(item):
                following.setdefault(item[:size], set()).add(token)
        self._following = {ids: frozenset(tokens) for ids, tokens in following.items()}

    def following(self, ids: tuple[int, ...]) -> frozenset[int]:
        """The tokens that may follow the beginning of an item."""
        return self._following[ids]


def read_catalogue(path: Path, folder: Path) -> Catalogue:
    """
    Args:
        path: the file of `rollout.beams.catalogue`.
        folder: the model's.

    Raises:
        ValueError: the file is missing or holds something else, or an item does not fit the model's tokenizer.
    """
    key = "rollout.beams.catalogue"
    if not path.is_file():
        raise ValueError(f"{key}: there is no file {path}; correct the path (it is relative to {Path.cwd()})")
    try:
        items = ITEMS.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = f"item {first['loc'][0]}: " if first["loc"] else ""
        raise ValueError(
            f"{key}: {path} must hold a JSON list of items, each a list of texts: {place}{first['msg']}"
        ) from None
    size = len(items[0])
    seen: dict[tuple[str, ...], int] = {}
    for number, item in enumerate(items):
        if len(item) != size:
            raise ValueError(
                f"{key}: {path}: item {number} has {len(item)} texts, but item 0 has {size}; give all equally many"
            )
        if (earlier := seen.setdefault(tuple(item), number)) != number:
            raise ValueError(f"{key}: {path}: item {number} is the same as item {earlier}; remove one of them")
    texts = list(dict.fromkeys(text for item in items for text in item))
    id_of = dict(zip(texts, single_ids(folder, texts, f"{key}: {path}"), strict=True))
    return Catalogue([tuple(id_of[text] for text in item) for item in items])
