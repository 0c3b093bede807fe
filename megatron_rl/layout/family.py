"""A model family is a table with one row for each fused parameter.

For example, the row `Rule(QKV, megatron=..., vllm=..., hf=(q, k, v))` is all that the actor, the loader, the exporter
and the bridge know about the projection to q, k and v. A new family is a new table (`layout/families/`). Invariants
(tests/unit/layout, tests/dist): every HF tensor of a model is in exactly one row; names and extents equal those that
transformers saves and that Megatron-Core and vLLM build; the shards of all ranks together hold every element, each at
its own place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, NamedTuple

from megatron_rl.layout.shards import Box, Shard
from megatron_rl.layout.splits import REPLICATED, Split, SplitKind, part
from megatron_rl.types import Mesh, ModelShape


@dataclass(frozen=True, slots=True)
class HfTensor:
    name: str
    """The name in the checkpoint, without the prefix of the layer. `{}` stands for the number of the expert."""
    dims: tuple[str, ...]
    """The extent of each dim, as a key of `sizes`: q, kv, hidden, ffn, ..."""


def sizes(shape: ModelShape) -> dict[str, int]:
    """The extents that `HfTensor.dims` names."""
    known = {
        "q": shape.num_heads * shape.head_dim,
        "kv": shape.num_kv_heads * shape.head_dim,
        "hidden": shape.hidden_size,
        "ffn": shape.ffn_size,
        "vocab": shape.vocab_size,
        "head": shape.head_dim,
        "value_head": 1,
    }
    if experts := shape.experts:
        known |= {"experts": experts.num_experts, "expert_ffn": experts.ffn_size, "shared_ffn": experts.shared_ffn_size}
    if latent := shape.latent:
        known |= {
            "query_rank": latent.query_rank,
            "kv_rank": latent.kv_rank,
            "kv_down": latent.kv_rank + latent.rope_dim,
            "q_up": shape.num_heads * (latent.nope_dim + latent.rope_dim),
            "kv_up": shape.num_heads * (latent.nope_dim + latent.value_dim),
            "value": shape.num_heads * latent.value_dim,
        }
    return known


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a family's table. Names are relative to the prefix of a layer; the embedding, the final norm and the
    output layer have whole names."""

    split: SplitKind
    hf: tuple[HfTensor, ...]
    megatron: str
    """Megatron's name. `{}` stands for the expert, counted from 0 on each rank."""
    vllm: str | None = None
    """vLLM's name, if it differs from the HF tensor's. A row of experts without `{}` is one parameter that stacks the
    experts of the rank along a new first dim."""
    fused: str | None = None
    """Megatron's name with Transformer Engine's layers, if it differs: these fuse a norm into the linear layer after
    it, and put the experts into one grouped layer."""
    when: Callable[[ModelShape], bool] = lambda shape: True
    """Whether a model of the family has this row."""
    float32: bool = False
    """Trainer and engine hold the parameter in float32 whatever the model's dtype is, and it is sent as float32."""

    @property
    def per_expert(self) -> bool:
        return "{}" in self.hf[0].name

    def extents(self, shape: ModelShape) -> list[tuple[int, ...]]:
        """The extents of each HF tensor of the row."""
        known = sizes(shape)
        return [tuple(known[dim] for dim in tensor.dims) for tensor in self.hf]

    def hf_names(self, shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (name, extents) of every HF tensor of the row, expert after expert."""
        for expert in range(_num_experts(shape) if self.per_expert else 1):
            for tensor, extents in zip(self.hf, self.extents(shape), strict=True):
                yield tensor.name.format(expert), extents


VALUE_HEAD = Rule(
    REPLICATED,
    hf=(HfTensor("score.weight", ("value_head", "hidden")),),
    megatron="value_head.weight",
)
"""The row of a critic in every family. Its HF tensor is that of transformers' classes `...ForSequenceClassification`
with one label."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What one rank holds of a row. It is the same in every layer, and for every expert of the rank."""

    local_name: str
    pieces: tuple[tuple[str, Box, Box], ...]
    """The pieces of the parameter: (HF name, HF box, local box)."""
    experts: tuple[int, int] | None
    """The interval [start, stop) of the rank's experts, by their numbers in the checkpoint; None if the row has no
    experts."""
    float32: bool = False

    @property
    def num_experts(self) -> int:
        """1 if the row has no experts."""
        return 1 if self.experts is None else self.experts[1] - self.experts[0]

    def shards(self, hf_prefix: str = "", prefix: str = "") -> Iterator[Shard]:
        local_name = prefix + self.local_name
        if self.experts is None:
            for hf_name, hf_box, local_box in self.pieces:
                yield Shard(hf_prefix + hf_name, hf_box, local_name, local_box)
            return
        stacked = "{}" not in local_name
        for index, expert in enumerate(range(*self.experts)):
            for hf_name, hf_box, local_box in self.pieces:
                box = ((index, index + 1), *local_box) if stacked else local_box
                yield Shard(hf_prefix + hf_name.format(expert), hf_box, local_name.format(index), box)


class Placed(NamedTuple):
    """A row's placement on one rank, in one layer or outside the layers."""

    placement: Placement
    hf_prefix: str
    prefix: str

    def shards(self) -> Iterator[Shard]:
        return self.placement.shards(self.hf_prefix, self.prefix)


@dataclass(frozen=True, slots=True)
class Ignored:
    """Tensors of a checkpoint that the model does not need. They are counted and reported."""

    pattern: str
    """A regular expression that matches whole names. NUM_LAYERS stands for the model's number of layers."""
    reason: str

    def matches(self, name: str, shape: ModelShape) -> bool:
        return re.fullmatch(self.pattern.replace("NUM_LAYERS", str(shape.num_layers)), name) is not None


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    """`model_type` of the HF config.json."""
    vllm_model: str
    """The class in vllm.model_executor.models that vLLM runs the family with."""
    embedding: Rule
    attention: tuple[Rule, ...]
    """The rows of norms and attention, which every layer has."""
    dense: tuple[Rule, ...]
    """The MLP's rows in layers without experts."""
    final_norm: Rule
    output: Rule
    mixture: tuple[Rule, ...] = ()
    """The MLP's rows in layers with experts."""
    read_config: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    """Reads from config.json the fields of ModelShape that are special to this family."""
    ignored: tuple[Ignored, ...] = ()
    rope_theta: float = 10_000.0
    """The base of the rotary embeddings if config.json does not give it."""
    vllm_repeats_ends: bool = False
    """Whether vLLM builds embedding, final norm and output layer on every pipeline stage."""
    hf_layer: str = "model.layers.{}."
    megatron_layer: str = "decoder.layers.{}."
    vllm_layer: str = "model.layers.{}."

    @property
    def qk_norm(self) -> Literal["none", "head", "full"]:
        """How q and k are normalised. `head`: each head alone; `full`: all heads together; `none`: not at all."""
        known: dict[tuple[str, ...] | None, Literal["none", "head", "full"]]
        known = {None: "none", ("head",): "head", ("q",): "full"}
        return known[self._dims("self_attn.q_norm.weight")]

    @property
    def qkv_bias(self) -> bool:
        return self._dims("self_attn.q_proj.bias") is not None

    @property
    def post_norm(self) -> bool:
        """Whether the norms are after attention and MLP, before the residual sum, instead of in front of them."""
        return self._dims("post_feedforward_layernorm.weight") is not None

    @property
    def router_bias(self) -> bool:
        """Whether the router adds a bias to the scores when it chooses experts. The bias is updated from the experts'
        load, not by a gradient (arXiv:2408.15664)."""
        return self._dims("mlp.gate.e_score_correction_bias") is not None

    def is_float32(self, hf_name: str) -> bool:
        """Whether trainer and engine hold an HF tensor in float32 whatever the model's dtype is."""
        rows = (rule for rule in (*self.attention, *self.dense, *self.mixture) if rule.float32)
        return any(hf_name.endswith(f".{tensor.name}") for rule in rows for tensor in rule.hf)

    def _dims(self, name: str) -> tuple[str, ...] | None:
        rules = (*self.attention, *self.dense, *self.mixture)
        return next((tensor.dims for rule in rules for tensor in rule.hf if tensor.name == name), None)

    def last_rule(self, shape: ModelShape) -> Rule | None:
        """The row after the final norm; None if the output layer is the embedding."""
        if shape.value_head:
            return VALUE_HEAD
        return None if shape.tied_embeddings else self.output

    def layer_rules(self, shape: ModelShape, layer: int) -> list[Rule]:
        mlp = self.mixture if shape.has_experts(layer) else self.dense
        return [rule for rule in (*self.attention, *mlp) if rule.when(shape)]

    def hf_tensors(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """The extents of every HF tensor of a model, by name."""
        last = self.last_rule(shape)
        ends = (self.embedding, self.final_norm, *([last] if last else []))
        tensors = {name: extents for rule in ends for name, extents in rule.hf_names(shape)}
        rows: dict[bool, list[tuple[str, tuple[int, ...]]]] = {}
        for layer in range(shape.num_layers):
            kind = shape.has_experts(layer)
            if kind not in rows:
                rows[kind] = [row for rule in self.layer_rules(shape, layer) for row in rule.hf_names(shape)]
            prefix = self.hf_layer.format(layer)
            tensors.update((prefix + name, extents) for name, extents in rows[kind])
        return tensors

    def num_parameters(self, shape: ModelShape) -> int:
        """The number of elements of all HF tensors. A tied embedding counts once."""
        return sum(prod(extents) for extents in self.hf_tensors(shape).values())

    def describe(self, hf_name: str) -> str | None:
        """A description, for error messages, of the row that an HF name belongs to, for any layer and expert. None if
        there is no such row."""
        pattern = re.escape(self.hf_layer).replace(re.escape("{}"), r"\d+")
        name = re.sub(rf"^{pattern}", "", hf_name)
        ends = (self.embedding, self.final_norm, self.output, VALUE_HEAD)
        for rule in (*self.attention, *self.dense, *self.mixture, *ends):
            for tensor in rule.hf:
                if re.fullmatch(re.escape(tensor.name).replace(re.escape("{}"), r"\d+"), name):
                    return f"{self.name}'s row {rule.megatron}: {tensor.name} [{', '.join(tensor.dims)}]"
        return None

    def check_mesh(self, shape: ModelShape, mesh: Mesh) -> None:
        """
        Raises:
            ValueError: the mesh does not divide heads, KV heads, FFN, experts or layers. The message says which values
                do.
        """
        for name, value, ways, axis in self._divisions(shape, mesh):
            if value % ways:
                may_be = [n for n in divisors(value) if self._may_be(shape, mesh, axis, n)]
                told = f"; it may be {listed(may_be)}" if may_be else ""
                raise ValueError(
                    f"the model has {value} {name}, which policy.parallel.{axis}={ways} does not divide{told}"
                )
        if shape.latent is None and mesh.tensor > shape.num_kv_heads:
            self._check_shared_heads(shape, mesh)
        mesh.layer_range(shape.num_layers, 0)

    def check_engine(self, shape: ModelShape, tensor: int, expert_parallel: bool, pipeline: int) -> None:
        """
        Raises:
            ValueError: vLLM cannot split the model so. The message says which `rollout.tensor` it can.
        """

        def fault(tensor: int) -> str | None:
            try:
                self.vllm_placed(shape, tensor, 0, expert_parallel, pipeline)
            except ValueError as error:
                return str(error)
            return None

        if found := fault(tensor):
            may_be = [n for n in divisors(shape.num_heads) if fault(n) is None]
            told = f"; with rollout.tensor={tensor} the engines cannot split it: it may be {listed(may_be)}"
            raise ValueError(found + (told if may_be else ""))

    def _may_be(self, shape: ModelShape, mesh: Mesh, axis: str, ways: int) -> bool:
        """Whether the mesh divides the model if one of its axes has another length."""
        try:
            mesh = replace(mesh, **{axis: ways})  # type: ignore[arg-type]  # the names are those of sizes
        except ValueError:  # the axes do not fit together
            return False
        shares = shape.latent is None and mesh.tensor > shape.num_kv_heads  # see `_check_shared_heads`
        if shares and (mesh.tensor % shape.num_kv_heads or self.qk_norm == "full"):
            return False
        return not any(value % ways for _, value, ways, _ in self._divisions(shape, mesh))

    def _divisions(self, shape: ModelShape, mesh: Mesh) -> list[tuple[str, int, int, str]]:
        """What is divided, its number, into how many parts, and the axis of the mesh."""
        experts = shape.experts
        if experts is None and mesh.expert > 1:
            raise ValueError(f"policy.parallel.expert={mesh.expert}, but a {self.name} model has no experts")
        divisions = [("attention heads", shape.num_heads, mesh.tensor, "tensor")]
        if shape.latent is None and mesh.tensor <= shape.num_kv_heads:
            divisions.append(("KV heads", shape.num_kv_heads, mesh.tensor, "tensor"))
        if experts is None or experts.first_dense_layers:
            divisions.append(("FFN size", shape.ffn_size, mesh.tensor, "tensor"))
        if experts:
            divisions.append(("experts", experts.num_experts, mesh.expert, "expert"))
            divisions.append(("FFN size of an expert", experts.ffn_size, mesh.expert_ways, "expert_tensor"))
            divisions.append(("FFN size of the shared experts", experts.shared_ffn_size, mesh.tensor, "tensor"))
        return divisions

    def _check_shared_heads(self, shape: ModelShape, mesh: Mesh) -> None:
        """Check that several ranks can share each KV head. Megatron then splits the rows of `linear_qkv` evenly,
        gathers its output from all ranks, and gives each rank its query heads and the KV head that they attend to."""
        refused = (
            f"the model has {shape.num_kv_heads} KV heads, which policy.parallel.tensor={mesh.tensor} does not divide"
        )
        if mesh.tensor % shape.num_kv_heads:
            raise ValueError(refused)
        if self.qk_norm == "full":
            raise ValueError(
                f"{refused}, and a {self.name} model normalises the heads of all ranks together, so no two ranks may "
                f"hold the same head; set it to {shape.num_kv_heads} or less"
            )

    def megatron_shards(self, shape: ModelShape, mesh: Mesh, rank: int, fused_norms: bool = False) -> list[Shard]:
        """All parameters of one trainer rank, as `megatron_placed` lists them."""
        return [shard for placed in self.megatron_placed(shape, mesh, rank, fused_norms) for shard in placed.shards()]

    def megatron_placed(self, shape: ModelShape, mesh: Mesh, rank: int, fused_norms: bool = False) -> list[Placed]:
        """All rows of one trainer rank, in order of depth.

        With virtual stages a rank holds several GPTModels, and the names of their parameters begin with `chunk0.`,
        `chunk1.` and so on. Without virtual stages the names have no such prefix.

        Args:
            fused_norms: the model has Transformer Engine's layers.

        Raises:
            ValueError: see `check_mesh`.
        """
        self.check_mesh(shape, mesh)
        tensor, stage, _ = mesh.coordinates(rank)
        expert_tensor, expert, _ = mesh.expert_coordinates(rank)

        def place(rule: Rule, name: str | None = None) -> Placement:
            split = rule.split.fused if fused_norms and rule.split.fused else rule.split.megatron
            local = name or (rule.fused if fused_norms and rule.fused else rule.megatron)
            if not rule.per_expert:
                return _place(rule, split, shape, (mesh.tensor, tensor), local)
            experts = part(_num_experts(shape), mesh.expert, expert)
            return _place(rule, split, shape, (mesh.expert_ways, expert_tensor), local, experts)

        placed: list[Placed] = []
        rows = {}
        for chunk in range(mesh.virtual):
            first = stage == 0 and chunk == 0
            last = stage == mesh.pipeline - 1 and chunk == mesh.virtual - 1
            prefix = f"chunk{chunk}." if mesh.virtual > 1 else ""
            if first:
                placed.append(Placed(place(self.embedding), "", prefix))
            for i, layer in enumerate(mesh.layer_range(shape.num_layers, stage, chunk)):
                kind = shape.has_experts(layer)
                if kind not in rows:
                    rows[kind] = [place(rule) for rule in self.layer_rules(shape, layer)]
                hf_prefix, local_prefix = self.hf_layer.format(layer), prefix + self.megatron_layer.format(i)
                placed += [Placed(row, hf_prefix, local_prefix) for row in rows[kind]]
            if last:
                placed.append(Placed(place(self.final_norm), "", prefix))
                if rule := self.last_rule(shape):
                    placed.append(Placed(place(rule), "", prefix))
                elif not first:  # the last stage's own copy of the word embedding
                    placed.append(Placed(place(self.embedding, self.output.megatron), "", prefix))
        return placed

    def vllm_shards(
        self, shape: ModelShape, tensor: int, rank: int, expert_parallel: bool = False, pipeline: int = 1
    ) -> list[Shard]:
        """All parameters of one rank of an engine, as `vllm_placed` lists them."""
        return [
            shard
            for placed in self.vllm_placed(shape, tensor, rank, expert_parallel, pipeline)
            for shard in placed.shards()
        ]

    def vllm_placed(
        self, shape: ModelShape, tensor: int, rank: int, expert_parallel: bool = False, pipeline: int = 1
    ) -> list[Placed]:
        """All rows of one rank of an engine, in order of depth. The engine has tensor x pipeline ranks, numbered along
        the tensor axis first.

        Args:
            expert_parallel: vLLM's enable_expert_parallel with its linear placement: whole experts are distributed over
                the tensor-parallel ranks.

        Raises:
            ValueError: the ranks do not divide heads, FFN or vocabulary, there are more stages than layers, or vLLM
                cannot split the family so widely.
        """
        if pipeline > shape.num_layers:
            raise ValueError(
                f"an engine of {pipeline} pipeline stages cannot have the {shape.num_layers} layers of the model, "
                "because a stage would be empty; lower rollout.pipeline"
            )
        tensor_rank, stage = rank % tensor, rank // tensor
        first, last = stage == 0, stage == pipeline - 1

        def place(rule: Rule) -> Placement:
            name = rule.vllm or rule.hf[0].name
            if not rule.per_expert:
                return _place(rule, rule.split.vllm, shape, (tensor, tensor_rank), name)
            if expert_parallel:
                return _place(rule, rule.split.vllm, shape, (1, 0), name, _linear(shape, tensor, tensor_rank))
            experts = 0, _num_experts(shape)
            return _place(rule, rule.split.vllm, shape, (tensor, tensor_rank), name, experts)

        placed: list[Placed] = []
        if first or self.vllm_repeats_ends or (shape.tied_embeddings and last):
            placed.append(Placed(place(self.embedding), "", ""))
        rows = {}
        for layer in engine_layers(shape.num_layers, pipeline, stage):
            kind = shape.has_experts(layer)
            if kind not in rows:
                rows[kind] = [place(rule) for rule in self.layer_rules(shape, layer)]
            hf_prefix, local_prefix = self.hf_layer.format(layer), self.vllm_layer.format(layer)
            placed += [Placed(row, hf_prefix, local_prefix) for row in rows[kind]]
        if last or self.vllm_repeats_ends:
            placed.append(Placed(place(self.final_norm), "", ""))
            if not shape.tied_embeddings:
                placed.append(Placed(place(self.output), "", ""))
        return placed


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def listed(numbers: Sequence[int]) -> str:
    """1, 2 or 4."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def _num_experts(shape: ModelShape) -> int:
    """The number of routed experts of a layer. Only models with experts have rows with a `{}` for the expert."""
    assert shape.experts is not None, f"{shape.family}: a model without experts has a row for each expert"
    return shape.experts.num_experts


def _place(
    rule: Rule,
    split: Split,
    shape: ModelShape,
    where: tuple[int, int],
    local_name: str,
    experts: tuple[int, int] | None = None,
) -> Placement:
    """The placement of one row on one rank.

    Args:
        where: (the number of ranks that share the row, this rank's number among them).
    """
    full = rule.extents(shape)
    try:
        pieces = split(shape, tuple(extents[rule.split.dim] for extents in full), *where)
    except ValueError as error:
        raise ValueError(f"{' and '.join(tensor.name for tensor in rule.hf)}: {error}") from error
    boxes = []
    for piece in pieces:
        extents, length = full[piece.tensor], piece.stop - piece.start
        hf_box = _with(extents, piece.dim, piece.start, piece.stop)
        local_box = _with(extents, piece.dim, piece.local_start, piece.local_start + length)
        boxes.append((rule.hf[piece.tensor].name, hf_box, local_box))
    return Placement(local_name, tuple(boxes), experts, rule.float32)


def _with(extent: tuple[int, ...], dim: int, start: int, stop: int) -> Box:
    return tuple((start, stop) if d == dim else (0, length) for d, length in enumerate(extent))


def _linear(shape: ModelShape, ways: int, rank: int) -> tuple[int, int]:
    """The experts of a rank in vLLM's linear placement. If they do not divide evenly, the first ranks hold one more."""
    base, more = divmod(_num_experts(shape), ways)
    start = rank * base + min(rank, more)
    return start, start + base + (rank < more)


def engine_layers(num_layers: int, pipeline: int, stage: int) -> range:
    """The layers of an engine's pipeline stage, as vllm.distributed.utils.get_pp_indices distributes them. If they do
    not divide evenly, the stages just before the last one hold one more."""
    base, more = divmod(num_layers, pipeline)
    counts = [base + (pipeline - 1 - more <= s < pipeline - 1) for s in range(pipeline)]
    return range(sum(counts[:stage]), sum(counts[: stage + 1]))
