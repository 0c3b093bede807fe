"""Checks the class of `rollout.backend` in its source, without running it: whether it exists, and whether it declares
the abilities that the configuration asks for."""

from __future__ import annotations

import ast

from megatron_rl.config.function import short_path
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.preflight.reward_source import Definition, definition, fault_of_function
from megatron_rl.rollout.backend import ABILITIES, EngineSpec, needed_abilities

KEY = "rollout.backend"
OURS = {
    "megatron_rl.rollout.backend:Sampler": frozenset[str](),
    "megatron_rl.rollout.vllm_sampler:VllmSampler": ABILITIES,
}


def faults_of_backend(config: GrpoRunConfig, trains: bool) -> list[str]:
    """
    Args:
        trains: see `needed_abilities`.
    """
    path = config.rollout.backend
    if path is None or config.rollout.replay is not None:
        return []
    if fault := fault_of_function(path, KEY) or _fault_of_class(path):
        return [fault]
    declared, name = _declared(path), short_path(path)
    if declared is None:
        return [
            f"{KEY}: the source of {name} does not say what it is able to do; let it be a subclass of "
            'megatron_rl.rollout.backend.Sampler, and write `abilities = frozenset({"forbid", ...})` in the class'
        ]
    if unknown := sorted(declared - ABILITIES):
        return [f"{KEY}: {name} declares {unknown[0]!r}, which is no ability; they are {', '.join(sorted(ABILITIES))}"]
    faults = [
        f"{key} needs a sampler with the ability {ability!r}, and {name} ({KEY}) does not declare it; add it to the "
        f"class and its `abilities`, or {'let engines of vLLM answer' if key == 'training' else f'change {key}'}"
        for ability, key in needed_abilities(config, trains).items()
        if ability not in declared
    ]
    if "forbid" not in declared and not config.rollout.sampling.forbid and _has_rows_without_token(config):
        faults.append(
            f"model.path: {config.model.path} has rows of the vocabulary without a token, which a sampler with the "
            f"ability 'forbid' never samples, and {name} ({KEY}) does not declare it; add it"
        )
    return faults


def _fault_of_class(path: str) -> str | None:
    """What keeps the class at a path from being a sampler, as far as its source tells."""
    found = definition(path, KEY)
    node, name = found[1] if isinstance(found, tuple) else None, short_path(path)
    if isinstance(node, Definition):
        return f"{KEY}: {name} is a function, and the key needs a class; name the class"
    if not isinstance(node, ast.ClassDef):
        return None
    bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    sample = next((one for one in node.body if getattr(one, "name", None) == "sample"), None)
    if not bases:
        return f"{KEY}: {name} is no subclass of megatron_rl.rollout.backend.Sampler; let it be one"
    if isinstance(sample, ast.FunctionDef) or (sample is None and bases == ["Sampler"]):
        return f"{KEY}: {name} needs `async def sample(self, request)`, which gives a completion; write it"
    return None


def _has_rows_without_token(config: GrpoRunConfig) -> bool:
    try:
        return bool(EngineSpec(config.model, config.rollout, config.run.seed).forbidden_ids)
    except (ValueError, OSError):  # the folder is not there, or has faults that are told elsewhere
        return False


def _declared(path: str) -> frozenset[str] | None:
    """The abilities that a class declares, or the first of its base classes that does; None if its source does not
    say."""
    if path in OURS:
        return OURS[path]
    module, _, name = path.rpartition(":")
    found = definition(path, KEY)
    node = found[1] if isinstance(found, tuple) else None
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        [origin] = [alias.name for alias in node.names if (alias.asname or alias.name) == name]
        return _declared(f"{node.module}:{origin}")
    if not isinstance(node, ast.ClassDef):
        return None
    for statement in node.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "abilities" for target in targets):
            return _literal(getattr(statement, "value", None))
    bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id != name]
    return next((known for base in bases if (known := _declared(f"{module}:{base}")) is not None), None)


def _literal(value: ast.expr | None) -> frozenset[str] | None:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "frozenset":
        value = value.args[0] if value.args else ast.Tuple(elts=[], ctx=ast.Load())
    try:
        return frozenset(ast.literal_eval(value)) if value is not None else None
    except (ValueError, TypeError):
        return None
