"""The memory of a trainer's GPU, of the policy or of a critic, by phase.

The bytes of weights, gradients and optimizer state equal the actor's allocations on a CPU (parameters.py); on GPUs the
padding of further gradient buckets is left out. The bytes of activations are estimates (activations.py), and the bytes
of NCCL are constants.
"""

from __future__ import annotations

from megatron_rl.config.optimizer import IN_FLIGHT, PIECE_ELEMENTS, AdamConfig, MuonConfig, OptimizerConfig
from megatron_rl.config.policy import ModelConfig, PolicyConfig
from megatron_rl.models import FAMILIES, is_matrix
from megatron_rl.planning.activations import activations, has_fused_layers, recomputed_modules
from megatron_rl.planning.gpu import GpuMemory, MemoryPart, always
from megatron_rl.planning.parameters import (
    BYTES,
    RankParameters,
    expert_data_ways,
    optimizer_ways,
    stage_parameters,
    state_width,
)
from megatron_rl.planning.tower import tower_bytes
from megatron_rl.planning.transfer import BRIDGE, COMMUNICATOR_BYTES, NO_PUSH, TrainersPush
from megatron_rl.types import HOLDS, Mesh, ModelShape

MERGED_BYTES = 2 * 4 * 2**22
"""Two numbers for each of a GPU's `convert.adapters.MERGED_ELEMENTS` (which needs torch)."""
PARTS = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer state"}
"""The rows of what trainers that share their GPUs give up, by its names in HOLDS."""


def num_communicators(mesh: Mesh) -> int:
    """The number of NCCL communicators of a trainer rank: one for each of its groups that Megatron's collectives use
    and that has more than one rank, and one for all ranks."""
    dense, expert = mesh.data * mesh.context, expert_data_ways(mesh)
    groups = [mesh.world_size, mesh.tensor, mesh.pipeline, dense, mesh.context, mesh.tensor * mesh.pipeline]
    if mesh.expert > 1:
        groups += [mesh.expert, mesh.expert_ways, expert]
    return sum(size > 1 for size in groups)


def trainer_memory(
    shape: ModelShape,
    model: ModelConfig,
    policy: PolicyConfig,
    num_tokens: int,
    *,
    on_gpus: bool,
    push: TrainersPush = NO_PUSH,
    num_mirrors: int = 0,
    section: str = "policy",
) -> GpuMemory:
    """The memory of the rank of a trainer that needs the most.

    Args:
        policy: the layout, the optimizer and Megatron's settings, of a critic too (`CriticConfig.trainer`).
        num_tokens: the largest number of tokens of a micro-batch.
        on_gpus: whether the trainers run on GPUs. On CPUs they have local layers and no NCCL.
        num_mirrors: the number of states that the nodes keep for each rank.
        section: the trainer's section of the configuration, `policy` or `critic`, for the remedies.
    """
    parallel, optimizer, mesh = policy.parallel, policy.optimizer, policy.parallel.mesh
    width, recomputed = BYTES[model.dtype], recomputed_modules(model, policy.megatron)
    fused = on_gpus and has_fused_layers(shape, model, mesh.context)
    number = num_communicators(mesh) if on_gpus else 0
    shorter = "lower balance.max_tokens_per_microbatch"
    split = f"{section}.parallel.tensor"
    fewer = f"raise {split} or {section}.parallel.pipeline, or for a mixture {section}.parallel.expert"
    recompute, less_state = "model.recompute" if section == "policy" else "recompute of its model", ""
    if isinstance(optimizer, AdamConfig):
        fewer_bits = f"{section}.optimizer.moments to bfloat16, or " if optimizer.moments == "float32" else ""
        less_state = f"set {section}.optimizer.offload, or {fewer_bits}"

    def of_stage(stage: int, held: RankParameters) -> GpuMemory:
        used = activations(shape, parallel, stage, num_tokens, width=width, recomputed=recomputed, fused=fused)
        tower = tower_bytes(shape, mesh, stage, num_tokens, width=width, recompute="full" in recomputed)
        computing, computed = max(
            (used.output, "output layer"), (used.layer, "layer"), (tower.layer, "layer of the vision tower")
        )
        state = held.state_bytes(mesh, model.dtype, optimizer)
        copied = _copied_bytes(held, mesh, optimizer) - used.kept - tower.kept - computing
        parts = {
            "weights": MemoryPart(always(held.weight_bytes(model.dtype)), fewer),
            "vision tower and its outputs": MemoryPart(always(tower.frozen), "train its text alone"),
            "gradients": MemoryPart(always(held.gradient_bytes(optimizer)), fewer),
            "optimizer state": MemoryPart(
                always(0.0 if optimizer.is_offloaded else state),
                f"{less_state}raise {section}.parallel.data, {split} or {section}.parallel.pipeline",
            ),
            "optimizer state in an update": MemoryPart(
                (_update_bytes(held, mesh, shape, model.dtype, optimizer), 0.0, 0.0), fewer
            ),
            "gradients (fp32) beyond activations": MemoryPart((max(0.0, copied), 0.0, 0.0), fewer),
            "activations kept for the backward passes": MemoryPart(
                (used.kept, 0.0, 0.0),
                f"set {recompute} to full, {shorter}, or raise {split} or {section}.parallel.context",
            ),
            "activations of the vision tower": MemoryPart(
                (tower.kept, 0.0, 0.0), f"set {recompute} to full, {shorter}, or leave {section}.vision_tower out"
            ),
            f"the {computed} being computed": MemoryPart(
                (computing, 0.0, 0.0), f"{shorter}, or raise {split} or {section}.parallel.context"
            ),
            "weights being dequantised": MemoryPart((held.dequantised_bytes(model.dtype), 0.0, 0.0), fewer),
            f"{number} NCCL communicators": MemoryPart(
                always(number * COMMUNICATOR_BYTES),
                f"set one of the sizes of {section}.parallel to 1",
            ),
            **_of_push(push, held.trained * width, on_gpus),
        }
        host = {"optimizer state": state} if optimizer.is_offloaded else {}
        host["a checkpoint's copy"] = held.state_elements(mesh) * width + state
        if num_mirrors:
            host[f"{num_mirrors} mirrors"] = num_mirrors * (held.kept_bytes(model.dtype) + state)
        return GpuMemory.of(f"{'trainer' if section == 'policy' else section}, stage {stage}", parts, host)

    stages = [of_stage(stage, held) for stage, held in enumerate(stage_parameters(shape, mesh, fused))]
    return max(stages, key=lambda memory: max(memory.totals))


def _of_push(push: TrainersPush, trained: int, on_gpus: bool) -> dict[str, MemoryPart]:
    """
    Args:
        trained: the bytes of what is trained.
    """
    merged = MERGED_BYTES if push.merges and on_gpus else 0.0
    copied = always(trained if push.copies else 0.0)
    return {
        BRIDGE: MemoryPart(
            always(push.communicator_bytes), "set bridge.chains, so that trainers send to fewer engines"
        ),
        "two buffers of the bridge": MemoryPart(always(2 * push.bucket_bytes), "lower bridge.bucket_mib"),
        "the adapters as a push sends them": MemoryPart(copied, "lower policy.lora.rank"),
        "rows that a push merges (fp32)": MemoryPart((0.0, merged, 0.0), "set rollout.lora to served"),
    }


def _copied_bytes(held: RankParameters, mesh: Mesh, optimizer: OptimizerConfig) -> float:
    """The fp32 copies of a rank's part of bf16 gradients, which an update makes when the activations are gone."""
    return 4.0 * held.state_elements(mesh) if optimizer.gradients == "bfloat16" else 0.0


def _update_bytes(held: RankParameters, mesh: Mesh, shape: ModelShape, dtype: str, optimizer: OptimizerConfig) -> float:
    """The fp32 numbers that are on the GPU in an update alone, at most (actor/optimizer): the pieces of a streamed
    state, or what Muon needs."""
    if isinstance(optimizer, MuonConfig):
        # Of the largest matrix: its part of a parameter before and after, the whole, and two of an iteration; X X', its
        # square, and their sum.
        work = max(5 * rows * columns + 3 * min(rows, columns) ** 2 for rows, columns in _matrices(shape))
        # Of the matrices that ranks share: this rank's intervals, and the matrices that it works on.
        dense, expert = optimizer_ways(mesh)
        shared = (held.matrices / dense if dense > 1 else 0) + (held.expert / expert if expert > 1 else 0)
        return 4.0 * (work + 2 * shared)
    elements = held.state_elements(mesh)
    if optimizer.is_offloaded:  # one arrives, one is updated, one leaves
        return min(IN_FLIGHT * PIECE_ELEMENTS, elements) * state_width(dtype, AdamConfig(), is_matrix=False)
    if optimizer.is_streamed:  # the fp32 moments of one piece; an fp32 copy of weights is updated in place
        return min(PIECE_ELEMENTS, elements) * state_width("float32", AdamConfig(), is_matrix=False)
    return 0.0


def _matrices(shape: ModelShape) -> set[tuple[int, ...]]:
    """The extents of the matrices of all layers."""
    tensors = FAMILIES[shape.family].hf_tensors(shape)
    return {extents for name, extents in tensors.items() if is_matrix(name, len(extents))}


def sharing(memory: GpuMemory, role: str) -> GpuMemory:
    """The memory of a trainer rank that shares its GPU with an engine's.

    Args:
        role: its key in HOLDS, `trainer` or `critic`.
    """
    present = {row: [phase for phase, held in HOLDS[role].items() if part in held] for part, row in PARTS.items()}
    return memory.sharing(present, copied=[PARTS["weights"], PARTS["optimizer"]])
