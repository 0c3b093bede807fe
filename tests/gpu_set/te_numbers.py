"""The gradient of Transformer Engine's layers, in real processes over gloo, with PyTorch in the place of their kernels.

Parameters, marks and what Megatron does with them are the real ones. The reference is one process with local layers in
float64, and one in float32 shows what rounding explains (tools/bench/compare_layouts.py).

    python tests/gpu_set/te_numbers.py '{"deepseek_v3": ["tp2", "cp2"], "llama with adapters": ["tp2 unchanged"]}'
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron's fused activations are the same formulas without a compiler

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

for room in ("", "ranks"):
    sys.path.insert(0, str(Path(__file__).parents[1] / room))
from sizes import VOCAB_SIZE  # noqa: E402

from megatron_rl.config.policy import LoraConfig, MegatronConfig, ModelConfig, ParallelConfig, PolicyConfig  # noqa: E402
from megatron_rl.data.pictures import Pictures  # noqa: E402
from megatron_rl.models import slices  # noqa: E402
from megatron_rl.models.adapters import A, B  # noqa: E402
from megatron_rl.models.peft import PREFIX, TENSORS  # noqa: E402
from megatron_rl.tools.bench.compare_layouts import (  # noqa: E402
    NUM_MICROBATCHES,
    ONE_PROCESS,
    deal_rows,
    difference,
    loaded_actor,
    parse_layout,
    random_rows,
    too_far,
    train_once,
)
from megatron_rl.types import Tokens  # noqa: E402

WITHOUT_KERNELS = MegatronConfig(transformer={"moe_permute_fusion": False})
"""This one is not a module's, but a function that Megatron calls."""
ADAPTED = {
    " with adapters": LoraConfig(rank=3, alpha=7),
    " with a base in fp8": LoraConfig(rank=3, alpha=7, base="fp8"),
    " with some": LoraConfig(rank=3, alpha=7, targets=("q_proj", "v_proj", "down_proj")),
}
"""What a model's name ends with, and its adapters. q and v are two of three weights that Megatron fuses."""


def models() -> dict[str, Any]:
    """What `write_models` writes: of each family one with sizes that the layers take."""
    from test_actor_families import GLM, KIMI_YARN, LATENT, MODELS, PLAIN, YARN

    latent = dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    narrow = LATENT | latent | dict(q_lora_rank=24)
    yarn = YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}
    return {
        "llama": ("Llama", dict(rope_parameters=PLAIN)),
        "qwen2": MODELS["qwen2"],
        "qwen2_windows": MODELS["qwen2_windows"],
        "qwen3_moe": MODELS["qwen3_moe"],
        "mixtral": MODELS["mixtral"],
        "deepseek_v3": ("DeepseekV3", dict(**narrow, rope_parameters=yarn)),
        "deepseek_v3_direct": ("DeepseekV3", dict(**narrow | {"q_lora_rank": None, "qk_nope_head_dim": 16})),
        "kimi_k2": (
            "DeepseekV3",
            dict(**narrow | {"n_group": 1, "topk_group": 1, "v_head_dim": 16}, rope_parameters=YARN | KIMI_YARN),
        ),
        "glm4_moe_lite": ("Glm4MoeLite", narrow),
        "glm4_moe": ("Glm4Moe", dict(**GLM, attention_bias=True, use_qk_norm=True, rope_parameters=PLAIN)),
    }


SEES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Models that see images (`image_models.write_model`). Their towers are trained, and transformers' model in float64 is
their reference."""


def rows_of(folder: Path, base: str) -> list[Tokens]:
    """Random rows, some of which have images if the model sees them."""
    if base not in SEES:
        return random_rows(VOCAB_SIZE, num_rows=10, longest=48, seed=3)
    from image_models import drawing, row

    one, two, pictures = drawing(20, 31, 0), drawing(9, 40, 1), Pictures(folder / base, folder / base / "images")
    parts = [[3, one, 9], [5, 7], [2, one, 4, two, 20], [1, two, two, 6], [30, 12], [9, one, 5]]
    return [row(pictures, part, seed) for seed, part in enumerate(parts)]


def exact_of(folder: Path, base: str) -> tuple[float, float, dict[str, Any]]:
    """Loss, norm and gradient of the rows."""
    from test_actor_images import world

    rows = rows_of(folder, base)
    _, same, gradient, loss = world(folder / base, base, len(rows), None)
    assert [one.ids.tolist() for one in rows] == [one.ids.tolist() for one in same]
    return loss, float(sum((one**2).sum() for one in gradient.values()) ** 0.5), gradient


def layout_of(text: str) -> ParallelConfig:
    """`tp2-cp2`, `tp2-cp2 recomputed`, `tp2 whole` (without sequence parallelism) or `tp2 unchanged` (`check_base`)."""
    axes, _, how = text.partition(" ")
    return parse_layout(axes).model_copy(update={"sequence": not how.startswith("whole")})


def base_of(name: str) -> tuple[str, LoraConfig | None]:
    """The model, and the adapters that it has."""
    ending = next((ending for ending in ADAPTED if name.endswith(ending)), "")
    return name.removesuffix(ending), ADAPTED.get(ending)


def check_base(rank: int, stores: Iterable[Any], folder: Path, model: ModelConfig, policy: Any, shares: Any) -> None:
    """With B = 0, and with adapters that are off, the log-probs are the base model's, bit for bit. The weights that are
    merged for a push are W + scale B A of the folders."""
    found = []
    without = policy.model_copy(update={"lora": None})
    at_zero = policy.model_copy(update={"lora": policy.lora.model_copy(update={"start": None})})
    for one, store in zip((without, at_zero, policy), stores, strict=True):
        actor, share = loaded_actor(rank, store, folder, model, one), shares[one.parallel.mesh.coordinates(rank)[2]]
        found.append(actor.score(share))
        if one is policy:
            with actor.adapting.off():
                found.append(actor.score(share))
            check_merged(actor, folder, policy.lora)
        actor.close()
    base, zero, adapted, off = found
    assert base == zero == off and (not base or base != adapted), found


def check_merged(actor: Any, folder: Path, lora: LoraConfig) -> None:
    weights, adapters = load_file(folder / "model.safetensors"), load_file(lora.start / TENSORS)
    expected = {
        name: torch.addmm(
            weights[name].double(),
            adapters[PREFIX + name.replace(".weight", f".{B}.weight")].double(),
            adapters[PREFIX + name.replace(".weight", f".{A}.weight")].double(),
            alpha=lora.adapters.scale,
        )
        for name in weights
        if PREFIX + name.replace(".weight", f".{A}.weight") in adapters
    }
    shards = [shard for shard in actor.shards if shard.hf_name in expected]
    assert {shard.local_name for shard in shards} == actor.adapting.merges.keys()
    for shard in shards:
        part = expected[shard.hf_name][slices(shard.hf_box)]
        merged = torch.empty(part.shape)
        with torch.no_grad():
            actor.adapting.merges[shard.local_name](shard.local_box, merged)
        torch.testing.assert_close(merged, part.float(), atol=1e-6, rtol=1e-5)


def serve(rank: int, folder: Path, cases: list[tuple[str, str]], results: Any) -> None:
    """Do the part of a rank in each case."""
    import stand_ins
    import torch.distributed as dist

    torch.set_num_threads(1)
    stand_ins.install()
    for number, (name, layout) in enumerate(cases):
        is_one = layout in ("float32", "float64")
        parallel = ParallelConfig() if is_one else layout_of(layout)
        if rank >= parallel.mesh.world_size:
            continue
        stores = (
            next(dist.rendezvous(f"file://{folder}/{number} {part}", rank, parallel.mesh.world_size))[0]
            for part in range(3)
        )
        base, lora = base_of(name)
        if lora:
            lora = lora.model_copy(update={"start": folder / name})
        recompute = "full" if layout.endswith(" recomputed") else "none"
        layers = "local" if is_one else "transformer_engine"
        if lora and lora.base == "fp8" and is_one:  # the others have its numbers
            base, lora = f"{base} rounded", lora.model_copy(update={"base": "unquantised"})
        model = ModelConfig(path=folder / base, dtype="float32", layers=layers, recompute=recompute)
        megatron = MegatronConfig() if is_one else WITHOUT_KERNELS
        tower = "trained" if base in SEES else "frozen"
        policy = PolicyConfig(parallel=parallel, megatron=megatron, lora=lora, vision_tower=tower)
        shares = deal_rows(folder / base, parallel, rows_of(folder, base), 1 if is_one else NUM_MICROBATCHES)
        found = None
        if layout.endswith("unchanged"):
            check_base(rank, stores, folder / base, model, policy, shares)
        else:
            found = train_once(rank, next(stores), folder / base, model, policy, shares, exact=layout == "float64")
        if rank == 0:
            results.put((name, layout, found))


def main(layouts: dict[str, list[str]]) -> dict[str, list[str]]:
    """What is too far from float64, of each family."""
    from image_models import write_model
    from random_adapters import in_fp8, write_adapters
    from test_actor_families import write_models

    cases = [(name, layout) for name, of in layouts.items() for layout in ("float64", "float32", *of)]
    cases = [case for case in cases if case[0] not in SEES or case[1] != "float64"]
    sizes = [layout_of(layout).mesh.world_size for of in layouts.values() for layout in of]
    processes = multiprocessing.get_context("spawn")
    results = processes.SimpleQueue()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bases = {base_of(name)[0] for name in layouts}
        write_models(folder, {name: kind for name, kind in models().items() if name in bases})
        for base in bases.intersection(SEES):
            write_model(folder / base, base)
        for base, name, lora in ((base_of(name)[0], name, base_of(name)[1]) for name in layouts):
            if lora:
                write_adapters(folder / name, folder / base, lora)
            if lora and lora.base == "fp8":
                in_fp8(folder / base, folder / f"{base} rounded")
        arguments = folder, cases, results
        ranks = [processes.Process(target=serve, args=(rank, *arguments), daemon=True) for rank in range(max(sizes))]
        for process in ranks:
            process.start()
        found: dict[str, dict[str, Any]] = {
            name: {"float64": exact_of(folder, name)} for name in bases.intersection(SEES)
        }
        for _ in cases:
            while results.empty():
                if any(process.exitcode for process in ranks):
                    raise SystemExit("a rank failed; its error is above")
                ranks[0].join(0.05)
            name, layout, numbers = results.get()
            if numbers is not None:
                found.setdefault(name, {})[layout] = numbers
        for process in ranks:
            process.join()
    faults = {}
    for name, of in found.items():
        exact = of.pop("float64")
        one = difference(ONE_PROCESS, of.pop("float32"), exact)
        print(asdict(one), file=sys.stderr)
        differences = [difference(layout, numbers, exact) for layout, numbers in of.items()]
        print(*map(asdict, differences), sep="\n", file=sys.stderr)
        faults[name] = [fault for one_of in differences for fault in too_far(one_of, one)]
    return faults


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
