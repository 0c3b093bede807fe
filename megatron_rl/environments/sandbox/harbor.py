"""Task folders of Harbor (https://harborframework.com/docs/tasks) as rows, and as the environment of these rows.

    python -m megatron_rl.environments.sandbox.harbor tasks rows.jsonl

    rollout:
      environment: {kind: tools, objects: "megatron_rl.environments.sandbox.harbor:HarborTask", max_turns: 20}
    rewards: [{kind: environment}]

A task has `instruction.md`, `task.toml`, `environment/` and `tests/test.sh`, which writes a number to
`/logs/verifier/reward.txt`, or `reward.json` with `reward`. With `docker_image` in `task.toml` the sandbox is made of
this image. Without it the programs of the machine take the place of the base image, and the Dockerfile may only set the
working directory and copy files. With an image, commands run in `environment.workdir`, by default `/app`. The network
is off, whatever a task says, and `agent.timeout_sec` has no effect (`rollout.environment.answer_timeout_s` bounds an
answer).

Invariants (tests/unit/environments): nothing below `tests/` or `solution/` is in the sandbox before the test; what the
model has left in `/tests` and `/logs` is gone then; a test that writes no reward, or that a limit ends, is a failure,
and never a reward.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Any

from megatron_rl.environments.sandbox.box import BoxError, is_free
from megatron_rl.environments.sandbox.spares import SPARES
from megatron_rl.environments.sandbox.workspace import Workspace

WITHOUT_EFFECT = ("CMD", "EXPOSE", "LABEL", "MAINTAINER")
DEFAULT_FOLDER = "/app"
TEST = "bash /tests/test.sh"
KINDS: Mapping[str, tuple[type | UnionType, str]] = {
    "environment": (dict, "a table"),
    "environment.memory_mb": (int, "a positive integer"),
    "environment.storage_mb": (int, "a positive integer"),
    "environment.docker_image": (str, "a text"),
    "environment.workdir": (str, "a text"),
    "verifier": (dict, "a table"),
    "verifier.timeout_sec": (int | float, "a positive number"),
    "verifier.env": (dict, "a table"),
}
"""What keys of task.toml must be."""
REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")


class HarborTask(Workspace):
    def reset(self, task: str) -> None:  # type: ignore[override]
        """
        Args:
            task: the folder of the task.

        Raises:
            BoxError: the sandbox cannot be made.
            ValueError: the task needs what is not supported.
        """
        self._folder = Path(task)
        self._settings = read_settings(self._folder)
        wanted = self._settings.get("environment", {})
        limits = self.limits
        if memory := wanted.get("memory_mb"):
            limits = replace(limits, memory_bytes=memory << 20)
        if storage := wanted.get("storage_mb"):
            limits = replace(limits, files_bytes=min(storage << 20, limits.files_bytes))
        image = wanted.get("docker_image")
        workdir, files = (wanted.get("workdir") or DEFAULT_FOLDER, {}) if image else copied(self._folder)
        self._box = SPARES.take(limits, workdir, image)
        for path, source in files.items():
            self._box.write(path, source.read_bytes(), os.access(source, os.X_OK))

    def get_reward(self) -> float:
        """
        Raises:
            BoxError: the sandbox is lost, or the test wrote no reward or did not end by itself.
        """
        self._box.run("find /tests /logs -mindepth 1 -delete; mkdir -p /logs/verifier")
        for path, source in _files(self._folder / "tests"):
            self._box.write(f"/tests/{path}", source.read_bytes(), os.access(source, os.X_OK))
        verifier = self._settings.get("verifier", {})
        variables = " ".join(shlex.quote(f"{name}={value}") for name, value in verifier.get("env", {}).items())
        ran = self._box.run(f"env {variables} {TEST}", verifier.get("timeout_sec", self.test_timeout_s))
        if ran.why:  # what it has written until then is no verdict
            raise BoxError(f"{self._folder}: tests/test.sh {ran.end}: {ran.output[-300:]}")
        for path in REWARDS:
            try:
                return reward_of(self._box.read(path).decode("utf-8-sig"), path.endswith("json"))
            except OSError:  # it is not there
                continue
            except ValueError as error:
                raise BoxError(f"{self._folder}: {path}: {error}") from None
        raise BoxError(f"{self._folder}: tests/test.sh wrote no reward and {ran.end}: {ran.output[-300:]}")


def read_settings(folder: Path) -> dict[str, Any]:
    """
    Raises:
        ValueError: the task needs what is not supported, or the folder is no task.
    """
    for name in ("instruction.md", "task.toml", "tests/test.sh"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder}: {name} is missing, so this is no task of Harbor")
    try:
        settings = tomllib.loads(_text(folder / "task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{folder}/task.toml: {error}") from None
    for name, (kinds, what) in KINDS.items():
        given: Any = settings
        for part in name.split("."):
            given = given.get(part) if isinstance(given, dict) else None
        is_right = isinstance(given, kinds) and (not isinstance(given, int | float) or 0 < given < math.inf)
        if given is not None and (not is_right or isinstance(given, bool)):
            raise ValueError(f"{folder}/task.toml: {name} = {given!r}, but must be {what}")
    wanted, verifier = settings.get("environment", {}), settings.get("verifier", {})
    needs = {
        "environment.memory (write memory_mb)": wanted.get("memory"),
        "environment.storage (write storage_mb)": wanted.get("storage"),
        "verifier.env with ${...}": any("${" in str(value) for value in verifier.get("env", {}).values()),
        "environment.env": wanted.get("env"),
        "environment.gpus": wanted.get("gpus"),
        "verifier.environment_mode separate": verifier.get("environment_mode") == "separate",
        "verifier.collect": verifier.get("collect"),
        "steps": settings.get("steps"),
        "environment/docker-compose.yaml": (folder / "environment" / "docker-compose.yaml").exists(),
    }
    if missing := [name for name, value in needs.items() if value]:
        raise ValueError(f"{folder}: {', '.join(missing)}: not supported")
    return settings


def copied(folder: Path) -> tuple[str, dict[str, Path]]:
    """The working directory of a task's Dockerfile and the files that it copies there, by their paths.

    Raises:
        ValueError: the Dockerfile does more.
    """
    context = folder / "environment"
    dockerfile = context / "Dockerfile"
    if not dockerfile.is_file():
        raise ValueError(f"{folder}: environment/Dockerfile is missing, and task.toml has no docker_image")
    workdir, files, made = DEFAULT_FOLDER, dict[str, Path](), [f"{DEFAULT_FOLDER}/"]
    for line in _text(dockerfile).replace("\\\n", " ").splitlines():
        words = line.split()
        kind = words[0].upper() if words and not words[0].startswith("#") else "LABEL"
        if kind == "WORKDIR" and len(words) == 2 and words[1].startswith("/") and not files:
            workdir = "/" + os.path.normpath(words[1]).lstrip("/")
            made.append(f"{workdir}/")
        elif kind in ("COPY", "ADD") and len(words) >= 3 and not line.count("--") and "[" not in line:
            target = os.path.join(workdir, words[-1])
            below = f"{os.path.normpath(target)}/"
            into = target.endswith(("/", "/.")) or len(words) > 3 or any(path.startswith(below) for path in made)
            for path, source in _copies(context, words[1:-1], target, into):
                files[os.path.relpath(path, workdir)] = source
                made.append(os.path.normpath(path))
        elif kind != "FROM" and kind not in WITHOUT_EFFECT:
            raise ValueError(
                f"{folder}: environment/Dockerfile: {line.strip()[:80]!r} needs an image: build it, and name it "
                "as docker_image below [environment] of task.toml"
            )
    if outside := [path for path in files if path.startswith("..")]:
        raise ValueError(f"{folder}: environment/Dockerfile copies {outside[0]}, which is outside of {workdir}")
    if not is_free(workdir):
        raise ValueError(
            f"{folder}: environment/Dockerfile: WORKDIR {workdir} is a folder of every sandbox, in one or above one"
        )
    return workdir, files


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _copies(context: Path, sources: Sequence[str], target: str, into: bool) -> Iterator[tuple[str, Path]]:
    for name in sources:
        source = context / name.lstrip("/")
        if source.is_dir():
            found = [(os.path.join(target, path), file) for path, file in _files(source) if path != "Dockerfile"]
        elif source.is_file():
            found = [(os.path.join(target, source.name) if into else target, source)]
        else:
            why = "and patterns are not supported" if set(name) & set("*?") else "which is not there"
            raise ValueError(f"{context}/Dockerfile copies {name}, {why}")
        for path, file in found:
            if not file.resolve().is_relative_to(context.resolve()):
                raise ValueError(f"{context}/Dockerfile copies {name}, which is outside of {context}")
            yield path, file


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files below a folder, by their paths in it."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            yield str(file.relative_to(folder)), file


def reward_of(text: str, is_json: bool) -> float:
    """The reward of a file `reward.json`, or `reward.txt`.

    Raises:
        ValueError: it has none.
    """
    given = json.loads(text) if is_json else float(text)
    if isinstance(given, Mapping):
        given = given["reward"] if "reward" in given else next(iter(given.values())) if len(given) == 1 else None
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise ValueError(f"{text.strip()[:80]!r} is no reward: a number is needed, or an object with `reward`")
    return float(given)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a row for each task of a folder that can run here.")
    parser.add_argument("tasks", type=Path, help="a folder of task folders")
    parser.add_argument("rows", type=Path, help="the file of rows (JSON lines) to write")
    options = parser.parse_args(arguments)
    rows = []
    for folder in sorted(path.parent.resolve() for path in options.tasks.glob("*/task.toml")):
        try:
            if not read_settings(folder).get("environment", {}).get("docker_image"):
                copied(folder)
            message = {"role": "user", "content": _text(folder / "instruction.md")}
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        rows.append(json.dumps({"messages": [message], "task": str(folder)}) + "\n")
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    draft = options.rows.with_name(f"{options.rows.name}.part")
    draft.write_text("".join(rows))
    draft.replace(options.rows)
    print(f"{len(rows)} rows: {options.rows}")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
