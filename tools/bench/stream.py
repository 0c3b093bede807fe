"""Measure what the driver costs, with stubs in place of vLLM and of the trainer. Everything else is the same as in a
run: Ray, the verifiers' process, the plan of a step, the store of tokens, the bridge's joining.

    rate          groups of 8 short answers come at a steady rate: the cores that driver and verifier use
    step          one step of 1,024 GPUs, half of them engines: the driver's seconds, and what the trainer's ranks fetch
    joining       all ranks of 1,024 GPUs join the bridge, as threads of one process, until they agree

There are 8 engines in every mode. The trainer's ranks are 16 processes, and each is one rank of every replica: the
driver makes as many calls, and processes ask it for as many references, as with 512 processes. A store looks up the
names of its clients: if no name server answers, `RES_OPTIONS="timeout:1 attempts:1"` makes joining wait less for it.

    python tools/bench/stream.py
    python tools/bench/stream.py --json --modes step joining
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from ray.experimental import get_object_locations

from megatron_rl.balance import plan_microbatches
from megatron_rl.bridge.join import Joining, host_store
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.cluster import session
from megatron_rl.cluster.engines import EngineGroup, EngineRank
from megatron_rl.cluster.nodes import RayPlacement
from megatron_rl.cluster.payloads import fetch
from megatron_rl.cluster.process import Process
from megatron_rl.cluster.restarts import Restarts
from megatron_rl.cluster.stream import RayStream, open_stream
from megatron_rl.cluster.verifier import VerifierGroup
from megatron_rl.cluster.waiting import gather
from megatron_rl.config.cluster import ClusterConfig
from megatron_rl.config.load import validate
from megatron_rl.config.package_files import find_shipped
from megatron_rl.config.policy import ParallelConfig
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.layout import Engines
from megatron_rl.loop.shares import deal
from megatron_rl.models import read_shape
from megatron_rl.recipes.tiny.task import write_task
from megatron_rl.tools.bench.rollout import cpu_seconds
from megatron_rl.types import GroupRequest, Minibatches, Prompt, Rollout, Share, StepBatch, Tokens

SAMPLES, SHORT = 8, {"ground_truth": "1", "median": 20, "sigma": 0.0}
"""The number of answers to a prompt, and the columns of its row at a steady rate. Answers have a lognormal
number of tokens."""
STEP_SAMPLES, LONG, LONGEST = 16, {"ground_truth": "1", "median": 4096, "sigma": 0.9}, 16_384
"""The same of a step, and the largest number of tokens."""
STORE_BYTES = 4 * 2**30
NUM_ENGINES, NUM_RANK_PROCESSES = 8, 16

TENSOR, PIPELINE, ENGINE_TENSOR = 4, 4, 8
SHAPE = read_shape(find_shipped(Path("configs", "model", "Qwen3-32B.json")))
"""Qwen3-32B and its layout."""
MODES = ("rate", "step", "joining")


class StubEngine:
    alive = True

    async def answer(
        self, ticket: int, asked: GroupRequest, samples: range, *others: object
    ) -> tuple[list[tuple[Rollout, Tokens]], list[tuple[Rollout, Tokens]]]:
        num_prompt, wanted = len(asked.prompt.token_ids), asked.prompt.columns
        rng = np.random.default_rng(asked.number)
        drawn = rng.lognormal(np.log(wanted["median"]), wanted["sigma"], asked.num_samples)
        answers = []
        for sample in samples:
            num = min(LONGEST, round(drawn[sample]))
            kinds = (np.int32, bool, np.float32, np.int32)
            ids, mask, logp, version = (np.zeros(num_prompt + num, kind) for kind in kinds)
            rollout = Rollout(num_prompt + num, num_prompt, num, 0, "stop", oldest_version=0)
            answers.append((rollout, Tokens(ids, mask, logp, version)))
        return answers, []

    async def cancel(self, ticket: int) -> None:
        pass

    def close(self) -> None:
        pass


class StubRank(EngineRank):
    async def start(self) -> None:
        self.engine = StubEngine()  # type: ignore[assignment]  # it has what a run without trainers calls


class StubGroup(EngineGroup):
    rank = StubRank


class StubTrainer:
    def begin(self, share: Share) -> int:
        """Returns the number of tokens of a share."""
        return sum(len(tokens.ids) for tokens in fetch(share.tokens, with_routes=True))


def configuration(folder: Path, prompts: int, samples: int, max_lag: int) -> GrpoRunConfig:
    values = {
        "run": {"name": "run", "folder": str(folder), "steps": 1},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": "none"},
        "balance": {"max_tokens_per_microbatch": 2 * LONGEST},
        "rewards": [{"kind": "exact_answer"}],
        "rollout": {
            "prompts_per_step": prompts,
            "samples_per_prompt": samples,
            "num_engines": NUM_ENGINES,
            "max_prompt_tokens": 8,
            "max_response_tokens": LONGEST,
            "max_lag": max_lag,
            "delimiter": "",
        },
    }
    return validate(GrpoRunConfig, values)


def measure(
    folder: Path, modes: Collection[str], rate: float, seconds: float, gpus: int
) -> dict[str, dict[str, float]]:
    """What `--help` describes, but for joining. Ray runs.

    Args:
        folder: has the demo's model; the runs write into it.
    """
    config = configuration(folder, 128, SAMPLES, 1)
    logs, placement, restarts = folder / "logs", RayPlacement(config), Restarts(0)
    engines = StubGroup(config, logs, placement, restarts, loads_weights=True)
    verifiers = VerifierGroup(config, logs, placement, restarts)
    engines.wait()
    verifiers.wait()
    stream = open_stream(config, engines, verifiers)
    step_config = configuration(folder, gpus // 2, STEP_SAMPLES, 0)
    works: dict[str, Callable[[], dict[str, float]]] = {
        "rate": lambda: at_a_rate(stream, verifiers, rate / SAMPLES, seconds),
        "step": lambda: a_step(step_config, open_stream(step_config, engines, verifiers), gpus // 2),
    }
    results = {mode: work() for mode, work in works.items() if mode in modes}
    engines.close()
    return results


def at_a_rate(stream: RayStream, verifiers: VerifierGroup, rate: float, seconds: float) -> dict[str, float]:
    """
    Args:
        rate: groups a second.
    """
    [verifier], prompt = verifiers.verifiers, rows(1, SHORT)[0]
    processes = {"driver": psutil.Process(), "verifier": psutil.Process(verifier.process.placed.pid)}
    start, before, asked, done = time.perf_counter(), cpu_seconds(processes), 0, 0
    while (now := time.perf_counter() - start) < seconds:
        while asked < now * rate:
            stream.ask([GroupRequest(asked, prompt, SAMPLES, (asked,))], 0)
            asked += 1
        done += len(stream.collect(0).groups)
    after = cpu_seconds(processes)
    while done < asked:
        done += len(stream.collect(0).groups)
    cores = {f"{name}_cores": (after[name] - before[name]) / now for name in processes}
    return {"answers": SAMPLES * done, "answers_per_s": SAMPLES * asked / now, **cores}


def a_step(config: GrpoRunConfig, stream: RayStream, num_ranks: int) -> dict[str, float]:
    """
    Args:
        num_ranks: the number of the trainer's ranks.
    """
    width = TENSOR * PIPELINE
    parallel = ParallelConfig(tensor=TENSOR, pipeline=PIPELINE, data=num_ranks // width)
    spent, driver = {}, {"driver": psutil.Process()}
    last, cpu = time.perf_counter(), cpu_seconds(driver)["driver"]

    def note(part: str) -> None:
        nonlocal last, cpu
        now, now_cpu = time.perf_counter(), cpu_seconds(driver)["driver"]
        spent[f"{part}_s"], spent[f"{part}_driver_s"] = now - last, now_cpu - cpu
        last, cpu = now, now_cpu

    prompts = rows(config.rollout.prompts_per_step, LONG)
    stream.ask([GroupRequest(i, prompt, STEP_SAMPLES, (i,)) for i, prompt in enumerate(prompts)], 0)
    groups = list(stream.collect(0).groups.values())
    note("answers")
    batch = StepBatch.of_groups(groups, 0)
    active = np.ones(len(batch.lengths), bool)
    plan = plan_microbatches(batch, active, SHAPE, parallel, config.balance, Minibatches(4), recompute="full")
    shares = deal(batch, plan, parallel.data)
    note("plan")
    remote = ray.remote(num_cpus=0)(StubTrainer)
    trainers = [remote.remote() for _ in range(NUM_RANK_PROCESSES)]
    processes = [Process(f"rank {i}", Path(os.devnull), trainer) for i, trainer in enumerate(trainers)]
    ray.get([trainer.begin.remote(replace(shares[0], tokens=[])) for trainer in trainers])
    note("start")
    held = [ray.put(share) for share in shares]
    asked = [(share, rank % NUM_RANK_PROCESSES) for share in held for rank in range(width)]
    calls = [trainers[process].begin.remote(share) for share, process in asked]
    tokens = gather(calls, [processes[process] for _, process in asked], "to begin", 600.0)
    note("begin")
    assert sum(tokens) == width * batch.lengths.sum(), "every sample has come to one replica"
    wanted = [{one.tokens.object for one in share.tokens} for share in shares]
    where = get_object_locations(list(set.union(*wanted)))
    sizes = {reference: found["object_size"] for reference, found in where.items()}
    fetched = [sum(sizes[reference] for reference in own) for own in wanted]
    stored = sum(sizes.values())
    return {
        "answers": float(len(batch.lengths)),
        "ranks": float(num_ranks),
        **{name: seconds for name, seconds in spent.items() if not name.startswith("start")},
        "references_of_all_ranks": float(width * sum(map(len, wanted))),
        "stored_gb": stored / 1e9,
        "fetched_gb_of_all_replicas": sum(fetched) / 1e9,
        "share_of_a_replica": sum(fetched) / len(fetched) / stored,
        "least_share": 1 / parallel.data,
    }


def join(gpus: int) -> dict[str, float]:
    layout = ParallelConfig(tensor=TENSOR, pipeline=PIPELINE, data=gpus // 2 // TENSOR // PIPELINE)
    store, engines = host_store("127.0.0.1"), Engines(gpus // 2 // ENGINE_TENSOR, tensor=ENGINE_TENSOR)
    setup = BridgeSetup(SHAPE, layout.mesh, False, engines, "bfloat16", "127.0.0.1", store.port)
    start = time.perf_counter()
    assert setup.agreement
    planned = time.perf_counter()
    with ThreadPoolExecutor(setup.world_size) as pool:
        list(pool.map(lambda rank: Joining(setup, rank, torch.device("cpu")), range(setup.world_size)))
    seconds = time.perf_counter() - planned
    return {"ranks": float(setup.world_size), "plan_s": planned - start, "join_s": seconds}


def rows(count: int, columns: Mapping[str, Any]) -> list[Prompt]:
    return [Prompt(f"row {i}", (5, 6, 7), "", columns) for i in range(count)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1000.0, help="answers a second of the steady rate")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long they come at this rate")
    parser.add_argument("--gpus", type=int, default=1024, help="the GPUs of the step and of the joining, 32 x N")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results: dict[str, dict[str, float]] = {}
    if set(args.modes) != {"joining"}:
        session.OBJECT_STORE_BYTES = STORE_BYTES
        with tempfile.TemporaryDirectory() as name, session.ray_session(ClusterConfig(), 1, Path(name, "logs")):
            write_task(Path(name))
            results |= measure(Path(name), args.modes, args.rate, args.seconds, args.gpus)
    if "joining" in args.modes:
        results["joining"] = join(args.gpus)
    if args.json:
        print(json.dumps(results))
        return 0
    for mode, row in results.items():
        print(f"{mode:12}" + ", ".join(f"{name}: {value:,.3g}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
