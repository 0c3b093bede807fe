"""Pushes over real gloo, shared memory and files, a thread a rank: trainers' shards into engines' parameters."""

from __future__ import annotations

import json
import resource
import signal
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from threading import Event

import cover
import pytest
import torch
from bridge_models import SHAPES, cut, hf_weights
from file_forms import known
from ordered_group import OrderedGroup
from patience import deadline
from torch.distributed import HashStore, ProcessGroupGloo

from megatron_rl.bridge.intake import Intake, Parameters
from megatron_rl.bridge.join import SHARED_GROUPS, host_store
from megatron_rl.bridge.line import Deadline
from megatron_rl.bridge.messages import ALIGNMENT_BYTES
from megatron_rl.bridge.sender import BridgeSender
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.layout import Engines
from megatron_rl.models import megatron_shards, slices, vllm_shards
from megatron_rl.types import Mesh

SHAPE = SHAPES["qwen3"]
CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Joined:
    """All ranks of a setup, joined, and a thread for each."""

    def __init__(self, setup: BridgeSetup, made=lambda live: {}) -> None:
        """made: from the parameters of a trainer rank to what BridgeSender makes of them."""
        self.setup, self.pool, self.made = setup, ThreadPoolExecutor(setup.world_size), made
        self.trainers = [
            cut(megatron_shards(setup.shape, setup.mesh, rank), hf_weights(setup.shape, 0))
            for rank in range(setup.mesh.world_size)
        ]
        engines = setup.engines
        self.shards = [
            vllm_shards(setup.shape, engines.tensor, rank, engines.expert_parallel, engines.pipeline)
            for _ in range(engines.num)
            for rank in range(engines.world_size)
        ]
        self.engines = [self._unwritten(shards) for shards in self.shards]
        self.join()

    def _unwritten(self, shards):
        """As vLLM has it: the setup's dtype, the router's bias in float32."""
        return {
            name: torch.full_like(t, torch.nan, dtype=None if "e_score" in name else DTYPES[self.setup.dtype])
            for name, t in cut(shards, hf_weights(self.setup.shape, 0)).items()
        }

    def join(self):
        setup, world = self.setup, self.setup.engines.world_size
        senders = [self.pool.submit(BridgeSender, setup, r, p, self.made(p)) for r, p in enumerate(self.trainers)]
        intakes = [
            self.pool.submit(Intake, setup, i // world, i % world, Parameters(p), CPU)
            for i, p in enumerate(self.engines)
        ]
        self.senders, self.intakes = [s.result() for s in senders], [i.result() for i in intakes]

    def push(self, version: int, verify: bool = False):
        """Start all; futures of senders and of receivers."""
        sent = self.send(version, verify)
        return sent, [self.pool.submit(intake.receive, version) for intake in self.intakes]

    def send(self, version: int, *options):
        return [self.pool.submit(sender.push, version, *options) for sender in self.senders]

    def learn(self, seed: int):
        """Other weights, in place."""
        for rank, live in enumerate(self.trainers):
            shards = megatron_shards(self.setup.shape, self.setup.mesh, rank)
            for name, value in cut(shards, hf_weights(self.setup.shape, seed)).items():
                live[name].copy_(value)

    def check(self, seed: int, made=lambda name, weight: weight):
        for rank, (shards, live) in enumerate(zip(self.shards, self.engines, strict=True)):
            weights = {name: made(name, weight) for name, weight in hf_weights(self.setup.shape, seed).items()}
            expected = cut(shards, weights)
            assert live.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(live[name], value.to(live[name].dtype)), (rank, name)

    def close(self):
        for end in [*self.senders, *self.intakes]:
            end.close()
        self.pool.shutdown()


@contextmanager
def joined(mesh=Mesh(), engines=Engines(), shape=SHAPE, made=lambda live: {}, **options):
    store = host_store("127.0.0.1")
    setup = BridgeSetup(shape, mesh, False, engines, "float32", "127.0.0.1", store.port, timeout_s=deadline(30))
    ranks = Joined(replace(setup, **options), made)
    yield ranks
    ranks.close()


ROUTES = [
    (Mesh(), Engines()),
    (Mesh(tensor=2, pipeline=2), Engines(1, 2)),
    (Mesh(tensor=2, data=2), Engines(2, 1)),
    (Mesh(data=2), Engines(1, 4)),  # two KV heads, replicated
    (Mesh(pipeline=2), Engines(1, 2, pipeline=2)),
    (Mesh(tensor=2), Engines(4, 1, num_chains=1)),
    (Mesh(pipeline=2), Engines(3, 2, num_chains=2)),
]


LARGE_BUCKETS, SMALL_BUCKETS = ([(*route, size) for route in ROUTES] for size in (2**26, 5000))


@pytest.mark.parametrize(
    ("mesh", "engines", "bucket_bytes"),
    cover.essential([*LARGE_BUCKETS, *SMALL_BUCKETS, (Mesh(), Engines(), 1)], LARGE_BUCKETS[1], *SMALL_BUCKETS),
    ids=str,
)
@pytest.mark.parametrize("share_memory", [True, False], ids=["shared memory", "gloo"])
def test_every_engine_rank_holds_its_shards(mesh, engines, bucket_bytes, share_memory):
    """Of a bucket of one byte every row is a message."""
    with joined(mesh, engines, share_memory=share_memory, bucket_bytes=bucket_bytes) as ranks:
        for version in (0, 1):
            ranks.learn(version)
            sent, received = ranks.push(version)
            metrics = [s.result() for s in sent]
            [r.result() for r in received]
            ranks.check(version)
        each = sum(t.nbytes for rank in ranks.engines[: engines.world_size] for t in rank.values())
        assert sum(m["bytes"] for m in metrics) == engines.heads * each
        assert [i.num_bytes for i in ranks.intakes] == [sum(t.nbytes for t in p.values()) for p in ranks.engines]


@pytest.mark.parametrize("share_memory", [True, False], ids=["shared memory", "gloo"])
def test_weights_are_made_when_they_are_sent(share_memory):
    """Some layers are sent as their threefold. What is in the trainers' memory stays as it is, and a push after another
    joining brings the same."""

    def threefold(live):
        def of(name):
            return lambda box, out: out.copy_(3 * live[name][slices(box)])

        return {name: of(name) for name in live if "linear_fc" in name and name.endswith("weight")}

    def expected(name, weight):
        return 3 * weight if ".mlp." in name and name.endswith("proj.weight") else weight

    sizes = dict(share_memory=share_memory, bucket_bytes=5000)  # so that weights are cut
    with joined(Mesh(tensor=2, data=2), Engines(2, 1), made=threefold, **sizes) as ranks:
        for version in (0, 1, 1):
            ranks.learn(version)
            sent, received = ranks.push(version)
            for done in [*sent, *received]:
                done.result()
            ranks.check(version, expected)
            if version:
                for end in [*ranks.senders, *ranks.intakes]:
                    end.close()
                ranks.setup = replace(ranks.setup, epoch=ranks.setup.epoch + 1)
                ranks.join()
        mine = cut(megatron_shards(SHAPE, ranks.setup.mesh, 0), hf_weights(SHAPE, 1))
        assert all(torch.equal(ranks.trainers[0][name], value) for name, value in mine.items())


def test_the_form_of_files_changes_nothing_in_a_push():
    """Experts are stacked, transposed and mixed in files alone."""
    engines = Engines(1, 2, expert_parallel=True)
    with known(), joined(Mesh(data=2, expert=2), engines, replace(SHAPES["qwen3_moe"], family="like_gpt_oss")) as ranks:
        sent, received = ranks.push(0)
        assert sum(s.result()["bytes"] for s in sent) == sum(t.nbytes for rank in ranks.engines for t in rank.values())
        [r.result() for r in received]
        ranks.check(0)


@pytest.mark.parametrize("share_memory", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize(("engines", "late"), [(Engines(3, 2), [0]), (Engines(3, 2, num_chains=2), [2])], ids=str)
def test_a_late_engine_does_not_hold_the_others(engines, late, share_memory):
    """It begins to receive only when the others have all weights. In a chain it holds only the engines behind it."""
    with joined(Mesh(tensor=2, pipeline=2), engines, share_memory=share_memory, bucket_bytes=5000) as ranks:
        for version in (0, 1):
            ranks.learn(version)
            sent = ranks.send(version, False, late)
            held = {engine for e in late for engine in engines.chain_of(e)}
            for wanted in (set(range(3)) - held, held):
                receivers = [i for engine in wanted for i in ranks.intakes[2 * engine : 2 * engine + 2]]
                [r.result() for r in [ranks.pool.submit(intake.receive, version) for intake in receivers]]
            [s.result() for s in sent]
            ranks.check(version)


def gloo_group(store, rank: int, num_ranks: int, timeout, device) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()
    options._devices, options._timeout = [ProcessGroupGloo.create_default_device()], timeout
    return ProcessGroupGloo(store, rank, num_ranks, options)


def test_the_stand_in_for_nccl_fails_on_another_order():
    with ThreadPoolExecutor(2) as pool:
        make = partial(gloo_group, HashStore(), num_ranks=2, timeout=timedelta(seconds=deadline(30)), device=None)
        one, other = (OrderedGroup(group) for group in pool.map(lambda rank: make(rank=rank), range(2)))
        whole, part = torch.arange(8), torch.arange(4)
        right, wrong = [whole, part], [part, whole]
        first = pool.submit(one.send, [whole], 1, 0)
        assert wait([first], 0.1).not_done, "the first send returns when its receive has been called"
        other.recv([torch.empty_like(whole)], 0, 0).wait(timedelta(seconds=deadline(30)))
        first.result().wait()
        for posted, taken in ((right, right), (right, wrong)):
            sends = [one.send([tensor], 1, tag) for tag, tensor in enumerate(posted)]
            rooms = [torch.empty_like(tensor) for tensor in taken]
            receives = [other.recv([room], 0, 7 - tag) for tag, room in enumerate(rooms)]
            if taken is wrong:
                with pytest.raises(RuntimeError):
                    [work.wait(timedelta(seconds=deadline(30))) for work in receives]
            else:
                [work.wait() for work in [*sends, *receives]]
                assert all(map(torch.equal, rooms, posted))
        one.abort()
        other.abort()


@pytest.mark.parametrize(("mesh", "engines"), [*ROUTES, (Mesh(pipeline=2), Engines(2, 2))], ids=str)
def test_the_contents_of_all_lines_may_pass_through_one_group(mesh, engines, monkeypatch):
    """As they do between GPUs, in the order of posting. Engines that feed others send through a second group. Both
    trainers of the last route feed the same ranks: if their connections were made in the first push, no rank would have
    answered the first trainer when it waits for the second one."""
    made = []

    def make(store, rank, num_ranks, *rest):
        made.append((rank, num_ranks))
        return OrderedGroup(gloo_group(store, rank, num_ranks, *rest))

    monkeypatch.setitem(SHARED_GROUPS, "cpu", make)
    with joined(mesh, engines, share_memory=False, bucket_bytes=5000) as ranks:
        world = ranks.setup.world_size
        assert sorted(made) == sorted([(rank, world) for rank in range(world)] * (1 + engines.are_chained))
        for version in (0, 1):
            ranks.learn(version)
            sent, received = ranks.push(version)
            [f.result() for f in [*sent, *received]]
            ranks.check(version)
        ranks.senders[0].close()
        sent, received = ranks.push(2)
        failed = [isinstance(f.exception(), RuntimeError) for f in [*sent, *received]]
        fed = {stretch.destination for stretch in ranks.senders[0].stretches}
        assert failed[0] and all(failed[len(sent) + rank] for rank in fed), "ends of the lines of trainer rank 0"


def test_a_content_that_stops_on_its_way_is_an_error_at_the_deadline(monkeypatch):
    """Its headers have arrived, and NCCL's wait for it has no deadline."""
    stopped, goes_on = [], Event()

    class Stopping(OrderedGroup):
        def send(self, *arguments):
            if self._numbers and not stopped:
                stopped.append(self._stream.submit(goes_on.wait))
            return super().send(*arguments)

    monkeypatch.setitem(SHARED_GROUPS, "cpu", lambda *arguments: Stopping(gloo_group(*arguments)))
    with joined(engines=Engines(1, 2), share_memory=False, bucket_bytes=5000, timeout_s=deadline(3)) as ranks:
        sent, received = ranks.push(0)
        errors = [str(future.exception()) for future in [*sent, *received]]
        goes_on.set()
        assert all("has died, or is silent past the deadline" in error for error in errors), errors
        assert any("a message has stopped on its way" in error for error in errors[len(sent) :])


def test_no_group_is_made_if_no_line_needs_it(monkeypatch):
    monkeypatch.setitem(SHARED_GROUPS, "cpu", lambda *_: pytest.fail("all ranks read each other's memory"))
    with joined(Mesh(tensor=2), Engines(2, 1)) as ranks:
        sent, received = ranks.push(0)
        [f.result() for f in [*sent, *received]]
        ranks.check(0)


@pytest.mark.parametrize("family", SHAPES)
def test_every_family_and_mixed_dtypes(family):
    """bfloat16 engines of float32 trainers; DeepSeek's router bias stays float32."""
    expert = 2 if SHAPES[family].mixture else 1
    mesh = Mesh(tensor=2, data=1, expert=expert, expert_tensor=1 if expert == 2 else None)
    engines = Engines(1, 2, expert_parallel=expert == 2)
    with joined(mesh, engines, SHAPES[family], dtype="bfloat16") as ranks:
        sent, received = ranks.push(0)
        [f.result() for f in [*sent, *received]]
        ranks.check(0)


def test_large_copies_are_neither_packed_nor_unpacked(monkeypatch):
    monkeypatch.setattr("megatron_rl.bridge.messages.ALONE_BYTES", 2000)
    with joined(share_memory=False, bucket_bytes=6000) as ranks:
        sent, received = ranks.push(0)
        [f.result() for f in [*sent, *received]]
        ranks.check(0)
        # The rows of one matrix, whole on both sides, needed no buffer: what did is below.
        packed = [m.num_bytes for m in ranks.senders[0]._schedule if len(m.copies) > 1]
        assert ranks.senders[0]._slots.tensors[0].numel() < max(packed) + 64 <= 6000 + 64


@pytest.mark.parametrize(
    ("mesh", "engines"),
    [(Mesh(tensor=2, pipeline=2), Engines(2, 2)), (Mesh(data=2), Engines(1, 4)), (Mesh(), Engines(3, 1, num_chains=1))],
    ids=str,
)
def test_many_messages_have_one_answer(mesh, engines, monkeypatch):
    """Every copy is a message. Both ends of a line know the same stretches, though each sees only its own parameters:
    an answer comes for what fits into a buffer, or for a whole turn of what lies in place."""
    monkeypatch.setattr("megatron_rl.bridge.messages.ALONE_BYTES", 1)
    monkeypatch.setattr("megatron_rl.layout.route_order.NUM_BLOCKS", 4)
    with joined(mesh, engines, share_memory=False, bucket_bytes=5000) as ranks:
        for version in (0, 1):
            ranks.learn(version)
            sent, received = ranks.push(version)
            [f.result() for f in [*sent, *received]]
            ranks.check(version)
        sent = [stretch.messages for sender in ranks.senders for stretch in sender.stretches]
        heads = ranks.intakes[:: 3 if engines.num_chains else 1]
        assert set(sent) == {stretch.messages for intake in heads for stretch in intake.stretches}
        assert len(sent) < sum(map(len, sent))
        longest = max(sum(message.num_bytes for message in messages) for messages in sent)
        assert (longest > 5000) == (engines.num_chains is None)
        for end in (*ranks.senders, *ranks.intakes):
            assert end._slots.tensors[0].numel() <= 5000 + ALIGNMENT_BYTES


@pytest.mark.parametrize("share_memory", [True, False], ids=["shared memory", "gloo"])
def test_an_engine_goes_on_while_the_next_one_writes(share_memory):
    """The second engine does not answer its first stretch before the first engine has completed two."""
    with joined(engines=Engines(2, 1, num_chains=1), share_memory=share_memory, bucket_bytes=5000) as ranks:
        first, second, two = *ranks.intakes, Event()
        settle, write = first._settle, second._write

        def settled(*arguments):
            two.set()
            settle(*arguments)

        def held(*arguments):
            assert two.wait(deadline(20)), "the first engine waits for the answer to its first stretch"
            return write(*arguments)

        first._settle, second._write = settled, held
        sent, received = ranks.push(0)
        [f.result() for f in [*sent, *received]]
        ranks.check(0)


def test_files_carry_a_push_and_the_last_two_versions_stay(tmp_path):
    with joined(Mesh(tensor=2), Engines(1, 2), folder=str(tmp_path)) as ranks:
        for version in (0, 1, 2):
            ranks.learn(version)
            sent, received = ranks.push(version)
            [f.result() for f in [*sent, *received]]
            ranks.check(version)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["version-00000001", "version-00000002"]


def test_a_reader_of_files_holds_no_more_than_a_bucket_at_a_time(tmp_path, monkeypatch):
    """Every copy is a message. In the memory of a sender they would lie in place, and a whole turn would be read."""
    monkeypatch.setattr("megatron_rl.bridge.messages.ALONE_BYTES", 1)
    monkeypatch.setattr("megatron_rl.layout.route_order.NUM_BLOCKS", 4)
    with joined(folder=str(tmp_path), bucket_bytes=5000) as ranks:
        [line] = ranks.intakes[0]._lines.values()
        held, take = [], line.take

        def taken(*arguments):
            parts = take(*arguments)
            held.append([content.numel() for _, content in parts])
            return parts

        line.take = taken
        sent, received = ranks.push(0)
        [f.result() for f in [*sent, *received]]
        ranks.check(0)
    assert max(map(len, held)) > 1 and max(map(sum, held)) <= 5000


def test_a_reader_of_files_starts_with_nothing_less_than_all(tmp_path):
    """One of two trainers wrote its part: the deadline passes, no parameter is touched."""
    with joined(Mesh(tensor=2), Engines(1, 1), folder=str(tmp_path), timeout_s=deadline(0.3)) as ranks:
        ranks.senders[0].push(5)
        with pytest.raises(RuntimeError, match="trainer-1-engine-0.complete"):
            ranks.intakes[0].receive(5)
        assert all(value.isnan().all() for value in ranks.engines[0].values())


def test_a_mark_of_an_earlier_life_is_gone_before_a_file_changes(tmp_path):
    """A run that resumed writes a version again: its readers wait for all of it."""
    with joined(folder=str(tmp_path), timeout_s=deadline(0.3)) as ranks:
        ranks.senders[0].push(0)
        ranks.senders[0]._lines[0].begin(0, Deadline(1.0))
        with pytest.raises(RuntimeError, match="complete did not come within the deadline"):
            ranks.intakes[0].receive(0)


def test_files_of_another_plan_or_spoilt_are_refused(tmp_path):
    with joined(folder=str(tmp_path)) as ranks:
        ranks.senders[0].push(0)
        file = next(tmp_path.glob("version-00000000/*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(RuntimeError, match="engine 0, rank 0 .*trainer rank 0"):
            ranks.intakes[0].receive(0)
    with joined(folder=str(tmp_path)) as ranks:
        file.write_bytes(data[:-5])
        with pytest.raises(RuntimeError, match="message-0.safetensors: .*; push this version again"):
            ranks.intakes[0].receive(0)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"]["version"] == "0"


def test_a_full_disk_is_named_and_leaves_no_mark(tmp_path):
    """A limit on files' sizes, which the kernel enforces as it does a full disk."""
    with joined(folder=str(tmp_path)) as ranks:
        limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(OSError, match="message-0.safetensors: cannot be written"):
                ranks.senders[0].push(0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, ignored)
    assert not list(tmp_path.rglob("*.complete"))


@pytest.mark.parametrize("share_memory", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("silent", ["receiver", "sender"])
def test_a_silent_peer_is_an_error_within_the_deadline(silent, share_memory):
    """That it returns is what the test says of the deadline: any later one is far away."""
    with joined(share_memory=share_memory, timeout_s=deadline(1)) as ranks:
        with pytest.raises(RuntimeError, match="has died, or is silent past the deadline"):
            ranks.intakes[0].receive(0) if silent == "sender" else ranks.senders[0].push(0)
        with pytest.raises(RuntimeError, match="an earlier push broke off; join the bridge again"):
            ranks.intakes[0].receive(0) if silent == "sender" else ranks.senders[0].push(0)


@pytest.mark.parametrize("engines", [Engines(2, 1), Engines(2, 1, num_chains=1)], ids=["fed by trainers", "chain"])
def test_the_first_failure_ends_all_at_once(engines):
    """One of two trainers is gone: nobody waits for the deadline, and after joining again all is well."""
    with joined(Mesh(pipeline=2), engines, share_memory=False, timeout_s=deadline(120)) as ranks:
        ranks.senders[1].close()
        sent = [ranks.pool.submit(ranks.senders[0].push, 0)]
        received = [ranks.pool.submit(intake.receive, 0) for intake in ranks.intakes]
        assert not wait([*sent, *received], timeout=deadline(40)).not_done, "somebody waits for the deadline"
        for future in received:
            with pytest.raises(RuntimeError, match="died, or is silent"):
                future.result()
        ranks.setup = replace(ranks.setup, epoch=1)
        ranks.join()
        sent, received = ranks.push(0)
        [f.result() for f in [*sent, *received]]
        ranks.check(0)


def test_another_version_is_an_error_on_both_sides():
    with joined() as ranks:
        push = ranks.pool.submit(ranks.senders[0].push, 4)
        with pytest.raises(RuntimeError, match="version 3.*rank 0 pushed version 4"):
            ranks.intakes[0].receive(3)
        with pytest.raises(RuntimeError, match="version 4, engine rank 0 expected 3"):
            push.result()


def test_an_engine_whose_fed_engine_refuses_fails_too():
    with joined(engines=Engines(2, 1, num_chains=1)) as ranks:
        push = ranks.pool.submit(ranks.senders[0].push, 4)
        first = ranks.pool.submit(ranks.intakes[0].receive, 4)
        with pytest.raises(RuntimeError, match="version 3.*rank 0 pushed version 4"):
            ranks.intakes[1].receive(3)
        with pytest.raises(RuntimeError, match="engine 0, rank 0 .*version 4"):
            first.result()
        wait([push])  # the first engine may have answered the trainer before it knew


@pytest.mark.parametrize(
    ("share_memory", "alone_bytes"), [(True, 2**22), (False, 2**22), (False, 1)], ids=["shared memory", "gloo", "long"]
)
def test_a_spoilt_message_is_seen_by_the_first_push_and_when_asked(share_memory, alone_bytes, monkeypatch):
    """One bit of the second message changes between the checksum and the wire; also in the middle of a stretch."""
    monkeypatch.setattr("megatron_rl.bridge.messages.ALONE_BYTES", alone_bytes)
    monkeypatch.setattr("megatron_rl.layout.route_order.NUM_BLOCKS", 4)
    with joined(share_memory=share_memory, bucket_bytes=5000) as ranks:
        line = ranks.senders[0]._lines[0]
        post, spoil = line.post, [True]

        def spoilt(stretch, parts):
            post(stretch, map(spoiled, parts))

        def spoiled(part):
            header, content = part
            if header.number == 1 and spoil[0]:
                content = content if share_memory else content.clone()
                content[7] ^= 16
            return header, content

        line.post = spoilt
        for version, verify in ((0, False), (1, True)):
            sent, received = ranks.push(version, verify)
            with pytest.raises(
                RuntimeError, match=f"engine rank 0 holds other bytes than were sent, in message 1 of version {version}"
            ):
                sent[0].result()
            with pytest.raises(RuntimeError, match="other bytes .*trainer rank 0"):
                received[0].result()
            ranks.setup = replace(ranks.setup, epoch=ranks.setup.epoch + 1)
            ranks.join()
            spoil[0] = False
            sent, received = ranks.push(version)
            [f.result() for f in [*sent, *received]]
            ranks.check(0)
            line = ranks.senders[0]._lines[0]
            post, spoil[0] = line.post, True
            line.post = spoilt


def test_ranks_that_disagree_refuse_on_both_sides():
    store = host_store("127.0.0.1")
    setup = BridgeSetup(SHAPE, Mesh(), False, Engines(), "float32", "127.0.0.1", store.port, timeout_s=deadline(10))
    trainer = cut(megatron_shards(SHAPE, Mesh(), 0), hf_weights(SHAPE, 0))
    engine = cut(vllm_shards(SHAPE, 1, 0), hf_weights(SHAPE, 0))
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(BridgeSender, setup, 0, trainer)]
        ends += [pool.submit(Intake, replace(setup, bucket_bytes=100), 0, 0, Parameters(engine), CPU)]
        for end in ends:
            with pytest.raises(ValueError, match="rank 0.*rank 1.*bucket 100"):
                end.result()


def test_an_engine_of_another_dtype_is_named():
    setup = BridgeSetup(SHAPE, Mesh(), False, Engines(), "bfloat16", "127.0.0.1", 1)
    engine = cut(vllm_shards(SHAPE, 1, 0), hf_weights(SHAPE, 0))
    with pytest.raises(ValueError, match="engine 0, rank 0: .*float32.*bfloat16"):
        Intake(setup, 0, 0, Parameters(engine), CPU)


def test_a_missing_rank_is_named():
    store = host_store("127.0.0.1")
    setup = BridgeSetup(SHAPE, Mesh(), False, Engines(), "float32", "127.0.0.1", store.port, timeout_s=0.5)
    with pytest.raises(RuntimeError, match=r"\[1\] of 2 .*0.5 s"):
        BridgeSender(setup, 0, cut(megatron_shards(SHAPE, Mesh(), 0), hf_weights(SHAPE, 0)))


def test_an_unknown_or_missing_trainer_parameter_is_named():
    setup = BridgeSetup(SHAPE, Mesh(), False, Engines(), "float32", "127.0.0.1", 1)
    good = cut(megatron_shards(SHAPE, Mesh(), 0), hf_weights(SHAPE, 0))
    with pytest.raises(ValueError, match="rank 0.*decoder.stray"):
        BridgeSender(setup, 0, good | {"decoder.stray": torch.zeros(1)})
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    with pytest.raises(ValueError, match=name):
        BridgeSender(setup, 0, {n: t for n, t in good.items() if n != name})


def test_no_default_group_is_made():
    with joined():
        assert not torch.distributed.is_initialized()
