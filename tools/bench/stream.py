"""Measure what the stream costs in addition to the engines: a stub in place of vLLM answers at once with short answers,
and everything else is the same as in an asynchronous run: Ray, admission, the verifiers' process, the journal.

    rate          groups of 8 answers come at a steady rate: the cores that driver and verifier use
    hour          as many answers as come in an hour at 1,000 a second, as fast as they can: the driver's memory
    in flight     100,000 requests under way at once: the time to ask for them, and until a step has the first batch

    python tools/bench/stream.py
    python tools/bench/stream.py --json --answers 400000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

from megatron_rl.cluster.engines import EngineGroup, EngineRank
from megatron_rl.cluster.nodes import RayPlacement
from megatron_rl.cluster.restarts import Restarts
from megatron_rl.cluster.session import ray_session
from megatron_rl.cluster.stream import RayStream
from megatron_rl.cluster.verifier import VerifierGroup
from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data import ShuffledStream
from megatron_rl.loop.engine_source import EngineSource
from megatron_rl.loop.stopping import NEVER
from megatron_rl.ports import Ports
from megatron_rl.tools.bench.rollout import Quiet, cpu_seconds
from megatron_rl.types import GroupRequest, Prompt, Rollout, Tokens

SAMPLES, LENGTH = 8, 20
"""The number of answers to a prompt, and of the tokens of each."""


class StubRank(EngineRank):
    async def start(self) -> None:
        self.released = asyncio.Event()
        self.released.set()

    async def answer(
        self, ticket: int, asked: GroupRequest, samples: range, *others: object
    ) -> tuple[tuple[list[Rollout], list[Rollout]], list[Tokens], list[Tokens]]:
        await self.released.wait()
        prompt = asked.prompt
        length = len(prompt.token_ids) + LENGTH
        columns = (np.zeros(length, kind) for kind in (np.int32, bool, np.float32, np.int32))
        tokens = Tokens(*columns)
        rollouts = [Rollout(length, len(prompt.token_ids), LENGTH, 0, "stop", oldest_version=0) for _ in samples]
        return (rollouts, []), [tokens for _ in samples], []

    async def hold(self, held: bool) -> None:
        self.released.clear() if held else self.released.set()

    async def close(self) -> None:
        pass


class StubGroup(EngineGroup):
    def _new(self, index: int) -> Any:
        self.record_of[index] = ""
        options = self._placement.group_options("engine", index) | {"max_concurrency": 2**20}
        return ray.remote(StubRank).options(**options).remote(self._config, index, str(self._logs), False, "")


def configuration(folder: Path, name: str, prompts: int, max_lag: int, num_steps: int) -> GrpoRunConfig:
    values = {
        "run": {"name": name, "folder": str(folder), "steps": num_steps},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": "none"},
        "balance": {"max_tokens_per_microbatch": 4096},
        "rewards": [{"kind": "exact_answer"}],
        "rollout": {
            "prompts_per_step": prompts,
            "samples_per_prompt": SAMPLES,
            "max_prompt_tokens": 8,
            "max_response_tokens": LENGTH,
            "max_lag": max_lag,
            "delimiter": "",
        },
    }
    return validate(GrpoRunConfig, values)


def measure(rate: float, seconds: float, answers: int, in_flight: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "megatron_rl.recipes.tiny.task", name], check=True, capture_output=True)
        steps = -(-answers // (128 * SAMPLES))
        config = configuration(folder, "hour", 128, 1, steps)
        logs = folder / "logs"
        with ray_session(config.cluster, 1, logs):
            placement, restarts = RayPlacement(config), Restarts(0)
            engines = StubGroup(config, logs, placement, restarts)
            verifiers = VerifierGroup(config, logs, placement, restarts)
            engines.wait()
            verifiers.wait()
            stream = RayStream(config, engines, verifiers)
            results = {
                "rate": at_a_rate(stream, verifiers, rate / SAMPLES, seconds),
                "hour": an_hour(config, stream),
                "in flight": many(configuration(folder, "many", in_flight // SAMPLES // 4, 3, 4), stream, engines),
            }
            engines.close()
    return results


def at_a_rate(stream: RayStream, verifiers: VerifierGroup, rate: float, seconds: float) -> dict[str, float]:
    """
    Args:
        rate: groups a second.
    """
    [verifier], prompt = verifiers.verifiers, rows(1)[0]
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
    return {"answers_per_s": SAMPLES * asked / now, **cores}


def an_hour(config: GrpoRunConfig, stream: RayStream) -> dict[str, float]:
    source, driver = source_of(config, stream), psutil.Process()
    memory: list[float] = []
    start = time.perf_counter()
    for step in range(config.run.steps):
        source.pushed(step)
        source.next(step)
        memory.append(driver.memory_info().rss / 2**20)
        if step % 50 == 0:  # the journal of older versions is removed when there is a checkpoint
            (config.run_folder / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    seconds = time.perf_counter() - start
    tenth = max(1, len(memory) // 10)
    return {
        "answers": config.run.steps * 128 * SAMPLES,
        "answers_per_s": config.run.steps * 128 * SAMPLES / seconds,
        "mib_after_a_tenth": memory[tenth],
        "mib_at_the_end": memory[-1],
    }


def many(config: GrpoRunConfig, stream: RayStream, engines: EngineGroup) -> dict[str, float]:
    """All groups of four batches are under way at once; no engine answers before all have been asked for."""
    source, [engine] = source_of(config, stream), engines.engines
    ray.get(engine.hold.remote(True))
    start = time.perf_counter()
    source.pushed(0)
    asked_s = time.perf_counter() - start
    ray.get(engine.hold.remote(False))
    start = time.perf_counter()
    source.next(0)
    answers = config.rollout.prompts_per_step * SAMPLES
    return {
        "requests": 4.0 * answers,
        "ask_ms_a_request": 1e3 * asked_s / (4 * answers),
        "take_ms_an_answer": 1e3 * (time.perf_counter() - start) / answers,
    }


def source_of(config: GrpoRunConfig, stream: RayStream) -> EngineSource:
    prompts = ShuffledStream(rows(1000), config.rollout.prompts_per_step, seed=0)
    ports = Ports(None, None, stream)  # type: ignore[arg-type]
    return EngineSource(config, ports, prompts, [], Quiet(), NEVER)  # type: ignore[arg-type]


def rows(count: int) -> list[Prompt]:
    return [Prompt(f"row {i}", (5, 6, 7), "", {"ground_truth": ""}) for i in range(count)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1000.0, help="answers a second of the steady rate")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long they come at this rate")
    parser.add_argument("--answers", type=int, default=3_600_000, help="the number of answers of the hour")
    parser.add_argument("--in-flight", type=int, default=100_000, help="the number of requests under way at once")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = measure(args.rate, args.seconds, args.answers, args.in_flight)
    if args.json:
        print(json.dumps(results))
        return 0
    for mode, row in results.items():
        print(f"{mode:12}" + ", ".join(f"{name}: {value:,.3g}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
