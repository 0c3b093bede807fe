"""The house's rules: imports go down, vendors stay in their rooms, every shipped YAML and command works."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from megatron_rl.recipes.launch import console
from megatron_rl.tools.record_times import replaced

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_rl"
LAYERS = {
    **dict.fromkeys(["config", "types", "ports", "processes"], 0),
    **dict.fromkeys(["algorithms", "balance", "layout", "verifiers", "data", "observe", "environments"], 1),
    **dict.fromkeys(["loop", "convert", "planning"], 2),
    **dict.fromkeys(["actor", "rollout", "bridge"], 3),
    "cluster": 4,
    "recipes": 5,
    **dict.fromkeys(["tools", "slurm"], 6),
    "__main__": 7,
}
VENDOR_ROOMS = {
    "megatron": {"actor"},
    "transformer_engine": {"actor"},
    "apex": {"actor"},
    "vllm": {"rollout", "bridge"},
    "ray": {"cluster"},
    "nemo_run": {"slurm"},
}


def sources() -> list[Path]:
    """The package's modules; recipes, tools and slurm are folders beside it, to which it holds links."""
    rooms = [PACKAGE, *(PACKAGE / name for name in ("recipes", "tools", "slurm"))]
    found = {path for room in rooms for path in room.rglob("*.py")}
    return sorted(path for path in found if path != PACKAGE / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    """Every imported module, lazy ones and those under TYPE_CHECKING included."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_and_never_sideways(path):
    here = room(path)
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "megatron_rl":
            there = rest[0]
            ordinary = LAYERS[there] < LAYERS[here] or there == here
            assert ordinary or LAYERS[here] == LAYERS[there] == 0, f"{here} (L{LAYERS[here]}) imports {name}"
        assert top not in {"recipes", "tools"}, f"{path} imports {name}, which an installed package does not have"
        if top in VENDOR_ROOMS and here != "tools":  # benchmarks of the bridge drive both its ends
            assert here in VENDOR_ROOMS[top], f"{here} imports {name}"


def test_vllm_in_the_bridge_is_in_the_files_that_only_its_workers_import():
    for path in (PACKAGE / "bridge").glob("*.py"):
        if any(name.split(".")[0] == "vllm" for name in imports(path)):
            assert path.name in ("receiver.py", "recording.py")


def test_lower_layers_load_no_vendor():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sources()
        if LAYERS[room(path)] <= 2
    ]
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        f"print(*sorted(set({list(VENDOR_ROOMS)!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_what_starts_without_torch_does_not_import_it():
    """Dry runs and errors of a configuration, which a person waits for, and the processes of the verifiers."""
    modules = ["megatron_rl.recipes.grpo", "megatron_rl.recipes.sft", "megatron_rl.cluster.verifier"]
    code = f"import sys, {', '.join(modules)}; print(*sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_names_of_the_algorithms_are_those_of_their_modules():
    """They are imported at their first use."""
    algorithms = import_module("megatron_rl.algorithms")
    for name in algorithms.__all__:
        assert getattr(algorithms, name).__name__ == name
    with pytest.raises(ImportError, match="misspelt"):
        exec("from megatron_rl.algorithms import misspelt")


def test_make_check_runs_the_tests_of_all_rooms_without_vendors_and_they_load_none():
    """The modules of these rooms load none either: see the test above."""
    checked = re.search(r"^pure := (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1].split()
    tested = {path.name for path in (ROOT / "tests" / "unit").iterdir() if any(path.glob("test_*.py"))}
    assert set(checked) == {name for name in tested if LAYERS[name] <= 2}
    for path in (path for name in checked for path in (ROOT / "tests" / "unit" / name).glob("*.py")):
        for name in imports(path):
            top, *rest = name.split(".")
            assert top not in VENDOR_ROOMS, f"{path} imports {name}"
            assert top != "megatron_rl" or rest[0] == "tools" or LAYERS[rest[0]] <= 2, f"{path} imports {name}"


RUNS_CODE = {"pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "cloudpickle.loads"}


def code_runners(source: str) -> list[str]:
    """The calls that would run code from the bytes that they read."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, options = ast.unparse(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
            safe = ast.unparse(options.get("weights_only", ast.Constant(False))) == "True"
            if name in RUNS_CODE or name == "torch.load" and not safe or "allow_pickle" in options:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and node.module in {"pickle", "marshal", "cloudpickle", "dill"}:
            found.append(ast.unparse(node))
    return found


def test_no_file_or_message_that_is_read_can_run_code():
    """A checkpoint may come from a stranger, and the stores of PyTorch have no password. The pool's pipes are private
    to a process and the processes that it forks."""
    for path in sources():
        found = code_runners(path.read_text())
        assert found == [] or path.match("megatron_rl/verifiers/pool.py"), (path, found)
    for bad in ("pickle.loads(x)", "torch.load(x)", "torch.load(x, weights_only=False)", "from pickle import loads"):
        assert code_runners(bad)
    assert not code_runners("torch.load(x, weights_only=True)")


def commands(path: Path) -> list[list[str]]:
    """The `$` lines that a YAML's head, or the README, tells a person to type."""
    return [match.split() for match in re.findall(r"^(?:# )?\$ (.+)$", path.read_text(), flags=re.MULTILINE)]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    return tmp_path


def planned(words: list[str]) -> list[str]:
    """The command's arguments after `python`; a recipe is only planned."""
    assert words[0] == "python"
    dry = ["--dry-run"] if words[1].startswith("recipes/") and "--dry-run" not in words else []
    return [*words[1:], *dry]


def printed(words: list[str], folder: Path) -> str:
    """What a command prints in a process of its own."""
    command = [sys.executable, *planned(words)]
    environment = os.environ | {"COLUMNS": "100"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def run_here(folder, monkeypatch, capsys) -> Callable[[list[str]], str]:
    """What a command prints, without a process for it: a module's `main` in the folder."""

    def run(words: list[str]) -> str:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", list(sys.path))
        before = dict(os.environ)
        first, *arguments = planned(words)
        name = arguments.pop(0) if first == "-m" else "megatron_rl." + first.removesuffix(".py").replace("/", ".")
        try:
            status = import_module(name).main(arguments)
        finally:  # recipes set variables when they are imported
            os.environ.clear()
            os.environ.update(before)
        shown = capsys.readouterr()
        assert status in (0, None), shown.out + shown.err
        return shown.out

    return run


@pytest.mark.parametrize(
    "path", sorted([*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "recipes").rglob("*.yaml")]), ids=lambda p: p.name
)
def test_every_yaml_dry_runs_with_the_command_at_its_head(path, run_here):
    given = commands(path)
    assert given and any(str(path.relative_to(ROOT)) in words for words in given)
    assert "parameters" in [run_here(words) for words in given][-1]


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*/*.yaml")), ids=lambda p: p.name)
def test_the_record_of_a_recipe_has_the_numbers_of_its_dry_run(path, run_here, monkeypatch):
    monkeypatch.setattr(console, "width", 160)
    [words] = commands(path)
    text = run_here(words)
    cells = {key.strip(): value.strip() for key, value in re.findall(r"│(.*?)│(.*?)│", text)}
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    [row] = [
        line for line in (path.parent / "RECORD.md").read_text().splitlines() if line.startswith(f"| `{path.name}`")
    ]
    total = next(value for key, value in cells.items() if key.endswith("such steps"))
    held = {
        side: f"{max(phases, key=float)} GB {side}"
        for side, name in {
            "a shared GPU": r"trainer, stage \d, and engine",
            "a trainer": r"trainer, stage \d",
            "an engine": "engine",
        }.items()
        for first, *phases in rows
        if len(phases) == 3 and re.fullmatch(name, first)
    }
    received = cells["bytes into the fullest engine rank"].partition(" (")[0]
    assert row.split(" | ")[1:] == [
        cells["trainer"],
        cells["engines"],
        ", ".join(held.values()),
        received,
        f"{cells['GPU-hours']}, {total} |",
    ]


def test_the_readmes_commands_work(folder):
    """Typed as they stand there, so each in a process; `make demo` is what it calls, `make test` is this run."""
    given = commands(ROOT / "README.md")
    assert ["make", "demo"] in given and ["make", "test"] in given
    plan = [printed(words, folder) for words in given if words[0] == "python"][-1]
    shown = (ROOT / "README.md").read_text()
    for line in plan.splitlines():
        if line.startswith("│"):
            assert line.strip() in shown, "the README's dry run is an old one"


def test_the_times_in_the_readme_are_one_line_that_a_tool_writes():
    text = (ROOT / "README.md").read_text()
    changed = replaced(text, "other times")
    assert [line for line in changed.splitlines() if line not in text.splitlines()] == ["other times"]
    assert len(changed.splitlines()) == len(text.splitlines())


def test_no_file_speaks_of_a_machine_or_an_index():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    forbidden = re.compile("|".join(["/wor" + "k/", "/ro" + "ot/", "pypi" + r"\.org", "index" + "-url"]))
    for name in tracked:
        if (ROOT / name).suffix in {".py", ".md", ".toml", ".yaml", ".txt", ".sh", ""} and (ROOT / name).is_file():
            found = forbidden.search((ROOT / name).read_text())
            assert not found, f"{name}: {found[0]}"
