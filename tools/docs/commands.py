"""The commands as a page: what each prints for `--help`, in the groups of `megatron-rl --help`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO

from megatron_rl.__main__ import GROUPS, main

HEAD = """# Commands

`megatron-rl COMMAND --help` prints what is here. In a clone, `python -m megatron_rl COMMAND` is the same. `gpu-day` and
`family` are only in a clone.
"""
WIDTH = "96"


def page() -> str:
    parts = [HEAD]
    for title, commands in GROUPS.items():
        parts.append(f"## {title}\n")
        for name, (_, purpose) in commands.items():
            sentence = f"{purpose[0].upper()}{purpose[1:]}."
            parts.append(f"### {name}\n\n{sentence}\n\n```text\n{help_of(name).rstrip()}\n```\n")
    return "\n".join(parts)


def help_of(command: str) -> str:
    printed = StringIO()
    with _narrow(), redirect_stdout(printed):
        try:
            main([*command.split(), "--help"])
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(f"megatron-rl {command} --help has failed") from ended
    return printed.getvalue()


@contextmanager
def _narrow() -> Iterator[None]:
    """The environment for a narrow terminal. What an import of a recipe sets does not stay."""
    before = dict(os.environ)
    os.environ["COLUMNS"] = WIDTH
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
