"""A model family is a table with one row for each fused parameter.

For example, the row `Rule(QKV, megatron=..., vllm=..., hf=(q, k, v))` is all that the actor, the loader, the exporter
and the bridge know about the projection to q, k and v. A new family is a new table (`models/families/`). Invariants
(tests/unit/models, tests/ranks): every HF tensor of a model is in exactly one row; names and extents are the same as
transformers saves and Megatron-Core and vLLM build; the shards of all ranks together hold every element, each at its
own place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from megatron_rl.models import divisions
from megatron_rl.models.adapters import adapter_rules, output_adapter_rules
from megatron_rl.models.multi_token import HEAD_EMBEDDING, HEAD_LAYER, MultiTokenHead
from megatron_rl.models.placement import Placed, Placement, engine_layers, linear_experts, place_row, whole_tensor
from megatron_rl.models.rule import VALUE_HEAD, Ignored, Rule
from megatron_rl.models.shards import Shard
from megatron_rl.models.splits import Sizes, part
from megatron_rl.models.traits import Traits
from megatron_rl.models.view import FileTensor, View
from megatron_rl.models.vision import tower_in_engine
from megatron_rl.types import Attention, DeltaNet, GatedMlp, Layer, Mesh, Mixture, Mlp, ModelShape

MEGATRON_LAYER, VLLM_LAYER = "decoder.layers.{}.", "model.layers.{}."
DESCRIBED: dict[str, Any] = {
    **{"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"},
    "is_causal": True,  # transformers' masks and vLLM's classes read it
    "per_layer_config": None,  # transformers gives the layers other sizes by it
    **{"rotary_pct": None, "rotary_emb_fraction": None},  # vLLM's names of partial_rotary_factor
}
WINDOWLESS = DESCRIBED | {"sliding_window": None}
"""The same for families whose layers have no window. transformers' classes of them read no `sliding_window`, but vLLM
gives every layer of any model the window that config.json names, if there is no `layer_types`."""


@dataclass(frozen=True, slots=True)
class Family(Traits):
    name: str
    """`model_type` of the HF config.json."""
    vllm_model: str
    """The class in vllm.model_executor.models that vLLM runs the family with. config.json names it in `architectures`,
    which vLLM chooses its class by, if there is no `published_model`."""
    embedding: Rule
    attention: tuple[Rule, ...]
    """The rows of norms and attention in layers with softmax attention, or with latent attention."""
    dense: tuple[Rule, ...]
    """The MLP's rows in layers without experts."""
    final_norm: Rule
    output: Rule
    mixture: tuple[Rule, ...] = ()
    """The MLP's rows in layers with experts."""
    linear: tuple[Rule, ...] = ()
    """The rows of norms and attention in layers with linear attention (`DeltaNet`)."""
    read_config: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    """Reads from config.json what is special to this family, as `config.Special` has it."""
    ignored: tuple[Ignored, ...] = ()
    absent: Mapping[str, float] = field(default_factory=dict)
    """What transformers takes for keys that config.json lacks, where it does not derive them from other keys.
    `rope_theta` is 10,000 if it is not here either."""
    known: Mapping[str, Any] = field(default_factory=DESCRIBED.copy)
    """The only value of some keys of config.json, and their value if they are absent. A key that the family's class of
    transformers or of vLLM computes with is here, or the family reads it (tests/unit/models)."""
    rotary_share: float | None = None
    """The share of each head's dims that are rotated if config.json does not give it. None: heads of this family are
    always rotated whole, so config.json with another share is refused."""
    engine_fault: Callable[[ModelShape, str, str], str | None] = lambda shape, dtype, device: None
    """Why vLLM 0.32.0 fails on a model of this family, or computes it wrongly, with a dtype and a device (`cpu` or
    `cuda`), and what to do, where vLLM tells neither when it starts. None if there is no such fault."""
    hf_layer: str = "model.layers.{}."
    published_model: str | None = None
    """The class that config.json names, if vLLM has none of this name."""

    @property
    def multi_token(self) -> MultiTokenHead | None:
        """None: models of this family have no such head."""
        return next((one for one in self.ignored if isinstance(one, MultiTokenHead)), None)

    def last_rules(self, shape: ModelShape) -> list[Rule]:
        """The rows after the final norm; none if the output layer is the embedding."""
        if shape.value_head:
            return [VALUE_HEAD]
        return [] if shape.tied_embeddings else [self.output, *output_adapter_rules(self.output, shape.adapters)]

    def block_rules(self, block: Attention | Mlp) -> list[Rule]:
        """The rows of a block and of the norms next to it."""
        kinds: dict[type, tuple[Rule, ...]] = {DeltaNet: self.linear, GatedMlp: self.dense, Mixture: self.mixture}
        rules = kinds.get(type(block), self.attention)
        return [rule for rule in rules if rule.when is None or rule.when(block)]

    def layer_rules(self, layer: Layer) -> list[Rule]:
        return self.block_rules(layer.attention) + self.block_rules(layer.mlp)

    def trained_rules(self, shape: ModelShape, layer: Layer) -> list[Rule]:
        """The rows of a layer on the trainer's side: `layer_rules`, and the rows of their adapters."""
        rules = self.layer_rules(layer)
        return rules + adapter_rules(rules, shape.adapters)

    def head_rules(self, shape: ModelShape) -> list[Rule]:
        """The rows of the multi-token head; none unless it is trained."""
        layers, head = shape.head_layers, self.multi_token
        return [rule for layer in layers if head for rule in head.rules(self.layer_rules(layer))]

    def head_tensors(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """The extents of every HF tensor of the multi-token head, by name; none unless it is trained."""
        prefix = self.multi_token.hf_prefix(shape) if self.multi_token else ""
        pairs = [(rule, shape.sizes(layer)) for layer in shape.head_layers for rule in self.head_rules(shape)]
        return {prefix + name: extents for rule, known in pairs for name, extents in rule.hf_names(known)}

    def hf_tensors(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """The extents of every HF tensor of a model, by name."""
        ends = (self.embedding, self.final_norm, *self.last_rules(shape))
        tensors = {name: extents for rule in ends for name, extents in rule.hf_names(shape.sizes())}
        rows = {
            layer: [row for rule in self.trained_rules(shape, layer) for row in rule.hf_names(shape.sizes(layer))]
            for layer in set(shape.layers)
        }
        for number, layer in enumerate(shape.layers):
            prefix = self.hf_layer.format(number)
            tensors.update((prefix + name, extents) for name, extents in rows[layer])
        return tensors | self.head_tensors(shape) | shape.tower

    def views(self, shape: ModelShape) -> dict[str, View]:
        """The views of the HF tensors that files hold in another form, by name."""
        found: dict[str, View] = {}
        for number, layer in enumerate(shape.layers):
            sizes = shape.sizes(layer)
            for rule in self.layer_rules(layer):
                found.update(rule.views(sizes, self.hf_layer.format(number)))
        return found

    def file_tensors(self, shape: ModelShape) -> dict[str, FileTensor]:
        """Every tensor of the files of a model, by name."""
        views, tensors = self.views(shape), dict[str, FileTensor]()
        for name, extents in self.hf_tensors(shape).items():
            if view := views.get(name):
                tensors.setdefault(view.name, FileTensor(view.extents, {})).views[name] = view
            else:
                tensors[name] = FileTensor(extents, {})
        if self.head_rules(shape) and self.multi_token:
            ends = {"embedding": self.embedding, "output": [*self.last_rules(shape), self.embedding][0]}
            tensors.update(self.multi_token.copied(shape, ends))
        return tensors

    def num_parameters(self, shape: ModelShape) -> int:
        """The number of elements of all HF tensors. A tied embedding counts once."""
        return sum(prod(extents) for extents in self.hf_tensors(shape).values())

    def describe(self, hf_name: str) -> str | None:
        """A description, for error messages, of the row that the name of an HF tensor, or of a file's tensor, belongs
        to, for any layer and expert. None if there is no such row."""
        pattern = re.escape(self.hf_layer).replace(re.escape("{}"), r"\d+")
        name = re.sub(rf"^{pattern}", "", self.multi_token.own_name(hf_name) if self.multi_token else hf_name)
        ends = (self.embedding, self.final_norm, self.output, VALUE_HEAD)
        of_head = self.multi_token.rows if self.multi_token else ()
        pairs = ((rule, tensor) for rule in (*self.rules, *of_head, *ends) for tensor in rule.hf)
        return next((f"{self.name}'s row {rule.megatron}: {one}" for rule, one in pairs if one.is_named(name)), None)

    def check_mesh(self, shape: ModelShape, mesh: Mesh) -> None:
        """See `divisions.check_mesh`."""
        divisions.check_mesh(self, shape, mesh)

    def check_engine(self, shape: ModelShape, tensor: int, expert_parallel: bool, pipeline: int) -> None:
        """See `divisions.check_engine`."""
        divisions.check_engine(self, shape, tensor, expert_parallel, pipeline)

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

        def place(rule: Rule, layer: Layer | None = None, name: str | None = None) -> Placement:
            split = rule.split.fused if fused_norms and rule.split.fused else rule.split.megatron
            local = name or (rule.fused if fused_norms and rule.fused else rule.megatron)
            sizes = shape.sizes(layer)
            if not rule.per_expert:
                return place_row(rule, split, sizes, (mesh.tensor, tensor), local)
            experts = part(sizes["experts"], mesh.expert, expert)
            return place_row(rule, split, sizes, (mesh.expert_ways, expert_tensor), local, experts)

        placed: list[Placed] = []
        rows: dict[Layer, list[Placement]] = {}
        for chunk in range(mesh.virtual):
            first = stage == 0 and chunk == 0
            last = stage == mesh.pipeline - 1 and chunk == mesh.virtual - 1
            prefix = f"chunk{chunk}." if mesh.virtual > 1 else ""
            if first:  # of a tower every tensor-parallel rank has the whole
                placed += [Placed(whole_tensor(*one), "", prefix) for one in shape.tower.items()]
                placed.append(Placed(place(self.embedding), "", prefix))
            for i, number in enumerate(mesh.layer_range(shape.num_layers, stage, chunk)):
                layer = shape.layers[number]
                if layer not in rows:
                    rows[layer] = [place(rule, layer) for rule in self.trained_rules(shape, layer)]
                hf_prefix, local_prefix = self.hf_layer.format(number), prefix + MEGATRON_LAYER.format(i)
                placed += [Placed(row, hf_prefix, local_prefix) for row in rows[layer]]
            if last:
                placed.append(Placed(place(self.final_norm), "", prefix))
                if rules := self.last_rules(shape):
                    placed += [Placed(place(rule), "", prefix) for rule in rules]
                elif not first:  # the last stage's own copy of the word embedding
                    placed.append(Placed(place(self.embedding, name=self.output.megatron), "", prefix))
                if (head := self.head_rules(shape)) and self.multi_token:
                    names = self.multi_token.hf_prefix(shape), prefix + HEAD_LAYER
                    placed += [Placed(place(rule, layer), *names) for layer in shape.head_layers for rule in head]
                    if not first:
                        placed.append(Placed(place(self.embedding, name=HEAD_EMBEDDING), "", prefix))
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
                "because a stage would be empty; lower rollout.parallel.pipeline"
            )
        tensor_rank, stage = rank % tensor, rank // tensor
        first, last = stage == 0, stage == pipeline - 1

        def place(rule: Rule, layer: Layer | None = None) -> list[Placement]:
            sizes = shape.sizes(layer)
            placements = [place_one(name, part, sizes) for name, part in rule.of_vllm()]
            return [placement for placement in placements if placement.pieces]

        def place_one(name: str, rule: Rule, sizes: Sizes) -> Placement:
            ways, experts = (tensor, tensor_rank), (0, sizes["experts"]) if rule.per_expert else None
            if rule.per_expert and expert_parallel:
                ways, experts = (1, 0), linear_experts(sizes["experts"], *ways)
            return place_row(rule, rule.split.vllm, sizes, ways, name, experts)

        placed = [Placed(row, "", "") for row in tower_in_engine(shape.tower, tensor, tensor_rank)]
        if first or self.embedding.on_every_stage or (shape.tied_embeddings and last):
            placed += [Placed(row, "", "") for row in place(self.embedding)]
        rows: dict[Layer, list[Placement]] = {}
        for number in engine_layers(shape.num_layers, pipeline, stage):
            layer = shape.layers[number]
            if layer not in rows:
                rows[layer] = [row for rule in self.layer_rules(layer) for row in place(rule, layer)]
            hf_prefix, local_prefix = self.hf_layer.format(number), VLLM_LAYER.format(number)
            placed += [Placed(row, hf_prefix, local_prefix) for row in rows[layer]]
        if last or self.final_norm.on_every_stage:
            placed += [Placed(row, "", "") for row in place(self.final_norm)]
        if (last or self.output.on_every_stage) and not shape.tied_embeddings:
            placed += [Placed(row, "", "") for row in place(self.output)]
        return placed
