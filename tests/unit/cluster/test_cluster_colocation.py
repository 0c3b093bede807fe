"""The phases of a run whose trainers and engines share GPUs, in the order in which memory is given up and taken."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.cluster.colocation import ORDER, Colocation, shared_links
from megatron_rl.cluster.placement import Node, Place, Placement
from megatron_rl.cluster.process import Location, Process
from megatron_rl.cluster.trainers import let_segments_grow
from megatron_rl.types import Mesh

TRAINER = {"training": 3, "weight sync": 1, "generating": 0, "scoring": 0}
CRITIC = {"training": 3, "weight sync": 0, "generating": 0, "scoring": 0}
ENGINE = {"training": 0, "weight sync": 1, "generating": 3, "scoring": 0}
TEACHER = {"generating": 0, "scoring": 3}
"""What each side holds, in parts of equal size."""


class Side:
    def __init__(self, holds: dict[str, int], begins: str, room: list[int]) -> None:
        self.holds, self.phase, self.room = holds, begins, room
        self.mesh, self.num_ranks = Mesh(data=2), 2
        self.processes = [Process("engine 0", Path("engine_0.log"), None, Location(1, "host", "node", ("4", "6")))]

    def begin(self, gpus) -> None:
        """It starts awake."""
        self.gpus = gpus
        self.enter("scoring")

    def locate(self) -> None: ...

    prepare = wait = lambda self, *gpus: None

    def enter(self, phase: str) -> None:
        self.room[0] += self.holds[self.phase] - self.holds[phase]
        assert self.room[0] >= 0, "one side took what the other had not given up"
        self.phase = phase


@given(st.lists(st.sampled_from(ORDER), max_size=12))
def test_memory_is_given_up_before_it_is_taken(phases):
    """A device of three parts holds everything of one side, or the weights of both."""
    room = [0]
    engines = Side(ENGINE, "generating", room)
    policy = Side(TRAINER, "generating", room)  # it holds nothing before it starts
    Colocation(policy, engines)
    assert policy.make_room() == ["4", "6"] and room == [3]
    policy.enter("training")
    for phase in phases:
        policy.before(phase)
        assert (policy.phase, engines.phase) == (phase, phase)
    engines.before()
    assert {policy.phase, engines.phase} == {"generating"} and room == [0]


@given(st.lists(st.sampled_from(ORDER), max_size=12))
def test_a_critic_gives_up_its_memory_before_engines_take_theirs(phases):
    """A device of six parts holds everything of policy and critic, which train together, or everything of an engine."""
    room = [0]
    engines = Side(ENGINE | {"generating": 6}, "generating", room)
    policy, critic = Side(TRAINER, "generating", room), Side(CRITIC, "generating", room)
    Colocation(policy, engines, [critic])
    for trainers in (policy, critic):  # they start one after the other
        assert trainers.make_room() == ["4", "6"]
        trainers.enter("training")
    assert room == [0]
    for phase in phases:
        critic.before(phase)
        assert {side.phase for side in (policy, critic, engines)} == {phase}


@given(st.lists(st.sampled_from([*ORDER, "first", "second"]), max_size=12))
def test_a_teacher_is_awake_alone_and_only_while_it_scores(steps):
    """A device of three parts holds everything of one side, or of one teacher."""
    room = [0]
    engines, policy = Side(ENGINE, "generating", room), Side(TRAINER, "generating", room)
    teachers = {name: Side(TEACHER, "generating", room) for name in ("first", "second")}
    colocation = Colocation(policy, engines, (), teachers.values())
    colocation.start_engines()
    assert [one.gpus for one in teachers.values()] == [["4,6"]] * 2, "one engine of two ranks"
    assert room == [3] and policy.make_room() == ["4", "6"]
    policy.enter("training")
    for step in steps:
        teachers[step].before() if step in teachers else policy.before(step)
        for name, teacher in teachers.items():
            assert teacher.phase == ("scoring" if name == step else "generating")
        expected = "scoring" if step in teachers else step
        assert (policy.phase, engines.phase) == (expected, expected)
    assert policy.make_room() == ["4", "6"] and {one.phase for one in teachers.values()} == {"generating"}


def test_each_change_of_phase_is_made_once():
    entered = []
    sides = [SimpleNamespace(enter=lambda phase, name=name: entered.append((name, phase))) for name in "pe"]
    colocation = Colocation(*sides)
    for phase in itertools.chain(["generating"] * 2, ["weight sync"] * 2, ["training"]):
        colocation.enter(phase)
    assert entered == [("e", "weight sync"), ("p", "weight sync"), ("e", "training"), ("p", "training")]


def test_the_plan_of_transfers_knows_who_shares_a_node():
    nodes = [Node(str(i), str(i), 8, 8, 8, 8) for i in range(2)]

    def placed(*numbers: int) -> Placement:
        return Placement(tuple(nodes), (), {"trainer": (tuple(Place(nodes[i], 1, 0) for i in numbers),)})

    assert shared_links(placed(0, 0, 1, 1)).gpus_per_node == 2 and shared_links(placed(0, 0, 1, 1)).colocated
    assert shared_links(placed(0, 0, 0, 1)).gpus_per_node == 1, "rank r would not be in node r // n"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_an_allocator_setting_of_the_user_stays(name):
    own: dict[str, str] = {}
    let_segments_grow(own)
    assert own == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    chosen = {name: "max_split_size_mb:512"}
    let_segments_grow(chosen)
    assert chosen == {name: "max_split_size_mb:512"}
