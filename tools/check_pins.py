"""Check the pins of a requirements file against the metadata of the package index, without installing anything.

For Python 3.11 and 3.12 on Linux x86-64 the command reports three things:

    conflict          a pin that the index does not have for this Python, a requirement of a pinned package that the
                      pinned version does not meet, an extra that a pinned package does not have, or requirements on
                      a package that no version can meet together
    metadata unknown  a pin that has no wheel, only a source distribution: its requirements are known after a build
    not pinned        a package that a pinned package requires and that the file does not pin: the installer chooses
                      a version in the range that is shown

Only the requirements of pinned packages are read: what a package that is not pinned requires is not checked. The
file's lines are exact pins, NAME[EXTRA,...]==VERSION, with or without a marker. pip reads the index, with its own
configuration; pip older than 23.3 may download the wheels too. The exit status is 0 without conflicts, 1 with
conflicts, and 2 if a file is not understood or the index does not answer.

    python tools/check_pins.py
    python tools/check_pins.py requirements/cpu.txt --json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

PYTHONS = ("3.11", "3.12")
PLATFORMS = ("linux_x86_64", "manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 40)))
"""The wheels that Ubuntu 24.04 (glibc 2.39) can install."""


@dataclass(frozen=True)
class Metadata:
    """What a wheel says about itself: all its requirements, and the names of its extras."""

    requires: tuple[Requirement, ...] = ()
    extras: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Findings:
    conflicts: list[str]
    unknown: list[str]
    not_pinned: dict[str, str]
    """Range and requiring packages, by name of the package."""


def environment(python: str) -> dict[str, str]:
    """The variables of environment markers (PEP 508) for one version of CPython, such as `3.12`, on Linux x86-64."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.9",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{python}.9",
        "python_version": python,
        "sys_platform": "linux",
    }


def read_pins(text: str, file: str) -> list[Requirement]:
    """The pins of a requirements file. Raises ValueError with file and line for everything that is not an exact pin."""
    pins = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        try:
            pin = Requirement(words)
        except InvalidRequirement as error:
            raise ValueError(f"{file}:{number}: {words!r} is not a requirement: {error}") from error
        if [(s.operator, s.version.endswith(".*")) for s in pin.specifier] != [("==", False)]:
            raise ValueError(f"{file}:{number}: {words!r} is not an exact pin; write NAME==VERSION")
        pins.append(pin)
    return pins


def version(pin: Requirement) -> Version:
    return Version(next(iter(pin.specifier)).version)


def named(pin: Requirement) -> str:
    return f"{pin.name}=={version(pin)}"


def active(pins: Iterable[Requirement], python: str) -> dict[str, Requirement]:
    """The pins that count for this Python, by canonical name. Raises ValueError if a package is pinned twice."""
    found: dict[str, Requirement] = {}
    for pin in pins:
        name = canonicalize_name(pin.name)
        if pin.marker is None or pin.marker.evaluate(environment(python)):
            if name in found:
                raise ValueError(f"{name} is pinned twice for Python {python}; remove one of the pins")
            found[name] = pin
    return found


def applicable(metadata: Metadata, extras: set[str], python: str) -> Iterator[Requirement]:
    """The requirements of a package that count for this Python with these extras."""
    for requirement in metadata.requires:
        marker, variables = requirement.marker, environment(python)
        if marker is None or any(marker.evaluate({**variables, "extra": extra}) for extra in {"", *extras}):
            yield requirement


def check(pins: dict[str, Requirement], index: dict[str, Metadata | None], python: str) -> Findings:
    """Compare pins with the metadata of their versions.

    `index` has one entry for each pin that exists for this Python; the entry is None if the metadata is unknown.
    A pinned package is checked with the extras that the file and all other pinned packages ask for.
    """
    known = {name: index[name] for name in pins if index.get(name) is not None}
    extras = {name: {canonicalize_name(extra) for extra in pin.extras} for name, pin in pins.items()}
    pending = list(known)
    while pending:
        name = pending.pop()
        for requirement in applicable(known[name], extras[name], python):
            target = canonicalize_name(requirement.name)
            asked = {canonicalize_name(extra) for extra in requirement.extras}
            if target in known and asked - extras[target]:
                extras[target] |= asked
                pending.append(target)

    conflicts = [f"{named(pins[name])} is not on the index for Python {python}" for name in pins if name not in index]
    ranges: dict[str, SpecifierSet] = {}
    requiring: dict[str, set[str]] = {}
    for name, metadata in known.items():
        pin = named(pins[name])
        for extra in sorted(extras[name] - metadata.extras):
            conflicts.append(f"{pin} has no extra {extra!r}")
        for requirement in applicable(metadata, extras[name], python):
            target = canonicalize_name(requirement.name)
            if target not in pins:
                ranges[target] = ranges.get(target, SpecifierSet()) & requirement.specifier
                requiring.setdefault(target, set()).add(pin)
            elif not requirement.specifier.contains(version(pins[target]), prereleases=True):
                conflicts.append(
                    f"{pin} requires {requirement.name}{requirement.specifier}, but {named(pins[target])} is pinned"
                )
    not_pinned = {}
    for name in sorted(ranges):
        who = ", ".join(sorted(requiring[name]))
        if ranges[name].is_unsatisfiable():
            conflicts.append(f"no version of {name} meets {ranges[name]}, which {who} require together")
        not_pinned[name] = f"{ranges[name] or 'any version'} (required by {who})"
    return Findings(
        conflicts, [named(pins[name]) for name in pins if name in index and index[name] is None], not_pinned
    )


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def look_up(pin: Requirement, python: str) -> tuple[bool, Metadata | None]:
    """Whether the index has the pin for this Python, and its wheel's metadata; None if there is no wheel.

    Raises RuntimeError with pip's words if the index does not answer.
    """
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    # `===` leaves out local builds such as 2.13.0+cpu, which pip prefers where its configuration offers some.
    exact = f"{pin.name}==={version(pin)}"
    with tempfile.TemporaryDirectory() as folder:  # pip asks for a target when the platform is not its own
        report = Path(folder) / "report.json"
        wanted = [
            "--dry-run",
            "--ignore-installed",
            "--no-deps",
            "--quiet",
            f"--report={report}",
            f"--target={folder}/t",
        ]
        done = pip("install", *wanted, "--only-binary=:all:", f"--python-version={python}", *platforms, exact)
        if done.returncode == 0:
            found = json.loads(report.read_text())["install"][0]["metadata"]
            requires = tuple(Requirement(line) for line in found.get("requires_dist", []))
            return True, Metadata(requires, frozenset(map(canonicalize_name, found.get("provides_extra", []))))
    if "No matching distribution found" not in done.stderr:
        raise RuntimeError(f"pip cannot read the index for {named(pin)}: {done.stderr.strip()}")
    listed = pip("index", "versions", "--pre", "--no-binary=:all:", f"--python-version={python}", pin.name)
    line = next((line for line in listed.stdout.splitlines() if line.startswith("Available versions:")), "")
    sources = [Version(text) for text in line.partition(":")[2].replace(",", " ").split()]
    return version(pin) in sources, None


def read_index(pins: dict[str, Requirement], python: str) -> dict[str, Metadata | None]:
    """The index's entries for `check`."""
    with ThreadPoolExecutor(max_workers=4) as pool:  # each thread waits for a pip
        answers = pool.map(lambda pin: look_up(pin, python), pins.values())
        return {name: metadata for name, (there, metadata) in zip(pins, answers) if there}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", type=Path, default=[Path("requirements/gpu.txt")])
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(arguments)
    results: dict[str, dict[str, Findings]] = {}
    try:
        for file in options.files:
            pins = read_pins(file.read_text(), str(file))
            for python in PYTHONS:
                chosen = active(pins, python)
                results.setdefault(str(file), {})[python] = check(chosen, read_index(chosen, python), python)
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps({file: {p: asdict(found) for p, found in of.items()} for file, of in results.items()}))
    else:
        for file, of in results.items():
            for python, found in of.items():
                print(f"{file}, Python {python}: {len(found.conflicts)} conflicts")
                print(*(f"  conflict: {text}\n" for text in found.conflicts), sep="", end="")
                print(*(f"  metadata unknown: {text}\n" for text in found.unknown), sep="", end="")
                print(*(f"  not pinned: {name} {text}\n" for name, text in found.not_pinned.items()), sep="", end="")
    return int(any(found.conflicts for of in results.values() for found in of.values()))


if __name__ == "__main__":
    sys.exit(main())
