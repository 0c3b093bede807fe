"""Muon in every layout against plain loops over whole matrices in float64; its norms, and its checkpoints.

The reference is transformers' model, one sample at a time, and numpy: a matrix is orthogonalised through its singular
values, each of which the polynomial of Jordan et al. (kellerjordan.github.io/posts/muon) maps for itself.
"""

from __future__ import annotations

import json
import math

import cover
import numpy as np
import pytest
import torch
from muon_scenarios import MUON
from scenarios import Layout
from test_actor_experts import as_saved
from test_actor_layouts import learning_rate

from megatron_rl.config.policy import MegatronConfig
from megatron_rl.convert import target
from megatron_rl.convert.forms import hub_tensors
from megatron_rl.convert.source import open_checkpoint
from megatron_rl.convert.tensor_files import Maps
from megatron_rl.types import Mesh

NUM_UPDATES = 3
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 3000}
"""Buckets of a few parameters, so that most matrices are split over the data-parallel ranks."""
RELATIVE = 1e-5
"""Of loss, norms and learning rate. Measured over all cases: 3.3e-6 for the gradient's norm, at most 3e-7 for the
others."""
OF_CHANGE = 5e-4
"""Of a tensor's largest change. Measured over all cases: 1.3e-4. Five iterations multiply the least singular values by
up to 3.4445^5 = 485, and with them what rounding in fp32 has made of these."""
QWEN3 = {
    "one": Layout(num_microbatches=3),
    "tp2": Layout(Mesh(tensor=2), num_microbatches=2),
    "tp4_two_kv_heads": Layout(Mesh(tensor=4), num_microbatches=2),
    "pp2": Layout(Mesh(pipeline=2), num_microbatches=3),
    "pp2_vpp2": Layout(Mesh(pipeline=2, virtual=2), num_microbatches=4),
    "dp2": Layout(Mesh(data=2)),
    "cp2": Layout(Mesh(context=2), num_microbatches=2),
    "tp2_dp2": Layout(Mesh(tensor=2, data=2), num_microbatches=2),
    "cp2_dp2_buckets": Layout(Mesh(data=2, context=2), num_microbatches=2, megatron=MegatronConfig(ddp=BUCKETS)),
    "tp2_dp2_buckets": Layout(Mesh(tensor=2, data=2), num_microbatches=2, megatron=MegatronConfig(ddp=BUCKETS)),
}
MIXTURES = {
    "one": Layout(),
    "dp2_ep2": Layout(Mesh(data=2, expert=2), num_microbatches=2),
    "dp2": Layout(Mesh(data=2), num_microbatches=2),
    "tp2_ep2_whole": Layout(Mesh(tensor=2, expert=2, expert_tensor=1), num_microbatches=2),
    "tp2_dp2_ep2": Layout(Mesh(tensor=2, data=2, expert=2), num_microbatches=2),
    "pp2_dp2_ep2": Layout(Mesh(pipeline=2, data=2, expert=2), num_microbatches=2),
}
CASES = [
    *(("qwen3", name) for name in QWEN3),
    *(("qwen3_moe", name) for name in MIXTURES),
    *(("deepseek_v3", name) for name in ("tp2_dp2_ep2", "dp2_ep2")),
    *(("tied", name) for name in ("pp2", "tp2_dp2")),
    *((model, "tp2_dp2_ep2") for model in ("glm4_moe", "qwen3_next", "qwen3_5_moe", "minimax_m2")),
    ("nemotron_h_experts", "tp2_dp2_ep2"),
]
ESSENTIAL = [("qwen3", "tp2_dp2_buckets"), ("qwen3_moe", "dp2_ep2")]


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    left, values, right = np.linalg.svd(matrix / (np.linalg.norm(matrix) + 1e-7), full_matrices=False)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ np.diag(values) @ right


class Plain:
    """A model in float64, with Muon and Adam as their papers write them."""

    def __init__(self, folder, scale: str = "moonlight", nesterov: bool = True) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
        self.scale, self.nesterov = scale, nesterov
        family = self.model.config.model_type
        self.values, self.gradients = {}, {}
        for name, parameter in self.model.named_parameters():
            parameter.grad = torch.zeros_like(parameter)
            self.values |= as_saved(name, parameter.detach().numpy(), family)  # views: an update changes the model
            self.gradients |= as_saved(name, parameter.grad.numpy(), family)
        self.first = {name: np.zeros_like(value) for name, value in self.values.items()}
        self.second = {name: np.zeros_like(value) for name, value in self.values.items()}

    def update(self, samples, number: int) -> dict[str, float]:
        loss, num_tokens = 0.0, sum(int(sample.tokens.action_mask.sum()) for sample in samples)
        self.model.zero_grad(set_to_none=False)
        for sample in samples:
            ids = torch.from_numpy(sample.tokens.ids.astype(np.int64))
            logp = self.model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            loss = loss - logp[torch.from_numpy(sample.tokens.action_mask[1:])].sum() / num_tokens
        loss.backward()
        before = {name: value.copy() for name, value in self.values.items()}
        norm = length(self.gradients)
        clip = min(1.0, MUON.clip_grad / (norm + 1e-6))
        for name, value in self.values.items():
            self._step(name, value, clip * self.gradients[name], number)
        change = {name: self.values[name] - before[name] for name in before}
        found = {"loss": loss.item(), "grad_norm": norm, "param_norm": length(self.values)}
        return found | {"update_ratio": length(change) / length(self.values), "lr": learning_rate(number)}

    def _step(self, name: str, value: np.ndarray, gradient: np.ndarray, number: int) -> None:
        rate, first, second = learning_rate(number), self.first[name], self.second[name]
        if value.ndim == 2 and "embed" not in name and "lm_head" not in name:
            first *= MUON.momentum
            first += gradient
            step = orthogonal(gradient + MUON.momentum * first if self.nesterov else first)
            rows, columns = value.shape
            original = math.sqrt(max(1, rows / columns))
            step *= 0.2 * math.sqrt(max(rows, columns)) if self.scale == "moonlight" else original
        else:
            beta1, beta2 = MUON.adam.betas
            first += (1 - beta1) * (gradient - first)
            second += (1 - beta2) * (gradient**2 - second)
            step = first / (1 - beta1**number) / (np.sqrt(second / (1 - beta2**number)) + MUON.adam.eps)
        value -= rate * (step + (MUON.weight_decay * value if value.ndim > 1 else 0))


def length(tensors) -> float:
    return math.sqrt(sum(float((tensor**2).sum()) for tensor in tensors.values()))


@pytest.fixture(scope="module")
def folder_of(folders, model_folder, tied_model_folder):
    return {"qwen3": model_folder, "tied": tied_model_folder} | folders


@pytest.fixture(scope="module")
def reference(folder_of, samples):
    """The numbers and the parameters of each update, by the name of a model."""
    known = {}

    def of(model: str, **settings):
        key = (model, *settings.items())
        if key not in known:
            plain, known[key] = Plain(folder_of[model], **settings), []
            for number in range(1, NUM_UPDATES + 1):
                numbers = plain.update(samples, number)
                known[key].append((numbers, {name: value.copy() for name, value in plain.values.items()}))
        return known[key]

    return of


def check(results, expected, start) -> None:
    assert all(metrics == results[0][0] for metrics, _ in results), "every rank reports the same bits"
    for metrics, found, (numbers, whole) in zip(*results[0], expected, strict=True):
        for name, value in numbers.items():
            assert metrics[name] == pytest.approx(value, rel=RELATIVE), name
        assert all(name.endswith("e_score_correction_bias") for name in found.keys() - whole.keys())
        for name, value in whole.items():
            scale = np.abs(value - start[name]).max()
            assert np.abs(found[name] - value).max() <= OF_CHANGE * scale, name


@pytest.mark.parametrize("model, name", cover.essential(CASES, *ESSENTIAL))
def test_updates_are_those_of_whole_matrices_in_every_layout(trainers, folder_of, samples, reference, model, name):
    layout = (QWEN3 if model in ("qwen3", "tied") else MIXTURES)[name]
    arguments = dict(folder=folder_of[model], samples=samples, layout=layout, num_updates=NUM_UPDATES)
    results = trainers.run("muon_scenarios.updates", layout.mesh.world_size, **arguments)
    check(results, reference(model), Plain(folder_of[model]).values)


SETTINGS = {"original": {"scale": "original"}, "no_nesterov": {"nesterov": False}}


@pytest.mark.deep
@pytest.mark.parametrize("name", SETTINGS)
def test_the_other_scale_and_plain_momentum(trainers, folder_of, samples, reference, name):
    settings, layout = SETTINGS[name], QWEN3["tp2_dp2"]
    arguments = dict(folder=folder_of["qwen3"], samples=samples, layout=layout, num_updates=NUM_UPDATES)
    results = trainers.run("muon_scenarios.updates", layout.mesh.world_size, **arguments, settings=settings)
    check(results, reference("qwen3", **settings), Plain(folder_of["qwen3"]).values)


BITWISE = {
    "tp2": ("qwen3", Layout(Mesh(tensor=2), num_microbatches=2)),
    "dp2_buckets": ("qwen3", Layout(Mesh(data=2), num_microbatches=2, megatron=MegatronConfig(ddp=BUCKETS))),
    "tp2_dp2_bf16": ("qwen3", Layout(Mesh(tensor=2, data=2), num_microbatches=2, dtype="bfloat16")),
    "pp2_bf16": ("qwen3", Layout(Mesh(pipeline=2, virtual=2), num_microbatches=2, dtype="bfloat16")),
    "dp2_ep2": ("deepseek_v3", MIXTURES["dp2_ep2"]),
}


@pytest.mark.parametrize("name", cover.essential(BITWISE, "pp2_bf16"))
def test_resume_is_bitwise(trainers, folder_of, samples, tmp_path, name):
    """Beside a mirror and the phases of shared GPUs."""
    model, layout = BITWISE[name]
    arguments = dict(folder=folder_of[model], samples=samples, layout=layout, checkpoint=tmp_path / "step2")
    size = layout.mesh.world_size
    unbroken = trainers.run("muon_scenarios.save_and_go_on", size, **arguments)
    resumed = trainers.run("muon_scenarios.resume", size, **arguments)
    for (metrics, parameters), (again, same) in zip(unbroken, resumed, strict=True):
        assert metrics == again and parameters.keys() == same.keys()
        assert all(np.array_equal(parameters[name], same[name]) for name in same)


CHANGES = {
    "qwen3": (Layout(Mesh(data=2, pipeline=2), dtype="bfloat16"), Layout(Mesh(tensor=2), dtype="bfloat16")),
    "tied": (Layout(Mesh(pipeline=2), num_microbatches=2), Layout(Mesh(tensor=2, data=2), num_microbatches=2)),
    "qwen3_moe": (MIXTURES["tp2_dp2_ep2"], MIXTURES["dp2_ep2"]),
}


@pytest.mark.deep
@pytest.mark.parametrize("model", CHANGES)
def test_a_run_resumes_on_another_mesh(trainers, folder_of, samples, tmp_path, model):
    """What the other mesh has read and writes again is the same to the bit."""
    saved, other = CHANGES[model]
    first, again = tmp_path / "first", tmp_path / "again"
    arguments = dict(folder=folder_of[model], samples=samples, checkpoint=first)
    unbroken = trainers.run("muon_scenarios.save_and_go_on", saved.mesh.world_size, layout=saved, **arguments)
    resumed = trainers.run("muon_scenarios.resume", other.mesh.world_size, layout=other, again=again, **arguments)
    found = everything(first)
    assert found == everything(again)
    kinds = {kind: {name for part, name in found if part == kind} for kind in {kind for kind, _ in found}}
    copies = {"fp32_param"} if saved.dtype == "bfloat16" else set()
    assert kinds.keys() == {"weights", "momentum_buffer", "exp_avg", "exp_avg_sq"} | copies
    assert kinds["exp_avg"] == kinds["exp_avg_sq"] == kinds["weights"] - kinds["momentum_buffer"]
    assert {name for name in kinds["exp_avg"] if "norm" not in name} <= {"model.embed_tokens.weight", "lm_head.weight"}
    relative = RELATIVE if saved.dtype == "float32" else 0.02  # of bf16 every order of sums rounds differently
    assert resumed[0][0][0]["loss"] == pytest.approx(unbroken[0][0][0]["loss"], rel=relative)
    assert resumed[0][0][0]["lr"] == unbroken[0][0][0]["lr"]


def everything(checkpoint) -> dict[tuple[str, str], bytes]:
    """The bytes of each HF tensor, and of the parts of its state."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"].values()
    kinds = {tensor["kind"] for entry in files for tensor in entry.get("tensors", {}).values()}
    found = {}
    for kind in kinds:
        source = open_checkpoint(checkpoint, kind)
        maps = Maps(source.checksums)
        for described in hub_tensors(source.shape):
            if described.name in source.regions:
                blocks = target.blocks(source.tensor(described, None), maps)
                found[kind, described.name] = b"".join(bytes(target.as_bytes(block)) for block in blocks)
    assert all(any(content) for content in found.values()), "some tensor has no state"
    return found


def test_a_checkpoint_of_another_kind_is_refused(trainers, model_folder, samples, tmp_path):
    arguments = dict(folder=model_folder, samples=samples, layout=Layout())
    trainers.run("muon_scenarios.save_and_go_on", 1, checkpoint=tmp_path / "muon", **arguments)
    trainers.run("save_and_go_on", 1, checkpoint=tmp_path / "adam", **arguments)
    for kind, other, settings in (("muon", "adam", {}), ("adam", "muon", {"optimizer": MUON})):
        [[error]] = trainers.run(
            "load_each", 1, folder=model_folder, layout=Layout(), checkpoints=[tmp_path / kind], **settings
        )
        assert f"was written with optimizer {kind}, but this run has {other}" in error
        assert "start from the checkpoint's Hugging Face export" in error
