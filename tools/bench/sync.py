"""Measure a push of new weights between real processes, and compare it with plain sends and with its replay.

Each rank is a process; trainer ranks hold random weights in bf16, and engine ranks write what they receive. Of each
layout the following ways run in turns, and the best turn of each counts:

    plain          each two ranks that the plan joins exchange as many bytes at once over gloo, from and to memory of
                   their own: the fastest that gloo allows
    bridge         the push over gloo
    memcpy         each engine rank copies as many bytes as it receives
    shared memory  the push through memory that both sides map

`replayed` is what bridge/push_simulation.py predicts for a push, with parameters that are measured in the same run: the
rate of a link comes from the plain way (the bytes of the fullest link divided by the time); a message takes at each end
the additional CPU seconds of a push over the plain way, times the number of ranks that share a core; and an answer is
timed between two ranks. The tool fails if the bridge leaves different bits in an engine. Peak memory is the largest
memory of a rank (VmHWM) from before joining until the end of the first push, minus its memory before joining, and
without the buffers of other ranks that an engine rank maps.

With --links every rank has a node of its own: network namespaces whose cables have a known rate in both directions. The
push is then compared with its bound, the bytes of the fullest link at this rate. This needs root, ip and tc.

    python tools/bench/sync.py --json
    python tools/bench/sync.py --layouts pipeline chain --gigabytes 0.5
    python tools/bench/sync.py --links 200mbit --nodes 2+2,4+4
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_rl.bridge.line import SLOTS
from megatron_rl.bridge.push_simulation import Costs, StretchSize, all_stretches, replay
from megatron_rl.bridge.setup import BUCKET_BYTES, BridgeSetup
from megatron_rl.layout import Engines, Links, TransferPlan
from megatron_rl.layout.traffic import traffic
from megatron_rl.models import read_shape
from megatron_rl.tools.bench.namespaces import NetworkNode, make_switch, why_not
from megatron_rl.tools.bench.sync_ranks import DEADLINE, RankProcess, ask, started
from megatron_rl.types import Mesh


@dataclass(frozen=True)
class SyncLayout:
    mesh: Mesh
    engines: Engines
    mixture: bool = False

    @property
    def num_ranks(self) -> tuple[int, int]:
        return self.mesh.world_size, self.engines.num * self.engines.world_size


LAYOUTS = {
    "pipeline-small": SyncLayout(Mesh(pipeline=2), Engines(1, 2)),
    "one-engine": SyncLayout(Mesh(tensor=2, pipeline=2), Engines(1, 2)),
    "two-engines": SyncLayout(Mesh(tensor=2, pipeline=2), Engines(2, 2)),
    "four-engines": SyncLayout(Mesh(tensor=4), Engines(4, 1)),
    "pipeline": SyncLayout(Mesh(pipeline=4), Engines(1, 4)),
    "experts": SyncLayout(Mesh(tensor=2, data=2, expert=2), Engines(1, 2, expert_parallel=True), mixture=True),
    "chain": SyncLayout(Mesh(tensor=2, pipeline=2), Engines(4, 1, num_chains=2)),
}
WAYS = ("plain", "bridge", "memcpy", "shared memory")
BETWEEN_NODES = ("plain", "bridge")
BRIDGES = ("bridge", "shared memory")
WITHOUT_WEIGHTS = ("plain", "memcpy")
"""The ways that leave no weights in the engines."""
NO_LINK_GBPS = 1e9
"""Through shared memory no link carries the bytes: they are packed and written."""


@dataclass(frozen=True)
class Size:
    hidden: int
    gigabytes: float
    """The approximate number in bf16."""
    bucket_bytes: int


HERE = Size(2560, 1.0, BUCKET_BYTES)
LIMITED = Size(1024, 0.1, 2**20)
"""Slow links need a small model. The buckets are smaller in proportion, so that a rank still has dozens of them."""


def config(hidden: int, num_layers: int, mixture: bool) -> dict[str, object]:
    """A config.json whose layers have 14 hidden^2 + 1024 hidden parameters, dense or with eight experts, and 16
    hidden^2 in the embedding and the output layer."""
    common = {
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 4 * hidden,
        "vocab_size": 8 * hidden,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    if not mixture:
        return common | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2}
    kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
    return common | kind | experts | {"decoder_sparse_step": 1, "mlp_only_layers": []}


def make_setup(layout: SyncLayout, size: Size, links: Links) -> BridgeSetup:
    stages, hidden = layout.mesh.pipeline, size.hidden
    layers = (size.gigabytes * 1e9 / 2 - 16 * hidden**2) / (14 * hidden**2 + 1024 * hidden)
    with tempfile.TemporaryDirectory() as folder:
        words = config(hidden, stages * max(1, round(layers / stages)), layout.mixture)
        Path(folder, "config.json").write_text(json.dumps(words))
        shape = read_shape(Path(folder))
    return BridgeSetup(
        shape,
        layout.mesh,
        False,
        layout.engines,
        "bfloat16",
        bucket_bytes=size.bucket_bytes,
        timeout_s=DEADLINE.total_seconds(),
        links=links,
    )


def turns_of(
    processes: Sequence[RankProcess], ways: Sequence[str], repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, list[int]]]:
    """The seconds of the turns of each way, the CPU seconds of all ranks together in them, and for each bridge the peak
    memory of each rank in bytes.

    Raises:
        RuntimeError: a way left other weights than the first push.
    """
    peaks = {way: ask(processes, "join", way) for way in ways if way in BRIDGES}
    expected = ask(processes, "sums")
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    cpu_s: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way in ways:
            ask(processes, "forget")
            took, used = zip(*ask(processes, "run", way), strict=True)
            seconds[way].append(max(took))
            cpu_s[way].append(sum(used))
            if way not in WITHOUT_WEIGHTS and ask(processes, "sums") != expected:
                raise RuntimeError(f"{way}: the engines' weights differ from those after the first push")
    return seconds, cpu_s, peaks


def num_ends(plan: TransferPlan, order: Sequence[StretchSize]) -> int:
    """How many times a push sends or receives a message: twice for each engine of a chain."""
    engines = plan.engines
    return sum(2 * len(engines.chain_of(run.destination // engines.world_size)) * run.num_messages for run in order)


def predicted(plan: TransferPlan, order: Sequence[StretchSize], bytes_per_s: float, costs: Costs) -> float:
    """The seconds of a push in the replay, with one link for each direction of each rank."""
    gbps = bytes_per_s * 8 / 1e9
    return replay(order, plan, Links(nvlink_gbps=gbps, nic_gbps=gbps), costs)


def compare(setup: BridgeSetup, processes: Sequence[RankProcess], ways: Sequence[str], repeats: int) -> dict[str, Any]:
    plan, size = setup.transfer_plan, setup.bucket_bytes
    turns, cpu_turns, peaks = turns_of(processes, ways, repeats)
    seconds, cpu_s = ({way: min(each) for way, each in found.items()} for found in (turns, cpu_turns))
    order, fullest = all_stretches(plan, size), traffic(plan, Links(), size).busiest_link_bytes
    answer_s = min(max(ask(processes, "answers")) for _ in range(repeats))
    # Over gloo the link's own share of the processors is the same as for the plain way.
    beside_links = {"bridge": cpu_s["bridge"] - cpu_s["plain"]}
    rates = {"bridge": fullest / seconds["plain"]}
    if "shared memory" in ways and not plan.engines.feeds:  # engines feed each other over gloo
        beside_links["shared memory"], rates["shared memory"] = cpu_s["shared memory"], NO_LINK_GBPS * 1e9 / 8
    message_cpu_s = {way: max(0.0, used) / num_ends(plan, order) for way, used in beside_links.items()}
    sharing = max(1.0, len(processes) / len(os.sched_getaffinity(0)))
    replayed = {
        way: predicted(plan, order, rates[way], Costs(answer_s, sharing * used)) for way, used in message_cpu_s.items()
    }
    held = ask(processes[plan.num_sources :], "held_bytes")
    received = plan.engine_bytes.astype(int).tolist() * setup.engines.num
    return {
        "mesh": changed(setup.mesh),
        "engines": changed(setup.engines),
        "num_ranks": [plan.num_sources, plan.num_destinations],
        "num_messages": sum(run.num_messages for run in order),
        "num_answers": sum(len(plan.engines.chain_of(run.destination // plan.engines.world_size)) for run in order),
        "bucket_bytes": size,
        "held_bytes": held,
        "received_bytes": received,
        "redundancy": sum(received) / sum(held),
        "fullest_link_bytes": fullest,
        "seconds": seconds,
        "turns_s": turns,
        "cpu_s": cpu_s,
        "gigabytes_per_s": {way: sum(received) / seconds[way] / 1e9 for way in ways},
        "answer_s": answer_s,
        "message_cpu_s": message_cpu_s,
        "replayed_s": replayed,
        "share_of_plain": {way: seconds["plain"] / seconds[way] for way in peaks},
        "replayed_share_of_plain": {way: seconds["plain"] / each for way, each in replayed.items()},
        "peak_buckets": {way: [peak / size for peak in each] for way, each in peaks.items()},
    }


def measure_here(layout: SyncLayout, size: Size, repeats: int) -> dict[str, Any]:
    setup = make_setup(layout, size, Links(gpus_per_node=sum(layout.num_ranks)))
    with started(setup) as processes:
        row = compare(setup, processes, WAYS, repeats)
    return row | {"share_of_memcpy": row["seconds"]["memcpy"] / row["seconds"]["shared memory"]}


@contextmanager
def nodes(number: int, rate: str) -> Iterator[list[NetworkNode]]:
    with ExitStack() as stack:
        switch = make_switch()
        stack.callback(switch.end)
        found = []
        for index in range(number):
            found.append(NetworkNode(switch, index + 1))
            stack.callback(found[-1].end)
            found[-1].limit(rate)
        yield found


def measure_links(layout: SyncLayout, size: Size, rate: str, repeats: int) -> dict[str, Any]:
    gbps = gbit_per_s(rate)
    setup = make_setup(layout, size, Links(nic_gbps=gbps))
    with nodes(sum(layout.num_ranks), rate) as found:
        prefixes = [node.inside() for node in found]
        variables = {"GLOO_SOCKET_IFNAME": "eth0", "RES_OPTIONS": "timeout:1 attempts:1"}  # no name server answers
        with started(setup, prefixes=prefixes, host=found[0].address, environment=variables) as processes:
            row = compare(setup, processes, BETWEEN_NODES, repeats)
    bound_s = row["fullest_link_bytes"] / (gbps * 1e9 / 8)
    least_s = traffic(setup.transfer_plan, Links(nic_gbps=gbps), size.bucket_bytes).least_s
    over = {f"{way}_over_bound": seconds / bound_s for way, seconds in row["seconds"].items()}
    return row | {"rate_gbps": gbps, "bound_s": bound_s, "least_s": least_s} | over


def gbit_per_s(rate: str) -> float:
    """A rate such as 200mbit in Gbit/s.

    Raises:
        ValueError: it is none.
    """
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)", rate)) or not float(found[1]):
        raise ValueError(f"--links {rate}: a rate is a number above 0 and mbit or gbit, such as 200mbit")
    return float(found[1]) * {"mbit": 1e-3, "gbit": 1.0}[found[2]]


def layouts_of(nodes: str) -> list[str]:
    """The names of the layouts with these numbers of trainer ranks and engine ranks, such as `2+2,4+4`.

    Raises:
        ValueError: there are none of some size.
    """
    names = []
    for size in nodes.split(","):
        some = [name for name, layout in LAYOUTS.items() if "{}+{}".format(*layout.num_ranks) == size]
        if not some:
            known = sorted({"{}+{}".format(*layout.num_ranks) for layout in LAYOUTS.values()})
            raise ValueError(f"--nodes: no layout has {size} ranks; there are layouts with {', '.join(known)}")
        names += some
    return names


def changed(value: Mesh | Engines) -> str:
    """The sizes that are not the default, such as `tensor 2, pipeline 2`."""
    sizes = [(field.name, getattr(value, field.name), field.default) for field in fields(value)]
    return ", ".join(f"{name} {size}" for name, size, default in sizes if size != default)


def show(name: str, row: dict[str, Any]) -> None:
    seconds, shares, replayed = row["seconds"], row["share_of_plain"], row["replayed_share_of_plain"]
    print(f"\n{name}: {row['mesh']} -> {row['engines']}; {row['num_messages']} messages, {row['num_answers']} answers")
    for way in seconds:
        print(f"  {way:14} {seconds[way]:8.3f} s {row['gigabytes_per_s'][way]:8.3f} GB/s", end="")
        print(f" {row['cpu_s'][way]:8.3f} CPU s of all ranks", end="")
        if way in shares:
            print(f", {shares[way]:.2f} of the plain sends' rate", end="")
            print(f" ({replayed[way]:.2f} replayed)" if way in replayed else "", end="")
        print(f", {seconds[way] / row['bound_s']:.2f} of the bound" if "bound_s" in row else "")
    if "share_of_memcpy" in row:
        print(f"  the push through shared memory reaches {row['share_of_memcpy']:.2f} of the rate of memcpy")
    print(f"  engine ranks hold {sum(row['held_bytes']):,} bytes and receive {sum(row['received_bytes']):,}")
    print(f"  an answer takes {row['answer_s'] * 1e6:.0f} us", end="")
    for way, used in row["message_cpu_s"].items():
        print(f"; {way}: a message {used * 1e3:.2f} ms of a processor at each end", end="")
    for way, peaks in row["peak_buckets"].items():
        print(f"\n  {way}: a rank's peak memory is {max(peaks):.1f} buckets", end="")
    print(flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, help="default: all of them; with --links those of --nodes"
    )
    parser.add_argument("--links", metavar="RATE", help="a node for each rank, with links of this rate, as 200mbit")
    parser.add_argument(
        "--nodes", default="2+2,4+4", help="with --links: the layouts of these sizes; default: %(default)s"
    )
    parser.add_argument("--gigabytes", type=float, help=f"default: {HERE.gigabytes}; with --links {LIMITED.gigabytes}")
    parser.add_argument(
        "--bucket-mib",
        type=float,
        help=f"default: {HERE.bucket_bytes / 2**20:g}; with --links {LIMITED.bucket_bytes / 2**20:g}",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="also print one JSON object, as the last line")
    options = parser.parse_args(arguments)
    default = LIMITED if options.links else HERE
    size = Size(
        default.hidden,
        options.gigabytes or default.gigabytes,
        int(options.bucket_mib * 2**20) if options.bucket_mib else default.bucket_bytes,
    )
    rows: dict[str, dict[str, Any]] = {}
    try:
        names = options.layouts or (layouts_of(options.nodes) if options.links else list(LAYOUTS))
        if options.links:
            gbit_per_s(options.links)
            if reason := why_not("tc"):
                raise ValueError(f"--links needs root, ip and tc, to make nodes on this machine; {reason}")
        for name in names:
            layout = LAYOUTS[name]
            if options.links:
                rows[name] = measure_links(layout, size, options.links, options.repeats)
            else:
                rows[name] = measure_here(layout, size, options.repeats)
            show(name, rows[name])
    except ValueError as error:
        parser.error(str(error))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"layouts": rows, "repeats": options.repeats, "messages_under_way": SLOTS}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
