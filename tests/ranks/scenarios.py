"""What the trainer processes of the tests do; each function is called on every rank of a world."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
import time
import zlib
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from megatron_rl.actor import checkpoint as checkpoint_room
from megatron_rl.actor import platform  # before Megatron: it silences its import

from megatron.core import parallel_state  # isort: skip
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region  # isort: skip
from megatron.core.utils import unwrap_model  # isort: skip
from shares import TrainSample, share_of

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.adapter_folders import export_adapters, load_adapters
from megatron_rl.actor.attention import packed_sequences
from megatron_rl.actor.gradient_sum import copied_to_all_ranks
from megatron_rl.actor.inspection import gradient_of, token_numbers
from megatron_rl.actor.logprobs import output_weight, vocabulary_shard
from megatron_rl.actor.packing import pack
from megatron_rl.actor.spec import ActorSpec
from megatron_rl.actor.weights import export_hf, load_weights
from megatron_rl.algorithms import Objective, PolicyObjective, PreferenceObjective, SupervisedObjective
from megatron_rl.algorithms.logprobs import token_logprobs
from megatron_rl.bridge.sender import BridgeSender
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.optimizer import AdamConfig, OptimizerConfig
from megatron_rl.config.policy import MegatronConfig, ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.config.preferences import PreferenceLossConfig
from megatron_rl.models import FAMILIES, critic_shape, read_shape, slices
from megatron_rl.tools.bench.compare_layouts import train_once
from megatron_rl.types import Denominators, Mesh, Metrics

OPTIMIZER = AdamConfig(
    lr=1e-2, warmup_steps=2, schedule="cosine", min_lr_ratio=0.1, eps=1e-4, weight_decay=0.1, clip_grad=0.1
)
"""A clip that is active, a decay that is felt, and an epsilon that does not blow rounding up to whole
steps."""
TOTAL_STEPS = 8
TEMPERATURE = 0.7
ALGORITHM = AlgorithmConfig()


@dataclass(frozen=True)
class Layout:
    mesh: Mesh = Mesh()
    sequence: bool = True
    num_microbatches: int = 1
    dtype: str = "float32"
    recompute: str = "none"
    megatron: MegatronConfig = MegatronConfig()

    @property
    def alignment(self) -> int:
        tensor = self.mesh.tensor if self.sequence else 1
        return tensor if self.mesh.context == 1 else 2 * self.mesh.context * tensor


COEFFICIENTS = {"kl": 0.3, "entropy": 0.05}


def build(
    rank: int,
    world_size: int,
    url: str,
    folder: Path,
    layout: Layout,
    algorithm: AlgorithmConfig | PreferenceLossConfig | None = ALGORITHM,
    optimizer: OptimizerConfig = OPTIMIZER,
    weights: Path | None = None,
    temperature: float = TEMPERATURE,
    **settings,
) -> MegatronActor:
    """`algorithm` is a loss of preferences, or None for supervised training. `weights`: where the weights are, if they
    are not in `folder`. `settings` are more keys of `policy`."""
    mesh = layout.mesh
    parallel = ParallelConfig(
        tensor=mesh.tensor,
        pipeline=mesh.pipeline,
        data=mesh.data,
        context=mesh.context,
        expert=mesh.expert,
        expert_tensor=mesh.expert_tensor,
        virtual=mesh.virtual,
        layers=mesh.layers,
        sequence=layout.sequence,
    )
    policy = PolicyConfig(parallel=parallel, optimizer=optimizer, megatron=layout.megatron, **settings)
    shape, has_head = read_shape(folder), isinstance(algorithm, PreferenceLossConfig) and algorithm.has_head
    spec = ActorSpec(
        shape=policy.adapted(critic_shape(shape) if has_head else shape),
        model=ModelConfig(path=folder, dtype=layout.dtype, recompute=layout.recompute),
        policy=policy,
        objective=_objective(algorithm),
        temperature=temperature if isinstance(algorithm, AlgorithmConfig) else 1.0,
        total_steps=TOTAL_STEPS,
        seed=0,
        pictures=str(folder / "images"),
        collective_timeout=timedelta(seconds=1234.5),
    )
    actor = MegatronActor(spec, rank=rank, world_size=world_size, store=meet(rank, world_size, url))
    waits = {group._get_backend(torch.device("cpu")).options._timeout for group in dist.distributed_c10d._world.pg_map}
    assert waits == {timedelta(seconds=1234.5)}, "the groups of Megatron wait as long as the others"
    load_weights(actor, weights or folder)
    actor.keep_reference()
    return actor


def _objective(algorithm: AlgorithmConfig | PreferenceLossConfig | None) -> Objective:
    if isinstance(algorithm, PreferenceLossConfig):
        return PreferenceObjective(algorithm)
    return PolicyObjective(algorithm) if algorithm else SupervisedObjective()


def meet(rank: int, world_size: int, url: str) -> dist.Store:
    """The store at `url`: a file of its own, or one that another process serves."""
    if url.startswith("file:"):
        return next(dist.rendezvous(url, rank, world_size))[0]
    host, port = url.removeprefix("tcp://").split(":")
    return dist.TCPStore(host, int(port), is_master=False)


def denominators(samples: list[TrainSample]) -> Denominators:
    return Denominators(sum(int(s.tokens.action_mask.sum()) for s in samples), len(samples))


def mine(samples: list[TrainSample], actor: MegatronActor, num_microbatches: int) -> list[list[TrainSample]]:
    """This rank's micro-batches. The last data-parallel rank has fewer samples, in one micro-batch; its
    others are empty."""
    _, _, data = actor.mesh.coordinates(actor.rank)
    if actor.mesh.data > 1:
        cut = 2 * len(samples) // 3
        samples = [samples[:cut], samples[cut:]][data]
        if data == 1:
            return [[] for _ in range(num_microbatches - 1)] + [samples]
    return [samples[m::num_microbatches] for m in range(num_microbatches)]


def begin(
    actor: MegatronActor, samples: list[TrainSample], layout: Layout, num_updates: int, version: int = 0
) -> Metrics:
    """The same samples in every optimizer step: from the second on the ratio is not 1."""
    minibatches = [mine(samples, actor, layout.num_microbatches)] * num_updates
    share = share_of(minibatches, [denominators(samples)] * num_updates, layout.alignment, version)
    return actor.begin(share, COEFFICIENTS)


def one_update(rank, world_size, url, **arguments):
    return train_once(rank, meet(rank, world_size, url), **arguments)


def train(rank, world_size, url, *, folder, samples, layout, num_updates=3, algorithm=ALGORITHM, **settings):
    """(mismatch, metrics of each update)"""
    actor = build(rank, world_size, url, folder, layout, algorithm, **settings)
    mismatch = begin(actor, samples, layout, num_updates)
    metrics = [actor.update(i, COEFFICIENTS) for i in range(num_updates)]
    actor.close()
    return mismatch, metrics


def score(rank, world_size, url, *, folder, samples, layout):
    """The log-probs that this rank tells, and the first update of a step that follows."""
    actor = build(rank, world_size, url, folder, layout)
    told = actor.score(share_of([mine(samples, actor, layout.num_microbatches)], alignment=layout.alignment))
    begin(actor, samples, layout, 1)
    metrics = actor.update(0, COEFFICIENTS)
    actor.close()
    return told, metrics


def train_steps(
    rank, world_size, url, *, folder, samples, layout, algorithm, pass_before_update, num_steps=3, later=(), **settings
):
    """Steps of one update each. `pass_before_update`: logp_old comes from a forward pass, also where it could be left
    out. `later`: the samples of all steps but the first, if they are others.

    Returns:
        (metrics of begin and update together, this rank's parameters) after each step; and how many forward passes
        over all micro-batches were made.
    """
    actor = build(rank, world_size, url, folder, layout, algorithm, **settings)
    needs = actor.spec.objective.needs
    if pass_before_update:
        actor.spec.objective.needs = replace(needs, statistics=needs.statistics | {"logp_old"})
    passes = 0

    def count(module, arguments, output) -> None:
        nonlocal passes
        passes += 1

    actor.chunks[-1].register_forward_hook(count)
    steps = []
    for step in range(num_steps):
        metrics = begin(actor, later if step and later else samples, layout, 1)
        metrics |= actor.update(0, COEFFICIENTS)
        steps.append((metrics, {name: p.detach().clone() for name, p in actor.parameters().items()}))
    actor.close()
    return steps, passes / layout.num_microbatches


def disagree(rank, world_size, url, *, folder, samples, layout):
    """The error of an update whose samples are not of the engine's policy, and whether the weights stayed."""
    actor = build(rank, world_size, url, folder, layout, AlgorithmConfig())
    before = {name: p.clone() for name, p in actor.parameters().items()}
    begin(actor, samples, layout, 1)
    error = _error(lambda: actor.update(0, {"max_mismatch": 1e-3}))
    unchanged = all(torch.equal(before[name], p) for name, p in actor.parameters().items())
    actor.close()
    return error, unchanged


def logits(rank, world_size, url, *, folder, samples, layout):
    """[T, vocabulary padded] of one packed row, with the row's lengths; TP only."""
    actor = build(rank, world_size, url, folder, layout)
    [[batch]] = pack(share_of([[samples]], alignment=layout.alignment))
    with platform.running(), torch.no_grad():
        hidden_1TH = actor.chunks[0](
            input_ids=batch.ids_T[None],
            position_ids=None,
            attention_mask=None,
            packed_seq_params=packed_sequences(batch.lengths_S, actor.spec.shape, fused=False),
        )
        weight_VH = output_weight(unwrap_model(actor.chunks[-1]))
        part_1TV = hidden_1TH.to(weight_VH.dtype) @ weight_VH.T
    parts = [torch.empty_like(part_1TV) for _ in range(layout.mesh.tensor)]
    dist.all_gather(parts, part_1TV.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    actor.close()
    return torch.cat(parts, -1)[0].float().numpy(), batch.lengths_S.numpy()


def gradient_in_columns(rank, world_size, url):
    """The gradient of a tensor that both ranks read, from gradients that lie in columns: by our function and by
    Megatron's."""
    platform.start(rank, world_size, meet(rank, world_size, url))
    found = []
    for copied in (copied_to_all_ranks, copy_to_tensor_model_parallel_region):
        x = torch.zeros(2, 3, requires_grad=True)
        copied(x, group=dist.group.WORLD).backward(torch.arange(6.0).view(3, 2).T + 10 * rank)
        found.append(x.grad.numpy())
    dist.barrier()
    dist.destroy_process_group()
    return found


def logprobs(rank, world_size, url, *, hidden_TH, weight_VH, target_T, grad_2T, vocab_size, temperature, forbidden):
    """The rows of a padded output layer split over the ranks: log-probs and entropies, and the gradients to hidden
    states (summed over the ranks) and to this rank's rows."""
    platform.start(rank, world_size, meet(rank, world_size, url))
    width = len(weight_VH) // world_size
    weight = torch.from_numpy(weight_VH[rank * width : (rank + 1) * width]).requires_grad_()
    hidden = torch.from_numpy(hidden_TH).requires_grad_()
    values = token_logprobs(
        copy_to_tensor_model_parallel_region(hidden, group=dist.group.WORLD),
        weight,
        torch.from_numpy(target_T),
        vocabulary_shard(weight, vocab_size, dist.group.WORLD, forbidden),
        temperature=temperature,
        also=("entropy",),
    )
    torch.autograd.backward(values[:2], torch.from_numpy(grad_2T).unbind())
    dist.barrier()  # without tokens nothing else has waited for the other ranks, which may still be connecting
    dist.destroy_process_group()
    return [x.detach().numpy() for x in values[:2]], hidden.grad.numpy(), weight.grad.numpy()


def balance_routers(rank, world_size, url, *, folder, samples, layout, router_bias_update_rate):
    """Two updates of the routers' biases with weights that stay, after one that is refused.

    Returns:
        (the error of the refused update, whether it changed no bias, this rank's biases by their HF names, and how many
        of its tokens each expert got in the last update)
    """
    still = AdamConfig(lr=1e-30)
    actor = build(
        rank, world_size, url, folder, layout, optimizer=still, router_bias_update_rate=router_bias_update_rate
    )
    biases = {
        shard.hf_name: actor.parameters()[shard.local_name]
        for shard in actor.shards
        if shard.hf_name.endswith("e_score_correction_bias")
    }
    before = {name: bias.clone() for name, bias in biases.items()}
    begin(actor, [replace(sample, advantage=float("inf")) for sample in samples], layout, 1)
    error = _error(lambda: actor.update(0, {}))
    unchanged = all(torch.equal(before[name], bias) for name, bias in biases.items())
    begin(actor, samples, layout, 2)
    for i in range(2):
        actor.update(i, {})
    prefixes = [f"chunk{number}." for number in range(len(actor.chunks))] if len(actor.chunks) > 1 else [""]
    routers = {
        prefix + name.replace("module.", ""): module
        for prefix, chunk in zip(prefixes, actor.chunks, strict=True)
        for name, module in chunk.named_modules()
    }
    load = {
        shard.hf_name: routers[shard.local_name.removesuffix(".expert_bias")].load_E.numpy()
        for shard in actor.shards
        if shard.hf_name in biases
    }
    result = {name: bias.numpy().copy() for name, bias in biases.items()}
    actor.close()
    return error, unchanged, result, load


def save_and_go_on(rank, world_size, url, *, folder, samples, layout, checkpoint, **settings):
    """Two updates, save, two more: the run that was not interrupted."""
    actor = build(rank, world_size, url, folder, layout, **settings)
    begin(actor, samples, layout, 2)
    for i in range(2):
        actor.update(i, {})
    save(actor, checkpoint, {"step": 2})
    return _two_more(actor, samples, layout)


def resume(rank, world_size, url, *, folder, samples, layout, checkpoint, **settings):
    actor = build(rank, world_size, url, folder, layout, **settings)
    extra = actor.load(checkpoint)
    return (*_two_more(actor, samples, layout), extra)


def save(actor: MegatronActor, folder: Path, extra: dict) -> None:
    actor.save(folder, extra)
    actor.finish_save()


def load_and_save(rank, world_size, url, *, folder, layout, checkpoint, target, **settings):
    """On this layout, which may be another than that of the checkpoint."""
    actor = build(rank, world_size, url, folder, layout, **settings)
    save(actor, target, actor.load(checkpoint))
    actor.close()


def save_each_update(
    rank, world_size, url, *, folder, samples, layout, checkpoints, updates, dies_after_s=None, resume_at=0
):
    """Updates, each of which begins a checkpoint that is finished after the next one. Returns their metrics. The
    process of rank 1 ends after `dies_after_s` seconds."""
    actor = build(rank, world_size, url, folder, layout)
    checkpoints.mkdir(exist_ok=True)
    if resume_at:
        actor.load(checkpoints / str(resume_at))
    if dies_after_s is not None and rank == 1:
        threading.Timer(dies_after_s, os._exit, (9,)).start()
    metrics = []
    for update in range(resume_at + 1, resume_at + updates + 1):
        begin(actor, samples, layout, 1)
        metrics.append(actor.update(0, {}))
        if len(metrics) > 1:
            actor.finish_save()
        actor.save(checkpoints / str(update), {"step": update})
    actor.finish_save()
    actor.close()
    return metrics


def _two_more(actor: MegatronActor, samples, layout):
    mismatch = begin(actor, samples, layout, 2)
    metrics = [actor.update(i, {}) for i in range(2)]
    parameters = {name: p.float().numpy().copy() for name, p in actor.parameters().items()}
    actor.close()
    return mismatch, metrics, parameters


def resume_with_other_settings(rank, world_size, url, *, folder, samples, layout, checkpoint):
    """The settings that the optimizer uses after loading a checkpoint of OPTIMIZER, and the next update's rate."""
    other = AdamConfig(lr=0.5, betas=(0.8, 0.7), weight_decay=0.3)
    actor = build(rank, world_size, url, folder, layout, optimizer=other)
    actor.load(checkpoint)
    settings = [
        (group["lr"], *group["betas"], group["weight_decay"]) for group in actor.optimizer.megatron.param_groups
    ]
    begin(actor, samples, layout, 1)
    rate = actor.update(0, COEFFICIENTS)["lr"]
    actor.close()
    return settings, rate


def load_each(rank, world_size, url, *, folder, layout, checkpoints, **settings):
    """The errors of loading."""
    actor = build(rank, world_size, url, folder, layout, **settings)
    errors = [_error(lambda: actor.load(checkpoint)) for checkpoint in checkpoints]
    actor.close()
    return errors


def save_on_a_full_disk(rank, world_size, url, *, folder, samples, layout, checkpoint):
    """The disk has 1,000 bytes free, then rank 1 may write files of 4 KiB at most, and then saving works again."""
    import resource
    import signal

    actor = build(rank, world_size, url, folder, layout)
    save(actor, checkpoint, {"step": 1})
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: SimpleNamespace(free=1000)
    refused = _error(lambda: save(actor, checkpoint, {"step": 2}))
    shutil.disk_usage = usage
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))

    def save_when_all_are_done() -> None:
        actor.save(checkpoint, {"step": 2})
        while not actor.is_saved:  # rank 0 learns that rank 1 has failed, and waits for it no longer
            time.sleep(0.01)
        actor.finish_save()

    error = _error(save_when_all_are_done)
    actor.agreement.gather(None)  # rank 0 has cleaned up
    left = sorted(path.name for path in checkpoint.parent.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    survivor = actor.load(checkpoint)
    save(actor, checkpoint, {"step": 3})
    replaced = actor.load(checkpoint)
    actor.close()
    return refused, error, left, survivor, replaced


def die_while_saving(rank, world_size, url, *, folder, samples, layout, checkpoint):
    """Rank 0 dies between its own files and the manifest."""
    actor = build(rank, world_size, url, folder, layout)
    checkpoint_room._write_manifest = lambda *arguments: os._exit(1)
    save(actor, checkpoint, {})


def refuse(rank, world_size, url, *, folder, samples, layout):
    """Errors of broken input, each found by one data-parallel rank alone, and whether the weights stayed."""
    actor = build(rank, world_size, url, folder, layout)
    before = {name: p.clone() for name, p in actor.parameters().items()}
    _, _, data = actor.mesh.coordinates(rank)
    errors = {}

    last = samples[-1].tokens
    broken = replace(samples[-1], tokens=replace(last, logp_rollout=last.logp_rollout * float("nan")))
    _begin_plain(actor, [[*samples[:-1], broken] if data else samples], layout)
    errors["rollout"] = _error(lambda: actor.update(0, {}))

    huge = replace(samples[-1], advantage=float("inf"))
    _begin_plain(actor, [samples if data == 0 else [huge]], layout)
    errors["gradient"] = _error(lambda: actor.update(0, {}))

    foreign = replace(samples[0], tokens=replace(samples[0].tokens, ids=samples[0].tokens.ids + 60))
    errors["vocabulary"] = _error(lambda: _begin_plain(actor, [samples if data == 0 else [foreign]], layout))

    unequal = [_cut_mask(samples[0])] if data else samples
    errors["unequal"] = _error(lambda: _begin_plain(actor, [unequal], layout))

    unchanged = all(torch.equal(before[name], p) for name, p in actor.parameters().items())
    _begin_plain(actor, [samples], layout)
    recovered = actor.update(0, {})
    actor.close()
    return errors, unchanged, recovered


def _cut_mask(sample: TrainSample) -> TrainSample:
    return replace(sample, tokens=replace(sample.tokens, action_mask=sample.tokens.action_mask[:-1]))


def refuse_routes(rank, world_size, url, *, folder, samples):
    """The errors of choices of experts that one data-parallel rank alone finds."""
    layout = Layout(Mesh(data=2))
    actor = build(rank, world_size, url, folder, layout, routing_replay=True)
    tokens = samples[2].tokens
    routes = tokens.routes.copy()
    routes[5, 1, 0] = 4
    broken = [*samples[:2], replace(samples[2], tokens=replace(tokens, routes=routes))]
    short = [replace(samples[0], tokens=replace(samples[0].tokens, routes=samples[0].tokens.routes[:, 1:]))]
    errors = [_error(lambda: _begin_plain(actor, [rows if rank else samples], layout)) for rows in (broken, short)]
    actor.close()
    return errors


def misalign(rank, world_size, url, *, folder, samples, layout):
    actor = build(rank, world_size, url, folder, layout)
    error = _error(lambda: actor.begin(share_of([[samples]], [denominators(samples)], 1), {}))
    actor.close()
    return error


def _begin_plain(actor: MegatronActor, microbatches, layout: Layout) -> None:
    actor.begin(share_of([microbatches], [Denominators(100, 10)], layout.alignment), {})


def _error(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


def export(rank, world_size, url, *, folder, layout, target, checkpoint=None, weights=None, **settings):
    actor = build(rank, world_size, url, folder, layout, weights=weights, **settings)
    if checkpoint is not None:
        actor.load(checkpoint)
    export_hf(actor, target)
    actor.close()


def save_at_once(rank, world_size, url, *, folder, layout, checkpoint, weights=None, **settings):
    actor = build(rank, world_size, url, folder, layout, weights=weights, **settings)
    save(actor, checkpoint, {})
    actor.close()


def time_updates(rank, world_size, url, *, folder, minibatches, layout, repeats):
    """CPU seconds of each mini-batch's supervised update, the fastest of some: other processes take none of them."""
    actor = build(rank, world_size, url, folder, layout, algorithm=None)
    actor.begin(share_of(minibatches, [denominators(sum(each, [])) for each in minibatches], layout.alignment), {})
    seconds = [[] for _ in minibatches]
    for _ in range(repeats):
        for i, times in enumerate(seconds):
            start = time.process_time()
            actor.update(i, {})
            times.append(time.process_time() - start)
    actor.close()
    return [min(times) for times in seconds]


def push_weights(rank, world_size, url, *, folder, layout, setup, version):
    """Change every weight and push them; then score the engines' samples, which arrive over the store.

    Returns:
        (this rank's parameters, what the push says of itself, the mismatch)
    """
    actor = build(rank, world_size, url, folder, layout)
    parameters = actor.parameters()
    with torch.no_grad():
        for shard in actor.shards:
            random = torch.Generator().manual_seed(zlib.crc32(f"{version} {shard.hf_name}".encode()))
            extents = FAMILIES[setup.shape.family].hf_tensors(setup.shape)[shard.hf_name]
            factors = 1 + 0.3 * torch.randn(extents, generator=random)  # the same for all that hold the tensor
            parameters[shard.local_name][slices(shard.local_box)].mul_(factors[slices(shard.hf_box)])
    actor.weights_changed()
    sender = BridgeSender(setup, rank, parameters)
    pushed = sender.push(version)
    sender.close()
    store = dist.TCPStore(setup.host, setup.port)
    samples = pickle.loads(store.get(f"samples {version}"))
    mismatch = begin(actor, samples, layout, 2, version)  # a step of one update would not compute it here
    live = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    actor.close()
    return live, pushed, mismatch


def push_into_files(rank, world_size, url, *, folder, layout, setup):
    """Push what a run pushes, into files that any engine may read."""
    actor = build(rank, world_size, url, folder, layout)
    sender = BridgeSender(setup, rank, actor.sent(setup.shape), actor.made(setup.shape))
    sender.push(0)
    sender.close()
    actor.close()


def push_adapters(rank, world_size, url, *, folder, layout, setup, version, lora, export):
    """Push the adapters, or the model that they are merged into if the setup's shape has none, score the engines'
    samples, which arrive over the store, and export the merged model and the adapters.

    Returns:
        (what the push says of itself, the mismatch, the mismatch of the base model)
    """
    actor = build(rank, world_size, url, folder, layout, lora=lora)
    load_adapters(actor, lora.start)
    sender = BridgeSender(setup, rank, actor.sent(setup.shape), actor.made(setup.shape))
    actor.sent(setup.shape)
    pushed = sender.push(version)
    sender.close()
    samples = pickle.loads(dist.TCPStore(setup.host, setup.port).get(f"samples {version}"))
    mismatch = begin(actor, samples, layout, 2, version)
    with actor.adapting.off():
        of_base = begin(actor, samples, layout, 2, version)
    export_hf(actor, export / "merged")
    export_adapters(actor, export / "adapters")
    actor.close()
    return pushed, mismatch, of_base


def merge_and_export(rank, world_size, url, *, folder, layout, lora, export):
    """Merge all that this rank has of the weights with adapters, as a push does, and export both.

    Returns:
        (HF name, HF box, merged rectangle) of each
    """
    actor = build(rank, world_size, url, folder, layout, lora=lora)
    load_adapters(actor, lora.start)
    made, merged = actor.made(actor.spec.shape.base), []
    for shard in actor.shards:
        if shard.local_name in made:
            part = torch.empty([stop - start for start, stop in shard.hf_box])
            made[shard.local_name](shard.local_box, part)
            merged.append((shard.hf_name, shard.hf_box, part))
    export_hf(actor, export / "merged")
    export_adapters(actor, export / "adapters")
    actor.close()
    return merged


def replay_engine(rank, world_size, url, *, folder, layout, setup, version):
    """Push the weights, and score the engine's samples, which arrive over the store.

    Returns:
        (the mismatch without the engine's choices of experts, the mismatch with them, the metrics of an update)
    """
    actor = build(rank, world_size, url, folder, layout, routing_replay=read_shape(folder).mixture is not None)
    sender = BridgeSender(setup, rank, actor.parameters())
    sender.push(version)
    sender.close()
    samples = pickle.loads(dist.TCPStore(setup.host, setup.port).get(f"samples {version}"))
    plain = [replace(sample, tokens=replace(sample.tokens, routes=None)) for sample in samples]
    without, replayed = (begin(actor, rows, layout, 2, version) for rows in (plain, samples))
    updated = actor.update(0, {})
    actor.close()
    return without, replayed, updated


def find_untrained(rank, world_size, url, *, folder, layout):
    """The tokens whose embeddings no training has moved."""
    actor = build(rank, world_size, url, folder, layout)
    found = actor.find_untrained()
    actor.close()
    return found


def inspect(rank, world_size, url, *, folder, samples, layout, parts, algorithm=ALGORITHM):
    """What `explain` asks of a step: (numbers of the tokens, gradient of each part, untrained tokens), and the metrics
    of the update that follows."""
    actor = build(rank, world_size, url, folder, layout, algorithm)
    begin(actor, samples, layout, 1)
    numbers = token_numbers(actor, COEFFICIENTS)
    gradients = [gradient_of(actor, 0, part, COEFFICIENTS) for part in parts]
    untrained = actor.find_untrained()
    metrics = actor.update(0, COEFFICIENTS)
    actor.close()
    return (numbers, gradients, untrained), metrics
