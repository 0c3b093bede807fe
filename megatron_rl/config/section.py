"""The base class of every part of the configuration: a frozen pydantic model that refuses unknown keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from megatron_rl.config.function import ImportPath


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_empty_text(cls, given: Any) -> Any:
        """YAML reads nothing as null, and a shell gives nothing for `key=''`. A key of text then has the empty text."""
        if not isinstance(given, Mapping):
            return given
        texts = {
            name for name, field in cls.model_fields.items() if field.annotation is str and not field.is_required()
        }
        return {name: "" if value is None and name in texts else value for name, value in given.items()}

    @model_validator(mode="before")
    @classmethod
    def _no_flag_as_number(cls, given: Any) -> Any:
        """Python counts true as 1, and YAML reads `on` and `yes` as true."""
        for name, value in given.items() if isinstance(given, Mapping) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field and not _allows_flag(field.annotation):
                raise ValueError(
                    f"{name} must not be {str(value).lower()}, which YAML also reads for on, off, yes and no"
                )
        return given

    def absolute(self) -> Self:
        """The same section with all its paths made absolute, from the working folder of this process. Processes on
        other nodes have other working folders."""
        return self.model_copy(update={name: _absolute(getattr(self, name)) for name in type(self).model_fields})

    def conflicts(self, run: Any) -> Iterator[str]:
        """The conflicts between this section and others of the run, one message each, with what to do. The sections
        inside report their own conflicts.

        Args:
            run: the whole configuration.
        """
        yield from ()

    def sections(self) -> Iterator[Section]:
        """The sections inside, at any depth."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            for section in value if isinstance(value, tuple) else (value,):
                if isinstance(section, Section):
                    yield section
                    yield from section.sections()


def _allows_flag(annotation: Any) -> bool:
    """Whether true and false are among a key's values, or are refused in the place of a section anyway."""
    if annotation in (bool, Any, True, False) or isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True
    return any(_allows_flag(inner) for inner in get_args(annotation))


def import_paths(value: Any) -> list[ImportPath]:
    """The import paths of all functions and classes that a section, or a section inside it, names."""
    if isinstance(value, Section):
        return [path for name in type(value).model_fields for path in import_paths(getattr(value, name))]
    if isinstance(value, tuple):
        return [path for one in value for path in import_paths(one)]
    return [value] if isinstance(value, ImportPath) else []


def _absolute(value: Any) -> Any:
    if isinstance(value, Path | Section | ImportPath):
        return value.absolute()
    return tuple(map(_absolute, value)) if isinstance(value, tuple) else value


class Method(Section):
    """A section that configures a published method; `megatron-rl algorithms` prints its formula and its source."""

    formula: ClassVar[str]
    source: ClassVar[str]


def default_kind(kind: str) -> BeforeValidator:
    """A validator for a union by `kind`: a mapping without the key `kind` gets this one, so that a user who sets one
    key of the default need not name its kind."""

    def fill(value: Any) -> Any:
        return {"kind": kind, **value} if isinstance(value, Mapping) and "kind" not in value else value

    return BeforeValidator(fill)
