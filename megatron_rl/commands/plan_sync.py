"""Compute the transfer plan of a model: the bytes on each kind of link, the busiest link, and the time of a push.

Only the planning time is measured; everything else is computed. Rates are for one direction, in Gbit/s.

    nvlink, nic     bytes between GPUs of a node and bytes between nodes, for one push to all engines
    busiest         bytes of the link that takes longest
    bound           bytes that must enter the fullest engine rank, divided by its link's rate
    least           time of the busiest link plus the time of one bucket for each further engine in a chain
    replayed        with --replay: time of a push that is played through, stretch by stretch, with their answers and
                    what each message costs a processor; it takes minutes for a thousand GPUs
    incomplete      with --repacked: the order is that for engines whose layers vLLM repacks, and this is the most that
                    a rank of an engine holds of modules whose weights have not all come, in bytes
    redundancy      bytes that all engine ranks receive, divided by the bytes that they hold; 1.00 is the minimum
    gathering       the same for a design that gathers full tensors on every rank: the bytes of the model minus the
                    bytes of a trainer rank, divided by the bytes that the fullest engine rank needs
    plan            CPU seconds of planning and hashing

Without --model the table has three models on 8 to 256 nodes; half of the nodes train.

    megatron-rl plan-sync
    megatron-rl plan-sync --replay --random 30 --json
    megatron-rl plan-sync --model configs/model/DeepSeek-V3.json --train pp=16,dp=64,ep=64,etp=1,layers=3+4x14+2 \
        --rollout tp=32,ep=true,replicas=32 --links gpus_per_node=8,nvlink_gbps=3600,nic_gbps=400 --json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_rl.bridge.push_simulation import Costs, all_stretches, most_incomplete_bytes, replay
from megatron_rl.config.package_files import PACKAGE, find_shipped
from megatron_rl.layout import Engines, Links, plan_weights
from megatron_rl.layout.copies import WIDTHS
from megatron_rl.layout.traffic import choose_chains, traffic
from megatron_rl.models import FAMILIES, read_shape
from megatron_rl.processes import peak_memory_bytes, piped
from megatron_rl.types import Mesh

MODELS = PACKAGE / "configs" / "model"
NODES = (8, 16, 32, 64, 128, 256)
TRAIN_KEYS = dict(tp="tensor", pp="pipeline", vpp="virtual", ep="expert", etp="expert_tensor", dp="data", cp="context")
ROLLOUT_KEYS = dict(tp="tensor", pp="pipeline", ep="expert_parallel", replicas="num", chains="num_chains")


@dataclass(frozen=True)
class Case:
    model: Path
    mesh: Mesh
    engines: Engines
    """If `num_chains` is None, the fastest number is chosen."""
    links: Links


def pairs(text: str, known: set[str], option: str) -> dict[str, str]:
    """Parse a text such as `tp=4,pp=4` into a dictionary."""
    found = dict(word.partition("=")[::2] for word in text.split(",") if word)
    for key, value in found.items():
        if key not in known or not value:
            raise ValueError(
                f"{option} {text}: {key}={value} is not understood; the keys are {', '.join(sorted(known))}"
            )
    return found


def layer_counts(text: str) -> tuple[int, ...]:
    """Parse a text such as `3+4x14+2`, which means 3 layers, fourteen times 4 layers, and 2 layers."""
    words = [word.partition("x") for word in text.split("+")]
    return tuple(int(count) for count, _, times in words for _ in range(int(times or 1)))


def parse_mesh(text: str) -> Mesh:
    found = pairs(text, {*TRAIN_KEYS, "layers"}, "--train")
    layers = layer_counts(found.pop("layers")) if "layers" in found else None
    return Mesh(**{TRAIN_KEYS[key]: int(value) for key, value in found.items()}, layers=layers)


def parse_engines(text: str) -> Engines:
    found = pairs(text, set(ROLLOUT_KEYS), "--rollout")
    settings: dict[str, Any] = {ROLLOUT_KEYS[k]: flag(v) if k == "ep" else int(v) for k, v in found.items()}
    return Engines(**settings)


def parse_links(text: str) -> Links:
    kinds: dict[str, Callable[[str], Any]] = dict(
        gpus_per_node=int, nics_per_node=int, nvlink_gbps=float, nic_gbps=float, colocated=flag
    )
    return Links(**{key: kinds[key](value) for key, value in pairs(text, set(kinds), "--links").items()})


def parse_case(options: argparse.Namespace) -> Case:
    engines, links = parse_engines(options.rollout), parse_links(options.links)
    return Case(options.model, parse_mesh(options.train), engines, links)


def flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"


def computed(case: Case, dtype: str, bucket_bytes: int, costs: Costs | None, repacked: bool) -> dict[str, Any]:
    """Everything about one plan, as a row of the report.

    Args:
        costs: what a message costs in the replay; None: no replay.
        repacked: vLLM repacks the layers of the engines.
    """
    shape, links, engines = read_shape(case.model), case.links, case.engines
    if engines.num_chains is None and not links.colocated:  # on shared GPUs every engine is near the trainer
        one = plan_weights(shape, case.mesh, replace(engines, num=1), dtype=dtype, links=links)
        slowest = traffic(one, links, bucket_bytes)
        rate = links.nic_bytes_per_s
        sender_s, receiver_s = slowest.busiest_sender_bytes / rate, one.engine_bytes.max() / rate
        engines = replace(engines, num_chains=choose_chains(sender_s, receiver_s, engines.num, bucket_bytes / rate))
        plan_weights.cache_clear()
    start = time.process_time()
    plan = plan_weights(shape, case.mesh, engines, dtype=dtype, links=links, repacked=repacked)
    digest = plan.digest
    plan_s = time.process_time() - start
    loads = traffic(plan, links, bucket_bytes)
    source, destination = plan.regions.source, plan.regions.destination
    gathered = FAMILIES[shape.family].num_parameters(shape) * WIDTHS[dtype] - plan.held_bytes(source).mean()
    replayed: dict[str, float] = {}
    if costs is not None:
        order = all_stretches(plan, bucket_bytes)
        seconds = replay(order, plan, links, costs)
        replayed = {
            "num_messages": sum(run.num_messages for run in order),
            "num_answers": len(order),
            "replayed_s": seconds,
            "replayed_share": seconds / loads.least_s,
        }
    if repacked:
        replayed["incomplete_bytes"] = most_incomplete_bytes(plan, bucket_bytes)
    return {
        "model": case.model.stem,
        "mesh": str(case.mesh),
        "num_parameters": FAMILIES[shape.family].num_parameters(shape),
        "trainer_gpus": case.mesh.world_size,
        "engine_gpus": plan.num_destinations,
        "num_engines": engines.num,
        "num_chains": engines.heads,
        "num_routes": plan.num_routes,
        "digest": digest,
        **asdict(loads),
        "fullest_rank_bytes": int(plan.engine_bytes.max()),
        "redundancy": loads.redundancy,
        "gathering_redundancy": gathered / plan.held_bytes(destination).max(),
        "gathering_s": gathered / links.nic_bytes_per_s,
        "plan_s": plan_s,
        **replayed,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def random_cases(number: int, seed: int) -> list[Case]:
    """Meshes of 4 to 64 trainer ranks and engines of 1 to 16 ranks, of all models in configs/model that they divide."""
    random = np.random.default_rng(seed)
    found: list[Case] = []
    models = sorted(MODELS.glob("*.json"))
    while len(found) < number:
        model = models[random.integers(len(models))]
        shape = read_shape(model)
        tensor, pipeline, data, width, replicas = (int(2**n) for n in random.integers(0, [4, 4, 4, 5, 4]))
        parallel = bool(random.integers(2)) and shape.mixture is not None
        expert = int(2 ** random.integers(0, 5)) if shape.mixture else 1
        try:
            mesh = Mesh(tensor, pipeline, data, expert=expert, expert_tensor=1 if expert > 1 else None)
            FAMILIES[shape.family].check_mesh(shape, mesh)
            FAMILIES[shape.family].vllm_placed(shape, width, 0, parallel)
        except (ValueError, AssertionError):  # the mesh does not divide the model
            continue
        if 4 <= mesh.world_size <= 64 and replicas * width <= 64:
            found.append(Case(model, mesh, Engines(replicas, width, 1, parallel), Links(gpus_per_node=8)))
    return found


def cases() -> list[Case]:
    """The cases of the table without --model. Half of the nodes train, and half run engines."""
    links, found = Links(gpus_per_node=8), []
    for nodes in NODES:
        gpus = 4 * nodes
        stages, layers = (4, "15+16+15x2") if gpus <= 64 else (16, "3+4x14+2")
        for name, mesh, engines in (
            ("Qwen3-32B", Mesh(8, 4, gpus // 32), Engines(gpus // 8, 8)),
            ("Qwen3-235B-A22B", Mesh(4, 2, gpus // 8, expert=16, expert_tensor=1), Engines(gpus // 8, 8, 1, True)),
            (
                "DeepSeek-V3",
                Mesh(1, stages, gpus // stages, expert=min(64, gpus // stages), layers=layer_counts(layers)),
                Engines(gpus // 16, 16, 1, True),
            ),
        ):
            found.append(Case(MODELS / f"{name}.json", mesh, engines, links))
    return found


def shown(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    heads = (
        "model|GPUs|engines, chains|routes|NVLink GB|NIC GB|busiest GB|bound s|least s|replayed s|incomplete GB"
        "|redundancy|gathering|plan s"
    )
    for i, head in enumerate(heads.split("|")):
        table.add_column(head, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(
            row["model"],
            f"{row['trainer_gpus']} + {row['engine_gpus']}",
            f"{row['num_engines']}, {row['num_chains']}",
            str(row["num_routes"]),
            f"{row['nvlink_bytes'] / 1e9:,.0f}",
            f"{row['nic_bytes'] / 1e9:,.0f}",
            f"{row['busiest_link_bytes'] / 1e9:.2f}",
            f"{row['bound_s']:.3f}",
            f"{row['least_s']:.3f}",
            f"{row['replayed_s']:.3f} ({row['replayed_share']:.2f})" if "replayed_s" in row else "",
            f"{row['incomplete_bytes'] / 1e9:.2f}" if "incomplete_bytes" in row else "",
            f"{row['redundancy']:.2f}",
            f"{row['gathering_redundancy']:.1f}",
            f"{row['plan_s']:.2f}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=lambda text: find_shipped(Path(text)), help="a Hugging Face folder or a config.json"
    )
    parser.add_argument("--train", default="", help="the trainer's mesh; keys: tp, pp, vpp, ep, etp, dp, cp, layers")
    parser.add_argument("--rollout", default="", help="the engines; keys: tp, pp, ep, replicas, chains")
    parser.add_argument(
        "--links",
        default="gpus_per_node=8",
        help="the hardware; keys: gpus_per_node, nics_per_node, nvlink_gbps, nic_gbps, colocated",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="the dtype that is sent")
    parser.add_argument("--bucket-bytes", type=int, default=64 * 2**20, help="the size of a message")
    parser.add_argument("--replay", action="store_true", help="play each push through, message by message")
    parser.add_argument("--repacked", action="store_true", help="vLLM repacks layers, so they are sent one by one")
    parser.add_argument("--answer-us", type=float, default=100, help="the time of an answer in the replay")
    parser.add_argument("--message-us", type=float, default=0, help="a processor's time for a message in the replay")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N random cases in place of the table's")
    parser.add_argument("--seed", type=int, default=0, help="the seed of --random")
    parser.add_argument("--json", action="store_true", help="also print one JSON object, as the last line")
    options = parser.parse_args(arguments)
    rows = []
    try:
        costs = Costs(options.answer_us / 1e6, options.message_us / 1e6) if options.replay else None
        every = random_cases(options.random, options.seed) if options.random else cases()
        for case in every if options.model is None else [parse_case(options)]:
            rows.append(computed(case, options.dtype, options.bucket_bytes, costs, options.repacked))
            plan_weights.cache_clear()
    except ValueError as error:
        parser.error(str(error))
    console = Console(width=160)
    console.print(shown(rows))
    peak = max(row["peak_memory_bytes"] for row in rows)
    console.print(
        f"peak memory of planning: {peak / 1e6:.0f} MB; busiest link of the last row: {rows[-1]['busiest_link']}"
    )
    if options.replay:
        shares = [row["replayed_share"] for row in rows]
        console.print(f"replayed / least: {np.mean(shares):.3f} in the mean, {max(shares):.3f} at most")
    if options.json:
        print(json.dumps(rows[0] if options.model else {"cases": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(piped(main))
