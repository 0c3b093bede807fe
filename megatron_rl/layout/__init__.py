"""The transfer of the weights from trainer to engines, planned as pure values. README.md describes it."""

from __future__ import annotations

from megatron_rl.layout.copies import Copy
from megatron_rl.layout.engines import Engines
from megatron_rl.layout.links import Links
from megatron_rl.layout.recording import Recording, box_of_view
from megatron_rl.layout.route_order import Turn
from megatron_rl.layout.transfer import TransferPlan, plan_weights

__all__ = ["Copy", "Engines", "Links", "Recording", "TransferPlan", "Turn", "box_of_view", "plan_weights"]
