"""Which variables reach the processes of a run, and which interface they choose: that of the address with which Ray
knows their node, or the one that the user names."""

from __future__ import annotations

import logging
import os
import socket

import psutil
import pytest
import ray

from megatron_rl.cluster.network import find_interface, network_environment, use_interface
from megatron_rl.config.cluster import ClusterConfig

SHELL = {
    "NCCL_IB_HCA": "mlx5",
    "NCCL_IB_PKEY": "1",
    "GLOO_SOCKET_IFNAME": "eth1",
    "RES_OPTIONS": "timeout:1",
    "HOME": "/home/somebody",
    "WANDB_API_KEY": "hidden",
    "UCX_SECRET": "hidden",
    "CUDA_VISIBLE_DEVICES": "0",
}


def test_network_variables_of_the_shell_are_handed_on_and_no_others(caplog):
    with caplog.at_level(logging.WARNING, "megatron_rl"):
        found = network_environment(ClusterConfig(), SHELL)
    names = {"NCCL_IB_HCA", "NCCL_IB_PKEY", "GLOO_SOCKET_IFNAME", "RES_OPTIONS"}
    assert found == {name: SHELL[name] for name in names}
    assert "UCX_SECRET" in caplog.text and "hidden" not in caplog.text


def test_the_configuration_overrides_the_shell():
    found = network_environment(ClusterConfig(interface="ib0", environment={"NCCL_IB_HCA": "mlx5_1"}), SHELL)
    assert found["NCCL_IB_HCA"] == "mlx5_1"
    assert found["GLOO_SOCKET_IFNAME"] == "ib0" and found["NCCL_SOCKET_IFNAME"] == "=ib0"


def loopback() -> str:
    return next(n for n, all in psutil.net_if_addrs().items() if "127.0.0.1" in [a.address for a in all])


def test_the_interface_is_that_of_the_nodes_address(monkeypatch):
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    assert str(find_interface({})) == f"{loopback()} (127.0.0.1)"


def test_an_interface_that_the_user_names_is_taken_or_refused_with_those_that_exist(monkeypatch):
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "203.0.113.9")
    assert find_interface({"GLOO_SOCKET_IFNAME": loopback()}).address in ("127.0.0.1", "::1")
    with pytest.raises(ValueError, match=rf"no network interface ib7 .*{loopback()}.*cluster.interface"):
        find_interface({"GLOO_SOCKET_IFNAME": "ib7"})
    with pytest.raises(ValueError, match="address 203.0.113.9.*--node-ip-address"):
        find_interface({})


def test_variables_that_are_set_keep_their_values(monkeypatch):
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": "ib"})
    use_interface()
    assert os.environ == {
        "NCCL_SOCKET_IFNAME": "ib",
        "GLOO_SOCKET_IFNAME": loopback(),
        "VLLM_HOST_IP": "127.0.0.1",
    }


def test_the_store_listens_at_its_address_alone():
    from megatron_rl.bridge.join import host_store

    store = host_store("127.0.0.1")
    listening = {
        connection.laddr
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == store.port
    }
    assert listening == {("127.0.0.1", store.port)}
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", store.port), timeout=10)
