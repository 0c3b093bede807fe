"""Plans on which node every process of a run will be, before any of them starts. The plan is a pure value: this module
does not know Ray, and `nodes.py` carries the plan out.

Invariants (tests/unit/cluster/test_cluster_placement.py):
- No node gives more CPUs or GPUs than it has free.
- The ranks of a tensor-parallel group are in one node. The blocks of ranks that must stay together are placed widest
  first, so if the widths divide each other (1, 2, 4, 8), GPUs alone never make the plan miss a placement that exists.
- Trainers and engines fill one node before they begin the next.
- An engine is in one node if any node is large enough, and otherwise in as few nodes as possible. Each of its pipeline
  stages is in one node if any node is large enough for a stage.
- A rank that shares its GPU is in the same node as the rank that it shares with.
- The plan depends only on its arguments.

A plan says how many GPUs of a node a rank gets. Which ones these are is decided by Ray when the process starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf


@dataclass(frozen=True, slots=True)
class Node:
    """A node, and what was free on it when it was first looked at."""

    id: str
    """A unique id; in a run it is Ray's."""
    name: str
    """The address or the name for people."""
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float
    pool: str | None = None
    """The name of the pool that the node belongs to."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a role needs: `num_groups` groups of `group_size` ranks."""

    role: str
    num_groups: int
    group_size: int
    block: int
    """The number of consecutive ranks that must be in one node. It divides `group_size`."""
    cpus: float
    """The CPUs that each rank reserves."""
    gpus: float
    """The GPUs that each rank reserves."""
    advice: str = ""
    """What a user can do if there is no room; without needs there always is."""
    pool: str | None = None
    """The only pool whose nodes may be used; None allows all nodes."""
    beside: str | None = None
    """The role with whose ranks these ranks share GPUs and nodes, rank by rank; None: they have their own."""
    included: str = ""
    """What `cpus` includes besides the role's own, for the message."""
    can_span: bool = False
    """Whether a group spans nodes if its block is wider than every node; otherwise that is an error."""
    stage: int = 1
    """The number of consecutive ranks that stay together even if the group spans nodes, unless they are wider than
    every node, too. It divides `block`."""

    @property
    def width(self) -> int:
        """The number of ranks that are placed as a whole."""
        return self.group_size if self.can_span else self.block

    def __str__(self) -> str:
        pool = f" of the pool {self.pool}" if self.pool else ""
        if self.block < self.group_size and not self.can_span:
            ranks = _count(self.num_groups * self.group_size, f"{self.role} rank")
            where = f", with the {self.block} ranks of a tensor-parallel group in one node" if self.block > 1 else ""
            return f"{ranks} of {_amounts(self.cpus, self.gpus)} each{self.included}{where}{pool}"
        each = _amounts(self.cpus * self.group_size, self.gpus * self.group_size)
        where = f"over several nodes{pool}" if self.can_span else f"in one node{pool}"
        return f"{_count(self.num_groups, self.role)} of {each} {where}{' each' if self.num_groups > 1 else ''}"


@dataclass(frozen=True, slots=True)
class Place:
    """The node of one rank, and what the rank reserves there."""

    node: Node
    cpus: float
    gpus: float


Group = tuple[Place, ...]
"""The place of each rank of a group, by rank."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes of all processes of a run."""

    nodes: tuple[Node, ...]
    demands: tuple[Demand, ...]
    groups: Mapping[str, tuple[Group, ...]]
    """The groups of each role, such as `groups["engine"][2]`. The trainer is one group, with its ranks in mesh order;
    each verifier is a group of one rank."""


class NoRoom(ValueError):
    """The nodes have no room for a demand."""

    def __init__(self, message: str, demand: Demand) -> None:
        super().__init__(message)
        self.demand = demand


def place(demands: Sequence[Demand], nodes: Sequence[Node]) -> Placement:
    """Place all groups of all roles.

    Args:
        nodes: the nodes, in the filling order of equal ones.

    Raises:
        NoRoom: the nodes have too few free CPUs or GPUs.
        ValueError: a block is wider than every node, so that more nodes would not help; or a pool has no node.
    """
    fitted = [_fitted(demand, nodes) for demand in _hosts(demands)]
    free = {node.id: _Free(node) for node in nodes}
    needs = "the run needs " + ", and ".join(str(demand) for demand in fitted if demand.cpus or demand.gpus)
    groups: dict[str, tuple[Group, ...]] = {}
    # Nodes of a pool first go to the roles that can use no others.
    for demand in sorted(fitted, key=lambda d: (d.pool is None, -d.width * d.gpus, -d.width * d.cpus)):
        groups[demand.role] = _place_groups(demand, demand.num_groups, free, needs, nodes)
    for guest in demands:
        if guest.beside is not None:
            hosts = [rank for group in groups[guest.beside] for rank in group]
            hosts = hosts[: guest.num_groups * guest.group_size]  # a teacher may have some of them
            ranks = [replace(host, cpus=guest.cpus, gpus=guest.gpus) for host in hosts]
            groups[guest.role] = _cut(ranks, guest.group_size)
    for host in demands:
        if any(guest.beside == host.role for guest in demands):
            # Ray reserves each GPU once. The engines have it, because they start first.
            ranks = [replace(rank, cpus=host.cpus, gpus=0) for group in groups[host.role] for rank in group]
            groups[host.role] = _cut(ranks, host.group_size)
    return Placement(tuple(nodes), tuple(demands), {demand.role: groups[demand.role] for demand in demands})


def place_again(placement: Placement, role: str, index: int, alive: Sequence[Node]) -> Placement:
    """Place one group again, after its processes died: in its old nodes if they live, and otherwise where there is
    room. All other groups keep their places.

    Args:
        alive: the nodes that live now. The free resources of a node that the placement knows are the free resources
            before the run, minus the reservations of the other groups, because Ray's own numbers lag behind a death.

    Raises:
        NoRoom: the nodes that live have too few free CPUs or GPUs.
        ValueError: see `place`.
    """
    if not alive:
        raise ValueError(f"Ray was lost: none of its nodes is alive, so that the {role} has no place")
    known = {node.id: node for node in placement.nodes}
    nodes = tuple(known.get(node.id, node) for node in alive)
    placement = replace(placement, nodes=nodes)
    ids = {node.id for node in nodes}
    if all(rank.node.id in ids for rank in placement.groups[role][index]):
        return placement
    if any(demand.beside == role or (demand.beside and demand.role == role) for demand in placement.demands):
        lost = dict.fromkeys(rank.node.name for rank in placement.groups[role][index] if rank.node.id not in ids)
        raise ValueError(
            f"the node {', '.join(lost)} is gone, where trainers and engines shared GPUs; start the run again with "
            "--resume auto, so that both get new places"
        )
    free = {node.id: _Free(node) for node in nodes}
    for other, groups in placement.groups.items():
        for i, group in enumerate(groups):
            if (other, i) != (role, index):
                for rank in group:
                    if rank.node.id in free:
                        free[rank.node.id].take(1, rank.cpus, rank.gpus)
    left = [replace(node, free_cpus=free[node.id].cpus, free_gpus=free[node.id].gpus) for node in nodes]
    [demand] = [demand for demand in placement.demands if demand.role == role]
    demand = replace(_fitted(demand, nodes), num_groups=1)
    name = f"{role} {index}" if len(placement.groups[role]) > 1 else f"the {role}"
    needs = f"{name} must be placed again: {demand}"
    [group] = _place_groups(demand, 1, free, needs, left)
    # The places refer to the nodes as the placement knows them, not to what is left of them.
    by_id = {node.id: node for node in nodes}
    group = tuple(replace(rank, node=by_id[rank.node.id]) for rank in group)
    changed = tuple(group if i == index else old for i, old in enumerate(placement.groups[role]))
    return replace(placement, groups={**placement.groups, role: changed})


def smallest_cluster(demands: Sequence[Demand], gpus_per_node: int) -> Placement:
    """The placement on as few equal, empty nodes as the demands need; each pool has its own nodes. A node has as many
    CPUs as the ranks on its GPUs reserve, so the GPUs alone decide.

    Raises:
        ValueError: a block is wider than a node.
    """
    hosts = _hosts(demands)
    cpus = max(gpus_per_node / d.gpus * d.cpus if d.gpus else d.cpus * d.num_groups * d.group_size for d in hosts)
    size = (cpus, float(gpus_per_node))
    used = {demand.pool: 0.0 for demand in demands}
    for demand in hosts:
        used[demand.pool] += demand.gpus * demand.num_groups * demand.group_size
    # A role without a pool and GPUs needs no node of its own, unless there is no other.
    counts = {pool: max(int(pool is not None), ceil(gpus / gpus_per_node)) for pool, gpus in used.items()}
    counts = counts if any(counts.values()) else {None: 1}
    while True:
        pools = [pool for pool, count in counts.items() for _ in range(count)]
        try:
            return place(demands, [Node(str(i), f"node {i + 1}", *size, *size, pool) for i, pool in enumerate(pools)])
        except NoRoom as error:
            counts[error.demand.pool] += 1


class _Free:
    """What is left of a node while a plan is made."""

    def __init__(self, node: Node) -> None:
        self.node, self.cpus, self.gpus = node, node.free_cpus, node.free_gpus
        self.guests = 0
        """The number of ranks that reserve nothing."""

    def capacity(self, cpus: float, gpus: float) -> float:
        """The number of blocks with these needs that fit."""
        return min(_times(self.cpus, cpus), _times(self.gpus, gpus))

    def take(self, count: int, cpus: float, gpus: float) -> None:
        self.cpus, self.gpus = round(self.cpus - count * cpus, 4), round(self.gpus - count * gpus, 4)
        self.guests += count if not cpus and not gpus else 0

    @property
    def load(self) -> tuple[bool, float, float]:
        """The sort key of nodes for ranks that reserve nothing: nodes whose GPUs are all in use come last; then the
        most free CPUs decide (each such rank counts as one CPU), and then the fewest GPUs."""
        return self.node.gpus > 0 and self.gpus < 1, self.guests - self.cpus, self.gpus


def _hosts(demands: Sequence[Demand]) -> list[Demand]:
    """The demands of the roles that have GPUs of their own, with the CPUs of the roles that share them."""
    found = []
    for host in (demand for demand in demands if demand.beside is None):
        guests = [guest for guest in demands if guest.beside == host.role and guest.cpus]
        included = "".join(f", of which {_amount(guest.cpus, 'CPU')} for its {guest.role} rank" for guest in guests)
        found.append(replace(host, cpus=host.cpus + sum(guest.cpus for guest in guests), included=included))
    return found


def _times(have: float, need: float) -> float:
    return int(have / need + 1e-6) if need else inf  # Ray counts in units of 1e-4


def _fitted(demand: Demand, nodes: Sequence[Node]) -> Demand:
    """The demand with the block that the nodes allow.

    Raises:
        ValueError: the block is wider than every node, or the pool has no node.
    """
    allowed = [node for node in nodes if demand.pool in (None, node.pool)]
    if not allowed:
        raise ValueError(
            f"cluster.pools: the {demand.role} needs nodes of the pool {demand.pool}, but no node of it is alive; "
            f"start them with `ray start --labels pool={demand.pool}`, or correct cluster.pools"
        )
    widest = max(min(_times(n.cpus, demand.cpus), _times(n.gpus, demand.gpus)) for n in allowed)
    if widest >= demand.block:
        return replace(demand, can_span=False)
    if demand.can_span and widest:
        return replace(demand, block=demand.stage if widest >= demand.stage else 1)
    most = f"{_amount(max(n.cpus for n in allowed), 'CPU')} and {_amount(max(n.gpus for n in allowed), 'GPU')}"
    ranks = f"{demand.block} ranks" if demand.block > 1 else "a rank"
    raise ValueError(
        f"{demand.role}: {ranks} of {_amounts(demand.cpus, demand.gpus)} {'each ' * (demand.block > 1)}must be in one "
        f"node, but no node has more than {most}; {demand.advice}"
    )


def _place_groups(
    demand: Demand, num_groups: int, free: Mapping[str, _Free], needs: str, nodes: Sequence[Node]
) -> tuple[Group, ...]:
    """
    Args:
        needs: what is to be placed, for the message.
        nodes: the nodes with what was free on them before, for the message.
    """
    allowed = [room for room in free.values() if demand.pool in (None, room.node.pool)]
    cpus, gpus = demand.cpus * demand.block, demand.gpus * demand.block
    blocks_per_group = demand.group_size // demand.block
    # Groups of one block fill the nodes together. A group of several blocks begins in a node of its own choice.
    calls = [num_groups] if blocks_per_group == 1 else [blocks_per_group] * num_groups
    chosen: list[Node] = []
    for count in calls:
        found = _fill(allowed, count, cpus, gpus) if cpus or gpus else _spread(allowed, count)
        chosen += found
        if len(found) < count:
            raise NoRoom(_shortage(demand, needs, len(chosen) * demand.block, nodes), demand)
    ranks = [Place(node, demand.cpus, demand.gpus) for node in chosen for _ in range(demand.block)]
    return _cut(ranks, demand.group_size)


def _cut(ranks: Sequence[Place], group_size: int) -> tuple[Group, ...]:
    return tuple(tuple(ranks[i : i + group_size]) for i in range(0, len(ranks), group_size))


def _fill(allowed: Sequence[_Free], count: int, cpus: float, gpus: float) -> list[Node]:
    """The nodes of `count` blocks: the smallest room that holds all that are left, or else the largest room, filled.
    Fewer nodes are returned if there is no room for all blocks."""
    chosen: list[Node] = []
    while len(chosen) < count:
        left = count - len(chosen)
        # By capacity, and then by the GPUs that would be idle.
        rooms = sorted(allowed, key=lambda room: (room.capacity(cpus, gpus), room.gpus))
        enough = [room for room in rooms if room.capacity(cpus, gpus) >= left]
        largest = [room for room in rooms if room.capacity(cpus, gpus) == rooms[-1].capacity(cpus, gpus)]
        room = (enough or largest)[0]
        taken = int(min(room.capacity(cpus, gpus), left))
        if not taken:
            break
        room.take(taken, cpus, gpus)
        chosen += [room.node] * taken
    return chosen


def _spread(allowed: Sequence[_Free], count: int) -> list[Node]:
    """The nodes of `count` blocks that reserve nothing."""
    chosen: list[Node] = []
    for _ in range(count if allowed else 0):
        room = min(allowed, key=lambda room: room.load)
        room.take(1, 0, 0)
        chosen.append(room.node)
    return chosen


def _shortage(demand: Demand, needs: str, num_placed: int, nodes: Sequence[Node]) -> str:
    by_amount: dict[str, list[str]] = {}
    for node in nodes:
        free = (
            f"{node.free_gpus:g} of {_amount(node.gpus, 'GPU')} and {node.free_cpus:g} of {_amount(node.cpus, 'CPU')}"
        )
        pool = f", pool {node.pool}" if node.pool else ""
        by_amount.setdefault(f"{free} free{pool}", []).append(node.name)
    # Nodes with the same amounts are one line, because a cluster may have hundreds.
    lines = [
        f"  {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}: {free}"
        for free, names in by_amount.items()
    ]
    in_ranks = demand.block < demand.group_size and not demand.can_span
    size, noun = (1, f"{demand.role} rank") if in_ranks else (demand.group_size, demand.role)
    total = demand.num_groups * demand.group_size
    return (
        f"{needs}. There is room for {num_placed // size} of {_count(total // size, noun)}:\n"
        + "\n".join(lines)
        + f"\nTo make it fit, {demand.advice}, add nodes, or free what others use (`ray status` shows it)"
    )


def _amounts(cpus: float, gpus: float) -> str:
    parts = [_amount(number, unit) for number, unit in ((cpus, "CPU"), (gpus, "GPU")) if number]
    return " and ".join(parts)


def _amount(number: float, unit: str) -> str:
    return f"{number:g} {unit if number == 1 else _plural(unit)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun if number == 1 else _plural(noun)}"


def _plural(noun: str) -> str:
    return f"{noun}s"
