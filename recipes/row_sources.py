"""The sources of rows that a configuration names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.config.data import DataConfig
from megatron_rl.data.forms import Reading
from megatron_rl.data.mixture import whole_shares


@dataclass(frozen=True, slots=True)
class RowSource:
    key: str
    """The key of the configuration that names the source."""
    name: str
    """The name of the source in the stream of prompts: that of a mixture's source, otherwise the key."""
    path: Path | str
    reading: Reading
    share: int = 1
    """The source's share of the prompts in lowest terms."""


def training_sources(data: DataConfig) -> list[RowSource]:
    """
    Raises:
        ValueError: the shares of a mixture's sources have too many digits.
    """
    if not isinstance(data.train, tuple):
        reading = replace(_reading(data), rated=data.easy_first_epochs > 0)
        return [RowSource("data.train", "data.train", data.train, reading)]
    shares = whole_shares({source.label: source.weight or source.count or 0 for source in data.train})
    return [
        RowSource(
            key=f"data.train.{index}",
            name=source.label,
            path=source.path,
            reading=Reading(
                columns=data.columns if source.columns is None else source.columns,
                system_prompt=data.system_prompt if source.system_prompt is None else source.system_prompt,
                chat_template=data.chat_template if source.chat_template is None else source.chat_template,
                dataset=source.label,
                rated=data.easy_first_epochs > 0,
            ),
            share=shares[source.label],
        )
        for index, source in enumerate(data.train)
    ]


def heldout_source(data: DataConfig) -> RowSource | None:
    return RowSource("data.eval", "data.eval", data.eval, _reading(data)) if data.eval else None


def _reading(data: DataConfig) -> Reading:
    return Reading(data.columns, data.system_prompt, data.chat_template)
