"""Bytes per link and times equal those computed by hand; the tool prints them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import SHAPES
from patience import deadline

from megatron_rl.commands import plan_sync
from megatron_rl.layout import Engines, Links, plan_weights
from megatron_rl.layout.traffic import choose_chains, traffic
from megatron_rl.types import Mesh

ROOT = Path(__file__).parents[3]


@given(
    st.sampled_from(["qwen3", "mixtral"]),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 5),
    st.booleans(),
    st.data(),
)
@settings(max_examples=40, deadline=None)
def test_classes_add_up_and_no_time_is_below_the_bound(name, per_node, tensor, num, colocated, data):
    links = Links(per_node, colocated=colocated)
    engines = Engines(num, tensor, num_chains=data.draw(st.integers(1, num)))
    plan = plan_weights(SHAPES[name], Mesh(tensor=2, data=2), engines, links=links)
    loads = traffic(plan, links, bucket_bytes=100)
    assert loads.device_bytes + loads.nvlink_bytes + loads.nic_bytes == loads.received_bytes == loads.needed_bytes
    assert loads.redundancy == 1
    assert 0 <= loads.bound_s <= loads.least_s


def test_chains_inside_a_node_spare_the_nics():
    """A node has 4 engines of one GPU. If the trainer feeds all of them, 4 models go over NICs; in a chain, one model
    goes over a NIC at 4 bytes/s and 3 over NVLink at 8 bytes/s. The chain adds 3 rounds of a bucket of 100 bytes."""
    links = Links(4, nvlink_gbps=64e-9, nic_gbps=32e-9)
    shape, mesh = SHAPES["qwen3"], Mesh(data=4)
    model = plan_weights(shape, mesh, Engines(), links=links).sent_bytes.sum()
    alone = traffic(plan_weights(shape, mesh, Engines(4), links=links), links, 100)
    chain = traffic(plan_weights(shape, mesh, Engines(4, num_chains=1), links=links), links, 100)
    assert (alone.nic_bytes, alone.nvlink_bytes, alone.num_rounds) == (4 * model, 0, 1)
    assert (chain.nic_bytes, chain.nvlink_bytes, chain.num_rounds) == (model, 3 * model, 4)
    assert chain.busiest_link == "NIC into engine 0 rank 0" and chain.busiest_link_bytes == model
    assert chain.bound_s == model / 4 and chain.least_s == model / 4 + 3 * 100 / 4


@pytest.mark.parametrize(
    ("sender_s", "receiver_s", "bucket_s", "chains"),
    [
        (0.1, 1.0, 0.01, 8),  # the trainer feeds all engines in less time than one engine needs
        (1.0, 1.0, 0.01, 1),  # the trainer's link is the bottleneck, and each further chain costs a second
        (0.5, 1.0, 0.01, 2),  # a second chain costs no time
        (0.1, 0.1, 10.0, 8),  # a bucket's way from engine to engine takes the longest
    ],
)
def test_number_of_chains_by_hand(sender_s, receiver_s, bucket_s, chains):
    assert choose_chains(sender_s, receiver_s, 8, bucket_s) == chains


@pytest.mark.deep
def test_the_tool_plans_671b_on_2048_gpus():
    """In a process of its own, whose peak memory it reports."""
    command = [
        *(sys.executable, "-m", "megatron_rl", "plan-sync", "--model", "configs/model/DeepSeek-V3.json", "--json"),
        *("--train", "pp=16,dp=64,ep=64,etp=1,layers=3+4x14+2", "--rollout", "tp=32,ep=true,replicas=32"),
        *("--links", "gpus_per_node=8,nvlink_gbps=3600,nic_gbps=400"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=deadline(120))
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert (row["trainer_gpus"], row["engine_gpus"]) == (1024, 1024)
    assert row["num_parameters"] == 671_026_419_200
    assert row["redundancy"] == 1.0
    assert row["least_s"] >= row["bound_s"] == pytest.approx(row["fullest_rank_bytes"] / 50e9)
    assert row["gathering_redundancy"] > 20, "1.3 TB into each rank, which needs a thirty-second and what is replicated"
    assert row["peak_memory_bytes"] < 1e9


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--train", "tp=2,zz=3", "zz=3 is not understood"),
        ("--rollout", "ep=yes", "'yes' is neither true nor false"),
        ("--links", "gpus_per_node=8,nics_per_node=3", "3 NICs per node"),
        ("--train", "pp=3", "64 layers"),
    ],
)
def test_the_tool_says_what_it_does_not_understand(option, text, message, capsys):
    with pytest.raises(SystemExit) as end:
        plan_sync.main(["--model", str(ROOT / "configs/model/Qwen3-32B.json"), option, text])
    assert end.value.code == 2 and message in capsys.readouterr().err
