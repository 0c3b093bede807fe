"""The rows that a script gives. A run reads one set for training, and one for evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def joined(eval_dataset: Any) -> Any:
    """The rows for evaluations. Rows of several data sets get the set's name as the column `dataset`.

    Raises:
        ValueError: there is such a column already.
    """
    if not isinstance(eval_dataset, Mapping):
        return eval_dataset
    rows = [(str(name), dict(row)) for name, rows in eval_dataset.items() for row in rows]
    for name, row in rows:
        if row.setdefault("dataset", name) != name:
            raise ValueError(
                f"eval_dataset: the rows of {name!r} have a column `dataset` already, which would have its name; "
                "rename the column, or give one data set with this column"
            )
    return [row for _, row in rows] or None
