"""What the tools share that let engines answer without trainers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.config.machine import num_cores, threads_of_ranks
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.recipes.defaults import read_config
from megatron_rl.recipes.launch import console
from megatron_rl.recipes.screen import waiting

if TYPE_CHECKING:
    from megatron_rl.cluster.engines import EngineGroup
    from megatron_rl.cluster.verifier import VerifierGroup


SECTIONS = ("model", "data", "rollout", "rewards", "eval")
"""What the answers and their scores depend on."""
FREE = {"num_engines", "tensor", "expert_parallel", "gpu_memory_utilization", "max_sequences", "prompts_per_step"}
"""The keys of `rollout` that may change when a tool goes on."""


def config_without_trainers(arguments: Sequence[str], out: Path) -> GrpoRunConfig:
    """The configuration of a run whose folder is `out`, for engines that load the weights of `model.path` themselves.

    Raises:
        ValueError: the configuration is wrong, or names weights that engines cannot load.
    """
    own = [f"run.folder={out.parent}", f"run.name={out.name}", "cluster.colocate=false", "policy.routing_replay=false"]
    own.append("rollout.replay=null")
    config = read_config(GrpoRunConfig, [*arguments, *own]).absolute()
    if config.model.weights is not None:
        raise ValueError(
            f"the engines load Hugging Face's form, but model.weights is {config.model.weights}; convert it with "
            f"tools/megatron_to_hf.py, give the result as model.path, and set model.weights=null"
        )
    return config


def settings_of(config: GrpoRunConfig) -> dict[str, Any]:
    """What the answers and their scores depend on, in JSON's types."""
    whole = config.model_dump(mode="json")
    sections = {name: whole[name] for name in SECTIONS}
    sections["rollout"] = {key: value for key, value in sections["rollout"].items() if key not in FREE}
    return sections | {"seed": config.run.seed}


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings, or compare them with the settings of the earlier start.

    Raises:
        ValueError: they differ.
    """
    if not path.exists():
        path.write_text(json.dumps(settings, indent=1))
        return
    earlier = json.loads(path.read_text())
    changed = [key for key in settings if settings[key] != earlier.get(key)]
    if changed:
        raise ValueError(
            f"{path.parent} has answers of other settings: {', '.join(changed)} changed (its {path.name} has the "
            f"earlier ones); give another --out, or the earlier settings"
        )


@contextmanager
def engines_alone(
    config: GrpoRunConfig, logs: Path, check: Callable[[], None]
) -> Iterator[tuple[EngineGroup, VerifierGroup]]:
    """Engines that have loaded their weights, and verifiers, as long as the context is open.

    Args:
        check: is called several times a second, and ends the work by raising.
    """
    from megatron_rl.cluster.engines import EngineGroup
    from megatron_rl.cluster.nodes import RayPlacement
    from megatron_rl.cluster.restarts import Restarts
    from megatron_rl.cluster.session import ray_session
    from megatron_rl.cluster.verifier import VerifierGroup
    from megatron_rl.rollout.shared_memory import remove_leftovers

    with ExitStack() as cleaning:
        cleaning.callback(remove_leftovers)
        with waiting(console, "Ray starts") as tell:
            num_threads = threads_of_ranks(config, num_cores())
            cleaning.enter_context(ray_session(config.cluster, 1, logs, check, num_threads=num_threads))
            tell("the engines start vLLM (logs/engine_0.log), and the verifiers load the rewards")
            placement = RayPlacement(config, ("engine", "verifier"))
            restarts = Restarts(config.cluster.restarts_per_hour)
            engines = EngineGroup(config, logs, placement, restarts, loads_weights=True)
            cleaning.callback(engines.close)
            verifiers = VerifierGroup(config, logs, placement, restarts)
            engines.wait()
            verifiers.wait()
        yield engines, verifiers
