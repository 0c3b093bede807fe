"""The order of a push's messages, on hosts and communicators that do exactly what they were told: no wait is a circle.

It follows sender.py, intake.py and NCCL. A host goes on when what it waits for has happened. A communicator carries out
what a rank has posted one after the other, and carries a message when it is the next one at both of its ends. A pair
that is not connected waits, at its first message, until the hosts of both ends have called.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path

import cover
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import engines as any_engines
from random_layouts import enlarged, meshes, served

from megatron_rl.bridge.line import SLOTS
from megatron_rl.bridge.replay import StretchSize, all_stretches
from megatron_rl.commands.size_run import read
from megatron_rl.layout import Engines, plan_weights, read_shape
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


@pytest.mark.parametrize(
    "recipe",
    cover.essential(RECIPES, *(one for one in RECIPES if one.parent.name == "qwen3_32b")),
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
@settings(max_examples=200)
def test_the_push_of_any_layout_ends(data):
    engines = data.draw(any_engines())
    shape = enlarged(data.draw(served(engines)))
    plan = plan_weights(shape, data.draw(meshes(shape)), engines, dtype="bfloat16")
    order = all_stretches(plan, data.draw(st.sampled_from([2**20, 2**24])))
    push = Push(order, engines, plan.num_sources, connected=True, one_group=data.draw(st.booleans()))
    assert push.run() == len(push.ends) > 0
