"""Write the configuration of a run from verl's run script, with a table of what became of every key.

The script is read and not run: its variables, arrays, arithmetic and conditions are followed. What only a shell could
tell is asked for, with the line; loops and functions are refused. Instead of a script, the overrides themselves may be
given.

    megatron-rl from-verl run_qwen3_8b.sh --out run.yaml
    megatron-rl from-verl run_qwen3_8b.sh --set DATA_ROOT=/data --rows 7473 --json
    megatron-rl from-verl run_qwen3_8b.sh actor_rollout_ref.actor.ppo_epochs=1      in place of the script's value
    megatron-rl from-verl data.train_files=train.parquet actor_rollout_ref.rollout.n=8 --rows 7473
    megatron-rl from-verl --markdown                    the page of all keys of verl

Each key is `used` (the same meaning), `mapped` (converted), `implied` (what happens here anyway, or what has no meaning
here), `left out` (training is the same, and the table says what else differs), or `refused`: something else would be
trained without it. One refused key ends the conversion, and all of them are listed. The exit status is 0 if the
configuration is complete, 1 if a key is refused, something has to be added before a dry run accepts it, or verl has no
such engine, and 2 if the script cannot be read.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.migrate.verl.call import UnsetVariables, VerlCall, read_overrides
from megatron_rl.migrate.verl.conversion import Converted, KeyRow, check_types
from megatron_rl.migrate.verl.keys import markdown
from megatron_rl.migrate.verl.layout import converted
from megatron_rl.migrate.verl.lexer import ScriptError
from megatron_rl.migrate.verl.settings import NoSuchEngine, Settings
from megatron_rl.migrate.verl.shell import read_script
from megatron_rl.processes import failed, read_text

FROM_SHELL = ("HOME", "PWD", "USER")
"""The variables of this shell that a script may use; others are given with --set."""
WIDTH = 180
"""The width of tables that no terminal shows."""
STYLES = {"used": "green", "mapped": "cyan", "implied": "dim", "left out": "yellow", "refused": "red"}
SECTIONS = ("run", "model", "policy", "critic", "data", "rollout", "balance", "algorithm", "rewards", "eval")


def read(given: argparse.Namespace) -> VerlCall:
    """The call of verl in a script, with the overrides that follow it; or the call with the given overrides.

    Raises:
        ScriptError: neither can be read.
        ValueError: the file cannot be read.
    """
    script, *words = given.words
    if "=" in script and not Path(script).is_file():
        return read_overrides(given.words)
    variables = {name: os.environ[name] for name in FROM_SHELL if name in os.environ}
    for pair in given.set:
        name, equals, variables[name] = pair.partition("=")
        if not equals:
            raise ScriptError(f"--set {pair}: write it as --set NAME=VALUE")
    try:
        call = read_script(read_text(Path(script)), variables)
    except UnsetVariables as error:
        exported = [f'--set {name}="${name}"' for name in error.names if name in os.environ]
        hint = f"\nThis shell has a value: {' '.join(exported)}" if exported else ""
        raise ScriptError(f"{error}{hint}") from error
    call.overrides += read_overrides(words).overrides
    return call


def count_rows(settings: Settings) -> list[int] | None:
    """The numbers of rows of the training files; None if one of them is not here or is no Parquet file."""
    files = settings["data.train_files"]
    counts = []
    for name in files if isinstance(files, list) else [files]:
        path = Path(os.path.expanduser(str(name)))
        if path.suffix != ".parquet" or not path.is_file():
            return None
        counts.append(int(import_module("pyarrow.parquet").read_metadata(path).num_rows))
    return counts


def problems_of(configuration: dict[str, Any]) -> list[str]:
    """What a run refuses in the configuration."""
    try:
        validate(GrpoRunConfig, configuration)
    except ValueError as error:
        parallel = configuration.get("policy", {}).get("parallel", {})
        sizes = yaml.safe_dump(parallel, default_flow_style=True, width=WIDTH).strip()
        told = re.sub(r"Mesh\(.*?\)(?=:)", lambda _: sizes, str(error))
        return [line.strip() for line in told.splitlines()[1:]] or [told]
    return []


OWN = "by megatron-rl from-verl."
"""What is in the head of every file that this command writes, and may replace."""


def as_yaml(configuration: dict[str, Any], command: str, source: str) -> str:
    """The file: a command that uses it, where it is from, and one block for each section."""
    ordered = {name: configuration[name] for name in SECTIONS if name in configuration}
    ordered |= {name: section for name, section in configuration.items() if name not in ordered}
    options: dict[str, Any] = {"sort_keys": False, "default_flow_style": None, "width": 110, "allow_unicode": True}
    body = yaml.dump(ordered, Dumper=_Plain, **options)
    return f"# $ {command}\n# From verl's {source}, {OWN}\n{body}"


class _Plain(yaml.SafeDumper):
    """Writes equal lists twice, where YAML would give one of them a name."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def shown(title: str, rows: Sequence[KeyRow]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("line", "verl", "", "here"):
        table.add_column(name, overflow="fold", justify="right" if name == "line" else "left")
    for row in rows:
        here = ", ".join(f"{key}={_short(value)}" for key, value in row.to.items())
        cells = (f"{row.key}={_short(row.value)}", row.status, ": ".join(filter(None, (here, row.why))))
        table.add_row(str(row.line or ""), *map(escape, cells), style=STYLES[row.status])
    return table


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="SCRIPT.sh key=value", help="the script, verl's overrides, or both")
    parser.add_argument("--out", metavar="FILE.yaml", help="write the configuration into this file")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the script")
    counts = "the numbers of rows of the training files, for run.steps and the mixture of several files"
    parser.add_argument("--rows", type=_numbers, metavar="N,M,...", help=counts)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--markdown", action="store_true", help="print the table of all keys of verl")
    given = parser.parse_intermixed_args(arguments)
    if given.markdown:
        print(markdown(), end="")
        return 0
    if not given.words:
        parser.error("give a script of verl's, or its overrides")
    try:
        settings = Settings(read(given))
        check_types(settings)
        settings.rows = count_rows(settings) if given.rows is None else given.rows
        found, notes = converted(settings)
    except (ValueError, OSError) as error:
        return failed(error) if isinstance(error, NoSuchEngine) else 1 + failed(error)
    recipe = "ppo" if settings.has_critic else "grpo"
    command = f"megatron-rl {recipe} {given.out or 'run.yaml'} --dry-run"
    source = Path(given.words[0]).name if settings.call.line else "overrides"
    text = as_yaml(found.configuration, command, source)
    problems = [] if found.refused else [*found.open, *problems_of(found.configuration)]
    notes = [*settings.call.notes, *notes]
    if given.out and not found.refused:
        target = Path(given.out)
        if target.exists() and OWN not in target.read_text(errors="replace"):
            print(f"error: {target} was not written by this command; give another --out, or remove it", file=sys.stderr)
            return 2
        target.write_text(text)
    if given.json:
        told: dict[str, Any] = {"configuration": None if found.refused else found.configuration}
        told |= {"keys": [asdict(row) for row in found.rows], "defaults": [asdict(row) for row in found.defaults]}
        told |= {"counts": found.counts(), "notes": notes, "refused": found.refused, "to_add": problems}
        print(json.dumps({**told, "command": command}))
    else:
        _print(found, notes, problems, "" if given.out or found.refused else text)
        print(f"\nnext: {NEXT if found.refused else command}")
    return 1 if problems or found.refused else 0


NEXT = "give values that are not refused, in the script or behind it (from-verl SCRIPT.sh key=value)"
"""What to do about refused keys."""


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def _print(found: Converted, notes: list[str], problems: list[str], text: str) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(shown("every key of the script", found.rows))
    console.print(shown("defaults of verl that the script does not give", found.defaults))
    counts = ", ".join(f"{number} {status}" for status, number in found.counts().items())
    console.print(f"{len(found.rows)} keys: {counts}", markup=False)
    downloads = [row.why for row in found.rows if row.why.startswith("hf download")]
    for note in (*notes, *dict.fromkeys(downloads)):
        console.print(f"- {note}", soft_wrap=True, markup=False)
    for what, lines in {"refused": found.refused, "to add": problems}.items():
        for line in lines:
            console.print(f"{what}: {line}", style="red", soft_wrap=True, markup=False)
    if text:
        print(f"\n{text}", end="")


if __name__ == "__main__":
    sys.exit(main())
