"""Routes cut into messages, and the order that all ranks keep."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.bridge.checksum import CHUNK_BYTES, checksum
from megatron_rl.bridge.line import SLOTS
from megatron_rl.bridge.messages import (
    ALIGNMENT_BYTES,
    ALONE_BYTES,
    Message,
    Stretch,
    in_place,
    late_last,
    schedule,
    split_messages,
    stretches,
)
from megatron_rl.layout import Copy, Engines, Links, Turn, plan_weights
from megatron_rl.layout.route_order import NUM_BLOCKS, order_routes
from megatron_rl.models import read_shape, volume
from megatron_rl.types import Mesh

DTYPES = st.sampled_from(["float32", "bfloat16"])


@st.composite
def routes(draw) -> list[Copy]:
    sizes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5), DTYPES), max_size=12))
    return [Copy("a", ((0, r), (0, c)), f"p{i}", ((0, r), (0, c)), t) for i, (r, c, t) in enumerate(sizes)]


@given(routes(), st.integers(1, 60))
def test_messages_hold_each_element_once_within_the_bound(copies, bound):
    messages = split_messages(0, 0, copies, bound)
    assert [message.number for message in messages] == list(range(len(messages)))
    written = {
        copy.destination_name: torch.zeros(copy.destination_box[0][1], copy.destination_box[1][1]) for copy in copies
    }
    for message in messages:
        assert message.num_bytes <= bound or len(message.copies) == 1
        widths = [copy.num_bytes // volume(copy.source_box) for copy in message.copies]
        assert widths == sorted(widths, reverse=True)  # so that each begins at a multiple of its own width
        for copy in message.copies:
            (a, b), (c, d) = copy.destination_box
            written[copy.destination_name][a:b, c:d] += 1
            if copy.num_bytes > bound:
                assert b - a == 1 or d - c == 1
    assert all((count == 1).all() for count in written.values())
    for a, b in zip(messages, messages[1:], strict=False):  # no message is cut before it must be
        assert a.num_bytes + max(copy.num_bytes for copy in b.copies) > bound


def test_a_large_copy_travels_alone():
    small, large = Copy("s", ((0, 1),), "s", ((0, 1),), "float32"), ALONE_BYTES // 4
    large = Copy("l", ((0, large),), "l", ((0, large),), "float32")
    messages = split_messages(0, 0, [small, large, small, small], 64 * 2**20)
    assert [[copy.source_name for copy in message.copies] for message in messages] == [["s"], ["l"], ["s", "s"]]
    assert [m.num_bytes for m in split_messages(0, 0, [large], ALONE_BYTES // 4)] == [ALONE_BYTES // 4] * 4


def sized(source: int, destination: int, number: int, num_bytes: int) -> Message:
    box = ((0, num_bytes // 2),)
    return Message(source, destination, number, (Copy("a", box, "a", box, "bfloat16"),))


NUM_TRAINERS, NUM_HEADS, BUCKET_BYTES = 5, 7, 3 * ALIGNMENT_BYTES
WORLD = 2
"""The ranks of an engine that the trainers feed; the last engine has only one."""


def trainer(order: list[Stretch], facts: set):
    """What `BridgeSender._push` does. It yields what it waits for."""
    for index, stretch in enumerate(order):
        if index >= SLOTS:
            yield "answered", order[index - SLOTS], 0
        facts.add(("posted", stretch, 0))
    for stretch in order[-SLOTS:]:
        yield "answered", stretch, 0


def engine(rank: int, order: list[tuple[int, Stretch]], hop: int, feeds: bool, points: list[int], facts: set):
    """What `Intake._receive` does in a rank of the engine that has `hop` engines before it in its chain.

    Args:
        order: its stretches, each with its turn.
        points: the turns after which the ranks of the engine repack a layer together.
    """
    points, turns, order = points[::-1], [turn for turn, _ in order], [stretch for _, stretch in order]
    slots: list[Stretch | None] = [None] * (SLOTS + feeds)

    def expect(index: int) -> None:
        before, slots[index % len(slots)] = slots[index % len(slots)], order[index]
        if before is not None:
            assert ("answered", before, hop) in facts, "what the buffer holds is not written"
            assert not feeds or ("answered", before, hop + 1) in facts, "the next engine reads the buffer"
        facts.add(("expected", order[index], hop))

    for index in range(min(SLOTS, len(order))):
        expect(index)

    def repack_before(turn: float):
        while points and points[-1] < turn:
            facts.add(("repacks", points[-1], rank, hop))
            peers = range(rank // WORLD * WORLD, min(rank // WORLD * WORLD + WORLD, NUM_HEADS))
            yield from [("repacks", points[-1], peer, hop) for peer in peers]
            points.pop()

    for index, stretch in enumerate(order):
        yield from repack_before(turns[index])
        yield "arrived", stretch, hop
        facts.add(("posted", stretch, hop + 1))
        facts.add(("answered", stretch, hop))
        if feeds and index > 0:
            yield "answered", order[index - 1], hop + 1
        if index + SLOTS < len(order):
            expect(index + SLOTS)
    for stretch in order[-1:] if feeds else []:
        yield "answered", stretch, hop + 1
    yield from repack_before(math.inf)


def stream(order: list[Stretch], hop: int, mine: str, other: str, facts: set):
    """One end of a communicator: its sends, or its receives, follow each other in the order in which they are posted.

    Args:
        mine, other: what makes this end ready for a stretch, and what the other end says when it has come to it.
    """
    for stretch in order:
        yield mine, stretch, hop
        facts.add((f"at {mine}", stretch, hop))
        yield f"at {other}", stretch, hop
        facts.add(("arrived", stretch, hop))


def run_on(programs: dict, waits: dict, facts: set) -> None:
    """Let each program run until it waits for something that is not a fact."""
    moved = True
    while moved:
        moved = False
        for name in [name for name, fact in waits.items() if fact in facts]:
            waits[name], moved = next(programs[name], None), True


@given(
    st.dictionaries(
        st.tuples(st.integers(0, NUM_TRAINERS - 1), st.integers(0, NUM_HEADS - 1)),
        st.lists(st.tuples(st.integers(1, 9).map(lambda size: 2 * size), st.booleans()), min_size=1, max_size=8),
        max_size=12,
    ),
    st.sets(st.integers(0, (NUM_HEADS - 1) // WORLD)),
    st.integers(1, 3),
    st.sampled_from([1, 3, 128]),
    st.sets(st.integers(0, 40)),
)
def test_two_buffers_are_enough_whatever_the_routes(routes, late, length, num_blocks, points):
    """Played through, with chains of `length` engines that feed another one and need a third buffer, with layers that
    all ranks of an engine repack together, and over communicators on which the sends of a rank follow each other, and
    its receives too. No rank waits in a circle, and none waits for the late engines before all others have everything.
    Each rank knows its own messages alone, and has the same stretches as the ranks at the other ends of its lines."""
    late = {head for head in range(NUM_HEADS) if head // WORLD in late}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_rl.layout.route_order.NUM_BLOCKS", num_blocks)
        sizes = [sum(size for size, _ in messages) for messages in routes.values()]
        turns = dict(zip(routes, order_routes(*zip(*routes, strict=True), sizes) if routes else (), strict=False))
    every = {
        sized(*route, number, size): packed
        for route, messages in routes.items()
        for number, (size, packed) in enumerate(messages)
    }

    def of_rank(side: str, rank: int) -> list[tuple[int, Stretch]]:
        order = schedule([message for message in every if getattr(message, side) == rank], turns)
        return [
            (number, Stretch.of(part, every.get))
            for number, turn in order.items()
            for part in stretches(turn, every.get, BUCKET_BYTES)
        ]

    outgoing = {source: [stretch for _, stretch in of_rank("source", source)] for source in range(NUM_TRAINERS)}
    incoming = {head: of_rank("destination", head) for head in range(NUM_HEADS)}
    for source, head in itertools.product(outgoing, incoming):
        sent = [stretch for stretch in outgoing[source] if stretch.destination == head]
        assert sent == [stretch for _, stretch in incoming[head] if stretch.source == source]
        for stretch in sent:
            num_packed = sum(start is not None for start in stretch.starts)
            assert stretch.buffer_bytes <= BUCKET_BYTES or num_packed == 1

    facts: set = set()
    others_done = "all others have everything", None, 0
    programs = {f"trainer {source}": trainer(late_last(order, late), facts) for source, order in outgoing.items()}
    for (head, order), hop in itertools.product(incoming.items(), range(length)):
        begin = [others_done] if head in late else []
        program = engine(head, order, hop, hop + 1 < length, sorted(points), facts)
        programs[f"engine {head}, {hop}"] = itertools.chain(begin, program)
        stretches_of_head = [stretch for _, stretch in order]
        programs[f"receives of {head}, {hop}"] = stream(stretches_of_head, hop, "expected", "posted", facts)
        if hop > 0:
            programs[f"sends to {head}, {hop}"] = stream(stretches_of_head, hop, "posted", "expected", facts)
    for source, order in outgoing.items():
        programs[f"sends of {source}"] = stream(late_last(order, late), 0, "posted", "expected", facts)
    waits = {name: next(program, None) for name, program in programs.items()}
    run_on(programs, waits, facts)
    for head, hop in itertools.product(set(incoming) - late, range(length)):
        assert waits[f"engine {head}, {hop}"] is None
    facts.add(others_done)
    run_on(programs, waits, facts)
    assert not any(waits.values())


def test_a_stretch_is_what_fits_into_one_buffer():
    """Of a turn of 100 bytes each: what nobody packs needs no room, and the fourth packed message finds none. What
    nobody packs has at most eight buckets."""
    turn = [sized(0, 0, number, 100) for number in range(8)]
    packed = {1, 3, 4, 6}
    split = list(stretches(turn, lambda message: message.number in packed, 3 * 128))
    assert [[message.number for message in part] for part in split] == [[0, 1, 2, 3, 4, 5], [6, 7]]
    first, second = (Stretch.of(part, lambda message: message.number in {3, 4}) for part in split)
    assert first.starts == (None, None, None, 0, 128, None) and first.buffer_bytes == 228 and first.number == 5
    assert second.starts == (None, None) and second.buffer_bytes == 0
    assert [len(part) for part in stretches([sized(0, 0, n, 100) for n in range(20)], lambda _: False, 100)] == [
        8,
        8,
        4,
    ]


def test_what_nobody_packs_has_one_answer_a_turn():
    """Qwen3-235B-A22B: an engine rank takes 94 layers with 16 experts of three matrices of 12.6 MB, which lie in place
    at both ends, and little else. If all are packed, five of them fit into a bucket."""
    shape = read_shape(Path(__file__).parents[3] / "configs" / "model" / "Qwen3-235B-A22B.json")
    plan = plan_weights(shape, Mesh(4, 2, 4, expert=16, expert_tensor=1), Engines(1, 8, 1, True), links=Links())
    routes, bucket_bytes, matrices = plan.received_by(0), 64 * 2**20, 94 * 16 * 3
    messages = [m for source, copies in routes.items() for m in split_messages(source, 0, copies, bucket_bytes)]
    order = schedule(messages, plan.turns).values()
    in_place = [part for turn in order for part in stretches(turn, lambda m: len(m.copies) > 1, bucket_bytes)]
    packed = [part for turn in order for part in stretches(turn, lambda m: True, bucket_bytes)]
    assert (
        [m for part in in_place for m in part] == [m for part in packed for m in part] == list(itertools.chain(*order))
    )
    assert matrices < len(messages) < 1.1 * matrices
    assert len(order) <= len(in_place) < 2 * NUM_BLOCKS < matrices / 5 < len(packed)


def test_messages_follow_the_turns_of_their_middle_bytes():
    """Two trainers and two engines, each pair with 100 bytes in two messages of 30 and 70: trainer 0 begins with engine
    0, and trainer 1 with engine 1. After 50 bytes all change; the second message is in the second half of its route."""
    turns = {
        (0, 0): [Turn(50, 0), Turn(100, 4)],
        (1, 1): [Turn(50, 1), Turn(100, 5)],
        (0, 1): [Turn(50, 2), Turn(100, 6)],
        (1, 0): [Turn(50, 3), Turn(100, 7)],
    }
    every = [sized(s, d, n, size) for s, d in turns for n, size in enumerate((30, 70))]
    order = [(m.source, m.destination, m.number) for turn in schedule(reversed(every), turns).values() for m in turn]
    assert order == [(*route, number) for number in (0, 1) for route in turns]


def test_parts_of_mixed_width_lie_side_by_side():
    copies = (
        Copy("a", ((0, 1), (2, 5)), "a", ((0, 1), (0, 3)), "float32"),
        Copy("b", ((0, 3),), "b", ((0, 3),), "bfloat16"),
    )
    message = Message(0, 0, 0, copies)
    buffer = torch.zeros(message.num_bytes, dtype=torch.uint8)
    first, second = message.parts(buffer)
    first.fill_(1.0), second.fill_(2.0)
    assert message.num_bytes == 18 and first.shape == (1, 3) and second.shape == (3,)
    assert buffer[:12].view(torch.float32).tolist() == [1.0] * 3
    assert buffer[12:].view(torch.bfloat16).tolist() == [2.0] * 3


def test_only_a_contiguous_copy_of_the_wires_dtype_stays_where_it_lies():
    parameters = {"p": torch.arange(12.0).view(3, 4)}

    def lies(box, dtype="float32"):
        message = Message(0, 0, 0, (Copy("p", box, "p", box, dtype),))
        return in_place(message, message.sources(parameters))

    assert lies(((1, 3), (0, 4))).data_ptr() == parameters["p"][1:].data_ptr()
    assert lies(((1, 3), (0, 2))) is None
    assert lies(((1, 3), (0, 4)), "bfloat16") is None


@given(st.binary(max_size=70), st.integers(0, 8), st.data())
def test_a_checksum_is_the_two_sums(data, offset, more):
    """By plain loops; and any changed byte, or two words that changed places, are seen."""
    words = [int.from_bytes(data[i : i + 8].ljust(8, b"\0"), "little") for i in range(0, len(data), 8)]
    expected = sum(words), sum(word * (i + 1) for i, word in enumerate(words))
    held = torch.zeros(offset + len(data), dtype=torch.uint8)[offset:]
    held.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else held)
    assert [x % 2**64 for x in checksum(held)] == [x % 2**64 for x in expected]
    if data:
        index = more.draw(st.integers(0, len(data) - 1))
        held[index] ^= more.draw(st.integers(1, 255))
        assert checksum(held)[0] % 2**64 != expected[0] % 2**64


def test_checksums_of_many_chunks(monkeypatch):
    """Two ends may have devices of other kinds, which sum other numbers of bytes at once."""
    data = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    whole = checksum(data)
    monkeypatch.setattr("megatron_rl.bridge.checksum.COLUMNS", 7)
    for rows in (1, 2, 100):
        monkeypatch.setitem(CHUNK_BYTES, "cpu", 8 * 7 * rows)
        assert checksum(data) == whole
    swapped = data.clone()
    swapped[:8], swapped[800:808] = data[800:808], data[:8]
    assert checksum(swapped)[0] == whole[0] and checksum(swapped) != whole
