"""Convert a Hugging Face folder to Megatron-Core, on CPUs.

Without a mesh the result is a distributed checkpoint (`torch_dist`) that Megatron-Core's dist_checkpointing.load reads
with any tensor, pipeline and expert parallelism. With a mesh the result is the parameters of each model-parallel rank,
in safetensors files. Configuration, tokenizer and chat template are written to its subfolder hf/.

    megatron-rl convert to-megatron models/Qwen3-32B checkpoints/qwen3-32b
    megatron-rl convert to-megatron models/Qwen3-32B checkpoints/qwen3-32b-tp8-pp4 --tensor 8 --pipeline 4 --dry-run
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_rl.convert import command, open_checkpoint, smallest_mesh, to_open, to_ranks
from megatron_rl.processes import piped
from megatron_rl.types import Mesh

AXES = ("tensor", "pipeline", "expert", "expert_tensor", "virtual", "layers")


def main(arguments: Sequence[str] | None = None) -> int:
    return command.run(_convert, arguments)


def _convert(arguments: Sequence[str] | None) -> None:
    parser = command.conversion_parser(__doc__)
    mesh = parser.add_argument_group("a given mesh")
    mesh.add_argument("--tensor", type=int, help="tensor parallelism; default: 1")
    mesh.add_argument("--pipeline", type=int, help="pipeline parallelism; default: 1")
    mesh.add_argument("--expert", type=int, help="expert parallelism; default: 1")
    mesh.add_argument("--expert-tensor", type=int, help="tensor parallelism of the experts; default: as --tensor")
    mesh.add_argument("--virtual", type=int, help="number of model chunks of a pipeline stage; default: 1")
    mesh.add_argument("--layers", help="number of layers of each chunk in order of depth, such as 15,17,17,15")
    mesh.add_argument(
        "--names",
        choices=["transformer_engine", "local"],
        default="transformer_engine",
        help="name the parameters as Transformer Engine's layers or as Megatron's local layers",
    )
    given = command.parse(parser, arguments)
    source = open_checkpoint(given.source)
    if all(getattr(given, axis) is None for axis in AXES):
        conversion = to_open(source, command.options(given))
    else:
        fused = given.names == "transformer_engine"
        conversion = to_ranks(source, _mesh(given), fused, command.options(given))
    command.convert(conversion, given)


def _mesh(given: argparse.Namespace) -> Mesh:
    return smallest_mesh(
        given.tensor or 1,
        given.expert or 1,
        given.expert_tensor,
        pipeline=given.pipeline or 1,
        virtual=given.virtual or 1,
        layers=tuple(map(int, given.layers.split(","))) if given.layers else None,
    )


if __name__ == "__main__":
    sys.exit(piped(main))
