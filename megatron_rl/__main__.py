"""The command `megatron-rl`: every command by name, wherever the package is installed.

megatron-rl COMMAND ... , or python -m megatron_rl COMMAND ...
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from megatron_rl.processes import piped

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Train": {
        "demo": ("recipes.tiny.demo", "teach a tiny model to add, on two CPU cores"),
        "demo-real": ("recipes.smollm2.demo", "teach a real small model one-digit sums, on two CPU cores"),
        "grpo": ("commands.grpo", "train by reinforcement: Megatron trains, vLLM answers"),
        "ppo": ("commands.ppo", "the same with a critic"),
        "sft": ("commands.sft", "train on rows with completions"),
        "dpo": ("commands.dpo", "train on preferences: pairs of answers (DPO, IPO, SimPO, ORPO, KTO)"),
        "reward-model": ("commands.reward_model", "train a reward model on pairs of answers"),
    },
    "Plan": {
        "init": ("commands.init", "write a YAML file to begin with, in which each key has its meaning"),
        "doctor": ("commands.doctor", "print what is installed, what a run will use, and what is slower for it"),
        "size-run": ("commands.size_run", "print a run's memory by phase, and the trainer's layouts that fit"),
        "plan-sync": ("commands.plan_sync", "compute the bytes and times of a weight transfer"),
        "reasoning-gym-rows": ("commands.reasoning_gym_rows", "write rows of any task of the library reasoning-gym"),
        "filter-difficulty": (
            "commands.filter_difficulty",
            "keep prompts that a model neither always nor never answers",
        ),
        "pairs": ("commands.pairs", "write pairs for `dpo` from the answers of runs or of two models"),
        "generate": ("commands.generate", "answer the prompts of a run's first steps, for rollout.replay"),
    },
    "Inspect": {
        "watch": ("commands.watch", "serve the report of a run to a browser, and follow the run"),
        "report": ("commands.report", "make the report of a run, or compare several runs"),
        "step-times": ("commands.step_times", "print where a run's time goes, who waits, and what would help first"),
        "explain": ("commands.explain", "name the answers and tokens that a metric of a step comes from"),
        "evaluate": ("commands.evaluate", "print accuracy, pass@k and maj@n of a model on rows with known answers"),
    },
    "Models": {
        "export": ("commands.export_checkpoint", "write any checkpoint of a run as a Hugging Face folder"),
        "convert to-megatron": ("commands.hf_to_megatron", "Hugging Face folder to Megatron-Core checkpoint"),
        "convert to-hf": ("commands.megatron_to_hf", "Megatron-Core checkpoint to Hugging Face folder"),
        "convert from-gguf": ("commands.gguf_to_hf", "GGUF file to Hugging Face folder"),
        "convert verify": ("commands.verify_checkpoint", "check a checkpoint, or compare two of them bit by bit"),
        "merge": ("commands.merge", "add trained adapters to their base model"),
        "push-weights": ("commands.push_checkpoint", "push a checkpoint into running vLLM servers"),
    },
    "Migrate": {
        "from-verl": (
            "migrate.verl.command",
            "write a configuration from verl's run script, and what became of each key",
        ),
    },
    "Reference": {
        "config": ("commands.config", "print the reference of a section or of a key of the configuration"),
        "metrics": ("commands.metrics", "print what the metrics of a run mean"),
        "algorithms": ("commands.algorithms", "list losses, advantage estimators, corrections and their sources"),
    },
}
"""Each command has a module below `megatron_rl`, with `main(arguments) -> exit status`, and a purpose."""
if (Path(__file__).parent / "tools").exists():  # only a clone has it
    purpose = "check on one GPU what a CPU cannot show, in fifteen minutes"
    GROUPS["Plan"]["gpu-day"] = "tools.bench.gpu_day.command", purpose
    purpose = "propose the table of a model that has no family, and check it"
    GROUPS["Models"]["family"] = "tools.bench.family.command", purpose
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
OTHERS = {"where": "step-times", "push": "push-weights", "help": "--help", "version": "--version", "train": "grpo"}
"""The names that commands had before 0.2.0, and what else people type, with the names today."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first words name; returns its exit status."""
    return piped(partial(_run, list(sys.argv[1:] if arguments is None else arguments)))


def _run(words: list[str]) -> int:
    for name, (module, _) in COMMANDS.items():
        size = len(name.split())
        if words[:size] == name.split():
            # argparse takes a program's name from here, for its usage line and its errors.
            sys.argv = [f"megatron-rl {name}", *words[size:]]
            status: int = import_module(f"megatron_rl.{module}").main(words[size:])
            return status
    if words[:1] in (["--version"], ["-V"]):
        print(f"megatron-rl {_version()}")
        return 0
    is_part = words[:1] == ["convert"] and words[1:] in ([], ["-h"], ["--help"])
    text = _listing("convert " if is_part else "")
    if is_part or not words or words[0] in ("-h", "--help"):
        print(text)
        return 0
    given = " ".join(words[:2])
    near = [OTHERS[words[0]]] if words[0] in OTHERS else get_close_matches(given, COMMANDS, 1)
    near = near or get_close_matches(words[0], COMMANDS, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    print(f"{text}\n\nerror: there is no command {given!r}{hint}", file=sys.stderr)
    return 2


def _version() -> str:
    """A clone's own version: its installed metadata is as old as its last `make setup`."""
    project = Path(__file__).parents[1] / "pyproject.toml"
    return str(tomllib.loads(project.read_text())["project"]["version"]) if project.exists() else version("megatron_rl")


def _listing(prefix: str) -> str:
    """The commands that begin with `prefix`, by groups."""
    lines = ["usage: megatron-rl COMMAND ... (each command has --help)"]
    for title, group in GROUPS.items():
        shown = {name: purpose for name, (_, purpose) in group.items() if name.startswith(prefix)}
        if shown:
            lines += ["", title, *(f"  {name:<20} {purpose}" for name, purpose in shown.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
