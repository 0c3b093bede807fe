"""Routes cut into messages, and the order that all ranks keep."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.bridge.checksum import checksum
from megatron_rl.bridge.messages import ALONE_BYTES, Message, in_place, late_last, schedule, split_messages
from megatron_rl.layout import Copy, Turn, volume
from megatron_rl.layout.turns import order_routes

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
    for a, b in zip(messages, messages[1:]):  # no message is cut before it must be
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


@given(
    st.dictionaries(
        st.tuples(st.integers(0, 4), st.integers(0, 6)),
        st.lists(st.integers(1, 9).map(lambda size: 2 * size), min_size=1, max_size=4),
        max_size=12,
    ),
    st.sets(st.integers(0, 6)),
)
def test_two_buffers_are_enough_whatever_the_routes(routes, late):
    """Played through: a rank posts a message when its receiver has taken the one before the last, and takes them in
    order. Nobody waits in a circle, and nobody waits for the late receivers before all others have everything. Each
    rank knows its own messages alone."""
    turns = dict(zip(routes, order_routes(*zip(*routes), list(map(sum, routes.values())))) if routes else ())
    every = [sized(s, d, n, size) for (s, d), sizes in routes.items() for n, size in enumerate(sizes)]
    outgoing = {s: late_last(schedule([m for m in every if m.source == s], turns), late) for s in range(5)}
    incoming = {d: schedule([m for m in every if m.destination == d], turns) for d in range(7)}
    posted, taken = set(), set()
    moved = True
    while moved:
        moved = False
        for queue in outgoing.values():
            for i, message in enumerate(queue):
                if message not in posted and (i < 2 or queue[i - 2] in taken):
                    posted.add(message)
                    moved = True
                    break
                if message not in posted:
                    break
        others_wait = any(m.destination not in late for m in set(every) - taken)
        for destination, queue in incoming.items():
            message = next((m for m in queue if m not in taken), None)
            if message in posted and not (destination in late and others_wait):
                taken.add(message)
                moved = True
    assert taken == set(every)


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
    order = [(m.source, m.destination, m.number) for m in schedule(reversed(every), turns)]
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
    data = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    whole = checksum(data)
    monkeypatch.setattr("megatron_rl.bridge.checksum.CHUNK_WORDS", 7)
    assert checksum(data) == whole
    swapped = data.clone()
    swapped[:8], swapped[800:808] = data[800:808], data[:8]
    assert checksum(swapped)[0] == whole[0] and checksum(swapped) != whole
