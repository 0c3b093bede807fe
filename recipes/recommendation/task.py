"""A recommendation task for a tiny model: a thought that says what a user wants next, and then an item.

The catalogue has 128 items. An item is a semantic id of three levels with eight codes each: a genre, a theme and a
volume. Only ids whose codes add up to a multiple of 4 exist, so each theme has two volumes. A user follows two series
of different genres in turn. The next item of a series has the next theme and the volume before. After

    <a_1><b_2><c_5> <a_3><b_0><c_1> <a_1><b_3><c_4> <a_3><b_1><c_0>

the user wants the series that was not watched last, which goes on with `<a_1><b_4><c_3>`; the other volume of this
theme, `<a_1><b_4><c_7>`, is as welcome. The thought is the genre. The demonstrations are imperfect on purpose: half of
them think of the series that was watched last and continue that one, and a tenth of the items have a random theme. So a
policy that starts from them must learn which thought leads to the right items. Training and held-out users are
disjoint. All files depend only on the seed.

    python -m megatron_rl.recipes.recommendation.task runs/recommendation/task
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_rl.recipes.tiny.model import write_character_model, write_rows, write_task_of

CODES = 8
"""The number of codes of each level."""
MODULUS = 4
LEVELS = "abc"
ITEM, THINK, CLOSE = "<item>", "<think>", "</think>"
NUM_TRAIN, NUM_EVAL, NUM_DEMONSTRATIONS = 4000, 300, 40000


class Item(NamedTuple):
    genre: int
    theme: int
    volume: int

    @property
    def tokens(self) -> list[str]:
        return [f"<{level}_{code}>" for level, code in zip(LEVELS, self, strict=True)]

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    @property
    def next(self) -> Item:
        """The next item of its series."""
        return Item(self.genre, (self.theme + 1) % CODES, (self.volume - 1) % CODES)

    @property
    def other_volume(self) -> Item:
        return Item(self.genre, self.theme, (self.volume + MODULUS) % CODES)


CATALOGUE = [
    Item(a, b, c) for a in range(CODES) for b in range(CODES) for c in range(CODES) if (a + b + c) % MODULUS == 0
]


class User(NamedTuple):
    """The first items of the two series that a user follows."""

    wanted: Item
    other: Item

    @property
    def prompt(self) -> str:
        history = (self.wanted, self.other, self.wanted.next, self.other.next)
        return "".join(item.text for item in history) + THINK

    @property
    def items(self) -> list[str]:
        """What the user would watch next."""
        found = self.wanted.next.next
        return [found.text, found.other_volume.text]


def demonstration(user: User, rng: random.Random) -> str:
    """A completion: half of them are about the wrong series, and a tenth of the items have a random theme."""
    item = (user.wanted if rng.random() < 0.5 else user.other).next.next
    if rng.random() < 0.1:
        item = rng.choice([one for one in CATALOGUE if one.genre == item.genre])
    if rng.random() < 0.5:
        item = item.other_volume
    return item.tokens[0] + CLOSE + ITEM + item.text


def write_task(folder: Path, seed: int = 0) -> None:
    """Write items.json, train.jsonl, eval.jsonl, demonstrations.jsonl and model/ (random weights) into the folder."""
    rng = random.Random(seed)
    every = [User(a, b) for a in CATALOGUE for b in CATALOGUE if a.genre != b.genre]
    users = rng.sample(every, NUM_TRAIN + NUM_EVAL)
    rows = [{"prompt": user.prompt, "items": user.items} for user in users]
    chosen = [rng.choice(users[:NUM_TRAIN]) for _ in range(NUM_DEMONSTRATIONS)]
    demonstrations = [{"prompt": user.prompt, "completion": demonstration(user, rng)} for user in chosen]
    write_rows(folder, rows[:NUM_TRAIN], rows[NUM_TRAIN:], demonstrations)
    (folder / "items.json").write_text(json.dumps([item.tokens for item in CATALOGUE]))
    own = [THINK, CLOSE, ITEM, *(f"<{level}_{code}>" for level in LEVELS for code in range(CODES))]
    write_character_model(folder / "model", seed, ["<pad>", "<eos>", "<unk>", *own], own, num_positions=64)


def main(arguments: Sequence[str] | None = None) -> int:
    return write_task_of(__doc__, write_task, arguments)


if __name__ == "__main__":
    sys.exit(main())
