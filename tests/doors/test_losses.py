"""The tokens and the losses of TRL's trainers against ours, within 1e-5, and the gradients of a tiny model."""

from __future__ import annotations

import json
import warnings

import pytest
import real  # noqa: F401  # skips
import torch
import trl
from datasets import Dataset
from given import model, scorer, tokenizer
from pydantic import TypeAdapter
from torch.nn.utils.rnn import pad_sequence
from trl.experimental import cpo, gkd, orpo

import megatron_rl.trl
from megatron_rl.algorithms.distillation import divergence
from megatron_rl.algorithms.preferences import answer_loss, likelihood_loss, pair_loss
from megatron_rl.config.preferences import (
    BradleyTerryLoss,
    CpoLoss,
    DpoLoss,
    IpoLoss,
    KtoLoss,
    OrpoLoss,
    PreferenceLoss,
    SimpoLoss,
)
from megatron_rl.data.preferences import load_preferences
from megatron_rl.data.scored_texts import scored_reader
from megatron_rl.data.supervised import demonstration_reader
from megatron_rl.trl import GKDConfig, RewardConfig, SFTConfig
from megatron_rl.trl.distillation import form, prompts_of
from megatron_rl.trl.offline import OfflineRows, loss_of

TURNS = "{% for m in messages %}({{ m.role }}) {{ m.content }}<|endoftext|>\n{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}(assistant) {% endif %}"
PAIRS = [
    {"prompt": "What is 2 plus 3?", "chosen": " It is 5.", "rejected": " No idea, ask somebody else."},
    {"prompt": "Name a colour.", "chosen": " Red, of course", "rejected": " 7"},
    {"prompt": "One and one", "chosen": " are two", "rejected": " are eleven or so"},
]
LABELLED = [
    {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
    for row, name in zip([*PAIRS, PAIRS[0]], ("chosen", "rejected", "rejected", "chosen"), strict=True)
]
LABELLED[3]["prompt"] = "What is 1 plus 4?"
CONFIGS = {
    "dpo": (DpoLoss(beta=0.3), trl.DPOTrainer, trl.DPOConfig, {"beta": 0.3}),
    "ipo": (IpoLoss(beta=0.3), trl.DPOTrainer, trl.DPOConfig, {"beta": 0.3, "loss_type": ["ipo"]}),
    "simpo": (
        SimpoLoss(beta=1.5, gamma=0.7),
        cpo.CPOTrainer,
        cpo.CPOConfig,
        {"beta": 1.5, "simpo_gamma": 0.7, "loss_type": "simpo", "cpo_alpha": 0.0},
    ),
    "cpo-simpo": (
        SimpoLoss(beta=1.5, gamma=0.5, alpha=0.3),
        cpo.CPOTrainer,
        cpo.CPOConfig,
        {"beta": 1.5, "loss_type": "simpo", "cpo_alpha": 0.3},
    ),
    "cpo": (CpoLoss(label_smoothing=0.2), cpo.CPOTrainer, cpo.CPOConfig, {"label_smoothing": 0.2}),
    "orpo": (OrpoLoss(beta=0.6), orpo.ORPOTrainer, orpo.ORPOConfig, {"beta": 0.6}),
    "kto": (
        KtoLoss(beta=0.4, desirable_weight=1.3, undesirable_weight=0.8),
        trl.KTOTrainer,
        trl.KTOConfig,
        {"beta": 0.4, "desirable_weight": 1.3, "undesirable_weight": 0.8},
    ),
}
PLAIN = {"report_to": "none", "bf16": False, "use_cpu": True, "gradient_checkpointing": False, "max_length": 256}


def logp_of(network, samples) -> torch.Tensor:
    """float64 [S]: the log-prob of the actions of each sample."""
    ids = pad_sequence([torch.from_numpy(one.ids).long() for one in samples], True)
    mask = pad_sequence([torch.from_numpy(one.action_mask) for one in samples], True)
    logp = network(ids).logits[:, :-1].double().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return (logp * mask[:, 1:]).sum(1)


def moved(network):
    """The same model with other weights, so that the policy is no longer the reference."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.03)
    return network


def ours(cfg, network, reference, rows, made, write) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and the numbers of the first answers."""
    read = demonstration_reader(made, 256, ("<|endoftext|>",), section="dpo")
    taken, _ = load_preferences(write(rows), lambda row: read(row)[0], cfg, 256)
    samples = [sample for row in taken for sample in row.samples]
    number = logp_of(network, samples)
    if cfg.has_reference:
        number = number - logp_of(reference, samples).detach()
    if cfg.is_mean:
        number = number / torch.tensor([sample.action_mask.sum() for sample in samples])
    first, second = number.view(-1, 2).unbind(1)
    if isinstance(cfg, KtoLoss):
        label = torch.tensor([row.labels[0] for row in taken])
        loss = answer_loss(cfg, first, second.mean().clamp(min=0).detach(), label).mean()
    else:
        size = torch.tensor([row.samples[0].action_mask.sum() for row in taken])
        loss = (pair_loss(cfg, first, second) + likelihood_loss(cfg, first, size)).mean()
    return loss, first


@pytest.fixture
def write(tmp_path):
    def write(rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.mark.parametrize("name", CONFIGS)
def test_a_loss_and_its_gradient_are_those_of_trl(name, models, tmp_path, monkeypatch, write):
    monkeypatch.chdir(models)
    cfg, trainer_of, config_of, values = CONFIGS[name]
    # TRL gives each prompt the answer of the row before for z, and we give it the one of the next row.
    rows, theirs = (LABELLED, LABELLED[::-1]) if name == "kto" else (PAIRS, PAIRS)
    made = tokenizer()()
    args = config_of(str(tmp_path), per_device_train_batch_size=len(rows), **PLAIN, **values)
    own = getattr(megatron_rl.trl, config_of.__name__)(str(tmp_path), **values)
    assert TypeAdapter(PreferenceLoss).validate_python(loss_of(own)) == cfg
    others = {"ref_model": model()()} if cfg.has_reference else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = Dataset.from_list(theirs)
        trainer = trainer_of(model=model()(), args=args, train_dataset=given, processing_class=made, **others)
    policy, reference = moved(trainer.model), model()()
    policy.eval()
    # TRL's term of CPO is the mean over the tokens of a batch, and ours over those of each answer.
    parts = [[row] for row in trainer.train_dataset] if name.startswith("cpo") else [list(trainer.train_dataset)]
    batches = [trainer.data_collator(part) for part in parts]
    expected = torch.stack([trainer.compute_loss(policy, batch) for batch in batches]).mean()
    if name == "orpo":  # TRL's first term is the mean over all tokens of prompts and chosen answers
        _, metrics = trainer.get_batch_loss_metrics(policy, batches[0])
        expected = expected - metrics["nll_loss"]
    expected.backward()
    gradient = {key: weight.grad.clone() for key, weight in policy.named_parameters()}
    policy.zero_grad()
    loss, chosen = ours(cfg, policy, reference, rows, made, write)
    if name == "orpo":
        loss = loss + chosen.mean()
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        return  # its gradient has the first term
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5) and loss.item() != 0
    loss.backward()
    for key, weight in policy.named_parameters():
        assert (weight.grad - gradient[key]).abs().max() < 1e-5, key


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("form", ["texts", "whole texts", "chats"])
@pytest.mark.parametrize("center", [None, 0.05], ids=["plain", "center"])
@pytest.mark.parametrize("margins", [None, (0.5, 0.0, -1.25)], ids=["no margin", "margin"])
def test_the_loss_of_a_reward_model_and_its_gradient_are_those_of_trl(
    form, center, margins, models, tmp_path, monkeypatch, write
):
    monkeypatch.chdir(models)
    rows = [dict(row) for row in PAIRS]
    if form == "chats":
        rows = [
            {"prompt": asked(r["prompt"]), "chosen": said(r["chosen"]), "rejected": said(r["rejected"])} for r in PAIRS
        ]
    if form == "whole texts":
        rows = [{name: r["prompt"] + r[name] for name in ("chosen", "rejected")} for r in PAIRS]
    if margins is not None:
        rows = [row | {"margin": margin} for row, margin in zip(rows, margins, strict=True)]
    made = tokenizer(template=TEMPLATE)()
    given = PLAIN | {"per_device_train_batch_size": len(rows), "center_rewards_coefficient": center}
    args, own = trl.RewardConfig(str(tmp_path), **given), RewardConfig(str(tmp_path), **given)
    trainer = trl.RewardTrainer(scorer("scorer")(), args, train_dataset=Dataset.from_list(rows), processing_class=made)
    network = moved(trainer.model).eval()
    expected = trainer.compute_loss(network, trainer.data_collator(list(trainer.train_dataset)))
    expected.backward()
    gradient = {key: weight.grad.clone() for key, weight in network.named_parameters()}
    network.zero_grad()

    cfg = BradleyTerryLoss(center=center or 0.0)
    prepared = OfflineRows("reward_model", own, made).prepared(rows)
    taken, _ = load_preferences(write(prepared), scored_reader(made, made.pad_token_id, 256), cfg, 256)
    theirs = [row[name] for row in trainer.train_dataset for name in ("chosen_ids", "rejected_ids")]
    assert [one.ids.tolist() for row in taken for one in row.samples] == theirs
    scores = [network(torch.from_numpy(one.ids).long()[None]).logits[0, 0] for row in taken for one in row.samples]
    chosen, rejected = torch.stack(scores).view(-1, 2).unbind(1)
    # The objective has the margins of rows in the place of a reference's log-probs.
    least = torch.tensor([row.logp_reference[0] for row in taken])
    assert least.tolist() == list(margins or (0.0, 0.0, 0.0))
    loss = pair_loss(cfg, chosen, rejected, least).mean()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5) and loss.item() != 0
    loss.backward()
    for key, weight in network.named_parameters():
        assert (weight.grad - gradient[key]).abs().max() < 1e-5, key
    assert max(one.abs().max() for one in gradient.values()) > 1e-3, "the bound is small beside the gradient"


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_divergence_over_the_whole_vocabulary_and_its_gradient_are_those_of_trl(beta, models, tmp_path, monkeypatch):
    monkeypatch.chdir(models)
    rows = [{"messages": asked(row["prompt"]) + said(row["chosen"])} for row in PAIRS]
    made = tokenizer(template=TEMPLATE)()
    own = GKDConfig(str(tmp_path), beta=beta, lmbda=1.0, temperature=1.0)
    args = gkd.GKDConfig(str(tmp_path), beta=beta, **PLAIN)
    given = Dataset.from_list(rows)
    trainer = gkd.GKDTrainer(model()(), moved(model()()), args, train_dataset=given, processing_class=made)
    policy, batch = trainer.model.eval(), trainer.data_collator(rows)
    expected = trainer.compute_loss(policy, batch)
    expected.backward()
    gradient = {key: weight.grad.clone() for key, weight in policy.named_parameters()}
    policy.zero_grad()

    told = [made.apply_chat_template(row["prompt"], add_generation_prompt=True) for row in prompts_of(rows)]
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    for row, prompt, kept, label in zip(ids, told, mask, batch["labels"], strict=True):
        assert row[kept & (label == -100)].tolist() == prompt["input_ids"], "the student answers TRL's prompts"
    logp = [
        one(ids, attention_mask=mask).logits[:, :-1].double().log_softmax(-1) for one in (policy, trainer.teacher_model)
    ]
    student, teacher = (one[batch["labels"][:, 1:] != -100] for one in logp)
    loss = divergence(student, teacher.detach(), form(own)).mean()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5) and loss.item() > 0.01
    loss.backward()
    for key, weight in policy.named_parameters():
        assert (weight.grad - gradient[key]).abs().max() < 1e-5, key
    assert max(one.abs().max() for one in gradient.values()) > 1e-3, "the bound is small beside the gradient"


ROWS = {
    "text": [{"text": "Once upon a time"}, {"text": "there was a king."}],
    "pair": [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS],
    "chat": [
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "good day"},
                {"role": "user", "content": "and now?"},
                {"role": "assistant", "content": "bye"},
            ]
        },
        {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2 or 3"}]},
    ],
}


@pytest.mark.parametrize(
    ("rows", "values"),
    [
        ("text", {}),
        ("pair", {}),
        ("pair", {"completion_only_loss": False}),
        ("chat", {}),
        ("chat", {"max_length": 20}),
        ("pair", {"max_length": 20}),
    ],
    ids=str,
)
def test_tokens_and_losses_of_supervised_rows_are_those_of_trl(rows, values, models, tmp_path, monkeypatch):
    monkeypatch.chdir(models)
    made = tokenizer(template=TEMPLATE)()
    given = PLAIN | values
    args = trl.SFTConfig(str(tmp_path), **given)
    trainer = trl.SFTTrainer(model()(), args, train_dataset=Dataset.from_list(ROWS[rows]), processing_class=made)
    theirs = [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]
    form = OfflineRows("sft", SFTConfig(str(tmp_path), **given), made)
    prepared = list(form.prepared(ROWS[rows]))
    turns = form.turns(prepared[0])
    read = demonstration_reader(made, given["max_length"], ("<|endoftext|>",), turns, is_cut=True)
    samples = [read(row)[0] for row in prepared]
    labels = [[i if t else -100 for i, t in zip(s.ids.tolist(), s.action_mask, strict=True)] for s in samples]
    for (ids, wanted), own, label in zip(theirs, samples, labels, strict=True):
        assert own.ids.tolist() == ids
        assert label[1:] == wanted[1:], "the first token has nothing before it"
    batch = trainer.data_collator(list(trainer.train_dataset))
    expected = trainer.compute_loss(trainer.model.eval(), batch)
    loss = -logp_of(trainer.model, samples).sum() / sum(sample.action_mask.sum() for sample in samples)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


def test_the_first_token_of_a_tokenizer_is_before_plain_text(models, monkeypatch, tmp_path):
    monkeypatch.chdir(models)
    from tokenizers.processors import TemplateProcessing

    made = tokenizer()()
    made.bos_token = "<|endoftext|>"
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", made.bos_token_id)]
    )
    assert made("x")["input_ids"][0] == made.bos_token_id
    form = OfflineRows("sft", SFTConfig(str(tmp_path)), made)
    read = demonstration_reader(made, 99, (), "whole")
    for row in (*ROWS["text"], *ROWS["pair"]):
        [prepared] = form.prepared([row])
        text = row.get("text") or row["prompt"] + row["completion"]
        assert read(prepared)[0].ids.tolist() == [*made(text)["input_ids"], made.eos_token_id]
    assert form.prepared(ROWS["chat"]) == ROWS["chat"], "chat templates write it themselves"
