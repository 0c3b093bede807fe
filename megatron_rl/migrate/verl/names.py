"""Which key of verl has which row of the table, and which key was meant by a name that verl does not have."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from megatron_rl.migrate.verl.keys import RULES
from megatron_rl.migrate.verl.rules import KeyRule
from megatron_rl.migrate.verl.settings import old_name

_WRITTEN = (Path(__file__).parent / "names.txt").read_text().split()
NAMES = frozenset((*_WRITTEN, *map(old_name, _WRITTEN)))
"""The keys that verl has, or had under an earlier name: of the configurations that it generates, of the classes that
read them, and of its scripts."""
OPEN = re.compile(
    r"data\.(apply_chat_template|mm_processor)_kwargs\..|(custom_reward_function|reward_model)\.reward_kwargs\..|"
    r".*\.override_(config|transformer_config|ddp_config|optimizer_config|mcore_model_config)\..|"
    r".*\.model\.lora\..|.*\.engine_kwargs\..|.*\.(mbridge_config|sampler_kwargs|kw_args)\..|"
    r"ray_(kwargs\.ray_)?init\..|hydra[./].|[\w/]+@[\w.]+$"
)
"""Sections where verl has no names of its own, but hands on what a user writes."""
LIKE = 0.7
"""Two last parts that are less alike (from 0 to 1) have nothing in common."""


@cache
def rule_of(key: str) -> KeyRule | None:
    """The row of a key; None if verl has no such key. A row with the whole key comes before one with `*`."""
    exact = next((rule for rule in RULES if rule.pattern == key), None)
    if exact is None and (key in NAMES or OPEN.match(key)):
        return next((rule for rule in RULES if fnmatchcase(key, rule.pattern)), None)
    return exact


def nearest(key: str) -> str:
    """The key of verl that is most like a key that it does not have: by the last part, if one is like it, and by the
    whole."""
    last = key.rpartition(".")[2]

    def likeness(name: str) -> float:
        parts = SequenceMatcher(None, last, name.rpartition(".")[2]).ratio()
        return SequenceMatcher(None, key, name).ratio() + (2 * parts if parts > LIKE else 0)

    return max(_WRITTEN, key=likeness)
