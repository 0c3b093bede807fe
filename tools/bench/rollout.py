"""Measure what it costs to wait: a real vLLM engine, a tiny model, answers with long-tailed lengths.

The same prompts are answered in five ways, each followed by the same time for the trainer, which here only sleeps:

    static        as many answers as the engine decodes at once, and the next ones when all of these have ended
    continuous    a step's answers together; the engine takes the next one as soon as one has ended
    max_lag 1     the engine answers while the trainer trains, one batch ahead; 2 and 4 in the same way

Lengths are drawn from a lognormal distribution whose largest value is 30 times its median, and every answer has exactly
its drawn length. Engine, verifier and stream are the same as in a run, in Ray processes; only the weights are not
moved.

    python tools/bench/rollout.py
    python tools/bench/rollout.py --json --steps 8
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

from megatron_rl.cluster.engines import EngineGroup, EngineRank
from megatron_rl.cluster.nodes import RayPlacement
from megatron_rl.cluster.restarts import Restarts
from megatron_rl.cluster.session import ray_session
from megatron_rl.cluster.stream import RayStream, open_stream
from megatron_rl.cluster.verifier import VerifierGroup
from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data import ShuffledStream
from megatron_rl.loop.engine_source import kind_of_source
from megatron_rl.loop.source import Prompts
from megatron_rl.loop.stopping import NEVER
from megatron_rl.ports import Ports
from megatron_rl.rollout.backend import EngineSpec
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.program import Call, Request
from megatron_rl.rollout.vllm_sampler import VllmSampler
from megatron_rl.types import Group, GroupRequest, Prompt, Rollouts

MEDIAN, LARGEST, SIGMA = 64, 30, 1.0
"""The lengths in tokens: the median, the largest as a multiple of it, and the deviation of the logarithm."""
SLOTS, PROMPTS, SAMPLES = 32, 32, 8
"""The number of answers that the engine decodes at once, of a step's prompts, and of the answers to each."""
MODES = {"static": 0, "continuous": 0, "max_lag 1": 1, "max_lag 2": 2, "max_lag 4": 4}
WARM_UP = 2
"""The number of steps, beyond the lag, before the measurement."""


LENGTHS = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, 2**16).clip(1, MEDIAN * LARGEST).astype(int)


class DrawnLengths(VllmSampler):
    """A sampler whose answers have drawn lengths: an answer's numbers choose its length."""

    def _give(self, request: Request) -> str:
        assert request.answer is not None
        ticket, sample = request.answer
        drawn = int(LENGTHS[(ticket * SAMPLES + sample) % len(LENGTHS)])
        return super()._give(replace(request, call=Call(drawn)))

    def _params(self, greedy: bool) -> dict[str, Any]:
        return super()._params(greedy) | {"ignore_eos": True, "stop_token_ids": []}


class BenchRank(EngineRank):
    """An engine that receives versions without weights, and measures how many of its slots are in use."""

    async def start(self) -> None:
        config = self.config
        self.sampler = DrawnLengths(EngineSpec(config.model, config.rollout, config.run.seed, record=Path(self.record)))
        self.engine = Engine(self.sampler.spec, lambda _: self.sampler)
        await self.engine.start()
        vllm = self.sampler._thread.engine
        core, self.in_use_s, self.since = vllm.engine_core, 0.0, None
        self.steps: list[tuple[int, float]] = []
        get_output = core.get_output

        def measured() -> Any:
            outputs, now = get_output(), time.perf_counter()
            if self.since is not None:
                self.in_use_s += len(outputs.outputs) * (now - self.since)
                self.steps.append((len(outputs.outputs), now - self.since))
            # With requests left, the slots are in use until the next step has ended, and otherwise idle.
            self.since = now if core.engine_core.scheduler.has_unfinished_requests() else None
            return outputs

        core.get_output = measured

    async def receive(self, version: int) -> dict[str, float]:
        return await self.sampler._thread.call(partial(self._take, version))

    def _take(self, version: int) -> dict[str, float]:
        engine = self.sampler._thread.engine
        engine.set_weight_version(str(version))
        engine.reset_prefix_cache(reset_running_requests=True)
        self.sampler.weights.version = version
        return {}

    async def slot_seconds(self) -> float:
        """The seconds that all slots together were in use."""
        return self.in_use_s

    async def step_costs(self) -> tuple[float, float]:
        """The seconds of a decode step, and the seconds that each answer adds to it: a line through the median step of
        each number of answers."""
        answers, seconds = np.array(self.steps).T
        numbers = [n for n in range(1, SLOTS + 1) if (answers == n).sum() >= 20]
        slope, fixed = np.polyfit(numbers, [np.median(seconds[answers == n]) for n in numbers], 1)
        return float(fixed), float(slope)


class BenchGroup(EngineGroup):
    rank = BenchRank


class StaticSource:
    """Asks for as many answers as the engine decodes at once, and waits until all have ended."""

    def __init__(self, stream: RayStream, prompts: ShuffledStream[Prompt]) -> None:
        self._stream, self._prompts = stream, prompts

    def pushed(self, version: int) -> None:
        pass

    def next(self, step: int) -> Rollouts:
        groups: list[Group] = []
        while len(groups) < PROMPTS:
            asked = self._prompts.take(SLOTS // SAMPLES)
            self._stream.ask([GroupRequest(n, prompt, SAMPLES, (n,)) for n, prompt in asked], step)
            goal = len(groups) + len(asked)
            while len(groups) < goal:
                groups += self._stream.collect(step).groups.values()
        return Rollouts(groups, None, {})


class Quiet:
    """A sink that records nothing. The only expected warning is that no answer is right."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def warn(self, message: str, rule: str | None = None, step: int | None = None) -> None:
        assert "scores above 0" in message, message


def configuration(model: Path, folder: Path, max_lag: int, num_steps: int) -> GrpoRunConfig:
    values = {
        "run": {"name": f"lag_{max_lag}", "folder": str(folder), "steps": num_steps},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": "none"},
        "balance": {"max_tokens_per_microbatch": 4096},
        "rewards": [{"kind": "exact_answer"}],
        "rollout": {
            "prompts_per_step": PROMPTS,
            "max_sequences": SLOTS,
            "samples_per_prompt": SAMPLES,
            "max_prompt_tokens": 3,
            "max_response_tokens": MEDIAN * LARGEST,
            "max_lag": max_lag,
            "delimiter": "",
        },
    }
    return validate(GrpoRunConfig, values)


def measure(num_steps: int, trainer_s: float, modes: Sequence[str]) -> dict[str, Any]:
    """The numbers of each mode, and the costs of the engine's steps. Engine and verifier are the same processes for all
    modes."""
    rows = [Prompt(f"row {i}", (5, 6, 7), "", {"ground_truth": "1"}) for i in range(1000)]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "megatron_rl.recipes.tiny.task", name], check=True, capture_output=True)
        description = folder / "model" / "config.json"
        description.write_text(
            json.dumps(json.loads(description.read_text()) | {"max_position_embeddings": MEDIAN * LARGEST + 3})
        )
        config = configuration(folder / "model", folder, 0, num_steps)
        logs = folder / "logs"
        with ray_session(config.cluster, 1, logs):
            placement, restarts = RayPlacement(config), Restarts(0)
            engines = BenchGroup(config, logs, placement, restarts)
            verifiers = VerifierGroup(config, logs, placement, restarts)
            engines.wait()
            verifiers.wait()
            for mode in modes:
                config = configuration(folder / "model", folder, MODES[mode], num_steps + 2 * MODES[mode] + WARM_UP)
                stream, prompts = open_stream(config, engines, verifiers), ShuffledStream(rows, PROMPTS, seed=0)
                source: Any = StaticSource(stream, prompts)
                if mode != "static":
                    ports = Ports(None, None, stream)  # type: ignore[arg-type]
                    kind = kind_of_source(config.rollout)
                    source = kind(config, ports, Prompts(prompts, []), Quiet(), NEVER)  # type: ignore[arg-type]
                results[mode] = run(source, engines, verifiers, config, trainer_s)
            fixed_s, per_answer_s = ray.get(engines.engines[0].step_costs.remote())
            engines.close()
    engine = {"fixed_s": fixed_s, "per_answer_s": per_answer_s}
    return {"modes": results, "engine": engine, "trainer_s": trainer_s}


def run(
    source: Any, engines: EngineGroup, verifiers: VerifierGroup, config: GrpoRunConfig, trainer_s: float
) -> dict[str, float]:
    [engine], [verifier] = engines.engines, verifiers.verifiers
    max_lag = config.rollout.max_lag
    first, last = max_lag + WARM_UP, config.run.steps - max_lag
    processes = {"driver": psutil.Process(), "verifier": psutil.Process(verifier.process.placed.pid)}
    num_tokens, start, before, in_use_s = 0, 0.0, {}, 0.0
    for step in range(config.run.steps):
        if step == first:
            start, before, in_use_s = time.perf_counter(), cpu_seconds(processes), ray.get(engine.slot_seconds.remote())
        if step == last:
            seconds, after = time.perf_counter() - start, cpu_seconds(processes)
            in_use_s = ray.get(engine.slot_seconds.remote()) - in_use_s
        ray.get(engine.receive.remote(step))
        source.pushed(step)
        groups = source.next(step).groups
        if first <= step < last:
            num_tokens += sum(sample.num_actions for group in groups for sample in group.rollouts)
        time.sleep(trainer_s)
    if last == config.run.steps:
        seconds, after = time.perf_counter() - start, cpu_seconds(processes)
        in_use_s = ray.get(engine.slot_seconds.remote()) - in_use_s
    return {
        "tokens_per_s": num_tokens / seconds,
        "occupancy": in_use_s / (SLOTS * seconds),
        "seconds_per_step": seconds / (last - first),
        **{f"{name}_cpu": (after[name] - before[name]) / seconds for name in processes},
    }


def cpu_seconds(processes: dict[str, psutil.Process]) -> dict[str, float]:
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="the number of steps that are measured in each mode")
    parser.add_argument("--trainer-seconds", type=float, default=0.8, help="the trainer's time in each step")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = measure(args.steps, args.trainer_seconds, args.modes)
    if args.json:
        print(json.dumps(results))
        return 0
    slowest = results["modes"][args.modes[0]]["tokens_per_s"]
    print("              tokens/s   times  slots in use  step    driver  verifier (of a core)")
    for mode, row in results["modes"].items():
        print(
            f"{mode:12}  {row['tokens_per_s']:8,.0f}  {row['tokens_per_s'] / slowest:6.2f}  {row['occupancy']:12.1%}"
            f"  {row['seconds_per_step']:.2f} s  {row['driver_cpu']:6.1%}  {row['verifier_cpu']:8.1%}"
        )
    engine = results["engine"]
    print(f"a step of n answers takes {engine['fixed_s'] * 1e3:.2f} ms + n x {engine['per_answer_s'] * 1e6:.0f} us")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
