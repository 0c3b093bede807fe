"""Export a checkpoint of a run as a Hugging Face folder that transformers and vLLM load, on one machine without a GPU.

This needs neither the ranks that wrote the checkpoint nor Megatron-Core nor, unless it sees images, the model that the
run began with. Every byte that is exported is checked against its checksum. A checkpoint of adapters becomes a folder
in PEFT's form; `megatron-rl merge` adds it to the base model. `megatron-rl convert to-hf` does the same for the folder
of one checkpoint, without a vision tower.

    megatron-rl export runs/gsm8k_32b models/after_the_newest_step
    megatron-rl export runs/gsm8k_32b models/after_step_40 --step 40
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_rl.convert import manifest
from megatron_rl.convert.adapters import write_adapters
from megatron_rl.convert.command import num_cores, run
from megatron_rl.convert.conversion import Options, to_hub
from megatron_rl.convert.source import open_checkpoint
from megatron_rl.convert.work import carry_out, require_new
from megatron_rl.loop.checkpoints import PATTERN, find_checkpoints, read_extra
from megatron_rl.processes import piped


def main(arguments: Sequence[str] | None = None) -> int:
    return run(_export, arguments)


def _export(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder or one of its checkpoints")
    parser.add_argument("target", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--step", type=int, help="the step of the checkpoint; default: the newest one")
    given = parser.parse_args(arguments)
    require_new(given.target)
    checkpoint = find_checkpoint(given.run, given.step)
    fields = manifest.read(checkpoint)
    if fields is None or "training" not in fields:
        raise ValueError(f"{checkpoint} is not a checkpoint of a run")
    shape, dtype = manifest.saved_shape(checkpoint, fields), fields["training"]["dtype"]
    if shape.adapters is not None and shape.value_head:
        raise ValueError(
            f"{checkpoint} holds the adapters of a critic and its value head, which PEFT's form does not have; take "
            "the folder critic_hf, which the run writes at its end, with the whole critic"
        )
    source = open_checkpoint(checkpoint, fields=fields, adapters=True)
    base = Path(read_extra(checkpoint)["config"]["model"]["path"])
    if shape.adapters is not None:
        num_bytes = write_adapters(source, getattr(torch, dtype), given.target, str(base))
    else:
        whole = base if shape.vision is not None else None
        if whole and not (whole / "config.json").is_file():
            raise ValueError(
                f"{checkpoint} is of a model that sees images, and the names of its tensors, and a frozen tower, are "
                f"taken from the run's model.path, {whole}, which is not there; put the folder back, or take the text "
                "model alone with `megatron-rl convert to-hf`"
            )
        made = carry_out(to_hub(source, Options(dtype), whole), given.target, num_cores(), lambda _: None)
        num_bytes = made.num_bytes
    print(f"{checkpoint}: {num_bytes:,} bytes written to {given.target}")


def find_checkpoint(run: Path, step: int | None) -> Path:
    """
    Raises:
        ValueError: the folder has no checkpoint, or none of that step.
    """
    if PATTERN.fullmatch(run.name) and step is None:
        return run
    if not run.is_dir():
        raise ValueError(f"there is no folder {run}; give the folder of a run, such as runs/first")
    found = find_checkpoints(run / "checkpoints")
    if not found:
        raise ValueError(f"{run} has no checkpoint (checkpoints/step_...)")
    if step is not None and step not in found:
        raise ValueError(f"{run} has no checkpoint of step {step}; it has {sorted(found)}")
    return found[max(found) if step is None else step]


if __name__ == "__main__":
    sys.exit(piped(main))
