"""Export a checkpoint of a run as a Hugging Face folder that transformers and vLLM load, on one machine without a GPU.

This needs neither the ranks that wrote the checkpoint nor Megatron-Core. Every byte is checked against its checksum.

    python tools/export_checkpoint.py runs/gsm8k_32b models/after_the_newest_step
    python tools/export_checkpoint.py runs/gsm8k_32b models/after_step_40 --step 40
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.actor.saved import export_saved
from megatron_rl.loop.checkpoints import PATTERN, find_checkpoints, read_extra


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder or one of its checkpoints")
    parser.add_argument("target", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--step", type=int, help="the step of the checkpoint; default: the newest one")
    parser.add_argument(
        "--model",
        type=Path,
        help="the model that the run began with, for tokenizer and configuration; default: the path that the run used",
    )
    given = parser.parse_args(arguments)
    try:
        checkpoint = find_checkpoint(given.run, given.step)
        model = given.model or Path(read_extra(checkpoint)["config"]["model"]["path"])
        if not (model / "config.json").is_file():
            raise ValueError(f"the model that the run began with, {model}, is missing; give its folder with --model")
        num_bytes = export_saved(checkpoint, given.target, model)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{checkpoint}: {num_bytes:,} bytes of weights written to {given.target}")
    return 0


def find_checkpoint(run: Path, step: int | None) -> Path:
    """
    Raises:
        ValueError: the folder has no checkpoint, or none of that step.
    """
    if PATTERN.fullmatch(run.name) and step is None:
        return run
    found = find_checkpoints(run / "checkpoints")
    if not found:
        raise ValueError(f"{run} has no checkpoint (checkpoints/step_...)")
    if step is not None and step not in found:
        raise ValueError(f"{run} has no checkpoint of step {step}; it has {sorted(found)}")
    return found[max(found) if step is None else step]


if __name__ == "__main__":
    sys.exit(main())
