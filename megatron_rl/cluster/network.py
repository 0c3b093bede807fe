"""The network of a run: the environment variables that reach every process, and the interface through which a process
talks to processes on other nodes.

gloo listens at the address of the machine's host name, which on many machines is the loopback address or nothing at
all; processes on other nodes then connect to themselves. So every process looks for the interface with the address that
Ray uses for its node, because Ray's own connections between the nodes prove that the others reach it there.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
import ray

from megatron_rl.config.cluster import SECRET, ClusterConfig

HANDED_ON = re.compile(r"(NCCL|TORCH_NCCL|GLOO|UCX|FI|NVSHMEM)_\w+|RES_OPTIONS|CUDA_DEVICE_MAX_CONNECTIONS")
"""The variables of the driver's shell that every process gets."""

FAMILIES = (socket.AF_INET, socket.AF_INET6)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def network_environment(cluster: ClusterConfig, shell: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of the network for every process of the run.

    A name that may be one of a secret is not handed on; the log says so.

    Args:
        shell: the environment of the driver.
    """
    known = {name: value for name, value in shell.items() if HANDED_ON.fullmatch(name)}
    withheld = sorted(name for name in known if SECRET.search(name))
    if withheld:
        log.warning("not handed on, because their names are those of secrets: %s", ", ".join(withheld))
    chosen = {name: value for name, value in known.items() if name not in withheld}
    if cluster.interface is not None:
        chosen |= _variables(cluster.interface)
    return chosen | cluster.environment


def find_interface(environment: Mapping[str, str]) -> Interface:
    """The interface through which the calling process talks to processes on other nodes. Ray must have started.

    Args:
        environment: it may name the interface (GLOO_SOCKET_IFNAME).

    Raises:
        ValueError: the node does not have the interface, or no interface has the node's address.
    """
    node = ray.util.get_node_ip_address()
    addresses = {  # the address of a link has its interface's name after a percent sign
        name: [address.address.partition("%")[0] for address in found if address.family in FAMILIES]
        for name, found in psutil.net_if_addrs().items()
    }
    if wanted := environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        own = addresses.get(wanted)
        if not own:
            raise ValueError(
                f"there is no network interface {wanted} with an address (there are {', '.join(sorted(addresses))}); "
                "correct cluster.interface or GLOO_SOCKET_IFNAME"
            )
        return Interface(wanted, node if node in own else own[0])
    for name, own in addresses.items():
        if node in own:
            return Interface(name, node)
    raise ValueError(
        f"no network interface has the address {node}, with which Ray knows this node; start Ray with another "
        "--node-ip-address, or set cluster.interface"
    )


def use_interface() -> Interface:
    """Make gloo, NCCL and vLLM use the interface of this process, before they start in it. Variables that
    are already set keep their values.

    Raises:
        ValueError: see `find_interface`.
    """
    found = find_interface(os.environ)
    for name, value in _variables(found.name).items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_HOST_IP", found.address)
    return found


def _variables(interface: str) -> dict[str, str]:
    """NCCL takes every interface whose name begins with the given one, except after an equals sign."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
