"""The recipes as pages: a table of all of them, and for each folder its RECORD.md with its configurations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes"
HEAD = ("recipe", "algorithm", "GPUs", "hours of a step: expected; longest", "hours of the run, expected", "data")


@dataclass(frozen=True, slots=True)
class Planned:
    """A configuration for GPUs, and its row in RECORD.md."""

    path: Path
    settings: dict[str, Any]
    row: tuple[str, ...]
    """Trainer, engines, memory, idle share, GPU-hours of a step (expected; longest), GPU-hours of the run."""

    @property
    def num_nodes(self) -> int:
        slurm = self.settings.get("slurm", {})
        return int(slurm.get("nodes", 1) + slurm.get("rollout_nodes", 0))

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * int(self.settings.get("slurm", {}).get("gpus_per_node", 1))

    def hours(self, column: int) -> str:
        """The hours of the wall clock for a column of GPU-hours."""
        numbers = [float(number.replace(",", "")) for number in self.row[column].split("; ")]
        return "; ".join(_hours(number / self.num_gpus) for number in numbers)

    @property
    def algorithm(self) -> str:
        settings = self.settings.get("algorithm", {})
        shaped = {shaping["kind"] for shaping in settings.get("shaping", [])}
        is_gspo = settings.get("loss", {}).get("kind") == "gspo"
        name = "GSPO" if is_gspo else "DAPO" if "soft_overlong" in shaped else "GRPO"
        return f"{name}, LoRA" if self.settings.get("policy", {}).get("lora") else name

    @property
    def data(self) -> str:
        """The names of the data sets, without owners and splits."""
        train = self.settings["data"]["train"]
        sources = train if isinstance(train, list) else [train]
        paths = [source["path"] if isinstance(source, dict) else source for source in sources]
        return ", ".join(re.sub(r"^hf://[^/]+/([^/:]+?)(-Processed)?[/:].*$", r"\1", path) for path in paths)


def folders() -> list[Path]:
    return sorted(record.parent for record in FOLDER.glob("*/RECORD.md"))


def planned(folder: Path) -> Iterator[Planned]:
    """The configurations of a folder that RECORD.md has a row for."""
    record = (folder / "RECORD.md").read_text()
    for path in sorted(folder.glob("*.yaml")):
        row = re.search(rf"^\| `{re.escape(path.name)}` \| (.*) \|$", record, flags=re.MULTILINE)
        if row is None:
            raise ValueError(f"{folder.name}/RECORD.md has no row for {path.name}")
        yield Planned(path, yaml.safe_load(path.read_text()), tuple(row[1].split(" | ")))


def title(folder: Path) -> str:
    return (folder / "RECORD.md").read_text().splitlines()[0].removeprefix("# ")


def state(folder: Path) -> str:
    """What RECORD.md says about the state, in bold below its title."""
    found = re.search(r"^\*\*(?:State: )?(.*?)\.?\*\*", (folder / "RECORD.md").read_text(), flags=re.MULTILINE)
    return found[1] if found else "run on CPUs"


def index() -> str:
    """The table of all recipes, and the text of recipes/README.md."""
    _, _, text = (FOLDER / "README.md").read_text().partition("\n\n")
    configurations, on_cpus = list[Planned](), []
    for folder in folders():
        own = list(planned(folder))
        configurations += own
        if not own:
            on_cpus.append(f"| [{title(folder)}]({folder.name}/RECORD.md) | {state(folder)} |")
    on_gpus = [_row(one) for one in sorted(configurations, key=lambda one: one.num_gpus)]
    table = "\n".join([_cells(HEAD), "|---|---|--:|--:|--:|---|", *on_gpus])
    small = "\n".join(["| recipe | state |", "|---|---|", *on_cpus])
    planned_only = "The hours are estimates of the dry run. Nobody has run these configurations yet."
    return (
        f"# Recipes\n\n## For GPUs\n\n{planned_only}\n\n{table}\n\n## For two CPU cores\n\n{small}\n\n"
        f"## How to read and use them\n\n{text}"
    )


def _row(one: Planned) -> str:
    link = f"[{one.path.stem}]({one.path.parent.name}/RECORD.md)"
    return _cells((link, one.algorithm, str(one.num_gpus), one.hours(4), one.hours(5), one.data))


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"


def _cells(texts: tuple[str, ...]) -> str:
    return f"| {' | '.join(texts)} |"


def page_of(folder: Path) -> str:
    """RECORD.md, followed by the configurations of the folder."""
    parts = [(folder / "RECORD.md").read_text().rstrip()]
    paths = sorted(folder.glob("*.yaml"))
    if paths:
        parts.append("## Configurations")
    for path in paths:
        parts.append(f"### {path.name}\n\n```yaml\n{path.read_text().rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
