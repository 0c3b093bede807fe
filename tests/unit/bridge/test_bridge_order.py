"""The order of a push's messages, on hosts and communicators that do exactly what they were told: no wait is a circle.

It follows sender.py, intake.py and NCCL. A host goes on when what it waits for has happened. A communicator carries out
what a rank has posted one after the other, and carries a message when it is the next one at both of its ends. A pair
that is not connected waits, at its first message, until the hosts of both ends have called.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import cover
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import engines as any_engines
from random_layouts import enlarged, meshes, served
from torch.distributed import HashStore

from megatron_rl.bridge import join
from megatron_rl.bridge.line import SLOTS
from megatron_rl.bridge.push_simulation import StretchSize, all_stretches
from megatron_rl.commands.size_run import read
from megatron_rl.layout import Engines, TransferPlan, plan_weights
from megatron_rl.models import read_shape
from megatron_rl.planning.shapes import planned_shape
from megatron_rl.planning.transfer import planned_transfer
from megatron_rl.types import Mesh

Program = Iterator[Hashable]
"""What a host does. It yields each event that it waits for."""


class Push:
    """All ranks of a push.

    Args of the constructor:
        order: the order of `all_stretches`.
        connected: every pair has been connected before.
        one_group: the lines share communicators. Otherwise each line has its own.
    """

    def __init__(
        self, order: Sequence[StretchSize], engines: Engines, num_sources: int, *, connected: bool, one_group: bool
    ) -> None:
        self.one_group, self.connected = one_group, connected
        self.happened: set[Hashable] = set()
        self.queues: defaultdict[Hashable, deque[tuple[str, int, int]]] = defaultdict(deque)
        self.ends: dict[tuple[int, int], tuple[int, int]] = {}
        """The sender and the receiver of each message, by the stretch and the hop."""
        sent, taken = defaultdict[int, list[int]](list), defaultdict[tuple[int, int], list[int]](list)
        chains = {chain[0]: list(chain) for chain in engines.chains}
        for stretch, one in enumerate(order):
            first, within = divmod(one.destination, engines.world_size)
            ranks = [one.source, *(num_sources + e * engines.world_size + within for e in chains[first])]
            sent[one.source].append(stretch)
            for hop, (sender, receiver) in enumerate(zip(ranks, ranks[1:], strict=False)):
                self.ends[stretch, hop] = sender, receiver
                taken[receiver, hop].append(stretch)
        self.hosts = [self._trainer(stretches) for stretches in sent.values()]
        self.hosts += [self._engine(stretches, hop) for (_, hop), stretches in taken.items()]

    def run(self) -> int:
        """The number of messages that were answered, of `len(self.ends)`."""
        waiting: defaultdict[Hashable, list[Program]] = defaultdict(list)
        ready = deque(self.hosts)
        self.wake = lambda event: ready.extend(waiting.pop(event, []))
        while ready:
            host = ready.popleft()
            for event in host:
                if event not in self.happened:
                    waiting[event].append(host)
                    break
        return sum(("answer", *message) in self.happened for message in self.ends)

    def _happens(self, *event: Hashable) -> None:
        self.happened.add(event)
        self.wake(event)

    def _trainer(self, stretches: Sequence[int]) -> Program:
        for index, stretch in enumerate(stretches):
            if index >= SLOTS:
                yield "answer", stretches[index - SLOTS], 0
            yield from self._call("send", stretch, 0)

    def _engine(self, stretches: Sequence[int], hop: int) -> Program:
        for stretch in stretches[:SLOTS]:
            yield from self._call("receive", stretch, hop)
        feeds = (stretches[0], hop + 1) in self.ends
        for index, stretch in enumerate(stretches):
            yield "arrival", stretch, hop
            if feeds:
                yield from self._call("send", stretch, hop + 1)
            self._happens("answer", stretch, hop)
            if feeds and index > 0:
                yield "answer", stretches[index - 1], hop + 1
            for later in stretches[index + SLOTS : index + SLOTS + 1]:
                yield from self._call("receive", later, hop)

    def _call(self, kind: str, stretch: int, hop: int) -> Program:
        sender, receiver = self.ends[stretch, hop]
        if not self.connected:
            self._happens(kind, sender, receiver)
            yield "receive" if kind == "send" else "send", sender, receiver
        queue = self._queue(kind, stretch, hop)
        queue.append((kind, stretch, hop))
        self._carry(queue)

    def _queue(self, kind: str, stretch: int, hop: int) -> deque[tuple[str, int, int]]:
        sender, receiver = self.ends[stretch, hop]
        group = hop % 2 if self.one_group else (sender, receiver)
        return self.queues[sender if kind == "send" else receiver, group]

    def _carry(self, queue: deque[tuple[str, int, int]]) -> None:
        """Carry the next message of a queue, and the ones that were behind it at either end."""
        looked_at = [queue]
        while looked_at:
            queue = looked_at.pop()
            if not queue:
                continue
            kind, stretch, hop = queue[0]
            other_kind = "receive" if kind == "send" else "send"
            other = self._queue(other_kind, stretch, hop)
            if other and other[0] == (other_kind, stretch, hop):
                queue.popleft()
                other.popleft()
                self._happens("arrival", stretch, hop)
                looked_at += [queue, other]


RECIPES = sorted(Path("recipes").glob("*/*.yaml"))


class Connected:
    """What the ranks do when they join, up to the messages that connect them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends: dict[str, set[tuple[int, int, int]]] = {"send": set(), "receive": set()}
        """(communicator, sender, receiver) of each of these messages, by who has called."""
        monkeypatch.setattr(join, "_gloo", lambda store, second, patience: None)
        monkeypatch.setitem(join.SHARED_GROUPS, "meta", self._group)

    def join(self, plan: TransferPlan, share_gpus: bool) -> None:
        trainers, engines = plan.num_sources, plan.engines
        outlets, inlets = (defaultdict[int, dict[int, int]](dict) for _ in range(2))
        for source, to in plan.turns:
            outlets[source][trainers + to] = 0
            inlets[trainers + to][source] = 0
        for chain in engines.chains:
            for hop, (feeding, fed) in enumerate(pairwise(chain), start=1):
                for within in range(engines.world_size):
                    one, next_one = (trainers + e * engines.world_size + within for e in (feeding, fed))
                    outlets[one][next_one] = inlets[next_one][one] = hop
        store = HashStore()
        store.set("needed/meta", "1")
        for rank in range(trainers + plan.num_destinations):
            joining = object.__new__(join.Joining)
            joining.rank, joining.device, joining._store = rank, torch.device("meta"), store
            joining._devices, joining._share_gpus = ["meta"] * (trainers + plan.num_destinations), share_gpus
            joining._patience, joining._are_chained, joining._contents = timedelta(1), engines.are_chained, []
            self.rank, self.made = rank, 0
            joining.share_contents(outlets[rank], inlets[rank])
            for peer, second in [*((to, False) for to in outlets[rank]), *((source, True) for source in inlets[rank])]:
                self.pair = (peer, rank) if second else (rank, peer)
                joining._groups("line", peer, second, near=False, hop=(inlets if second else outlets)[rank][peer])

    def _group(self, store: object, rank: int, num_ranks: int, *_: object) -> SimpleNamespace:
        members = range(num_ranks) if num_ranks > 2 else self.pair
        number, self.made = self.made, self.made + 1

        def call(kind: str, peer: int) -> None:
            ends = (members[rank], members[peer])
            self.ends[kind].add((0 if num_ranks == 2 else number, *(ends if kind == "send" else ends[::-1])))

        return SimpleNamespace(
            _start_coalescing=lambda: None,
            send=lambda tensors, to, tag: call("send", to),
            recv=lambda tensors, source, tag: call("receive", source),
            _end_coalescing=lambda: None,
        )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda one: one.stem)
def test_joining_connects_every_pair_that_exchanges_a_message(recipe, monkeypatch):
    """Both ends of each pair, over the communicator that carries its messages, and no other pair."""
    config = read([str(recipe)])
    plan = planned_transfer(config, planned_shape(config), config.policy.parallel.mesh)
    connected = Connected(monkeypatch)
    connected.join(plan, config.cluster.colocate)
    world, first = plan.engines.world_size, plan.num_sources
    messages = {(0, source, first + to) for source, to in plan.turns}
    for _, to in plan.turns:
        [chain] = [chain for chain in plan.engines.chains if chain[0] == to // world]
        ranks = [first + engine * world + to % world for engine in chain]
        messages |= {(hop % 2, *ends) for hop, ends in enumerate(pairwise(ranks), start=1)}
    assert connected.ends["send"] == connected.ends["receive"] == messages


@pytest.mark.parametrize(
    "recipe",
    cover.essential(RECIPES, *(one for one in RECIPES if one.stem == "qwen3_32b-dapo-8n8g-tp8cp2-32k")),
    ids=lambda one: one.stem,
)
def test_the_push_of_a_recipe_ends(recipe):
    config = read([str(recipe)])
    plan = planned_transfer(config, planned_shape(config), config.policy.parallel.mesh)
    order = all_stretches(plan, int(config.bridge.bucket_mib * 2**20))
    separate = not config.cluster.colocate
    push = Push(order, plan.engines, plan.num_sources, connected=True, one_group=separate)
    assert push.run() == len(push.ends) > 0


def test_a_first_push_would_not_end_if_it_connected_the_pairs():
    """Qwen3-32B from two nodes to two others: a rank of an engine has not answered one trainer when it waits for the
    next one."""
    mesh, engines = Mesh(tensor=4, pipeline=4), Engines(4, 4)
    plan = plan_weights(read_shape(Path("configs/model/Qwen3-32B.json")), mesh, engines, dtype="bfloat16")
    order = all_stretches(plan, 2**26)
    for connected in (True, False):
        answered = Push(order, engines, plan.num_sources, connected=connected, one_group=True).run()
        assert (answered == len(order)) == connected


@given(st.data())
@settings(max_examples=cover.examples(200))
def test_the_push_of_any_layout_ends(data):
    engines = data.draw(any_engines())
    shape = enlarged(data.draw(served(engines)))
    plan = plan_weights(shape, data.draw(meshes(shape)), engines, dtype="bfloat16")
    order = all_stretches(plan, data.draw(st.sampled_from([2**20, 2**24])))
    push = Push(order, engines, plan.num_sources, connected=True, one_group=data.draw(st.booleans()))
    assert push.run() == len(push.ends) > 0
