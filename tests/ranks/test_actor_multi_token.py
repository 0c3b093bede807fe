"""The multi-token head that a run trains: its loss and gradient against float64 with transformers' own layers, what the
policy notices of it, and its way into checkpoints and exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import cover
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scenarios import Layout
from sizes import VOCAB_SIZE
from test_actor_checkpoint import check_resumed
from test_actor_experts import as_saved
from test_actor_families import MODELS, write_models
from transformers_models import open_model

from megatron_rl.commands import export_checkpoint, hf_to_megatron, megatron_to_hf, verify_checkpoint
from megatron_rl.config.policy import LoraConfig, MegatronConfig, ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.loop.checkpoints import folder_name
from megatron_rl.models import check_parameters, megatron_shards, read_shape
from megatron_rl.planning.activations import activations
from megatron_rl.planning.parameters import rank_parameters
from megatron_rl.tools.bench.compare_layouts import deal_rows, parse_layout, random_rows, relative
from megatron_rl.types import Mesh, Tokens

NUM_LAYERS = 4
NAMES = ("deepseek_v3", "glm4_moe_lite", "glm4_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
LAST = f"model.layers.{NUM_LAYERS}."
COPIES = {LAST + "embed_tokens.weight": "model.embed_tokens.weight", LAST + "shared_head.head.weight": "lm_head.weight"}
OLDER = (LAST, LAST, ("enorm", "hnorm", "eh_proj", "shared_head.norm"), "num_nextn_predict_layers")
QWEN = ("mtp.", "mtp.layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"))


def names_of(name: str) -> tuple[str, str, list[str], str]:
    """What the names of a head begin with, and of its layer; the names of the norms of embedding and hidden state, of
    the matrix and of the last norm; and the key of config.json."""
    key = "num_nextn_predict_layers" if name == "qwen3_next" else "mtp_num_hidden_layers"
    prefix, layer, ends, key = (*QWEN, key) if name.startswith("qwen") else OLDER
    return prefix, layer, [f"{prefix}{end}.weight" for end in ends], key


@pytest.fixture(scope="module")
def wholes(tmp_path_factory) -> dict[str, Path]:
    """Models of five layers: the last one is the head's."""
    models = {}
    for name in NAMES:
        family, more = MODELS[name]
        kinds = ["linear_attention"] * 3 + ["full_attention"] * 2
        more = more | {"num_hidden_layers": NUM_LAYERS + 1} | ({"layer_types": kinds} if "qwen" in name else {})
        models[name] = family, more
    return write_models(tmp_path_factory.mktemp("wholes"), models)


@pytest.fixture(scope="module")
def heads(wholes, tmp_path_factory) -> dict[str, Path]:
    """The same as folders of four layers and a head, as they are published."""
    root, folders = tmp_path_factory.mktemp("heads"), {}
    for name, whole in wholes.items():
        folders[name] = root / name
        shutil.copytree(whole, folders[name])
        _, layer, ends, key = names_of(name)
        generator = torch.Generator().manual_seed(1)
        tensors = {one.replace(LAST, layer): x for one, x in load_file(whole / "model.safetensors").items()}
        for end in ends:
            tensors[end] = torch.rand(32, generator=generator) + (-0.5 if name.startswith("qwen") else 0.5)
        tensors[ends[2]] = 0.2 * torch.randn(32, 64, generator=generator)
        if layer == LAST:
            tensors |= {copy: tensors[one].clone() for copy, one in COPIES.items()}
        save_file(tensors, folders[name] / "model.safetensors", {"format": "pt"})
        config = json.loads((whole / "config.json").read_text())
        config |= {"num_hidden_layers": NUM_LAYERS, key: 1}
        for kinds in ("mlp_layer_types", "layer_types"):
            if config.get(kinds):
                config[kinds] = config[kinds][:NUM_LAYERS]
        (folders[name] / "config.json").write_text(json.dumps(config))
    return folders


@pytest.fixture(scope="module")
def rows(groups) -> list[Tokens]:
    """One of them has holes in its answer, as tools leave; one is too short for a target; some share a prompt."""
    rows = random_rows(VOCAB_SIZE, num_rows=8, longest=48, seed=3)
    rows[0].action_mask[[4, 5, 9]] = False
    short = Tokens(
        np.arange(2, dtype=np.int32), np.array([False, True]), np.zeros(2, np.float32), np.zeros(2, np.int32)
    )
    assert len(rows[0].ids) > 10
    return [*rows, short, *groups]


def plain_head(
    name: str, whole: Path, folder: Path, rows: list[Tokens], targets: str = "sampled"
) -> tuple[float, float, dict[str, np.ndarray]]:
    """Loss, accuracy and gradient of the head, sample by sample: the formula of the paper, around a layer of
    transformers."""
    model = open_model(whole, torch.float64, experts_implementation="eager")
    tensors, eps = load_file(folder / "model.safetensors"), model.config.rms_norm_eps
    _, prefix, ends, _ = names_of(name)
    enorm, hnorm, projection, last = own = [tensors[end].double().requires_grad_() for end in ends]
    one = 1.0 if name.startswith("qwen") else 0.0
    trunk, layer = model.model.layers[:NUM_LAYERS], model.model.layers[NUM_LAYERS]

    def norm(x, weight):
        return (one + weight) * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()

    losses, hits = [], 0
    for row in rows:
        ids = torch.from_numpy(row.ids.astype(np.int64))
        with torch.no_grad():
            embedded = x = model.model.embed_tokens(ids[None])
            angles = model.model.rotary_emb(x, torch.arange(len(ids))[None])
            for below in trunk:
                x = below(x, position_embeddings=angles, attention_mask=None)
            hidden = norm(x, model.model.norm.weight)
        both = torch.cat((norm(embedded[:, 1:], enorm), norm(hidden[:, :-1], hnorm)), -1)
        angles = tuple(one[:, :-1] for one in angles)
        x = layer(both @ projection.T, position_embeddings=angles, attention_mask=None)
        logits = (norm(x, last) @ model.lm_head.weight.detach().T)[0]
        for i in range(len(ids) - 2):
            if row.action_mask[i + 1] and row.action_mask[i + 2]:
                if targets == "policy":
                    p, likeliest = (hidden[0, i + 1] @ model.lm_head.weight.detach().T).softmax(-1).topk(32)
                    losses.append(-(p / p.sum() * logits[i].log_softmax(-1)[likeliest]).sum())
                else:
                    losses.append(-logits[i].log_softmax(-1)[ids[i + 2]])
                hits += int(logits[i].argmax() == ids[i + 2])
    loss = torch.stack(losses).mean()
    loss.backward()
    found = {end: tensor.grad.numpy() for end, tensor in zip(ends, own, strict=True)}
    for end, parameter in layer.named_parameters():
        found |= as_saved(prefix + end, parameter.grad.numpy(), model.config.model_type)
    return loss.item(), hits / len(losses), found


@pytest.fixture(scope="module")
def expected(wholes, heads, rows):
    known = {}

    def of(name: str, targets: str = "sampled"):
        if (name, targets) not in known:
            known[name, targets] = plain_head(name, wholes[name], heads[name], rows, targets)
        return known[name, targets]

    return of


@pytest.fixture(scope="module")
def numbers(trainers, heads, rows):
    """By rank: metrics and, of rank 0, the gradient by names."""

    def of(name: str, layout: str, choice: str, recompute: str = "none", dtype: str = "float32", **more: str):
        parallel = parse_layout(layout.removesuffix("-nosequence")) if layout else ParallelConfig()
        parallel = parallel.model_copy(update={"sequence": not layout.endswith("-nosequence")})
        shares = deal_rows(heads[name], parallel, rows, 2 if layout else 1)
        model = ModelConfig(path=heads[name], dtype=dtype, recompute=recompute)
        scale = MegatronConfig(optimizer={"initial_loss_scale": 2.0**10})
        policy = PolicyConfig(parallel=parallel, multi_token=choice, megatron=scale, **more)
        arguments = dict(folder=heads[name], model=model, policy=policy, shares=shares)
        return trainers.run("multi_token_scenarios.update_once", parallel.mesh.world_size, **arguments)

    return of


def check(name: str, results, expected) -> None:
    loss, accuracy, gradient = expected
    for metrics, _ in results:
        assert metrics["multi_token/loss"] == pytest.approx(loss, rel=1e-6)
        assert metrics["multi_token/accuracy"] == pytest.approx(accuracy)
    found = results[0][1]
    assert {one for one in found if one.startswith(names_of(name)[0])} == gradient.keys()
    for one, tensor in gradient.items():
        assert np.abs(tensor).max() > 0 and relative(found[one], tensor) < 1e-5, one  # fp32 against float64


@pytest.mark.parametrize("name", cover.essential(NAMES))
def test_one_process_has_loss_and_gradient_of_the_formula_and_the_policys_gradient_stays(numbers, expected, name):
    results = numbers(name, "", "train")
    check(name, results, expected(name))
    ((metrics, gradient),) = results
    ((without, gradient_without),) = numbers(name, "", "drop")
    assert {key: value for key, value in metrics.items() if not key.startswith("multi_token/")} == without
    assert gradient_without.keys() == {one for one in gradient if not one.startswith(names_of(name)[0])}
    assert all(np.array_equal(gradient[one], tensor) for one, tensor in gradient_without.items())


LAYOUTS = {
    "deepseek_v3": ("tp2", "pp2", "pp2-vpp2", "cp2", "dp2-ep2", "tp2-cp2", "pp2-dp2-ep2", "tp2-dp2-ep2-etp1"),
    "glm4_moe_lite": ("tp2-dp2-ep2",),
    "glm4_moe": ("tp2", "pp2", "cp2-ep2", "tp2-pp2"),
    "qwen3_next": ("tp2", "pp2", "cp2", "tp2-dp2-ep2"),
    "qwen3_5": ("tp2", "tp2-nosequence", "pp2", "cp2"),
    "qwen3_5_moe": ("tp2-cp2",),
}
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]
RECOMPUTED = [("deepseek_v3", "tp2"), ("glm4_moe", "cp2-ep2")]


@pytest.mark.parametrize("name, layout", cover.essential(CASES))
def test_every_layout_has_loss_and_gradient_of_the_formula(numbers, expected, name, layout):
    recompute = "full" if (name, layout) in RECOMPUTED else "none"
    check(name, numbers(name, layout, "train", recompute), expected(name))


TOWARDS_POLICY = [("glm4_moe", ""), ("deepseek_v3", "tp2-cp2"), ("deepseek_v3", "pp2-dp2-ep2"), ("qwen3_next", "tp2")]


@pytest.mark.parametrize("name, layout", cover.essential(TOWARDS_POLICY))
def test_a_head_may_be_trained_towards_the_policys_distribution(numbers, expected, name, layout):
    """The vocabulary has 60 tokens, so the 32 most probable ones have a part of the probability."""
    check(name, numbers(name, layout, "train", multi_token_targets="policy"), expected(name, "policy"))


@pytest.mark.deep
@pytest.mark.parametrize("name, layout", [("deepseek_v3", "pp2-dp2-ep2"), ("glm4_moe", "tp2")])
def test_in_float16_its_gradient_has_the_loss_scale_too(numbers, expected, name, layout):
    loss, _, gradient = expected(name)
    (metrics, found), *_ = numbers(name, layout, "train", dtype="float16")
    assert metrics["multi_token/loss"] == pytest.approx(loss, rel=1e-3)
    whole = [np.concatenate([one[name].ravel() for name in gradient]) for one in (found, gradient)]
    assert relative(*whole) < 0.1  # a token may choose another expert; without the scale it is 1


POLICY = (Layout(Mesh(tensor=2), num_microbatches=2), Layout(Mesh(pipeline=2, data=2, expert=2), num_microbatches=2))


@pytest.mark.deep
def test_updates_of_the_policy_are_the_same_with_a_head_and_its_loss_falls(trainers, heads, long_samples):
    """Clipping is active, and the bias and the balancing of experts leave the head out."""
    more = dict(router_bias_update_rate=0.01, load_balancing_loss=0.1)
    losses = []
    for layout in POLICY:
        arguments = dict(folder=heads["deepseek_v3"], samples=long_samples, layout=layout, num_updates=4, **more)
        (_, metrics), *_ = trainers.run("train", layout.mesh.world_size, multi_token="train", **arguments)
        (_, without), *_ = trainers.run("train", layout.mesh.world_size, **arguments)
        losses.append([update["multi_token/loss"] for update in metrics])
        for update, other in zip(metrics, without, strict=True):
            assert update.keys() - other.keys() == {"multi_token/loss", "multi_token/accuracy"}
            for key, value in other.items():  # data-parallel ranks have other intervals, and add their norms
                assert update[key] == (value if layout.mesh.data == 1 else pytest.approx(value, rel=1e-6)), key
    first, second = losses
    assert first == sorted(first, reverse=True) and first[-1] < first[0] - 0.1
    # The last stage's copy of the embedding follows the first one's, which moves the loss by 1e-2 in these updates.
    assert second == pytest.approx(first, rel=1e-4)


RESUMED = [Layout(Mesh(pipeline=2), dtype="bfloat16"), Layout(Mesh(data=2, expert=2), num_microbatches=2)]


@pytest.mark.deep
@pytest.mark.parametrize("layout", RESUMED, ids=("pp2", "dp2_ep2"))
def test_a_run_that_trains_the_head_resumes_to_the_bit(trainers, heads, long_samples, tmp_path, layout):
    arguments = dict(
        folder=heads["deepseek_v3"],
        samples=long_samples,
        layout=layout,
        checkpoint=tmp_path / "step2",
        multi_token="train",
    )
    unbroken = trainers.run("save_and_go_on", 2, **arguments)
    assert any(name.startswith("mtp.embedding") for _, _, held in unbroken for name in held) == (layout is RESUMED[0])
    check_resumed(trainers, unbroken, arguments)


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_counted_and_engines_get_no_head(trainers, heads, samples, dtype):
    folder, layout = heads["deepseek_v3"], Layout(Mesh(pipeline=2), dtype=dtype)
    shape = PolicyConfig(multi_token="train").adapted(read_shape(folder))
    arguments = dict(folder=folder, samples=samples, layout=layout, multi_token="train")
    for rank, found in enumerate(trainers.run("memory_scenarios.allocated", 2, **arguments)):
        held = rank_parameters(shape, layout.mesh, rank)
        assert (held.copied > 0) == (rank == 1)
        weights = held.weight_bytes(dtype) - 4 * held.constant  # a router's bias is a buffer
        assert found == (weights, held.gradient_bytes(), held.state_bytes(layout.mesh, dtype))
    for rank, sent in enumerate(trainers.run("multi_token_scenarios.sent", 2, folder=folder, layout=layout)):
        check_parameters(megatron_shards(shape.served, layout.mesh, rank), sent, "trainer")


@pytest.mark.deep
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_of_a_head_are_counted(trainers, heads, equal_samples, recompute):
    """Within 10 % with the rest of the model, and what the head adds within 20 %."""
    layout, added = Layout(recompute=recompute), []
    for choice in ("train", "drop"):
        shape = PolicyConfig(multi_token=choice).adapted(read_shape(heads["glm4_moe"]))
        given = dict(folder=heads["glm4_moe"], samples=equal_samples, layout=layout, multi_token=choice)
        ((saved, num_tokens),) = trainers.run("memory_scenarios.saved_activations", 1, fresh=True, **given)
        estimate = activations(
            shape, ParallelConfig(), 0, num_tokens, width=4, recomputed={recompute} - {"none"}, fused=False
        ).kept
        assert estimate == pytest.approx(saved, rel=0.1)
        added.append((estimate, saved))
    (estimate, saved), (less, less_saved) = added
    assert estimate - less == pytest.approx(saved - less_saved, rel=0.2)


@pytest.mark.deep
def test_checkpoint_and_exports_have_the_trained_head(trainers, heads, long_samples, tmp_path):
    layout, checkpoint = Layout(Mesh(pipeline=2)), tmp_path / folder_name(0)
    arguments = dict(folder=heads["glm4_moe"], samples=long_samples, layout=layout)
    trainers.run("multi_token_scenarios.train_and_save", 2, **arguments, checkpoint=checkpoint, target=tmp_path / "hf")
    begun, trained = load_file(heads["glm4_moe"] / "model.safetensors"), load_file(tmp_path / "hf/model.safetensors")
    assert trained.keys() == begun.keys()
    frozen = {name for name in begun if torch.equal(begun[name], trained[name])}
    assert {name.rpartition(".")[2] for name in frozen} <= {"e_score_correction_bias"}
    assert all(torch.equal(trained[copy], trained[name]) for copy, name in COPIES.items())
    assert json.loads((tmp_path / "hf/config.json").read_text())["num_nextn_predict_layers"] == 1

    def same(folder: Path, prefix: str = "") -> None:
        """But the tensors that begin with the prefix."""
        names, found = (
            {one for one in trained if not (prefix and one.startswith(prefix))},
            load_file(folder / "model.safetensors"),
        )
        assert found.keys() == names and all(torch.equal(found[name], trained[name]) for name in names)

    assert export_checkpoint.main([str(checkpoint), str(tmp_path / "saved")]) == 0
    same(tmp_path / "saved")
    for folder, against in (("saved", checkpoint), (checkpoint, "saved"), (checkpoint, "hf")):
        assert verify_checkpoint.main([str(tmp_path / folder), "--against", str(tmp_path / against)]) == 0
    assert megatron_to_hf.main([str(checkpoint), str(tmp_path / "dropped"), "--multi-token", "drop"]) == 0
    same(tmp_path / "dropped", LAST)
    assert json.loads((tmp_path / "dropped/config.json").read_text())["num_nextn_predict_layers"] == 0
    # Another mesh resumes it, and a conversion begins a run.
    one = dict(folder=heads["glm4_moe"], layout=Layout(), multi_token="train")
    trainers.run("export", 1, target=tmp_path / "resumed", checkpoint=checkpoint, **one)
    same(tmp_path / "resumed")
    for number, source in enumerate((tmp_path / "saved", checkpoint)):
        if source != checkpoint:
            source = tmp_path / "converted"
            assert hf_to_megatron.main([str(tmp_path / "saved"), str(source)]) == 0
        trainers.run("export", 1, target=tmp_path / f"begun{number}", weights=source, **one)
        same(tmp_path / f"begun{number}")


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_gradient_of_the_multi_token_head_that_is_no_number_changes_no_weight(trainers, heads, long_samples, dtype):
    """In float16 four smaller scales are tried first."""
    scales = MegatronConfig(optimizer={"initial_loss_scale": 2.0**10, "min_loss_scale": 2.0})
    layout = Layout(dtype=dtype, megatron=scales)
    arguments = dict(folder=heads["deepseek_v3"], samples=long_samples, layout=layout)
    [(error, changed)] = trainers.run("float16_scenarios.refused_head", 1, **arguments)
    assert error != "no error" and not changed


@pytest.mark.deep
def test_a_stage_without_adapters_has_no_gradient_to_scale(trainers, heads, long_samples):
    """Of Qwen3-Next's four layers only the last one has q_proj and v_proj."""
    scales = MegatronConfig(optimizer={"initial_loss_scale": 2.0**8})
    layout = Layout(Mesh(pipeline=4), dtype="float16", megatron=scales)
    lora = LoraConfig(rank=3, alpha=7, targets=("q_proj", "v_proj"))
    arguments = dict(folder=heads["qwen3_next"], samples=long_samples, layout=layout, lora=lora, steps=(1,))
    for metrics, _, _, made in trainers.run("float16_scenarios.updates", 4, **arguments):
        assert made == 1 and metrics[0]["grad_norm"] > 0
