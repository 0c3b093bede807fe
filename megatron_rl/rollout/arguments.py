"""What vLLM's command line has against values of `rollout.vllm`, in JSON:

    python -m megatron_rl.rollout.arguments '{"moe_backend": "tritn"}'

It imports vLLM, which takes seconds, and needs no GPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import ArgumentTypeError
from collections.abc import Mapping
from typing import Any, NoReturn


def refused(options: Mapping[str, Any]) -> dict[str, str]:
    """What vLLM says about each value that it refuses, by the argument's name. An argument that the command line does
    not have is not checked."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def refuse(message: str) -> NoReturn:
        raise ArgumentTypeError(message)

    parser: Any = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.error = refuse  # it would end the process
    known, told = vars(parser.parse_args([])), {}
    for name, value in options.items():
        if name not in known or value is None:
            continue
        # vLLM's files have the types of YAML; on the command line itself a flag and a mapping have other forms.
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            json.dump({name: value}, file)
            file.flush()
            try:
                parser.parse_args(["--config", file.name])
            except ArgumentTypeError as error:
                told[name] = " ".join(str(error).split())
    return told


if __name__ == "__main__":
    print(json.dumps(refused(json.loads(sys.argv[1]))))
