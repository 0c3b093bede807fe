"""A frozen teacher on the policy's ranks: every form against dense float64 distributions, in every layout."""

from __future__ import annotations

from dataclasses import replace

import cover
import numpy as np
import pytest
import torch
from scenarios import OPTIMIZER, TEMPERATURE
from sizes import VOCAB_SIZE
from teacher_scenarios import weight_of
from test_actor_layouts import LAYOUTS, learning_rate

from megatron_rl.config.algorithm import AlgorithmConfig

FORMS = {
    "sampled": {"form": "sampled"},
    "forward": {"form": "forward", "top_k": 5},
    "reverse": {"form": "reverse", "top_k": 5},
    "jensen_shannon": {"form": "jensen_shannon", "top_k": 3, "support": "teacher"},
    "everything": {"form": "reverse", "top_k": VOCAB_SIZE},
}
CHOSEN = ("tp4_two_kv_heads", "tp2_pp2_vpp2", "cp2_dp2_empty_microbatch", "tp2_cp2", "pp2_dp2_empty_microbatch")
CASES = [(form, layout) for form in FORMS for layout in CHOSEN]
ESSENTIAL = [("reverse", "tp2_cp2"), ("sampled", "cp2_dp2_empty_microbatch")]


def algorithm_of(form: str) -> AlgorithmConfig:
    loss = {"by": "trainer", **FORMS[form]}
    return AlgorithmConfig(distillation=loss, epochs=2, reshuffle=False, correction=None)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    """Of another family and size, with the policy's vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(4)
    sizes = {"hidden_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, intermediate_size=64, vocab_size=VOCAB_SIZE, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def compared(form: str, s_TV: torch.Tensor, t_TV: torch.Tensor) -> torch.Tensor:
    """The divergence of each token over the support and all other tokens together, from whole distributions."""
    case = FORMS[form]
    follows = case.get("support", "teacher" if form == "forward" else "student")
    support_TK = (t_TV if follows == "teacher" else s_TV).detach().topk(case["top_k"]).indices

    def binned(p_TV: torch.Tensor) -> torch.Tensor:
        p_TK = p_TV.gather(1, support_TK)
        rest_T1 = 1 - p_TK.sum(1, keepdim=True)
        return p_TK if case["top_k"] == VOCAB_SIZE else torch.cat([p_TK, rest_T1], 1)

    s_TK, t_TK = binned(s_TV), binned(t_TV)

    def kl(a_TK: torch.Tensor, b_TK: torch.Tensor) -> torch.Tensor:
        return (a_TK * (a_TK / b_TK).log()).sum(1)

    middle_TK = (s_TK + t_TK) / 2
    by_form = {"forward": (t_TK, s_TK), "reverse": (s_TK, t_TK)}
    if form == "jensen_shannon":
        return (kl(s_TK, middle_TK) + kl(t_TK, middle_TK)) / 2
    return kl(*by_form[case["form"]])


def dense(folder, teacher_folder, samples, form: str, of_teacher=torch.float64):
    """(loss, gradient norm, mean divergence of scored tokens, their share) of the first update, in float64. The teacher
    may have another type: transformers' experts have no kernels for float64."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    teacher = AutoModelForCausalLM.from_pretrained(teacher_folder, dtype=of_teacher)
    num_tokens = sum(int(s.tokens.action_mask.sum()) for s in samples)
    loss, total, scored = torch.zeros((), dtype=torch.float64), 0.0, 0
    for sample in samples:
        ids = torch.from_numpy(sample.tokens.ids.astype(np.int64))
        mask = torch.from_numpy(sample.tokens.action_mask[1:])
        weight = weight_of(sample.index)
        s_TV = (policy(ids[None]).logits[0, :-1] / TEMPERATURE).softmax(-1)[mask]
        with torch.no_grad():
            t_TV = (teacher(ids[None]).logits[0, :-1].double() / TEMPERATURE).softmax(-1)[mask]
        target = ids[1:][mask][:, None]
        log_s, log_t = (x.gather(1, target)[:, 0].log() for x in (s_TV, t_TV))
        advantage_T = torch.full_like(log_s, sample.advantage)
        if form == "sampled":
            kl_T = (log_s - log_t).detach()
            advantage_T = advantage_T - weight * kl_T
        else:
            kl_T = compared(form, s_TV, t_TV)
            loss = loss + weight * kl_T.sum() / num_tokens
        loss = loss - (advantage_T * (log_s - log_s.detach()).exp()).sum() / num_tokens
        if weight:
            total, scored = total + kl_T.sum().item(), scored + len(kl_T)
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in policy.parameters() if p.grad is not None]).sum().sqrt()
    return loss.item(), norm.item(), total / scored, scored / num_tokens


@pytest.fixture(scope="module")
def references(model_folder, teacher_folder, samples):
    found: dict = {}

    def of(form: str):
        if form not in found:
            found[form] = dense(model_folder, teacher_folder, samples, form)
        return found[form]

    return of


@pytest.fixture(scope="module")
def one_process(trainers, model_folder, teacher_folder, samples):
    """The metrics of the second epoch."""
    found: dict = {}

    def of(form: str):
        if form not in found:
            folders = {"folder": model_folder, "teacher": teacher_folder}
            given = {"samples": samples, "layout": LAYOUTS["one"], "algorithm": algorithm_of(form)}
            [told] = trainers.run("teacher_scenarios.learn", 1, **folders, **given)
            found[form] = told[1]
        return found[form]

    return of


@pytest.mark.parametrize(("form", "name"), cover.essential(CASES, *ESSENTIAL))
def test_every_form_in_every_layout(
    trainers, model_folder, teacher_folder, samples, references, one_process, form, name
):
    layout = LAYOUTS[name]
    folders = {"folder": model_folder, "teacher": teacher_folder}
    given = {"samples": samples, "layout": layout, "algorithm": algorithm_of(form)}
    results = trainers.run("teacher_scenarios.learn", layout.mesh.world_size, **folders, **given)
    first, second = results[0]
    assert all(told == [first, second] for told in results), "every rank reports the same bits"
    loss, norm, kl, scored = references(form)
    assert first["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert first["teacher/kl"] == pytest.approx(kl, rel=1e-5)
    assert first["teacher/scored"] == pytest.approx(scored, rel=1e-6)
    assert first["lr"] == pytest.approx(learning_rate(1)) and OPTIMIZER.clip_grad < norm
    for metric in ("loss", "grad_norm", "teacher/kl"):  # the columns that the first epoch has left
        assert second[metric] == pytest.approx(one_process(form)[metric], rel=2e-5, abs=1e-6), metric


@pytest.mark.parametrize("form", FORMS)
def test_a_teacher_that_is_the_policy_gives_a_gradient_of_exactly_zero(trainers, model_folder, samples, form):
    layout, alone = LAYOUTS["tp2_no_sequence"], [replace(sample, advantage=0.0) for sample in samples]
    folders = {"folder": model_folder, "teacher": model_folder}
    given = {"samples": alone, "layout": layout, "algorithm": algorithm_of(form)}
    results = trainers.run("teacher_scenarios.learn", layout.mesh.world_size, **folders, **given)
    first, _ = results[0]
    assert first["grad_norm"] == 0.0 and first["teacher/kl"] == 0.0


@pytest.mark.deep
def test_a_teacher_with_experts(trainers, model_folder, samples, tmp_path):
    """Which the policy lacks."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**sizes, **experts, head_dim=16, vocab_size=VOCAB_SIZE, initializer_range=0.2)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    given = {"samples": samples, "layout": LAYOUTS["tp2"], "algorithm": algorithm_of("sampled")}
    [(first, _), _] = trainers.run("teacher_scenarios.learn", 2, folder=model_folder, teacher=tmp_path, **given)
    loss, norm, kl, _ = dense(model_folder, tmp_path, samples, "sampled", torch.float32)
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert first["teacher/kl"] == pytest.approx(kl, rel=1e-5) and first["loss"] == pytest.approx(loss, abs=1e-6)
