"""Write a YAML file to begin with: the keys that most runs set, each with its meaning.

Overrides replace the values of the file. All other keys have defaults; `megatron-rl config` prints them.

    megatron-rl init run.yaml model.path=models/Qwen3-0.6B data.train=rows.jsonl
    megatron-rl init demonstrations.yaml --kind sft
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml

from megatron_rl.config.load import merge, merge_arguments, validate
from megatron_rl.config.reference import find, parts, plain
from megatron_rl.config.schema import BaseConfig, DpoRunConfig, GrpoRunConfig, RewardModelRunConfig, SftRunConfig
from megatron_rl.processes import open_text, piped

COMMON: dict[str, Any] = {
    "run": {"name": "first", "steps": 100},
    "model": {"path": "models/Qwen3-0.6B"},
    "policy": {
        "parallel": {"tensor": 1, "pipeline": 1, "context": 1},
        "optimizer": {"lr": 1e-6, "warmup_steps": 5},
    },
    "balance": {"max_tokens_per_microbatch": 16384},
    "checkpoint": {"every": 20, "keep": 2},
}
SFT_POLICY: dict[str, Any] = {**COMMON["policy"], "optimizer": {"lr": 1e-5, "warmup_steps": 5}}
STARTERS: dict[str, dict[str, Any]] = {
    "grpo": {
        **COMMON,
        "data": {"train": "rows.jsonl", "eval": None},
        "rollout": {
            "num_engines": 1,
            "parallel": {"tensor": 1},
            "prompts_per_step": 64,
            "samples_per_prompt": 8,
            "max_prompt_tokens": 1024,
            "max_response_tokens": 4096,
            "max_lag": 0,
        },
        "rewards": [{"kind": "mathematics"}],
        "eval": {"every": 0},
    },
    "sft": {
        **COMMON,
        "policy": SFT_POLICY,
        "sft": {"rows": "demonstrations.jsonl", "rows_per_step": 64, "max_tokens": 4096},
    },
    "dpo": {
        **COMMON,
        "dpo": {"rows": "pairs.jsonl", "rows_per_step": 64, "max_tokens": 4096, "loss": {"kind": "dpo", "beta": 0.1}},
    },
    "reward-model": {
        **COMMON,
        "reward_model": {"rows": "pairs.jsonl", "rows_per_step": 64, "max_tokens": 4096},
    },
}
"""The file of each kind of run."""
CONFIGS: dict[str, type[BaseConfig]] = {
    "grpo": GrpoRunConfig,
    "sft": SftRunConfig,
    "dpo": DpoRunConfig,
    "reward-model": RewardModelRunConfig,
}


def text_of(kind: str, values: Mapping[str, Any]) -> str:
    """The file's text. Each key has the first sentence of its reference before it."""
    head = [f"# megatron-rl {kind} FILE --dry-run   checks this file and prints what the run will need"]
    return "\n".join([*head, *_lines(values, ())]) + "\n"


def _lines(values: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[str]:
    indent = "  " * len(above)
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _lines(value, (*above, name))
            continue
        for line in wrap(_meaning(".".join((*above, name))), 100 - len(indent)):
            yield f"{indent}# {line}"
        written = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
        yield f"{indent}{name}: {written}"


def _meaning(path: str) -> str:
    """
    Raises:
        ValueError: there is no such key.
    """
    keys = [key for part in parts() for key in part.keys if plain(key.path) == path]
    if not keys:  # a list of sections
        find(path)
        return f"`megatron-rl config {path}` prints all kinds."
    return keys[0].meaning.partition(". ")[0].rstrip(".") + "."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE.yaml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--kind", choices=STARTERS, default="grpo", help="the kind of run (default: grpo)")
    options = parser.parse_intermixed_args(arguments)
    try:
        if wrong := [word for word in options.overrides if "=" not in word]:
            raise ValueError(f"{wrong[0]!r} is no override like run.steps=10")
        values, given = deepcopy(STARTERS[options.kind]), merge_arguments(options.overrides)
        if isinstance(run := given.get("run"), dict) and run.get("epochs") is not None:
            del values["run"]["steps"]  # the length is one of the two
        merge(values, given)
        validate(CONFIGS[options.kind], values | {"run": {"steps": 1} | values["run"]}, lambda: True)
        text = text_of(options.kind, values)
        with open_text(options.file, "x") as file:
            file.write(text)
    except FileExistsError:
        print(f"error: {options.file} is there already; give another name", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {options.file} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.file} is written; next: megatron-rl {options.kind} {options.file} --dry-run")
    return 0


if __name__ == "__main__":
    sys.exit(piped(main))
