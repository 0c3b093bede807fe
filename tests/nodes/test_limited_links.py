"""Links of a known rate, and the bridge's benchmark over them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from patience import deadline

from megatron_rl.layout import Engines
from megatron_rl.tools.bench.namespaces import Namespaces, NetworkNode, make_switch, why_not
from megatron_rl.tools.bench.sync import Size, SyncLayout, measure_links
from megatron_rl.types import Mesh

NUM_BYTES = 4_000_000
BURST_BYTES = 2**17
SERVER = f"""
import socket
server = socket.create_server(("10.77.0.2", 7777))
print(flush=True)
end, _ = server.accept()
file = end.makefile("rwb")
file.read({NUM_BYTES})
file.write(bytes({NUM_BYTES}))
file.flush()
"""
CLIENT = f"""
import socket, time
file = socket.create_connection(("10.77.0.2", 7777)).makefile("rwb")
start = time.monotonic()
file.write(bytes({NUM_BYTES}))
file.flush()
file.read(1)
sent = time.monotonic()
file.read({NUM_BYTES} - 1)
print(sent - start, time.monotonic() - sent)
"""


@pytest.fixture(scope="module")
def possible() -> None:
    if reason := why_not("tc"):
        pytest.skip(f"this machine cannot have nodes: {reason}")


@pytest.fixture
def pair(possible):
    ends: list[Namespaces] = [make_switch()]
    try:
        ends += [NetworkNode(ends[0], 1), NetworkNode(ends[0], 2)]
        yield ends[1:]
    finally:
        for end in reversed(ends):
            end.end()


@pytest.mark.deep
def test_both_directions_of_a_limited_link_take_their_time(pair):
    """Only the first node has a limited cable: 4 MB leave it, and then 4 MB come to it. A lower bound holds on every
    machine. The last bytes of what it sends may still be on their way when the first byte comes back, and a full bucket
    of tokens passes at once."""
    limited, free = pair
    limited.limit("80mbit")
    server = subprocess.Popen(free.inside(sys.executable, "-c", SERVER), stdout=subprocess.PIPE)
    assert server.stdout.readline() == b"\n"
    command = limited.inside(sys.executable, "-c", CLIENT)
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=deadline(60))
    server.wait(deadline(30))
    for seconds in map(float, done.stdout.split()):
        assert seconds > (NUM_BYTES - 2 * BURST_BYTES) / 10e6


@pytest.mark.deep
def test_a_push_between_nodes_needs_the_time_of_its_bytes_and_no_more_bytes(possible):
    row = measure_links(SyncLayout(Mesh(), Engines(1, 1)), Size(512, 0.01, 2**20), "400mbit", repeats=1)
    assert row["received_bytes"] == row["held_bytes"] == [row["fullest_link_bytes"]]
    assert row["bound_s"] == row["fullest_link_bytes"] / 50e6
    assert row["num_messages"] > 10
    for way in ("plain", "bridge"):
        assert row["seconds"][way] > row["bound_s"] - 2 * BURST_BYTES / 50e6
        assert row[f"{way}_over_bound"] == row["seconds"][way] / row["bound_s"]
    # The replay knows the rate of the link from the plain way, and adds what messages cost; the rest is rounding.
    assert row["replayed_s"]["bridge"] >= row["seconds"]["plain"] - 1e-9
