"""Compare our micro-batch plans with usual strategies, over many simulated workloads.

The cases combine workloads of lengths up to 32,768 tokens (uniform, lognormal, 12 % at that limit, two modes, one
giant) with numbers of samples, numbers of data-parallel ranks and caps of a micro-batch (32,768 and 65,536 tokens).
Costs are FLOPs of Qwen3-32B, and sequences are padded to multiples of 16. The results of each strategy are:

    over cap        number of cases with a micro-batch over the cap
    micro-batches   number of micro-batches of a rank, divided by the number that first-fit decreasing needs for all
                    samples, divided by the number of ranks; mean and worst case
    imbalance       (max - mean) / mean of the ranks' FLOPs; median over seeds for 256 samples on 8 ranks, if no sample
                    costs more than the mean rank
    lockstep        sum over positions of the most expensive rank there, divided by a lower bound that holds for every
                    plan under the cap; mean and worst case for 256 samples and more (a strategy that breaks the cap can
                    be below 1)
    planned in      CPU time to plan, the best of several repeats, also as a multiple of the time to sort the same list

Further cases have 8,192 lognormal answers (median 1,800 tokens) on 64 ranks, which fill up to 97 % of all micro-batches
where the cap is the longest answer. There our plans compare with LPT, which divides the samples over the ranks first.

    python tools/bench/simulate_balance.py
    python tools/bench/simulate_balance.py --small --json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.balance import AssignmentLimits, assign, training_flops
from megatron_rl.balance.karmarkar_karp import karmarkar_karp
from megatron_rl.balance.metrics import imbalance, lockstep, lockstep_floor
from megatron_rl.balance.packing import first_fit_decreasing, padded
from megatron_rl.models import read_shape

SHAPE = read_shape(Path(__file__).parents[2] / "configs" / "model" / "Qwen3-32B.json")
LONGEST, ALIGNMENT = 32768, 16
CAPS = (LONGEST, 2 * LONGEST)
SIZES, RANKS = (64, 256, 1024, 4096, 16384), (1, 8, 32, 64, 256)
SMALL_SIZES, SMALL_RANKS = (64, 256), (1, 8)
TAILS = ((32768, 32768), (32768, 40960), (32768, 65536), (16384, 16384), (16384, 32768))
"""The longest answer and the cap of the cases with 8,192 answers, in tokens."""


def workload(name: str, num_samples: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if name == "uniform":
        lengths: np.ndarray = rng.integers(256, LONGEST + 1, num_samples)
    elif name == "lognormal":
        lengths = rng.lognormal(np.log(6000), 0.8, num_samples)
    elif name == "at the limit":  # 12 % of the samples were cut off at the limit
        lengths = rng.lognormal(np.log(8000), 0.6, num_samples)
        lengths[rng.random(num_samples) < 0.12] = LONGEST
    elif name == "two modes":  # answers with and without a thought
        thinks = rng.random(num_samples) < 0.5
        lengths = np.where(thinks, rng.normal(16000, 5000, num_samples), rng.normal(800, 200, num_samples))
    else:
        lengths = rng.normal(2000, 500, num_samples)
        lengths[0] = LONGEST
    return rng.permutation(np.clip(lengths, 64, LONGEST).astype(np.int64))


WORKLOADS = ("uniform", "lognormal", "at the limit", "two modes", "one giant")


@dataclass(frozen=True, slots=True)
class PackingCase:
    sizes_S: np.ndarray
    costs_S: np.ndarray
    cap: int
    num_ranks: int

    @classmethod
    def of(cls, name: str, num_samples: int, num_ranks: int, cap: int, seed: int) -> PackingCase:
        lengths = workload(name, num_samples, seed)
        return cls(padded(lengths, ALIGNMENT), training_flops(lengths, SHAPE), cap, num_ranks)


Cells = tuple[np.ndarray, int]
"""The cell of each sample, `position * num_ranks + rank`, and the number of positions."""


def ours(case: PackingCase) -> Cells:
    packing = assign(case.sizes_S, case.costs_S, AssignmentLimits(case.cap, case.num_ranks))
    return packing.cell_S, packing.count


def ranks_then_bins(case: PackingCase, ranks: list[np.ndarray], bins: Callable[[np.ndarray], list[int]]) -> Cells:
    """Put each rank's samples into its bins in order. The number of positions equals the bins of the rank with most
    bins."""
    cell_S, count = np.zeros(len(case.sizes_S), np.int64), 0
    for rank, samples in enumerate(ranks):
        if len(samples):
            positions = np.array(bins(samples))
            cell_S[samples] = positions * case.num_ranks + rank
            count = max(count, int(positions.max()) + 1)
    return cell_S, count


def first_fit_by_rank(case: PackingCase, ranks: list[np.ndarray]) -> Cells:
    return ranks_then_bins(case, ranks, lambda samples: first_fit_decreasing(case.sizes_S[samples].tolist(), case.cap))


def arrival_first_fit(case: PackingCase) -> Cells:
    """Rank 0 gets the first n / R samples, and so on. Each rank packs its samples by first-fit in that order."""
    return first_fit_by_rank(case, np.array_split(np.arange(len(case.sizes_S)), case.num_ranks))


def sort_and_stride(case: PackingCase) -> Cells:
    """The samples are given to the ranks in turn, longest first. Each rank packs them by first-fit in that order."""
    order = np.argsort(-case.sizes_S, kind="stable")
    return first_fit_by_rank(case, [order[rank :: case.num_ranks] for rank in range(case.num_ranks)])


def longest_processing_time(case: PackingCase) -> Cells:
    """Each sample, most expensive first, goes to the cheapest rank. Each rank packs by first-fit decreasing."""
    cost_R, owner = np.zeros(case.num_ranks), np.zeros(len(case.sizes_S), np.int64)
    order = np.argsort(-case.sizes_S, kind="stable")
    for sample in order:
        owner[sample] = cost_R.argmin()
        cost_R[owner[sample]] += case.costs_S[sample]
    return first_fit_by_rank(case, [order[owner[order] == rank] for rank in range(case.num_ranks)])


def cost_only_karmarkar_karp(case: PackingCase) -> Cells:
    """Karmarkar-Karp splits the samples over the ranks by cost, and each rank's samples over as many micro-batches as
    the tokens of the fullest rank need. Nothing guarantees the cap."""
    ranks = [np.array(part, np.int64) for part in karmarkar_karp(case.costs_S.tolist(), case.num_ranks)]
    count = max(-(-int(case.sizes_S[samples].sum()) // case.cap) for samples in ranks)

    def bins(samples: np.ndarray) -> list[int]:
        positions = np.zeros(len(samples), np.int64)
        for position, members in enumerate(karmarkar_karp(case.costs_S[samples].tolist(), count)):
            positions[members] = position
        return positions.tolist()

    cell_S, _ = ranks_then_bins(case, ranks, bins)
    return cell_S, count


STRATEGIES: dict[str, Callable[[PackingCase], Cells]] = {
    "ours": ours,
    "arrival, first-fit": arrival_first_fit,
    "sort and stride": sort_and_stride,
    "LPT": longest_processing_time,
    "cost-only Karmarkar-Karp": cost_only_karmarkar_karp,
}


@dataclass(frozen=True, slots=True)
class PackingOutcome:
    over_cap: bool
    microbatches: float
    """The number of micro-batches divided by the number from first-fit decreasing."""
    imbalance: float
    lockstep: float


def judge(case: PackingCase, cells: Cells) -> PackingOutcome:
    cell_S, count = cells
    num_cells = count * case.num_ranks
    assert len(cell_S) == len(case.sizes_S) and cell_S.min() >= 0 and cell_S.max() < num_cells
    tokens = np.bincount(cell_S, weights=case.sizes_S, minlength=num_cells)
    cost_PR = np.bincount(cell_S, weights=case.costs_S, minlength=num_cells).reshape(count, case.num_ranks)
    fewest = -(
        -(max(first_fit_decreasing(sorted(case.sizes_S.tolist(), reverse=True), case.cap)) + 1) // case.num_ranks
    )
    floor = lockstep_floor(case.sizes_S, case.costs_S, case.cap, case.num_ranks)
    return PackingOutcome(bool(tokens.max() > case.cap), count / fewest, imbalance(cost_PR), lockstep(cost_PR) / floor)


def grid(small: bool) -> Iterator[tuple[int, PackingCase]]:
    """All cases, as (number of samples, case)."""
    for num_samples in SMALL_SIZES if small else SIZES:
        for num_ranks in SMALL_RANKS if small else RANKS:
            for name in WORKLOADS:
                for cap in CAPS:
                    yield num_samples, PackingCase.of(name, num_samples, num_ranks, cap, seed=0)


def eight_ranks(num_seeds: int) -> Iterator[PackingCase]:
    """Cases of 256 samples on 8 ranks where no sample costs more than the mean rank."""
    for seed in range(num_seeds):
        for name in WORKLOADS:
            for cap in CAPS:
                case = PackingCase.of(name, 256, 8, cap, seed)
                if case.costs_S.max() <= case.costs_S.sum() / 8:
                    yield case


def compare(small: bool) -> dict[str, dict[str, float]]:
    cases, even = list(grid(small)), list(eight_ranks(2 if small else 20))
    report = {}
    for name, strategy in STRATEGIES.items():
        outcomes = [(num_samples, judge(case, strategy(case))) for num_samples, case in cases]
        large = [outcome.lockstep for num_samples, outcome in outcomes if num_samples >= 256]
        by_cap = {
            cap: [o.lockstep for (n, o), (_, c) in zip(outcomes, cases, strict=True) if n >= 256 and c.cap == cap]
            for cap in CAPS
        }
        imbalances = [judge(case, strategy(case)).imbalance for case in even]
        report[name] = {
            "cases": len(outcomes),
            "over_cap": sum(outcome.over_cap for _, outcome in outcomes),
            "microbatches_mean": float(np.mean([outcome.microbatches for _, outcome in outcomes])),
            "microbatches_worst": max(outcome.microbatches for _, outcome in outcomes),
            "imbalance_median": float(np.median(imbalances)),
            "imbalance_worst": max(imbalances),
            "lockstep_mean": float(np.mean(large)),
            "lockstep_worst": max(large),
            **{f"lockstep_mean_cap_{cap}": float(np.mean(values)) for cap, values in by_cap.items()},
        }
    return report


def compare_tails(small: bool) -> list[dict[str, float]]:
    """Our plans and LPT's of 8,192 lognormal answers on 64 ranks: means over the seeds."""
    rows = []
    for longest, cap in TAILS:
        outcomes: dict[str, list[PackingOutcome]] = {"ours": [], "LPT": []}
        for seed in range(1 if small else 4):
            drawn = np.random.default_rng(seed).lognormal(np.log(1800), 1.0, 8192)
            lengths = np.clip(drawn, 64, longest).astype(np.int64)
            case = PackingCase(padded(lengths, ALIGNMENT), training_flops(lengths, SHAPE), cap, 64)
            for name, found in outcomes.items():
                found.append(judge(case, STRATEGIES[name](case)))
        row: dict[str, float] = {"longest": longest, "cap": cap}
        for name, found in outcomes.items():
            row |= {
                f"{name}_lockstep": float(np.mean([outcome.lockstep for outcome in found])),
                f"{name}_imbalance": float(np.mean([outcome.imbalance for outcome in found])),
                f"{name}_microbatches": float(np.mean([outcome.microbatches for outcome in found])),
            }
        rows.append(row)
    return rows


def fastest_s(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def planning_times(small: bool) -> dict[str, dict[str, float]]:
    """The planning times of our plans over all workloads, mean and worst. Each is the best of several repeats."""
    report = {}
    for num_samples, num_ranks, repeats in ((256, 8, 30),) if small else ((256, 8, 100), (8192, 64, 10)):
        times, ratios = [], []
        for name in WORKLOADS:
            for cap in CAPS:
                case = PackingCase.of(name, num_samples, num_ranks, cap, seed=0)
                lengths = case.sizes_S.tolist()
                times.append(fastest_s(lambda: ours(case), repeats))
                ratios.append(times[-1] / fastest_s(lambda: sorted(lengths), repeats))
        report[f"{num_samples}_samples_{num_ranks}_ranks"] = {
            "plan_s_mean": float(np.mean(times)),
            "plan_s_worst": max(times),
            "times_of_a_sort_mean": float(np.mean(ratios)),
            "times_of_a_sort_worst": max(ratios),
        }
    return report


def print_tables(report: dict[str, Any]) -> None:
    print(f"{'':25} {'over cap':>10} {'micro-batches':>16} {'imbalance':>11} {'lockstep':>17}")
    for name, row in report["strategies"].items():
        microbatches = f"{row['microbatches_mean']:.3f} / {row['microbatches_worst']:.2f}"
        steps = f"{row['lockstep_mean']:.3f} / {row['lockstep_worst']:.2f}"
        over = f"{row['over_cap']} of {row['cases']}"
        print(f"{name:25} {over:>10} {microbatches:>16} {row['imbalance_median']:>11.4%} {steps:>17}")
    for row in report["tails"]:
        ours, other = (f"{row[f'{name}_lockstep']:.4f} ({row[f'{name}_imbalance']:.3%})" for name in ("ours", "LPT"))
        print(f"8192 answers up to {row['longest']} tokens, cap {row['cap']}: lockstep (imbalance) {ours}, LPT {other}")
    for name, row in report["planning"].items():
        print(
            f"{name.replace('_', ' ')}: planned in {row['plan_s_mean'] * 1e3:.1f} ms (worst workload "
            f"{row['plan_s_worst'] * 1e3:.1f} ms), {row['times_of_a_sort_mean']:.0f} times as long as a sort"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, as the last line, instead of tables"
    )
    parser.add_argument("--small", action="store_true", help="fewer cases and seeds; takes a few seconds")
    options = parser.parse_args(arguments)
    report = {
        "strategies": compare(options.small),
        "tails": compare_tails(options.small),
        "planning": planning_times(options.small),
    }
    if options.json:
        json.dump(report, sys.stdout)
        print()
    else:
        print_tables(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
