"""What every part of the configuration is: a frozen pydantic model that refuses unknown keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def default_kind(kind: str) -> BeforeValidator:
    """For a union by `kind`: a mapping that names none is of this one, so that a key of the default needs no kind."""

    def fill(value: Any) -> Any:
        return {"kind": kind, **value} if isinstance(value, Mapping) and "kind" not in value else value

    return BeforeValidator(fill)
