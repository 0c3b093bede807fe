"""Adapters have the gradients of PEFT's formula on transformers' model in float64, in every layout, and engines serve
what the trainers push."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import get_args

import cover
import pytest
import torch
import transformers
from bridge_engines import Fleet
from patience import deadline
from random_adapters import in_fp8, write_adapters
from safetensors.torch import load_file, save_file
from scenarios import TEMPERATURE, Layout
from shares import TrainSample
from sizes import VOCAB_SIZE
from test_actor_experts import plain_gradient
from test_actor_gradients import check_equal, relative
from test_bridge_engines import MODELS, PROMPTS, SIZES, largest_mismatch
from vllm.config.lora import MaxLoRARanks

from megatron_rl.bridge.join import host_store
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.config.policy import LoraConfig, ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.layout import Engines, Recording
from megatron_rl.models import read_shape
from megatron_rl.models.peft import CONFIG, PREFIX, TENSORS
from megatron_rl.planning.adapters import SLOT_RANKS, served_adapters
from megatron_rl.tools.bench.compare_layouts import NUM_MICROBATCHES, deal_rows, parse_layout, random_rows
from megatron_rl.types import Mesh

LORA = LoraConfig(rank=3, alpha=7)
SOME = LoraConfig(rank=3, alpha=7, rank_stabilised=True, targets=("q_proj", "v_proj", "down_proj"))
"""q and v are two of three weights that Megatron fuses."""
SOME_AND_OUTPUT = SOME.model_copy(update={"targets": (*SOME.targets, "lm_head")})
ALL_AND_OUTPUT = LoraConfig(
    rank=3,
    alpha=7,
    targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"),
)
LAYOUTS = {
    "qwen3": ("tp2", "tp4", "pp2", "cp2", "dp2", "tp2-pp2", "pp2-vpp2-cp2"),
    "qwen2": ("tp2", "pp2"),
    "qwen3_moe": ("tp2", "dp2-ep2", "tp2-ep2-etp1", "tp2-dp2-ep2", "tp2-dp2-ep2-etp1"),
    "deepseek_v3": ("tp2", "pp2"),
    "gpt_oss": ("tp2-dp2-ep2",),
    "minimax_m2": ("tp2-dp2-ep2",),
    "gemma3": ("tp2-cp2",),
    "qwen3_next": ("tp2", "pp2", "cp2", "tp2-dp2-ep2"),
    "qwen3_5": ("tp2", "pp2", "tp2-cp2"),
    "nemotron_h": ("tp2", "tp2-cp2"),
    "nemotron_h_experts": ("tp2-dp2-ep2",),
}
SOME_OF_DELTA = LoraConfig(rank=3, alpha=7, targets=("in_proj_z", "in_proj_a", "in_proj_ba", "out_proj", "q_proj"))
"""Some of the projections that are one weight of Megatron."""
CHOSEN = {"qwen3": ALL_AND_OUTPUT}
"""The adapters of the models that have not all linear layers' alone."""
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]
FORMULA = [
    ("qwen3", SOME_AND_OUTPUT),
    ("qwen3", LoraConfig(rank=3, alpha=7, targets=("lm_head",))),
    ("qwen2", LORA),
    ("qwen3_moe", LORA),
    *((name, LORA) for name in ("deepseek_v3", "minimax_m2", "gemma3")),
    *(("qwen3_next", lora) for lora in (LORA, SOME_OF_DELTA)),
    *(("qwen3_5", lora) for lora in (LORA, SOME_OF_DELTA)),
    ("nemotron_h", LORA),
    ("nemotron_h", LoraConfig(rank=3, alpha=7, targets=("in_proj", "k_proj", "down_proj"))),
]
RECOMPUTED = [
    *(("qwen3", "tp2-pp2"), ("qwen2", "pp2"), ("qwen3_moe", "tp2-dp2-ep2"), ("deepseek_v3", "tp2")),
    *(("qwen3_next", "tp2"), ("qwen3_5", "pp2")),
]


@pytest.fixture(scope="module")
def rows():
    return random_rows(VOCAB_SIZE, num_rows=8, longest=40, seed=3)


@pytest.fixture(scope="module")
def start_of(folders, model_folder, tmp_path_factory):
    """(the model, the adapters that the run begins with) by the model's name."""
    known, root = {}, tmp_path_factory.mktemp("starts")

    def of(name: str, lora: LoraConfig = LORA) -> tuple[Path, LoraConfig]:
        folder = model_folder if name == "qwen3" else folders[name]
        if (name, lora) not in known:
            known[name, lora] = write_adapters(root / str(len(known)), folder, lora)
        return folder, lora.model_copy(update={"start": known[name, lora]})

    return of


@pytest.fixture(scope="module")
def numbers(trainers, start_of, rows):
    def of(name: str, parallel, num_microbatches, recompute="none", exact=False, lora=None, folder=None) -> list:
        known, lora = start_of(name, lora or CHOSEN.get(name, LORA))
        folder = folder or known
        model = ModelConfig(path=folder, dtype="float32", recompute=recompute)
        given = dict(folder=folder, model=model, policy=PolicyConfig(parallel=parallel, lora=lora), exact=exact)
        shares = deal_rows(folder, parallel, rows, num_microbatches)
        return trainers.run("one_update", parallel.mesh.world_size, shares=shares, **given)

    return of


@pytest.fixture(scope="module")
def of_one_process(numbers):
    known = {}

    def of(name: str, exact: bool = False):
        if (name, exact) not in known:
            (known[name, exact],) = numbers(name, ParallelConfig(), 1, exact=exact)
        return known[name, exact]

    return of


def merge(folder: Path, model: Path, started: LoraConfig) -> Path:
    """The base model with PEFT's formula: W + scale B A, computed in float64."""
    shutil.copytree(model, folder)
    weights, stored = load_file(model / "model.safetensors"), load_file(started.start / TENSORS)
    for name, a in stored.items():
        if name.endswith(".lora_A.weight"):
            weight = name.removeprefix(PREFIX).replace("lora_A.", "")
            b = stored[name.replace("lora_A", "lora_B")].double()
            weights[weight] = (weights[weight].double() + started.adapters.scale * b @ a.double()).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("name", "lora"), cover.essential(FORMULA, FORMULA[0]))
def test_one_process_has_the_gradient_of_pefts_formula(start_of, rows, numbers, tmp_path, name, lora):
    """By the chain rule from the gradient of the merged weight W: scale B^T dW of A, and scale dW A^T of B."""
    folder, started = start_of(name, lora)
    ((_, _, found),) = numbers(name, ParallelConfig(), 1, lora=lora)
    of_weights = plain_gradient(merge(tmp_path / "merged", folder, started), rows, 0.0, 0.0)
    stored = load_file(started.start / TENSORS)
    assert found.keys() == {key.removeprefix(PREFIX) for key in stored}
    for key in found:
        base, part = re.fullmatch(r"(.*)\.lora_([AB])\.weight", key).groups()
        a, b = (stored[f"{PREFIX}{base}.lora_{one}.weight"].double().numpy() for one in "AB")
        weight = of_weights[f"{base}.weight"]
        expected = started.adapters.scale * (b.T @ weight if part == "A" else weight @ a.T)
        assert relative(found[key], expected) < 1e-5, key


@pytest.mark.parametrize(("name", "layout"), cover.essential(CASES, ("qwen3", "tp2-pp2")))
def test_every_layout_has_the_gradient_of_one_process(numbers, of_one_process, name, layout):
    recompute = "full" if (name, layout) in RECOMPUTED else "none"
    results = numbers(name, parse_layout(layout), NUM_MICROBATCHES, recompute)
    check_equal(layout, results, of_one_process(name), of_one_process(name, exact=True))


IN_FP8 = [
    ("qwen3", ""),
    ("qwen3", "tp2-pp2"),
    ("qwen2", ""),
    ("qwen3_moe", "tp2-dp2-ep2-etp1"),
    ("deepseek_v3", "tp2-dp2-ep2"),
    ("minimax_m2", "tp2"),
    ("gemma3", "tp2"),
    ("qwen3_next", "tp2"),
    ("qwen3_5", "tp2-cp2"),
]


@pytest.mark.parametrize(("name", "layout"), cover.essential(IN_FP8, IN_FP8[0]))
def test_a_base_in_fp8_has_the_gradient_of_the_rounded_weights(start_of, rows, numbers, tmp_path, name, layout):
    """Also where a rank has parts of blocks. In one process all numbers are equal to the bit."""
    lora = CHOSEN.get(name, LORA)
    rounded = in_fp8(start_of(name, lora)[0], tmp_path / "rounded")
    (one,) = numbers(name, ParallelConfig(), 1, lora=lora, folder=rounded)
    parallel = parse_layout(layout) if layout else ParallelConfig()
    found = numbers(name, parallel, NUM_MICROBATCHES if layout else 1, lora=lora.model_copy(update={"base": "fp8"}))
    if layout:
        (exact,) = numbers(name, ParallelConfig(), 1, lora=lora, folder=rounded, exact=True)
        check_equal(layout, found, one, exact)
        return
    ((*metrics, gradients),), (*expected, of_rounded) = found, one
    assert metrics == expected and gradients.keys() == of_rounded.keys()
    assert all((gradients[key] == of_rounded[key]).all() for key in gradients)


@pytest.mark.deep
@pytest.mark.parametrize(("name", "lora"), [("qwen3", SOME_AND_OUTPUT), ("qwen3_5", SOME_OF_DELTA)])
def test_without_sequence_parallelism_and_with_fewer_targets_too(numbers, name, lora):
    parallel = parse_layout("tp2").model_copy(update={"sequence": False})
    (one,), (exact,) = (numbers(name, ParallelConfig(), 1, lora=lora, exact=exact) for exact in (False, True))
    check_equal("tp2", numbers(name, parallel, NUM_MICROBATCHES, lora=lora), one, exact)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    for name in ("dense", "tied"):
        torch.manual_seed(0)
        config = transformers.Qwen3Config(**(SIZES | MODELS[name][1]))
        transformers.Qwen3ForCausalLM(config).save_pretrained(root / name)
    return root


def test_the_planner_knows_the_ranks_of_vllms_slots():
    assert get_args(MaxLoRARanks) == SLOT_RANKS


def held(recording: Recording) -> set:
    return {(shard.hf_name, shard.hf_box) for shard in recording.shards}


SERVED = [
    ("dense", Mesh(tensor=2, pipeline=2), Engines(2, 1), LORA),
    ("tied", Mesh(tensor=4), Engines(1, 2), LORA),
    ("tied", Mesh(), Engines(1, 1), SOME),
]


@pytest.mark.parametrize(("name", "mesh", "engines", "lora"), cover.essential(SERVED, SERVED[2]))
def test_engines_serve_what_trainers_push(trainers, models, tmp_path, name, mesh, engines, lora):
    folder, store = models / name, host_store("127.0.0.1")
    shape, start = replace(read_shape(folder), adapters=lora.adapters), write_adapters(tmp_path / "start", folder, lora)
    started = lora.model_copy(update={"start": start})
    fleet = Fleet(folder, engines, TEMPERATURE, adapters=lora.adapters)
    try:
        address = "float32", "127.0.0.1", store.port
        recorded = fleet.record(shape)
        assert [held(one) for one in served_adapters(shape, engines)] == [held(one) for one in recorded], "as planned"
        setup = BridgeSetup(shape, mesh, False, engines, *address, timeout_s=deadline(60), recorded=recorded)
        with ThreadPoolExecutor(1) as pool:
            given = dict(folder=folder, layout=Layout(mesh), setup=setup, version=1, lora=started, export=tmp_path)
            training = pool.submit(trainers.run, "push_adapters", mesh.world_size, **given)
            fleet.join(setup)
            fleet.receive(engines.num, 1)
            answers = fleet.generate(engines.num, PROMPTS, 1)
            samples = [TrainSample(f"answer{i}", tokens, 1.0, 1.0) for i, tokens in enumerate(answers)]
            store.set("samples 1", pickle.dumps(samples))
            pushed, mismatch, of_base = zip(*training.result(), strict=True)
    finally:
        fleet.close()
    assert max(ranks["mismatch/max_abs"] for ranks in mismatch) < 1e-5
    assert max(ranks["mismatch/max_abs"] for ranks in of_base) > 0.1, "the base model is another one"
    assert largest_mismatch(tmp_path / "merged", answers) < 1e-5
    assert largest_mismatch(merge(tmp_path / "by_hand", folder, started), answers) < 1e-5
    exported, given = (load_file(one / TENSORS) for one in (tmp_path / "adapters", start))
    assert exported.keys() == given.keys() and all(torch.equal(exported[key], given[key]) for key in given)
    assert json.loads((tmp_path / "adapters" / CONFIG).read_text()) == json.loads((start / CONFIG).read_text())
    assert sum(push["bytes"] for push in pushed) < sum(tensor.nbytes for tensor in given.values()) * 3 * engines.num
