"""The layouts of the bridge's benchmark, its arguments, and a run on this machine."""

from __future__ import annotations

import pytest

from megatron_rl.bridge.push_simulation import all_stretches
from megatron_rl.layout import Engines, Links
from megatron_rl.tools.bench import sync
from megatron_rl.tools.bench.sync import (
    LAYOUTS,
    Size,
    SyncLayout,
    gbit_per_s,
    layouts_of,
    make_setup,
    measure_here,
    num_ends,
)
from megatron_rl.tools.bench.sync_ranks import hops
from megatron_rl.types import Mesh

SMALL = Size(512, 0.01, 2**20)


@pytest.mark.parametrize("name", LAYOUTS)
def test_plain_sends_bring_every_engine_rank_its_bytes_over_the_hops_of_the_push(name):
    setup = make_setup(LAYOUTS[name], SMALL, Links())
    plan, engines = setup.transfer_plan, setup.engines
    into = dict.fromkeys(range(plan.num_sources, setup.world_size), 0)
    for (sender, receiver), num_bytes in hops(plan).items():
        assert sender != receiver
        into[receiver] += num_bytes
    assert list(into.values()) == plan.engine_bytes.tolist() * engines.num
    fed_by_engines = {receiver for sender, receiver in hops(plan) if sender >= plan.num_sources}
    assert len(fed_by_engines) == (engines.num - engines.heads) * engines.world_size


@pytest.mark.deep
def test_a_push_on_this_machine_is_measured_both_ways():
    row = measure_here(SyncLayout(Mesh(), Engines(1, 1)), SMALL, repeats=1)
    assert row["received_bytes"] == row["held_bytes"] == [row["fullest_link_bytes"]]
    assert row["redundancy"] == 1.0
    for way in ("bridge", "shared memory"):
        assert row["share_of_plain"][way] == row["seconds"]["plain"] / row["seconds"][way]
        assert row["replayed_s"][way] > 2 * row["message_cpu_s"][way], "a processor at each end of the line"


def test_a_message_has_two_ends_for_each_engine_of_its_chain():
    setup = make_setup(LAYOUTS["chain"], SMALL, Links())
    order = all_stretches(setup.transfer_plan, SMALL.bucket_bytes)
    assert num_ends(setup.transfer_plan, order) == 4 * sum(run.num_messages for run in order) > 0


def test_rates_and_numbers_of_nodes():
    assert (gbit_per_s("200mbit"), gbit_per_s("1.5gbit")) == (0.2, 1.5)
    assert layouts_of("2+2") == ["pipeline-small"]
    assert {LAYOUTS[name].num_ranks for name in layouts_of("4+4,4+2")} == {(4, 4), (4, 2)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--links", "0mbit"], "--links 0mbit: a rate is a number above 0 and mbit or gbit, such as 200mbit"),
        (["--links", "fast"], "--links fast: a rate"),
        (["--links", "200mbit", "--nodes", "3+3"], "no layout has 3+3 ranks; there are layouts with 2+2, 4+2, 4+4"),
        (
            ["--links", "200mbit"],
            "--links needs root, ip and tc, to make nodes on this machine; the programs ip, unshare",
        ),
    ],
)
def test_what_is_wrong_is_told_in_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as ended:
        sync.main(arguments)
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and message in said
