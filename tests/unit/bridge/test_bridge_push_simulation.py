"""A push that is played through: times by hand, and bounds that no push can beat."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.bridge.push_simulation import Costs, StretchSize, all_stretches, most_incomplete_bytes, replay
from megatron_rl.layout import Copy, Engines, Links, Turn, plan_weights
from megatron_rl.layout.traffic import traffic
from megatron_rl.models import read_shape
from megatron_rl.types import Mesh

MODELS = Path(__file__).parents[3] / "configs" / "model"
RATE = 8e-7
"""A NIC of 100 bytes per second, in Gbit/s."""
LINKS = Links(nic_gbps=RATE, nvlink_gbps=RATE)


def seconds(runs: list[tuple[int, int, int]], *, sources: int, engines: Engines, **costs: float) -> float:
    """Each of the runs is one message."""
    plan = SimpleNamespace(num_sources=sources, num_destinations=engines.num * engines.world_size, engines=engines)
    return replay([StretchSize(*run, 1) for run in runs], plan, LINKS, Costs(**({"answer_s": 0.0} | costs)))


def test_two_messages_are_under_way():
    """Each takes 1 s. The third one needs the answer to the first: at 1.5 s, or at 3.5 s."""
    three = [(0, 0, 100)] * 3
    assert seconds(three, sources=1, engines=Engines(1), answer_s=0.5) == pytest.approx(3.0)
    assert seconds(three, sources=1, engines=Engines(1), answer_s=2.5) == pytest.approx(4.5)


def test_a_processor_works_beside_the_link():
    """Packing 0.25 s, 1 s on the link, writing 0.25 s; packing and writing of others go on meanwhile."""
    assert seconds([(0, 0, 100)] * 2, sources=1, engines=Engines(1), message_s=0.25) == pytest.approx(2.5)


def test_a_stretch_costs_a_processor_each_of_its_messages():
    """Two messages take 0.5 s to pack, 2 s on the link and 0.5 s to write."""
    plan = SimpleNamespace(num_sources=1, num_destinations=1, engines=Engines(1))
    assert replay([StretchSize(0, 0, 200, 2)], plan, LINKS, Costs(0.0, 0.25)) == pytest.approx(3.0)


def test_ends_that_are_busy_make_others_wait():
    """Trainer 1 waits for engine 0 until trainer 0 has sent, and sends to engine 1 after that."""
    together = [(0, 0, 100), (1, 0, 100), (1, 1, 100)]
    assert seconds(together, sources=2, engines=Engines(2)) == pytest.approx(3.0)
    turned = [(0, 0, 100), (1, 1, 100), (1, 0, 100)]
    assert seconds(turned, sources=2, engines=Engines(2)) == pytest.approx(2.0)


def test_a_module_is_held_until_all_ranks_of_the_engine_have_it():
    """Rank 0 gets 4 bytes of `a`, then 4 of `b`; rank 1 gets its 4 bytes of `a` before or after `b`."""

    def copied(module: str) -> Copy:
        return Copy(f"{module}.weight", ((0, 2),), f"{module}.weight", ((0, 2),), "bfloat16")

    sent = {0: (copied("a"), copied("b")), 1: (copied("a"),)}
    plan = SimpleNamespace(source=np.array([0]), engines=Engines(1, 2), sent_by=lambda rank: sent)
    for first, most in ((True, 4), (False, 8)):
        plan.turns = {(0, 0): [Turn(4, 0), Turn(8, 2)], (0, 1): [Turn(4, 1 if first else 3)]}
        assert most_incomplete_bytes(plan, 4) == most


@pytest.mark.deep
def test_the_order_for_engines_that_repack_leaves_few_layers_incomplete():
    shape, mesh = read_shape(MODELS / "Qwen3-30B-A3B.json"), Mesh(2, 2, 2, expert=4, expert_tensor=1)
    plans = [plan_weights(shape, mesh, Engines(2, 8, 1, True), repacked=repacked) for repacked in (False, True)]
    free, ordered = (most_incomplete_bytes(plan, 2**26) / plan.engine_bytes.max() for plan in plans)
    assert ordered < 0.3 < 0.5 < free


def test_an_engine_passes_on_what_it_has_and_waits_for_the_answer_before():
    """Through a chain of two. The first engine has the stretches at 1, 2 and 3 s, the second one at 2, 3 and 4 s, and
    an answer of half a second delays nobody: the first engine waits for its first one until 2.5 s. Answers of 2.5 s
    come to the trainer at 3.5 and 4.5 s, and its third and fourth stretch arrive at 4.5 and 5.5 s."""
    chain = Engines(2, num_chains=1)
    assert seconds([(0, 0, 100)] * 3, sources=1, engines=chain) == pytest.approx(4.0)
    assert seconds([(0, 0, 100)] * 3, sources=1, engines=chain, answer_s=0.5) == pytest.approx(4.0)
    assert seconds([(0, 0, 100)] * 4, sources=1, engines=chain, answer_s=2.5) == pytest.approx(6.5)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 500)), min_size=1, max_size=20),
    st.sampled_from([None, 1, 2]),
)
def test_no_push_beats_the_bytes_of_a_link(messages, num_chains):
    engines = Engines(4, num_chains=num_chains)
    heads = [chain[0] for chain in engines.chains]
    fed = [(source, heads[to % len(heads)], size) for source, to, size in messages]
    loads = [sum(size for *ends, size in fed if ends[side] == end) for side in (0, 1) for end in range(4)]
    took = seconds(fed, sources=3, engines=engines)
    assert max(loads) / 100 - 1e-9 <= took <= sum(size for *_, size in fed) * len(engines.chains[0]) / 100 + 1e-9


def test_a_sparse_plan_is_close_to_its_bound():
    shape = read_shape(MODELS / "Qwen3-32B.json")
    plan = plan_weights(shape, Mesh(2, 2), Engines(2, 2), links=Links())
    time = replay(all_stretches(plan, 64 * 2**20), plan, Links())
    assert 1 <= time / traffic(plan, Links(), 64 * 2**20).least_s < 1.05
