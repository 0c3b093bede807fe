"""Add trained adapters to their base model: a Hugging Face folder that transformers and vLLM load, on a CPU.

The adapters are a folder in PEFT's form, such as `hf/adapters` of a run. Weights without adapters keep their bits; the
others become W + scale B A, computed in float32. Where the run had its base model in fp8 (`policy.lora.base`), the
weights of linear layers are rounded to that first, so the result is the model that was trained.

    megatron-rl merge models/Qwen3-32B runs/mine/hf/adapters models/merged
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.convert import Options, carry_out, manifest, open_checkpoint, to_hub
from megatron_rl.convert.adapters import finite, write_merged
from megatron_rl.convert.command import num_cores, run
from megatron_rl.convert.fp8 import rounded
from megatron_rl.convert.source import Source
from megatron_rl.convert.tensor_files import Maps, read_safetensors, rectangle
from megatron_rl.convert.work import require_new
from megatron_rl.models import FAMILIES, is_linear_weight, slices
from megatron_rl.models.adapters import A, B
from megatron_rl.models.composite import name_alone
from megatron_rl.models.peft import (
    PREFIX,
    TENSORS,
    base_form,
    base_of,
    read_adapters,
    require_base,
    require_fitting,
)
from megatron_rl.processes import piped


def main(arguments: Sequence[str] | None = None) -> int:
    return run(_merge, arguments)


def _merge(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="the base model, in any form that the converter reads")
    parser.add_argument("adapters", type=Path, help="the folder with adapter_config.json")
    parser.add_argument("target", type=Path, help="a folder that does not exist yet")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="convert the base model to this dtype first; with the run's model.dtype the result has the bits of its "
        "folder hf. By default each tensor keeps its own",
    )
    given = parser.parse_args(arguments)
    require_new(given.target)
    unfinished = given.target.with_name(f"{given.target.name}.unmerged")
    shutil.rmtree(unfinished, ignore_errors=True)
    source = open_checkpoint(given.base)
    adapters = read_adapters(given.adapters)
    require_fitting(given.adapters, replace(source.shape, adapters=adapters), given.base)
    told = base_of(given.adapters)
    if not require_base(told, given.base, str(given.adapters)):
        why = "names its base model in another form" if told else "does not name its base model"
        print(f"not checked, because {given.adapters} {why}: whether that is {given.base}")
    maps = Maps({})
    tensors = {
        name: finite(maps.tensor(held), held) for name, held in read_safetensors(given.adapters / TENSORS).items()
    }
    if source.shape.vision is None:
        carry_out(to_hub(source, Options(dtype=given.dtype)), unfinished, num_cores(), lambda num_bytes: None)
        (unfinished / manifest.NAME).unlink()  # its checksums are the base model's
    elif given.dtype is None:
        shutil.copytree(given.base, unfinished, copy_function=shutil.copyfile)  # its other parts stay as they are
    else:
        raise ValueError(f"--dtype does not go together with a model that sees images, {given.base}; leave it out")
    num_merged = _add(tensors, unfinished, adapters.scale, base_form(given.adapters) == "fp8")
    unfinished.rename(given.target)
    print(f"{num_merged} weights of {given.base} merged with {given.adapters}: {given.target}")


@torch.no_grad()
def _add(adapters: dict[str, Tensor], folder: Path, scale: float, in_fp8: bool) -> int:
    """Add scale B A to the weights of a Hugging Face folder, in its files. Returns the number of weights."""
    source = open_checkpoint(folder)
    if in_fp8:
        for name, extents in FAMILIES[source.shape.family].hf_tensors(source.shape).items():
            if is_linear_weight(name, len(extents), source.shape):
                weight = _open(source, name)
                weight.copy_(rounded(weight))
    named = [name for name in adapters if name.endswith(f".{A}.weight")]
    for name in named:
        a, b = adapters[name], adapters[name.replace(A, B)]
        weight = _open(source, name_alone(source.shape, name.removeprefix(PREFIX)).replace(f"{A}.", ""))
        write_merged(weight, weight, a, b, scale)
    return len(named)


def _open(source: Source, name: str) -> Tensor:
    """A tensor of a Hugging Face folder in the memory of its file, which changes with it."""
    [region] = source.regions[name]
    held = region.stored
    whole = torch.from_file(str(held.path), shared=True, size=held.path.stat().st_size, dtype=torch.uint8)
    tensor = whole[held.start : held.start + held.num_bytes].view(held.dtype).view(held.extents)
    return rectangle(tensor, held.view, region.box) if held.view else tensor[slices(region.box)]


if __name__ == "__main__":
    sys.exit(piped(main))
