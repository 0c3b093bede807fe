"""Simulate engines and a trainer that work in turns or at the same time, without either.

Time is simulated event by event: an engine decodes its answers step by step, a step takes longer the more answers and
the more context it has, a trainer takes a batch when `loop/admission.py`, the code of a run, gives it one. Nothing is
measured, so the results are as good as the costs that go in.

    python tools/simulate_async.py                   Qwen3-32B on 8 to 128 nodes of 8 H100, and the best split of each
    python tools/simulate_async.py --against FILE    the modes of bench_rollout.py, beside what it measured (its --json)

Of Qwen3-32B the costs are those of a dry run: bytes of weights and cache through the memory of
an H100, operations at a share of its peak. A batch is 128 prompts x 16 answers, lognormal around 6,000 tokens and cut
at 32,768; engines are TP4, trainers TP4 x PP4.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.balance import training_flops
from megatron_rl.balance.hardware import BANDWIDTH, DECODING_SHARE, PEAK_FLOPS, TRAINING_SHARE
from megatron_rl.layout import read_shape
from megatron_rl.layout.families import FAMILIES
from megatron_rl.loop.admission import Admission

MODEL = Path(__file__).parent.parent / "configs" / "model" / "Qwen3-32B.json"
NODES = (8, 16, 32, 64, 128)
NUM_GPUS, TENSOR, TRAINER_NODES = 8, 4, 2
"""The GPUs of a node, those of an engine, and the nodes of one replica of the trainer."""
MEMORY_BYTES, MEMORY_SHARE = 80e9, 0.85
PROMPT_TOKENS, LONGEST = 500, 32768
PUSH_S = 1.5
LAGS = {"max_lag 0": 0, "max_lag 1": 1, "max_lag 4": 4}


@dataclass(frozen=True, slots=True)
class Costs:
    """The seconds of one decode step, and how many answers an engine decodes at once."""

    slots: int
    fixed_s: float
    per_answer_s: float
    per_token_s: float = 0.0
    """The seconds for each token of context of all answers together."""


class Engine:
    """One simulated engine. Its clock counts decode steps; between two events the steps take equally long."""

    def __init__(self, costs: Costs, prompt_tokens: int) -> None:
        self._costs, self._prompt_tokens = costs, prompt_tokens
        self.waiting: deque[tuple[int, int]] = deque()
        """(group, length) of the answers that wait for a slot."""
        self.running: list[tuple[float, int]] = []
        """A heap of (step of the last token, group)."""
        self._begun = 0.0
        """The sum of the steps at which the running answers began."""
        self._lengths: dict[tuple[float, int], list[int]] = {}
        self.steps = self.now = self.in_use_s = 0.0

    def add(self, group: int, lengths: Sequence[int]) -> None:
        self.waiting.extend((group, length) for length in lengths)
        self._fill()

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self._costs.slots:
            group, length = self.waiting.popleft()
            end = self.steps + length
            heapq.heappush(self.running, (end, group))
            self._lengths.setdefault((end, group), []).append(length)
            self._begun += self.steps

    @property
    def step_s(self) -> float:
        num = len(self.running)
        context = num * (self._prompt_tokens + self.steps) - self._begun
        return self._costs.fixed_s + self._costs.per_answer_s * num + self._costs.per_token_s * context

    def next_end(self) -> float:
        """The time at which the next answer ends; infinite if none runs."""
        return self.now + (self.running[0][0] - self.steps) * self.step_s if self.running else np.inf

    def advance(self, now: float) -> Iterator[int]:
        """Go on to a time that is not after the next end. Yields the group of each answer that ends."""
        if self.running:
            self.in_use_s += len(self.running) * (now - self.now)
            self.steps += (now - self.now) / self.step_s
        self.now = now
        while self.running and self.running[0][0] <= self.steps + 1e-9:
            end, group = heapq.heappop(self.running)
            length = self._lengths[end, group].pop()
            self._begun -= end - length
            self.steps = max(self.steps, end)
            self._fill()
            yield group


class World:
    """The engines, and the groups that they have begun."""

    def __init__(self, costs: Costs, num_engines: int, num_samples: int, lengths: np.ndarray, prompt_tokens: int):
        self.engines = [Engine(costs, prompt_tokens) for _ in range(num_engines)]
        self.num_samples, self._all_lengths = num_samples, lengths
        self._engine_of: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._groups_on = Counter({i: 0 for i in range(num_engines)})
        self._ends: list[tuple[float, int]] = []
        """A heap of (next end, engine); an entry that is no longer right is corrected when it is taken."""
        self.now = 0.0

    def lengths(self, group: int) -> np.ndarray:
        first = group * self.num_samples
        return self._all_lengths[np.arange(first, first + self.num_samples) % len(self._all_lengths)]

    def ask(self, group: int) -> None:
        """A group goes to the engine that works on the fewest groups."""
        index = min(self._groups_on, key=self._groups_on.__getitem__)
        self._groups_on[index] += 1
        self._engine_of[group], self._left[group] = index, self.num_samples
        engine = self.engines[index]
        for _ in engine.advance(self.now):
            raise AssertionError("answers that end now have ended before")
        engine.add(group, self.lengths(group).tolist())
        heapq.heappush(self._ends, (engine.next_end(), index))

    def run(self, until: float, enough: Callable[[], bool] = lambda: False) -> Iterator[int]:
        """Let the engines work up to a time, or until it is enough. Yields each group whose answers have all ended."""
        while not enough():
            while self._ends and self._ends[0][0] != self.engines[self._ends[0][1]].next_end():
                _, index = heapq.heappop(self._ends)
                if (end := self.engines[index].next_end()) < np.inf:
                    heapq.heappush(self._ends, (end, index))
            if not self._ends or self._ends[0][0] > until:
                break
            self.now, index = heapq.heappop(self._ends)
            engine = self.engines[index]
            for group in engine.advance(self.now):
                self._left[group] -= 1
                if not self._left[group]:
                    self._groups_on[self._engine_of[group]] -= 1
                    yield group
            heapq.heappush(self._ends, (engine.next_end(), index))
        else:
            return
        self.now = until
        for engine in self.engines:
            for _ in engine.advance(until):
                raise AssertionError("an answer has ended before the next end")

    def pause(self, seconds: float) -> None:
        """All engines receive weights."""
        self.now += seconds
        self._ends = []
        for index, engine in enumerate(self.engines):
            engine.now += seconds
            if engine.running:
                heapq.heappush(self._ends, (engine.next_end(), index))

    @property
    def in_use_s(self) -> float:
        return sum(engine.in_use_s for engine in self.engines)


@dataclass(frozen=True, slots=True)
class Job:
    """What is the same in all modes."""

    costs: Costs
    num_engines: int
    prompts: int
    samples: int
    lengths: np.ndarray
    trainer_s: Callable[[np.ndarray], float]
    """The seconds that the trainer takes for answers of these lengths."""
    push_s: float = 0.0
    prompt_tokens: int = 0


def simulate(job: Job, max_lag: int | None, num_steps: int, warm_up: int) -> dict[str, Any]:
    """One mode.

    Args:
        max_lag: None is the static mode, in which the engines answer as much as they have slots for, and then the next.
        warm_up: the number of steps, beyond the lag, before the measurement.
    """
    world = World(job.costs, job.num_engines, job.samples, job.lengths, job.prompt_tokens)
    lag = max_lag or 0
    admission, number = Admission(job.prompts, lag), 0
    lags: Counter[int] = Counter()
    start = in_use_s = trained_s = 0.0
    num_tokens, total_steps = 0, num_steps + 2 * lag + warm_up
    version_of: dict[int, int] = {}
    first, last = lag + warm_up, total_steps - lag
    end = 0.0
    for step in range(total_steps):
        if step == first:
            start, in_use_s, trained_s, num_tokens = world.now, world.in_use_s, 0.0, 0
        if step == last:
            break
        world.pause(job.push_s)
        taken: list[int] | None
        if max_lag is None:
            taken = []
            while len(taken) < job.prompts:
                chunk = min(job.prompts - len(taken), max(1, job.num_engines * job.costs.slots // job.samples))
                for _ in range(chunk):
                    world.ask(number)
                    number += 1
                goal = len(taken) + chunk
                for group in world.run(np.inf, lambda goal=goal, done=taken: len(done) == goal):
                    taken.append(group)
        else:
            for _ in range(admission.room(total_steps - step)):
                admission.admit(number, step)
                version_of[number] = step
                world.ask(number)
                number += 1
            while (taken := admission.take(step)) is None:
                before = len(admission.running)
                for group in world.run(np.inf, lambda n=before: len(admission.running) < n):
                    admission.finish(group, useful=True)
            lags.update(step - version_of[group] for group in taken if step >= first)
        lengths = np.concatenate([world.lengths(group) for group in taken])
        seconds = job.trainer_s(lengths)
        num_tokens, trained_s = num_tokens + int(lengths.sum()), trained_s + seconds
        for group in world.run(world.now + seconds):
            admission.finish(group, useful=True)
        end = world.now
    seconds = end - start
    slots = job.costs.slots * job.num_engines
    return {
        "tokens_per_s": num_tokens / seconds,
        "seconds_per_step": seconds / num_steps,
        "slots_in_use": (world.in_use_s - in_use_s) / (slots * seconds),
        "trainer_busy": trained_s / seconds,
        "lags": {str(lag): count / max(1, sum(lags.values())) for lag, count in sorted(lags.items())},
    }


def qwen3_32b(num_nodes: int, trainer_nodes: int) -> Job:
    """Qwen3-32B on nodes of which some train."""
    shape = read_shape(MODEL)
    parameters, width = FAMILIES[shape.family].num_parameters(shape), 2
    cache_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.num_layers * width
    bandwidth = TENSOR * BANDWIDTH * DECODING_SHARE
    lengths = np.random.default_rng(0).lognormal(np.log(6000), 0.8, 2**16).clip(1, LONGEST).astype(int)
    room = (TENSOR * MEMORY_BYTES * MEMORY_SHARE - parameters * width) / cache_bytes
    costs = Costs(
        slots=int(room / (PROMPT_TOKENS + lengths.mean())),
        fixed_s=parameters * width / bandwidth,
        per_answer_s=2 * parameters / (TENSOR * PEAK_FLOPS * TRAINING_SHARE),
        per_token_s=cache_bytes / bandwidth,
    )
    gpus = trainer_nodes * NUM_GPUS

    def trainer_s(lengths: np.ndarray) -> float:
        flops = training_flops(lengths + PROMPT_TOKENS, shape, "full").sum()
        return float(flops / (gpus * PEAK_FLOPS * TRAINING_SHARE))

    num_engines = (num_nodes - trainer_nodes) * NUM_GPUS // TENSOR
    return Job(costs, num_engines, 128, 16, lengths, trainer_s, PUSH_S, PROMPT_TOKENS)


def best_split(num_nodes: int, max_lag: int, num_steps: int) -> dict[str, Any]:
    """The number of trainer nodes with the most tokens per second."""
    choices = sorted({max(TRAINER_NODES, num_nodes * i // 16 // TRAINER_NODES * TRAINER_NODES) for i in range(1, 15)})
    results = []
    for trainer_nodes in choices:
        if trainer_nodes < num_nodes:
            result = simulate(qwen3_32b(num_nodes, trainer_nodes), max_lag, num_steps, warm_up=2)
            results.append(result | {"trainer_nodes": trainer_nodes, "engine_nodes": num_nodes - trainer_nodes})
    return max(results, key=lambda result: result["tokens_per_s"])


def against(path: Path, num_steps: int) -> dict[str, Any]:
    """The modes of bench_rollout.py: tokens per second as multiples of the first mode's, simulated and measured."""
    from megatron_rl.tools.bench_rollout import LENGTHS, MODES, PROMPTS, SAMPLES, SLOTS, WARM_UP

    measured = json.loads(path.read_text())
    costs = Costs(SLOTS, measured["engine"]["fixed_s"], measured["engine"]["per_answer_s"])
    trainer_s = measured["trainer_s"]
    job = Job(costs, 1, PROMPTS, SAMPLES, LENGTHS, lambda lengths: trainer_s)
    rows: dict[str, Any] = {}
    for mode in measured["modes"]:
        lag = None if mode == "static" else MODES[mode]
        rows[mode] = {"simulated": simulate(job, lag, num_steps, WARM_UP), "measured": measured["modes"][mode]}
    base = {kind: next(iter(rows.values()))[kind]["tokens_per_s"] for kind in ("simulated", "measured")}
    return {
        mode: {f"{kind}_ratio": row[kind]["tokens_per_s"] / base[kind] for kind in base} | row
        for mode, row in rows.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="the number of simulated steps after the warm-up")
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES))
    parser.add_argument("--against", type=Path, help="a file with the output of bench_rollout.py --json")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(arguments)
    if args.against:
        rows = against(args.against, args.steps)
        if args.json:
            print(json.dumps(rows))
            return 0
        print("              simulated  measured  slots in use, simulated")
        for mode, row in rows.items():
            used = row["simulated"]["slots_in_use"]
            print(f"{mode:12}  {row['simulated_ratio']:9.2f}  {row['measured_ratio']:8.2f}  {used:12.1%}")
        return 0
    results = {num: {mode: best_split(num, lag, args.steps) for mode, lag in LAGS.items()} for num in args.nodes}
    if args.json:
        print(json.dumps(results))
        return 0
    print("nodes  mode       trainers  engines  tokens/s    step   slots in use  trainer busy  lag, mean")
    for num, modes in results.items():
        for mode, row in modes.items():
            lag = sum(int(lag) * share for lag, share in row["lags"].items())
            print(
                f"{num:5}  {mode:9}  {row['trainer_nodes']:8}  {row['engine_nodes']:7}  {row['tokens_per_s']:8,.0f}"
                f"  {row['seconds_per_step']:6,.0f} s  {row['slots_in_use']:10.1%}  {row['trainer_busy']:12.1%}"
                f"  {lag:9.2f}"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
