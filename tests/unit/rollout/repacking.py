"""What the workers of an engine note while a push makes them repack layers."""

from __future__ import annotations

NOTES: list[tuple[str, int]] = []
"""The name of each layer that was repacked, and the bytes that the worker held at that time in the checkpoint's
form."""


def note_repacking(worker) -> None:
    """Let a worker write down the layers that it repacks from now on."""
    from megatron_rl.bridge.model_parameters import ModelParameters

    repack = ModelParameters._repack

    def noted(self, layer) -> None:
        NOTES.append((self._prefixes[layer], sum(tensor.nbytes for tensor in self._held.values())))
        repack(self, layer)

    ModelParameters._repack = noted


def notes(worker) -> list[tuple[str, int]]:
    return NOTES


def repack_experts(worker) -> None:
    """Let a worker on a CPU treat unquantised experts as those are treated whose kernel has a form of its own."""
    from megatron_rl.bridge import model_parameters

    model_parameters.IN_PLACE = set()
