"""Compares `rollout.vllm` with the arguments of the installed vLLM, before a job waits for its GPUs.

Names are read from vLLM's source. Values go through vLLM's own command line in another process, which imports vLLM in
several seconds, and is started only if there are values. Neither needs a GPU. What vLLM refuses only when it knows the
model or the GPU, an engine tells when it starts.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from pydantic import JsonValue

from megatron_rl.config.schema import BaseConfig, GrpoRunConfig
from megatron_rl.preflight.rows import Tell


def faults_of_engine_options(config: BaseConfig, tell: Tell) -> list[str]:
    """The faults of `rollout.vllm`."""
    options = config.rollout.vllm if isinstance(config, GrpoRunConfig) else {}
    if not options:
        return []
    known = argument_names()
    if known is None:
        tell("not checked, because vLLM is not installed here: rollout.vllm")
        return []
    unknown = [name for name in options if name not in known]
    return [_unknown(name, known) for name in unknown] or _refused(options, tell)


def argument_names() -> list[str] | None:
    """The names of the arguments of vLLM's engine; None if vLLM is not installed."""
    if (found := find_spec("vllm")) is None or found.origin is None:
        return None
    tree = ast.parse((Path(found.origin).parent / "engine" / "arg_utils.py").read_text())
    [arguments] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"]
    names = [
        node.target.id
        for node in arguments.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    return [name for name in names if not name.startswith("_")]


def _unknown(name: str, known: list[str]) -> str:
    near = get_close_matches(name.replace("-", "_"), known, 3)
    hint = f"did you mean {' or '.join(near)}?" if near else "vllm.EngineArgs lists its arguments"
    return f"rollout.vllm.{name}: the installed vLLM has no such argument; {hint}"


def _refused(options: dict[str, JsonValue], tell: Tell) -> list[str]:
    command = [sys.executable, "-m", "megatron_rl.rollout.arguments", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it ended"])[-1]
        tell(f"not checked, because vLLM cannot be imported here ({reason}): the values of rollout.vllm")
        return []
    told: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return [f"rollout.vllm.{name}: vLLM refuses {json.dumps(options[name])}: {said}" for name, said in told.items()]
