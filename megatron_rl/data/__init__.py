"""Reads files of rows as prompts or as supervised rows, and makes shuffled streams of them."""

from __future__ import annotations

from megatron_rl.data.journal import Journal, JournalWriter, NoJournal
from megatron_rl.data.prompts import Rules, load_prompts
from megatron_rl.data.stream import ItemSource, RowsDigest, ShuffledStream
from megatron_rl.data.supervised import load_supervised

__all__ = [
    "Journal",
    "JournalWriter",
    "NoJournal",
    "RowsDigest",
    "Rules",
    "ShuffledStream",
    "ItemSource",
    "load_prompts",
    "load_supervised",
]
