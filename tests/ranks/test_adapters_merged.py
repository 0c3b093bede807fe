"""With `rollout.lora: merged` trainers merge adapters into weights while they send them: engines hold the bits of an
export, whatever the layouts of both sides are, and say what the trainers say."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import cover
import pytest
import torch
import warm
from bridge_engines import Fleet
from loaded_engine import checksums
from patience import deadline
from random_adapters import in_fp8, write_adapters
from safetensors.torch import load_file
from scenarios import TEMPERATURE, Layout
from shares import TrainSample
from test_actor_adapters import LORA, SOME_AND_OUTPUT, merge
from test_bridge_engines import (
    EP2_TP2,
    EP2_TP2_WHOLE,
    PROMPTS,
    TP2_PP2,
    check_held,
    largest_mismatch,
    made_up,
    write_model,
)

from megatron_rl.bridge.join import host_store
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.commands.merge import main as merge_folders
from megatron_rl.config.policy import LoraConfig
from megatron_rl.layout import Engines
from megatron_rl.models import read_shape, slices
from megatron_rl.models.peft import PREFIX, TENSORS
from megatron_rl.types import Mesh

IN_FP8 = LORA.model_copy(update={"base": "fp8"})
SMALL = LoraConfig(rank=3, alpha=2)
"""With LORA's 7 fp32 rounds the log-probs of gpt-oss's random model to 1.1e-5."""
CASES = {
    "dense": ("dense", TP2_PP2, Engines(2, 1), SOME_AND_OUTPUT),
    "dense, TP2": ("dense", Mesh(tensor=2, data=2), Engines(1, 2), LORA),
    "moe": ("moe", EP2_TP2, Engines(1, 1), LORA),
    "moe, whole experts, TP2": ("moe", EP2_TP2_WHOLE, Engines(1, 2), LORA),
    "moe, base in fp8, TP2 and expert parallel": ("moe", EP2_TP2, Engines(1, 2, expert_parallel=True), IN_FP8),
    "latent": ("latent", TP2_PP2, Engines(1, 1), LORA),
    "latent, TP2 and expert parallel": ("latent", EP2_TP2, Engines(1, 2, expert_parallel=True), LORA),
    "sinks": ("sinks", EP2_TP2, Engines(1, 1), SMALL),
    "linear, TP2": ("linear", EP2_TP2, Engines(1, 2), LORA),
}
"""(model, trainer, engines, adapters). vLLM serves adapters in none of them but the second."""


@pytest.mark.parametrize("case", cover.essential(CASES))
def test_engines_hold_what_an_export_has_and_say_what_the_trainers_say(trainers, tmp_path, case):
    name, mesh, engines, lora = CASES[case]
    folder, store = write_model(name, tmp_path / "model"), host_store("127.0.0.1")
    shape, start = read_shape(folder), write_adapters(tmp_path / "start", folder, lora)
    started, speaks = lora.model_copy(update={"start": start}), name != "linear"
    fleet = Fleet(folder, engines, TEMPERATURE)
    try:
        setup = BridgeSetup(
            shape,
            mesh,
            False,
            engines,
            "float32",
            "127.0.0.1",
            store.port,
            bucket_bytes=2000,  # so that weights are cut into several messages
            timeout_s=deadline(60),
            recorded=fleet.record(shape),
        )
        with ThreadPoolExecutor(1) as pool:
            given = dict(folder=folder, layout=Layout(mesh), setup=setup, version=1, lora=started, export=tmp_path)
            training = pool.submit(trainers.run, "push_adapters", mesh.world_size, **given)
            fleet.join(setup)
            fleet.receive(engines.num, 1)
            answers = fleet.generate(engines.num, PROMPTS, 1) if speaks else made_up()
            samples = [TrainSample(f"answer{i}", tokens, 1.0, 1.0) for i, tokens in enumerate(answers)]
            store.set("samples 1", pickle.dumps(samples))
            pushed, mismatch, of_base = zip(*training.result(), strict=True)
        needed = check_held(fleet, tmp_path / "merged", shape, engines)
    finally:
        fleet.close()
    assert sum(push["bytes"] for push in pushed) == needed
    if speaks:
        assert max(ranks["mismatch/max_abs"] for ranks in mismatch) < 1e-5
        assert max(ranks["mismatch/max_abs"] for ranks in of_base) > 0.1, "the base model is another one"
        assert largest_mismatch(tmp_path / "merged", answers) < 1e-5
    if name == "sinks":  # its files hold all experts of a layer in one tensor
        return
    assert merge_folders([str(folder), str(tmp_path / "adapters"), str(tmp_path / "by tool")]) == 0
    rounded = in_fp8(folder, tmp_path / "rounded") if lora.base == "fp8" else folder
    by_hand = merge(tmp_path / "by_hand", rounded, started)
    folders = by_hand, tmp_path / "merged", rounded, tmp_path / "by tool"
    exact, merged, base, by_tool = (load_file(one / "model.safetensors") for one in folders)
    assert merged.keys() == by_tool.keys() and all(torch.equal(merged[one], by_tool[one]) for one in merged)
    for weight in base:
        torch.testing.assert_close(merged[weight], exact[weight], rtol=0, atol=2e-7)
    exported, given = (load_file(one / TENSORS) for one in (tmp_path / "adapters", start))
    assert exported.keys() == given.keys() and all(torch.equal(exported[key], given[key]) for key in given)
    changed = {weight for weight in base if (merged[weight] != base[weight]).any()}
    assert len(changed) == len(load_file(start / TENSORS)) // 2


@pytest.mark.deep
@pytest.mark.parametrize("mesh", [Mesh(tensor=2, pipeline=2), Mesh(tensor=2, context=2)], ids=["tp2-pp2", "tp2-cp2"])
def test_trainers_of_qwen3_5_merge_the_bits_of_an_export(trainers, folders, tmp_path, mesh):
    """Four weights are one of Megatron, and one of them is several intervals of its rows. No engine is there: vLLM
    computes this model in bf16 alone on CPUs."""
    folder = folders["qwen3_5"]
    started = LORA.model_copy(update={"start": write_adapters(tmp_path / "start", folder, LORA)})
    given = dict(folder=folder, layout=Layout(mesh), lora=started, export=tmp_path)
    made = [one for ranks in trainers.run("merge_and_export", mesh.world_size, **given) for one in ranks]
    by_hand = merge(tmp_path / "by_hand", folder, started)
    exact, merged = (load_file(one / "model.safetensors") for one in (by_hand, tmp_path / "merged"))
    for weight, tensor in exact.items():
        torch.testing.assert_close(merged[weight], tensor, rtol=0, atol=2e-7)
    assert {f"{PREFIX}{name.removesuffix('weight')}lora_A.weight" for name, _, _ in made} == {
        key for key in load_file(started.start / TENSORS) if ".lora_A." in key
    }
    assert all(torch.equal(part, merged[name][slices(box)]) for name, box, part in made)


@pytest.mark.deep
def test_a_quantised_engine_has_the_numbers_of_one_that_loads_the_export(trainers, tmp_path):
    """In bfloat16, every layer and its scales, after vLLM has quantised them to fp8. The trainers' base is in fp8."""
    folder, store = write_model("dense", tmp_path / "model"), host_store("127.0.0.1")
    start, engines, mesh = write_adapters(tmp_path / "start", folder, IN_FP8), Engines(), Mesh(tensor=2)
    fleet = Fleet(folder, engines, TEMPERATURE, dtype="bfloat16", quantization="fp8_per_channel")
    try:
        address, shape = ("bfloat16", "127.0.0.1", store.port), read_shape(folder)
        recorded = fleet.record(shape)
        setup = BridgeSetup(shape, mesh, False, engines, *address, timeout_s=deadline(60), recorded=recorded)
        lora = IN_FP8.model_copy(update={"start": start})
        layout = Layout(mesh, dtype="bfloat16")
        with ThreadPoolExecutor(1) as pool:
            given = dict(folder=folder, layout=layout, setup=setup, version=1, lora=lora, export=tmp_path)
            training = pool.submit(trainers.run, "push_adapters", mesh.world_size, **given)
            fleet.join(setup)
            fleet.receive(1, 1)
            samples = [TrainSample(f"answer{i}", tokens, 1.0, 1.0) for i, tokens in enumerate(made_up())]
            store.set("samples 1", pickle.dumps(samples))
            training.result()
        (held,) = fleet.checksums()
    finally:
        fleet.close()
    by_tool = [str(folder), str(tmp_path / "adapters"), str(tmp_path / "by tool"), "--dtype", "bfloat16"]
    assert merge_folders(by_tool) == 0
    exported, made = (load_file(tmp_path / one / "model.safetensors") for one in ("merged", "by tool"))
    assert exported.keys() == made.keys() and all(torch.equal(exported[one], made[one]) for one in made)
    (merged,), (base,) = warm.together(
        checksums, [(tmp_path / "merged", "fp8_per_channel", 1), (folder, "fp8_per_channel", 1)], deadline(240)
    )
    layers = [name for name in merged if "layers." in name]  # vLLM keeps the others packed on a CPU
    assert {name: held[name] for name in layers} == {name: merged[name] for name in layers}
    linear = [name for name in layers if name.endswith("proj.weight")]
    assert len(linear) == 4 * 4 and all(held[name] != base[name] for name in linear)
