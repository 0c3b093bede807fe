"""What mixtures of experts report of their experts, in every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from test_actor_families import BALANCED

from shares import TrainSample

LAYOUTS = {
    "qwen3_moe": ("one", "pp2_dp2_ep2", "tp2_dp2_ep2_whole", "tp2_pp2_vpp2"),
    "deepseek_v3": ("one", "tp2_cp2", "tp2_pp2"),
}
"""With padding (TP, CP), empty micro-batches (DP), recomputation (tp2_pp2), and stages that hold a dense layer and stages
that hold none."""
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]


@torch.no_grad()
def expert_loads(folder: Path, samples: list[TrainSample]) -> np.ndarray:
    """int64 [layers with experts, experts]: the number of tokens that each expert gets in transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    routers = [module.gate for _, module in model.named_modules() if hasattr(module, "gate")]
    num_experts = len(routers[0].weight)
    loads = np.zeros((len(routers), num_experts), np.int64)
    for load, router in zip(loads, routers, strict=True):

        def count(module, arguments, output, load=load) -> None:
            load += output[2].flatten().bincount(minlength=num_experts).numpy()

        router.register_forward_hook(count)
    for sample in samples:
        model(torch.from_numpy(sample.tokens.ids.astype(np.int64))[None])
    return loads


@pytest.mark.parametrize("name, layout_name", CASES)
def test_the_load_of_the_experts_is_reported(trainers, folders, long_samples, name, layout_name):
    layout, samples = BALANCED[layout_name], long_samples[:4]
    results = trainers.run(
        "train", layout.mesh.world_size, folder=folders[name], samples=samples, layout=layout, num_updates=1
    )
    loads = expert_loads(folders[name], samples)
    assert all(loads.sum(1) % sum(len(sample.tokens.ids) for sample in samples) == 0)
    for _, (metrics,) in results:
        # Counts are integers, so only the last quotients round.
        ratios = loads.max(1) / loads.mean(1)
        assert metrics["experts/load/max"] == pytest.approx(ratios.max(), rel=1e-12)
        assert metrics["experts/load_mean"] == pytest.approx(ratios.mean(), rel=1e-12)
        assert metrics["experts/unused"] == pytest.approx((loads == 0).mean(), rel=1e-12)
        assert ratios.max() > ratios.mean()


def test_a_dense_model_has_no_such_metric(trainers, model_folder, long_samples):
    layout = BALANCED["one"]
    ((_, (metrics,)),) = trainers.run(
        "train", 1, folder=model_folder, samples=long_samples, layout=layout, num_updates=1
    )
    assert not [name for name in metrics if name.startswith("experts/")]
