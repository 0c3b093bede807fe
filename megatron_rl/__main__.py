"""The command `megatron-rl`: every recipe and tool by name, wherever the package is installed.

megatron-rl COMMAND ... , or python -m megatron_rl COMMAND ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.util import find_spec

from megatron_rl.processes import piped

COMMANDS = {
    "grpo": ("recipes.grpo", "train by reinforcement: Megatron trains, vLLM answers"),
    "ppo": ("recipes.ppo", "the same with a critic"),
    "sft": ("recipes.sft", "train on rows with completions"),
    "demo": ("recipes.tiny.demo", "teach a tiny model to add, on two CPU cores"),
    "demo-real": ("recipes.smollm2.demo", "teach a real small model one-digit sums, on two CPU cores"),
    "export": ("tools.export_checkpoint", "write any checkpoint of a run as a Hugging Face folder"),
    "evaluate": ("tools.evaluate", "print accuracy, pass@k and maj@n of a model on rows with known answers"),
    "filter-difficulty": ("tools.filter_difficulty", "keep the prompts that a model neither always nor never answers"),
    "explain": ("recipes.explain", "name the answers and tokens that a metric of a step comes from"),
    "generate": ("tools.generate", "answer the prompts of a run's first steps without training, for rollout.replay"),
    "reasoning-gym-rows": ("tools.reasoning_gym_rows", "write rows of any task of the library reasoning-gym"),
    "size-run": ("tools.size_run", "print a run's memory by phase, and the trainer's layouts that fit"),
    "doctor": ("tools.doctor", "print what is installed, what a run will use, and what is slower for it"),
    "report": ("tools.report", "make the report of a run, or compare several runs"),
    "watch": ("tools.watch", "serve the report of a run to a browser, and follow the run"),
    "where": ("tools.where", "print where a run's time goes, who waits for whom, and what would help first"),
    "from-verl": (
        "migrate.verl.command",
        "write a configuration from a run script of verl, with what became of each key",
    ),
    "convert to-megatron": ("tools.hf_to_megatron", "Hugging Face folder to Megatron-Core checkpoint"),
    "convert to-hf": ("tools.megatron_to_hf", "Megatron-Core checkpoint to Hugging Face folder"),
    "convert from-gguf": ("tools.gguf_to_hf", "GGUF file to Hugging Face folder"),
    "convert verify": ("tools.verify_checkpoint", "check a checkpoint, or compare two of them bit by bit"),
    "merge": ("tools.merge", "add trained adapters to their base model"),
    "push": ("tools.push_checkpoint", "push a checkpoint into running vLLM servers"),
    "plan-sync": ("tools.plan_sync", "compute the bytes and times of a weight transfer"),
    "config": ("tools.config", "print the reference of a section or of a key of the configuration"),
    "metrics": ("tools.metrics", "print what the metrics of a run mean"),
    "algorithms": ("tools.algorithms", "list losses, advantage estimators, corrections and their sources"),
}
"""Module below `megatron_rl`, with `main(arguments) -> exit status`, and what the command does."""
if find_spec("megatron_rl.tools.bench"):  # only a clone has it
    COMMANDS["family"] = "tools.bench.family", "propose the table of a model that no family has yet, and check it"
    COMMANDS["gpu-day"] = "tools.bench.gpu_day", "check on one GPU what a CPU cannot show, in less than fifteen minutes"


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
    listing = "\n".join(f"  {name:<20} {purpose}" for name, (_, purpose) in COMMANDS.items())
    text = f"usage: megatron-rl COMMAND ... (each command has --help)\n\n{listing}"
    if words and words[0] not in ("-h", "--help"):
        given = " ".join(words[:2])
        near = get_close_matches(given, COMMANDS, 1) or get_close_matches(words[0], COMMANDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(f"{text}\n\nerror: there is no command {given!r}{hint}", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
