"""Convert a GGUF file to a Hugging Face folder, on CPUs: what a run begins with, and what the other conversions read.

The file may hold F32, F16, BF16, Q8_0, Q4_1 or Q4_0. Blocks are dequantised: the model is the rounded one of the file,
not the original release. Tokenizer and chat template are taken from the file. The packages gguf and accelerate are
needed (pip install gguf accelerate).

    megatron-rl convert from-gguf models/SmolLM2-135M-Instruct.Q4_1.gguf models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_rl.convert import command
from megatron_rl.convert.gguf import from_gguf
from megatron_rl.processes import piped


def main(arguments: Sequence[str] | None = None) -> int:
    return command.run(_convert, arguments)


def _convert(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a .gguf file")
    parser.add_argument("target", type=Path, help="a folder that does not exist yet")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="the dtype of all tensors; default: float32"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of sentences")
    given = parser.parse_args(arguments)
    start = time.perf_counter()
    done = from_gguf(given.source, given.target, given.dtype)
    seconds = time.perf_counter() - start
    if given.json:
        print(json.dumps(asdict(done) | {"target": str(given.target), "dtype": given.dtype, "seconds": seconds}))
        return
    print(f"{done.family} of {done.num_parameters:,} parameters in {given.dtype}, {seconds:.1f} s: {given.target}")
    if done.is_quantised:
        print(f"a dequantised model: its weights are those that {done.described} stand for, not the original ones")
    for note in done.notes:
        print(f"note: {note}")


if __name__ == "__main__":
    sys.exit(piped(main))
