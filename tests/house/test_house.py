"""The house's rules: imports go down, vendors stay in their rooms, every shipped YAML and command works."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import cache
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import cover
import pytest
from pages import blocks

from megatron_rl.commands.size_run import read
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data.forms import recognise
from megatron_rl.planning.layouts import fitting_layouts
from megatron_rl.planning.memory import run_memory
from megatron_rl.planning.shapes import planned_shape
from megatron_rl.preflight.row_sources import heldout_source, training_sources

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_rl"
LAYERS = {
    **dict.fromkeys(["config", "types", "ports", "processes", "spans"], 0),
    **dict.fromkeys(["algorithms", "balance", "models", "verifiers", "data", "observe", "environments"], 1),
    **dict.fromkeys(["loop", "convert", "layout", "explain"], 2),
    **dict.fromkeys(["actor", "rollout", "bridge", "planning"], 3),
    **dict.fromkeys(["cluster", "preflight"], 4),
    "commands": 5,
    **dict.fromkeys(["recipes", "slurm", "api"], 6),
    **dict.fromkeys(["__main__", "trl", "migrate", "run_plan"], 7),
    "tools": 8,
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


RUNS_CODE = {"pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "cloudpickle.loads"}


class Facts(NamedTuple):
    imports: list[str]
    """Every imported module, lazy ones and those under TYPE_CHECKING included; a relative import begins with a dot."""
    code_runners: list[str]
    """The calls that would run code from the bytes that they read."""


@cache  # several rules read the same files
def facts(source: str) -> Facts:
    found = Facts([], [])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.imports.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.imports.extend(f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names)
            if node.module in {"pickle", "marshal", "cloudpickle", "dill"}:
                found.code_runners.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            options = {keyword.arg: keyword.value for keyword in node.keywords}
            if node.func.attr in {"load", "loads", "Unpickler"} or "allow_pickle" in options:
                name = ast.unparse(node.func)
                safe = ast.unparse(options.get("weights_only", ast.Constant(False))) == "True"
                if name in RUNS_CODE or name == "torch.load" and not safe or "allow_pickle" in options:
                    found.code_runners.append(ast.unparse(node))
    return found


def imports(path: Path) -> list[str]:
    return facts(path.read_text()).imports


def fault_of_import(here: str, name: str) -> str | None:
    """What is wrong with an import of `name` in the room `here`."""
    top, *rest = name.split(".")
    if not top:
        return "is a relative import"
    if top == "megatron_rl":
        there = rest[0]
        ordinary = LAYERS[there] < LAYERS[here] or there == here
        if not ordinary and not LAYERS[here] == LAYERS[there] == 0:
            return f"is of layer {LAYERS[there]}, and {here} of {LAYERS[here]}"
    if top in {"recipes", "tools"}:
        return "is nothing that an installed package has"
    if top in VENDOR_ROOMS and here != "tools" and here not in VENDOR_ROOMS[top]:
        return f"is a vendor that {here} does not know"  # benchmarks of the bridge, in tools, drive both its ends
    return None


def test_imports_go_down_and_never_sideways():
    read = sources()
    assert {room(path) for path in read} == set(LAYERS)
    faults = [
        f"{path.relative_to(PACKAGE)}: {name} {fault}"
        for path in read
        for name in imports(path)
        if (fault := fault_of_import(room(path), name))
    ]
    assert faults == []
    for here, name in [
        ("loop", "megatron_rl.actor.actor"),
        ("data", "megatron_rl.verifiers"),
        ("cluster", "recipes.tiny"),
        ("loop", "ray"),
        ("actor", "vllm"),
        ("actor", ".phases"),
    ]:
        assert fault_of_import(here, name)


def test_nothing_that_is_installed_imports_what_only_a_clone_has():
    left_out = "megatron_rl.tools"
    assert f'exclude = ["{left_out}*"]' in (ROOT / "pyproject.toml").read_text()
    own = [path for path in sources() if PACKAGE / "tools" in path.parents]
    assert own
    for path in set(sources()) - set(own):
        assert [name for name in imports(path) if f"{name}.".startswith(f"{left_out}.")] == [], path


def test_vllm_in_the_bridge_is_in_the_files_that_only_its_workers_import():
    for path in (PACKAGE / "bridge").glob("*.py"):
        if any(name.split(".")[0] == "vllm" for name in imports(path)):
            assert path.name in ("receiver.py", "model_parameters.py", "vllm_loaders.py")


@pytest.mark.deep
def test_lower_layers_load_no_vendor():
    """Through other packages neither; the rule above is for what they import themselves."""
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
    modules = ["megatron_rl.commands.grpo", "megatron_rl.commands.sft", "megatron_rl.cluster.verifier"]
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
    pure = {name for name in LAYERS if LAYERS[name] <= 2} | {"planning"}
    assert set(checked) == tested & pure
    for path in (path for name in checked for path in (ROOT / "tests" / "unit" / name).glob("*.py")):
        for name in imports(path):
            top, *rest = name.split(".")
            assert top and top not in VENDOR_ROOMS, f"{path} imports {name}"
            assert top != "megatron_rl" or rest[0] in ("tools", "commands", *pure), f"{path} imports {name}"


def test_no_file_or_message_that_is_read_can_run_code():
    """A checkpoint may come from a stranger, and the stores of PyTorch have no password. The pool's pipes are private
    to a process and the processes that it forks."""
    for path in sources():
        found = facts(path.read_text()).code_runners
        # The last one has the functions of a user's own script, which the configuration names as it names their code.
        known = (
            "megatron_rl/verifiers/pool.py",
            "megatron_rl/verifiers/fork_server.py",
            "megatron_rl/config/function.py",
        )
        assert found == [] or any(map(path.match, known)), (path, found)
    for bad in ("pickle.loads(x)", "torch.load(x)", "torch.load(x, weights_only=False)", "from pickle import loads"):
        assert facts(bad).code_runners
    assert not facts("torch.load(x, weights_only=True)").code_runners


YAMLS = sorted([*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "recipes").rglob("*.yaml")])


def commands(path: Path) -> list[tuple[str, ...]]:
    """The `$` lines that a YAML's head tells a person to type."""
    return [tuple(match.split()) for match in re.findall(r"^(?:# )?\$ (.+)$", path.read_text(), flags=re.MULTILINE)]


def planned(words: tuple[str, ...]) -> list[str]:
    """The command's arguments after `python`; a run is only planned."""
    if words[0] == "python":
        return [*words[1:]]
    assert words[0] == "megatron-rl"
    dry = ["--dry-run"] if words[1] in ("grpo", "ppo", "sft") and "--dry-run" not in words else []
    return ["-m", "megatron_rl.__main__", *words[1:], *dry]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A working folder for all commands: what one has written is there for the next."""
    folder = tmp_path_factory.mktemp("house")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    return folder


@pytest.fixture(scope="module")
def run_here(folder) -> Callable[..., str]:
    """What a command prints, without a process for it: a module's `main` in the folder. A command of several heads runs
    once."""

    @cache
    def run(words: tuple[str, ...], width: int = 260) -> str:
        first, *arguments = planned(words)
        name = arguments.pop(0) if first == "-m" else "megatron_rl." + first.removesuffix(".py").replace("/", ".")
        variables, path, text = dict(os.environ), list(sys.path), StringIO()
        try:
            with pytest.MonkeyPatch.context() as patch, redirect_stdout(text), redirect_stderr(text), chdir(folder):
                patch.setattr(import_module("megatron_rl.commands.launch").console, "width", width)
                status = import_module(name).main(arguments)
        finally:  # recipes set variables when they are imported
            os.environ.clear()
            os.environ.update(variables)
            sys.path[:] = path
        assert status in (0, None), text.getvalue()
        return text.getvalue()

    return run


# The heads of the others first make a model, for which transformers is imported; tests/e2e runs recipes of each kind.
# One of each folder.
ESSENTIAL = list({p.parent: p for p in YAMLS if len(commands(p)) == 1 and "deepseek" not in p.name}.values())


@pytest.mark.parametrize("path", cover.essential(YAMLS, *ESSENTIAL), ids=lambda p: p.name)
def test_every_yaml_dry_runs_with_the_command_at_its_head(path, run_here):
    given = commands(path)
    assert given and any(str(path.relative_to(ROOT)) in words for words in given)
    assert "parameters" in [run_here(words) for words in given][-1]


RECIPES = sorted((ROOT / "recipes").glob("*/*.yaml"))
SMALL = [path for path in RECIPES if path.parent.name in ("qwen3_8b", "qwen3_32b", "one_gpu")]


@pytest.mark.parametrize(
    "path", cover.essential(RECIPES, *(path for path in RECIPES if path in ESSENTIAL)), ids=lambda p: p.name
)
def test_the_record_of_a_recipe_has_the_numbers_of_its_dry_run_and_few_gpus_wait(path, run_here):
    [words] = commands(path)
    text = run_here(words)  # the first column of times is for the expected lengths
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    cells = {first: others for first, *others in rows}
    [row] = [
        line for line in (path.parent / "RECORD.md").read_text().splitlines() if line.startswith(f"| `{path.name}`")
    ]
    [total] = [value for key, (value, *_) in cells.items() if re.fullmatch(r"GPU-hours of [\d,]+ steps", key)]
    peaks = {
        side: [max(map(float, phases)) for first, *phases in rows if len(phases) == 3 and re.fullmatch(name, first)]
        for side, name in {
            "a shared GPU": r"trainer, stage \d+, and engine",
            "a trainer": r"trainer, stage \d+",
            "an engine": r"engine(, stage \d+)?",
        }.items()
    }
    idle = cells.get("idle GPU-hours", ["0%", "0%"])
    assert row.split(" | ")[1:] == [
        *cells["trainer"],
        *cells["engines"],
        ", ".join(f"{max(of_stages):.1f} GB {side}" for side, of_stages in peaks.items() if of_stages),
        idle[0],
        "; ".join(cells["GPU-hours of a step"]),
        f"{total} |",
    ]
    assert float(idle[0].rstrip("%")) <= 25


@pytest.mark.parametrize(
    "path", cover.essential(RECIPES, *(path for path in SMALL if path in ESSENTIAL)), ids=lambda p: p.name
)
def test_the_layout_of_a_recipe_is_the_first_one_of_the_planner_or_the_record_names_that_one(path):
    config = read([str(path)])
    first = fitting_layouts(config, planned_shape(config))[0]
    if (first.parallel, first.recompute) != (config.policy.parallel, config.model.recompute):
        assert first.label in (path.parent / "RECORD.md").read_text()
    changed = read([str(path), *first.overrides])
    assert changed.policy.parallel == first.parallel and run_memory(changed, planned_shape(changed)).problems == []
    assert config.policy.parallel.expert <= 64 and config.rollout.parallel.tensor <= 8


MATHEMATICS = {  # rows in the forms of open-r1/DAPO-Math-17k-Processed and of HuggingFaceH4/aime_2024
    "train": {
        "prompt": "What is the sum of the first six odd numbers?",
        "solution": "36",
        "data_source": "math_dapo",
        "source_prompt": [{"role": "user", "content": "Solve the following problem."}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "36", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "0"},
    },
    "eval": {"id": 1, "problem": "What is 6 x 6?", "solution": "It is 36.", "answer": "036", "url": "", "year": "2024"},
}


@pytest.mark.parametrize("path", [path for path in RECIPES if "olmo" not in path.name], ids=lambda p: p.name)
def test_a_recipe_reads_the_rows_of_its_data_sets(path):
    data = load_config(GrpoRunConfig, [str(path)]).data
    [train], heldout = training_sources(data), heldout_source(data)
    for source, row in ((train, MATHEMATICS["train"]), (heldout, MATHEMATICS["eval"])):
        question = recognise(row, source.reading)
        turns = [turn["role"] for turn in question.messages]
        assert turns == ["system", "user"] and question.messages[1]["content"] in row.values()
        assert question.columns["ground_truth"].lstrip("0") == "36"


PLANS = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("sizing", "one_gpu", "qwen3_32b_on_slurm"))]


@pytest.mark.parametrize("page", PLANS, ids=lambda page: page.name)
def test_the_plans_on_a_page_are_what_the_commands_print(run_here, page, tmp_path):
    """Each block of output is a part of what the command above it prints."""
    command, compared = "", 0
    for block in blocks(page):
        if block.mark == "run":
            command = block.text.replace("cluster.yaml", str(tmp_path / "cluster.yaml"))
        elif block.mark == "file: cluster.yaml":
            (tmp_path / "cluster.yaml").write_text(block.text)
        elif block.mark == "shows" and re.search(r"(?m)^(│|#SBATCH)", block.text):
            kind, *arguments = command.split()[1:]
            printed = run_here(("megatron-rl", kind, *arguments), width=100)
            printed = re.sub(" +", " ", printed.replace("┃", "│"))
            lines = [re.sub(" +", " ", line) for line in block.text.splitlines() if line.startswith(("│", "#SBATCH"))]
            assert [line for line in lines if line not in printed] == [], f"{block.where}: {command} prints others"
            compared += len(lines)
    assert compared


def test_no_file_speaks_of_a_machine_or_an_index():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    forbidden = re.compile("|".join(["/wor" + "k/", "/ro" + "ot/", "pypi" + r"\.org", "index" + "-url"]))
    for name in tracked:
        if (ROOT / name).suffix in {".py", ".md", ".toml", ".yaml", ".txt", ".sh", ""} and (ROOT / name).is_file():
            found = forbidden.search((ROOT / name).read_text())
            assert not found, f"{name}: {found[0]}"


def test_nothing_large_or_packed_is_committed_by_accident():
    """A package that a command left in the clone is such a file: 41 wheels, 17 MB, were committed once."""
    meant = {"recipes/tiny/data/warm_start/model.safetensors"}  # the demo's first weights, 1.3 MB
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    sizes = {name: (ROOT / name).stat().st_size for name in tracked if (ROOT / name).is_file()}
    assert {name for name, size in sizes.items() if size > 200_000} == meant
    assert [name for name in sizes if Path(name).suffix in {".whl", ".zip", ".tar", ".tgz", ".so"}] == []
