"""The entries of the section `rewards` for what a script gives as `reward_funcs`.

Invariants (tests/unit/trl, tests/doors): a reward model scores with its tokenizer and is never called like a function;
each entry has a name of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.trl.models import folder_of, linked

SCORER = "megatron_rl.trl.reward_model:ModelReward"


class GivenRewards:
    """Functions, objects that can be called, and reward models, by name, folder or object."""

    def __init__(self, given: Any, weights: Any, tokenizers: Any, others: Sequence[Mapping[str, Any]] = ()) -> None:
        """
        Args:
            given: one, or a list.
            weights: `reward_weights`; None means 1 for each.
            tokenizers: `reward_processing_classes`: one, or a list with an entry for each; functions need none.
            others: further entries, of environments.

        Raises:
            ValueError: the lengths do not fit, or one of them is no reward.
        """
        several = isinstance(given, Sequence) and not isinstance(given, str)
        self.given = list(given) if several else [] if given is None else [given]
        self._others = others
        if not self.given and not others:
            raise ValueError("reward_funcs is empty, so that no answer would have a reward; give a function")
        self._weights = [1.0] * len(self.given) if weights is None else [float(one) for one in weights]
        if len(self._weights) != len(self.given):
            raise ValueError(f"reward_weights has {len(self._weights)} numbers for {len(self.given)} reward_funcs")
        listed = isinstance(tokenizers, list | tuple)
        self._tokenizers = list(tokenizers) if listed else [tokenizers] * (1 if tokenizers is not None else len(self))
        if len(self._tokenizers) != len(self.given):
            raise ValueError(
                f"reward_processing_classes has {len(self._tokenizers)} entries for {len(self.given)} reward_funcs; "
                "give one for each, None for a function"
            )
        for reward in self.given:
            if not isinstance(reward, str | Path) and not callable(reward):
                raise ValueError(f"the reward {reward!r} is neither a function nor a reward model")
            if is_model(reward) and getattr(reward.config, "num_labels", 1) != 1:
                raise ValueError(f"the reward model {name_of(reward)} has {reward.config.num_labels} labels, not one")

    def __len__(self) -> int:
        return len(self.given)

    @property
    def names(self) -> list[str]:
        """TRL's names, with numbers where two are equal."""
        found: list[str] = []
        for reward in self.given:
            name, number = name_of(reward), 1
            while name in found:
                number += 1
                name = f"{name_of(reward)}_{number}"
            found.append(name)
        return found

    def entries(self, into: Path) -> list[dict[str, Any]]:
        """The entries.

        Args:
            into: a folder for reward models that are objects.
        """
        found = []
        for name, reward, weight, tokenizer in zip(
            self.names, self.given, self._weights, self._tokenizers, strict=True
        ):
            # TRL goes on if a function abstains on every row, which may be of another task. One that raises stops it.
            entry = {"kind": "function", "path": reward, "weight": weight, "max_silent_steps": None}
            if isinstance(reward, str | Path) or is_model(reward):
                path = str(_saved(reward, tokenizer, into / name).absolute())
                entry |= {"path": SCORER, "arguments": {"path": path}, "name": name}
            elif name != name_of(reward) or name.startswith("lambda"):
                entry["name"] = name
            found.append(entry)
        return [*found, *map(dict, self._others)]


def is_model(reward: Any) -> bool:
    """Whether it is a model of transformers, which can be called like a function, but not with a function's
    arguments."""
    return hasattr(reward, "save_pretrained") and hasattr(reward, "config")


def name_of(reward: Any) -> str:
    if isinstance(reward, str | Path):
        name = Path(reward).name
    elif is_model(reward):
        name = Path(str(getattr(reward.config, "_name_or_path", "") or type(reward).__name__)).name
    else:
        inner = getattr(reward, "func", reward)  # of a functools.partial
        name = getattr(reward, "__name__", getattr(inner, "__name__", type(reward).__name__))
    return re.sub(r"[^\w.-]+", "_", name.strip("<>")) or "reward"


def _saved(reward: Any, tokenizer: Any, into: Path) -> Path:
    """The folder of a reward model with its tokenizer."""
    if not is_model(reward):
        folder = folder_of(str(reward))
        if tokenizer is None:
            return folder
        linked(folder, into, tokenizer)
        return into
    reward.save_pretrained(into)
    if tokenizer is None:
        from transformers import AutoTokenizer

        name = str(getattr(reward.config, "_name_or_path", "") or "")
        if not name:
            raise ValueError(
                f"the reward model {name_of(reward)} has no tokenizer; give reward_processing_classes, which has it"
            )
        tokenizer = AutoTokenizer.from_pretrained(folder_of(name))
    tokenizer.save_pretrained(into)
    return into
