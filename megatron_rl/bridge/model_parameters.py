"""The live parameters of a vLLM worker, into which the bridge writes: as they are, or repacked by vLLM afterwards."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
    make_online_process_loader,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from megatron_rl.bridge.intake import Parameters
from megatron_rl.bridge.messages import Message
from megatron_rl.bridge.verification import (
    Arrived,
    Sums,
    changed,
    element_sums,
    is_sampled,
    kernel_sums,
    made_anew,
    read,
    short,
)
from megatron_rl.models import Box, Shard, slices
from megatron_rl.models.interleaving import are_zeros, described, part, whole
from megatron_rl.types import TOWER

IN_PLACE = {UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON, UnquantizedMoeBackend.CPU}
"""vLLM's kernels that read unquantised experts in the checkpoint's form. On Hopper vLLM chooses Triton's. On a CPU
`unpack` has given the experts this form."""


class ModelParameters(Parameters):
    """The live parameters, if they have the checkpoint's form. A layer that vLLM repacks gets memory of that form from
    its first message on. When all ranks of the engine have the layer, vLLM repacks it again.

    vLLM may reduce over the ranks while it repacks, so all ranks repack at the same points of the push's global order:
    a layer is repacked when all messages of its last turn, and of the turns before, have been written. Everything that
    a rank waits for then comes earlier in this order, so that the ranks cannot wait for each other in a circle.

    Latent attention decodes with matrices that vLLM makes of kv_b_proj's weight. They are parameters, but no checkpoint
    has them. If the weight is quantised they are copies, so vLLM rebuilds them at the end of the push.
    """

    def __init__(
        self, model: nn.Module, model_config: Any, device: torch.device, shards: Iterable[Shard], side: str
    ) -> None:
        """
        Args:
            shards: what this rank holds.
            side: the name of this rank in error messages.
        """
        self._model_config, self._device, self._side = model_config, device, side
        self._layers: dict[str, nn.Module] = {}
        """The layers of the parameters that vLLM repacks, by the parameters' names. This and `_held` have vLLM's names,
        and `forms` has the names that describe the parameters (models/interleaving.py)."""
        self._held: dict[str, Tensor] = {}
        self._latent: dict[str, MLAAttention] = {
            name: layer for name, layer in model.named_modules() if isinstance(layer, MLAAttention)
        }
        made = {id(parameter) for layer in self._latent.values() for parameter in layer._parameters.values()}
        shards = list(shards)
        if not any(shard.local_name.startswith(TOWER) for shard in shards):  # the folder's, which no push changes
            made |= {id(parameter) for name, parameter in model.named_parameters() if name.startswith(TOWER)}
        forms: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if id(p) not in made}
        for prefix, layer, formed in repacked_layers(model):
            for name in layer._parameters:
                if name != "bias":  # the only parameter that vLLM does not repack
                    forms.pop(f"{prefix}.{name}", None)
            for name, form in formed.items():
                forms[f"{prefix}.{name}"], self._layers[f"{prefix}.{name}"] = form, layer
        names = {shard.local_name for shard in shards}
        for name in are_zeros(forms, names):
            if name not in self._layers:
                forms[name].data.zero_()
        self._formed = forms
        super().__init__(described({n: p for n, p in forms.items() if n not in are_zeros(forms, names)}, names))
        self._prefixes = {layer: name for name, layer in model.named_modules()}
        self._plain: dict[str, list[tuple[str, Box]]] = {}
        """The places of the weights that vLLM does not repack, by module. Padding is not among them."""
        for shard in shards:
            if whole(shard.local_name) not in self._layers:
                module = shard.local_name.rpartition(".")[0]
                self._plain.setdefault(module, []).append((shard.local_name, shard.local_box))

    def last_turns(self, turns: Mapping[int, Sequence[Message]]) -> dict[str, int]:
        """The last of the given turns that brings something to each layer that vLLM repacks, by the layers' names."""
        found = {}
        for turn, messages in turns.items():
            for copied in (copied for message in messages for copied in message.copies):
                if (layer := self._layers.get(whole(copied.destination_name))) is not None:
                    found[self._prefixes[layer]] = turn
        return found

    def repack_after(self, last_turns: Iterable[Mapping[str, int]]) -> None:
        """Repack each layer of this rank after the last turn that brings something to it on any rank of the engine.

        Args:
            last_turns: the last turns of each rank.
        """
        last: dict[str, int] = {}
        for of_rank in last_turns:
            last |= {name: max(turn, last.get(name, 0)) for name, turn in of_rank.items()}
        mine = {self._prefixes[layer]: layer for layer in self._layers.values()}
        self._order = [(turn, mine[name]) for turn, name in sorted((t, n) for n, t in last.items()) if name in mine]

    def __getitem__(self, name: str) -> Tensor:
        if whole(name) not in self._layers:
            return self.forms[name]
        return part(name, self._memory(whole(name)))

    def _memory(self, name: str) -> Tensor:
        """A parameter in the checkpoint's form, of a layer that vLLM will repack."""
        if name not in self._held:
            form = self._formed[name]
            self._held[name] = torch.zeros(form.shape, dtype=form.dtype, device=self._device)
        return self._held[name]

    def begin(self, version: int, whole: bool) -> None:
        self._version, self._whole = version, whole
        self._num_repacked = 0
        self._arrived: list[Arrived] = []
        """The verified weights that vLLM does not repack."""
        self._made_anew: dict[nn.Module, dict[str, Sums]] = {}

    def written(self, message: Message, verified: bool) -> None:
        for one in message.copies if verified else ():
            name, box = one.destination_name, one.destination_box
            if whole(name) not in self._layers and self._is_verified(name.rpartition(".")[0]):
                self._arrived.append((name, box, element_sums(self.forms[name][slices(box)])))

    def reached(self, turn: float) -> None:
        while self._num_repacked < len(self._order) and self._order[self._num_repacked][0] < turn:
            self._repack(self._order[self._num_repacked][1])
            self._num_repacked += 1

    def finish(self) -> dict[str, str]:
        self.reached(math.inf)
        for layer in self._latent.values():
            layer.process_weights_after_loading(self._model_config.dtype)
        return self._verify()

    def _is_verified(self, module: str) -> bool:
        return self._whole or is_sampled(module, self._version)

    def _verify(self) -> dict[str, str]:
        """Compare what the kernels read now with what they should read. Returns digests by module.

        Raises:
            RuntimeError: they differ; the message names rank, module, tensor and kernel.
        """
        if other := changed(self._arrived, self.forms):
            raise RuntimeError(f"{self._side}: {other} has changed since version {self._version} arrived")
        sample = {module: places for module, places in self._plain.items() if self._is_verified(module)}
        places = [place for of_module in sample.values() for place in of_module]
        found = iter(read([element_sums(self.forms[name][slices(box)]) for name, box in places]))
        digests = {m: short({f"{name} {box}": next(found) for name, box in sample[m]}) for m in sample}
        for name in filter(self._is_verified, self._latent):
            self._made_anew[self._latent[name]] = kernel_sums(self._decoding_anew(self._latent[name]))
        for layer, expected in self._made_anew.items():
            module, of_kernels = self._prefixes[layer], kernel_sums(layer)
            if of_kernels != expected:
                names = sorted(name for name, _ in of_kernels.items() ^ expected.items())
                raise RuntimeError(
                    f"{self._side}: {module} does not hold what vLLM makes of version {self._version}: "
                    f"{', '.join(dict.fromkeys(names))} ({type(getattr(layer, 'quant_method', layer)).__name__})"
                )
            digests[module] = short(of_kernels)
        return digests

    def _decoding_anew(self, layer: MLAAttention) -> MLAAttention:
        """Latent attention with its matrices for decoding rebuilt in new memory."""
        anew = copy.copy(layer)
        made = dict.fromkeys(layer._parameters)
        anew.__dict__ |= {"_parameters": made, "_buffers": dict(layer._buffers), "impl": copy.copy(layer.impl)}
        anew.process_weights_after_loading(self._model_config.dtype)
        return anew

    def _repack(self, layer: nn.Module) -> None:
        """Let vLLM reload one layer. It gets this rank's part, so it has nothing to cut and nothing to fuse."""
        formed, buffers = get_layerwise_info(layer).restore_metadata
        if self._is_verified(self._prefixes[layer]):
            weights = {
                full.rpartition(".")[2]: self._memory(full) for full, owner in self._layers.items() if owner is layer
            }
            self._made_anew[layer] = kernel_sums(made_anew(layer, formed | buffers, weights))
        loaders = {name: form.weight_loader for name, form in formed.items()}
        initialize_layerwise_reload(layer)
        for name in formed:
            getattr(layer, name).weight_loader = default_weight_loader
            getattr(layer, name).weight_loader = make_online_process_loader(layer, name)
        for full in [full for full, owner in self._layers.items() if owner is layer]:
            parameter = getattr(layer, full.rpartition(".")[2])
            parameter.weight_loader(parameter, self._memory(full))
            del self._held[full]
        finalize_layerwise_reload(layer, self._model_config)
        for name, loader in loaders.items():  # vLLM's own loaders stay as they were
            formed[name].weight_loader = loader


def repacked_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """(name, layer, its parameters as vLLM created them) of the layers that vLLM repacks."""
    for name, layer in model.named_modules():
        formed = get_layerwise_info(layer).restore_metadata[0]
        if formed and _is_repacked(layer) and not name.startswith(TOWER):
            yield name, layer, formed


def _is_repacked(layer: nn.Module) -> bool:
    """Whether vLLM may have changed the layer's weights after it loaded them. Equal shapes do not prove that it has
    not, because some kernels need rows or experts in another order."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, UnquantizedFusedMoEMethod):
        return method.unquantized_backend not in IN_PLACE
    plain = UnquantizedLinearMethod, UnquantizedEmbeddingMethod
    return isinstance(method, QuantizeMethodBase) and not isinstance(method, plain)
