"""Rows of a script or of a notebook, in a file for the processes of its run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.processes import open_text

Rows = str | os.PathLike[str] | Iterable[Mapping[str, Any]]
"""A path of rows as in `data.train`, a list of rows, or a data set of the library `datasets`."""


class GivenRows:
    """Rows that a user gave, and the path of their file."""

    def __init__(self, given: Rows, path: Path) -> None:
        self._given = given
        if isinstance(given, str | os.PathLike):
            self.path = os.fspath(given)
        else:
            self.path = str(path if hasattr(given, "save_to_disk") else path.with_suffix(".jsonl"))

    def save(self) -> None:
        """Write the rows, unless they are in a file already.

        Raises:
            ValueError: there are none, or one is no mapping, or has a value that JSON does not have.
        """
        if isinstance(self._given, str | os.PathLike):
            return
        if hasattr(self._given, "save_to_disk"):
            self._given.save_to_disk(self.path)
            return
        if not isinstance(self._given, Iterable):
            raise ValueError(f"the data must be rows, or a path of rows, but it is {self._given!r}")
        number = 0
        with open_text(Path(self.path)) as file:
            for number, row in enumerate(self._given, start=1):
                if not isinstance(row, Mapping):
                    raise ValueError(
                        f"row {number} of the data must be a mapping of its columns, but it is {row!r:.80}"
                    )
                try:
                    file.write(json.dumps(row, ensure_ascii=False, default=_plain) + "\n")
                except TypeError as error:
                    raise ValueError(f"row {number} of the data is not JSON: {error}; convert the value") from error
        if not number:
            raise ValueError("the data has no row")


def _plain(value: Any) -> Any:
    """A number of NumPy's as one of Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no type of JSON's")
