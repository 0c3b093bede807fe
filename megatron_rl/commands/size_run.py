"""Print what a run needs before it is started: the memory of its GPUs by phase, and the trainer's layouts that fit.

The arguments are the same as for the recipes: YAML files and overrides, merged from left to right. The first tables are
the dry run's (planning/memory.py has what they count). The last one has the 10 fastest layouts of the trainer on the
same number of GPUs that fit into their memory, and the configured one if it fits; where it must be, the optimizer's
state is offloaded to the memory of the nodes. The times come from planning/estimates.py, for a step whose samples all
have the largest length. With --json each layout also has its overrides. Neither weights nor GPUs are needed. The exit
status is 0 if the run fits, and 1 if it does not or if the configuration is wrong.

    megatron-rl size-run recipes/qwen3_32b/qwen3_32b-dapo-4n8g-tp8.yaml
    megatron-rl size-run recipes/qwen3_32b/qwen3_32b-dapo-4n8g-tp8.yaml model.recompute=none --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_rl.commands.defaults import with_defaults
from megatron_rl.commands.dry_run import describe_memory, describe_policy
from megatron_rl.config.load import merge_arguments, validate
from megatron_rl.config.schema import BaseConfig, DpoRunConfig, GrpoRunConfig, RewardModelRunConfig, SftRunConfig
from megatron_rl.planning.gpu import PHASES
from megatron_rl.planning.layouts import Layout, fitting_layouts
from megatron_rl.planning.memory import RunMemory, run_memory
from megatron_rl.planning.parameters import ParameterCount, count_parameters
from megatron_rl.planning.shapes import planned_model, trained_shape
from megatron_rl.preflight.model import faults_of_division, faults_of_model
from megatron_rl.processes import failed, piped


def read(arguments: Sequence[str]) -> BaseConfig:
    """The configuration of a run without engines if there is its section, otherwise the configuration of reinforcement
    learning."""
    merged = merge_arguments(arguments)
    offline = (SftRunConfig, DpoRunConfig, RewardModelRunConfig)
    kind = next((one for one in offline if one.section in merged), GrpoRunConfig)
    if isinstance(run := merged.get("run"), dict) and run.pop("epochs", None) is not None:
        run["steps"] = run.get("steps") or 1  # the sizes do not depend on the length
    return with_defaults(validate(kind, merged))


def as_dict(
    memory: RunMemory, layouts: Sequence[Layout], parameters: ParameterCount, refused: Sequence[str]
) -> dict[str, object]:
    engine = memory.engine
    return {
        "parameters": parameters._asdict(),
        "fits": not memory.problems,
        "problems": memory.problems,
        "refused": refused,
        "gpu_bytes": memory.trainer_limit if memory.on_gpus else None,
        "phases": list(PHASES),
        "ranks": [{"name": gpu.name, "bytes": gpu.parts, "total_bytes": gpu.totals} for gpu in memory.gpus],
        "training_bytes": memory.training_bytes,
        "layers": "transformer_engine" if memory.fused else "local",
        "host_bytes": {
            "trainer": memory.trainer.host,
            "critic": memory.critic.host if memory.critic else None,
            "engine": engine.gpu.host if engine else None,
        },
        "kv_sequences": None if engine is None else {"longest": engine.longest, "half": engine.half},
        "layouts": [
            {
                "layout": layout.label,
                "overrides": layout.overrides,
                "seconds": layout.seconds,
                "bytes": max(layout.memory.totals),
            }
            for layout in layouts
        ],
    }


def shown(layouts: Sequence[Layout], config: BaseConfig) -> Table:
    table = Table(title="the trainer's layouts that fit, fastest first: estimates for H100 GPUs", title_justify="left")
    table.add_column("")
    table.add_column("a step, s", justify="right")
    table.add_column("GB", justify="right")
    for layout in layouts:
        is_present = (layout.parallel.mesh, layout.recompute, bool(layout.offload)) == (
            config.policy.parallel.mesh,
            config.model.recompute,
            config.policy.optimizer.is_offloaded,
        )
        name = layout.label + (" (configured)" if is_present else "")
        table.add_row(name, f"{layout.seconds:,.0f}", f"{max(layout.memory.totals) / 1e9:.1f}")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configuration", nargs="+", metavar="FILE.yaml | section.key=value")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_intermixed_args(arguments)
    console = Console(highlight=False)
    try:
        config = read(options.configuration)
        model = planned_model(config)
        shape = trained_shape(config, model)
        memory = run_memory(config, shape)
        refused = faults_of_division(config, model) + faults_of_model(config, model)
    except (ValueError, OSError) as error:
        return failed(error)
    layouts = fitting_layouts(config, shape) if memory.on_gpus else []
    if options.json:
        print(json.dumps(as_dict(memory, layouts, count_parameters(shape), refused)))
        return 1 if memory.problems or refused else 0
    describe_policy(config, console)
    describe_memory(config, shape, console)
    told = [f"does not fit: {problem}" for problem in memory.problems] + [f"refused: {fault}" for fault in refused]
    for problem in told:
        console.print(problem, style="red", soft_wrap=True, markup=False)
    if layouts:
        console.print(shown(layouts, config))
    elif memory.on_gpus:
        console.print(
            f"No layout of the trainer fits on {config.policy.parallel.mesh.world_size} GPUs. Use more GPUs, or lower "
            f"balance.max_tokens_per_microbatch.",
            soft_wrap=True,
        )
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(piped(main))
