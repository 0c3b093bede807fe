"""Losses of preferences on real ranks: in every layout the updates are those of one rank, and the first one's loss and
gradient those of transformers, one answer at a time."""

from __future__ import annotations

import cover
import numpy as np
import pytest
import torch
from scenarios import Layout
from shares import TrainSample

from megatron_rl.algorithms.preferences import answer_loss, likelihood_loss, pair_loss
from megatron_rl.config.policy import LoraConfig
from megatron_rl.config.preferences import BradleyTerryLoss, DpoLoss, IpoLoss, KtoLoss, OrpoLoss, SimpoLoss
from megatron_rl.types import Mesh, Tokens

LOSSES = {
    "dpo": DpoLoss(beta=0.3),
    "ipo": IpoLoss(beta=0.3),
    "simpo": SimpoLoss(alpha=0.5),
    "orpo": OrpoLoss(beta=0.5),
    "kto": KtoLoss(beta=0.3, undesirable_weight=0.7),
    "bradley_terry": BradleyTerryLoss(center=0.1),
}
NUM_ROWS = 5
RELATIVE = (1e-5, 2e-5, 1e-4)
"""See RELATIVE_OF_UPDATE in test_actor_layouts.py."""


@pytest.fixture(scope="module")
def classifier_folder(model_folder, tmp_path_factory):
    """The model with a head for one score, as transformers saves it."""
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(model_folder, dtype=torch.float32, num_labels=1)
    model.score.weight.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def pairs() -> tuple[list[TrainSample], list[float]]:
    """Answers 2 i and 2 i + 1 to the same prompt, and their log-probs under a reference."""
    rng, samples, references = np.random.default_rng(3), [], []
    for i in range(NUM_ROWS):
        prompt = rng.integers(1, 60, int(rng.integers(2, 20)))
        for label in (1.0, -1.0):
            ids = np.concatenate([prompt, rng.integers(1, 60, int(rng.integers(1, 9)))]).astype(np.int32)
            mask, zeros = np.arange(len(ids)) >= len(prompt), np.zeros(len(ids), np.float32)
            tokens = Tokens(ids, mask, zeros, np.full(len(ids), -1, np.int32))
            samples.append(TrainSample(f"pair {i}, {label}", tokens, label, 1.0, len(samples)))
            references.append(-4.2 * float(mask.sum()) + float(rng.normal()))
    return samples, references


def labelled(samples, loss):
    """KTO's second answers only count for z."""
    if loss.has_pairs:
        return samples
    labels = [1.0, 0.0, -1.0, 0.0] * NUM_ROWS
    return [TrainSample(s.name, s.tokens, label, 1.0, s.index) for s, label in zip(samples, labels, strict=False)]


def of_transformers(folder, samples, references, loss) -> tuple[float, float]:
    """(loss, norm of its gradient), in float64."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if loss.has_head else AutoModelForCausalLM
    model, numbers = kind.from_pretrained(folder, dtype=torch.float64), []
    for sample, reference in zip(samples, references, strict=True):
        ids, mask = torch.from_numpy(sample.tokens.ids).long(), torch.from_numpy(sample.tokens.action_mask)
        if loss.has_head:
            numbers.append(model(ids[None]).logits[0, 0])
            continue
        logp_LV = model(ids[None]).logits[0].log_softmax(-1)
        logp = logp_LV[:-1].gather(1, ids[1:, None])[:, 0][mask[1:]].sum()
        number = logp - (reference if loss.has_reference else 0.0)
        numbers.append(number / mask.sum() if loss.is_mean else number)
    first, second = torch.stack(numbers).view(-1, 2).unbind(1)
    if loss.has_head:  # as in TRL's RewardTrainer
        value = -torch.nn.functional.logsigmoid(first - second - torch.tensor(references[::2])).mean()
        value += loss.center * torch.mean((first + second) ** 2)
    elif loss.has_pairs:
        value = (pair_loss(loss, first, second) + likelihood_loss(loss, first, torch.ones(()))).mean()
    else:
        labels = torch.tensor([sample.advantage for sample in samples[0::2]])
        value = answer_loss(loss, first, second.detach().mean().clamp(min=0), labels).mean()
    value.backward()
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    return value.item(), torch.stack(squares).sum().sqrt().item()


def updates_of(trainers, folder, pairs, layout: Layout, loss, **settings):
    samples, references = pairs
    if loss.has_head:
        references = margins(references)
    results = trainers.run(
        "preference_scenarios.train",
        layout.mesh.world_size,
        folder=folder,
        samples=labelled(samples, loss),
        layout=layout,
        loss=loss,
        logp_reference=references if loss.has_reference or loss.has_head else [0.0] * len(references),
        **settings,
    )
    assert all(one == results[0] for one in results)
    return results[0]


def margins(references):
    """The margin of each pair, at both answers."""
    return [0.1 * abs(references[i // 2 * 2]) for i in range(len(references))]


@pytest.fixture
def folder_of(model_folder, classifier_folder):
    return lambda loss: classifier_folder if loss.has_head else model_folder


@pytest.mark.parametrize("name", cover.essential([*LOSSES], "dpo", "bradley_terry"))
def test_the_first_update_is_that_of_transformers(trainers, folder_of, pairs, name):
    loss = LOSSES[name]
    folder, references = folder_of(loss), margins(pairs[1]) if loss.has_head else pairs[1]
    expected, norm = of_transformers(folder, labelled(pairs[0], loss), references, loss)
    first, *later = updates_of(trainers, folder, pairs, Layout(num_microbatches=3), loss)
    assert first["loss"] == pytest.approx(expected, rel=1e-5) and first["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert later[-1]["loss"] != first["loss"]


LAYOUTS = {
    "cp2_dp2_empty_microbatch": Layout(Mesh(context=2, data=2), num_microbatches=2),
    "tp2_pp2": Layout(Mesh(tensor=2, pipeline=2), num_microbatches=3),
    "pp2_vpp2_dp2": Layout(Mesh(pipeline=2, virtual=2, data=2), num_microbatches=2),
    "tp2_dp2": Layout(Mesh(tensor=2, data=2), num_microbatches=2),
}
CASES = [(layout, name, adapted) for layout in LAYOUTS for name in LOSSES for adapted in (False, True)]


@pytest.mark.parametrize(
    ("layout", "name", "adapted"),
    cover.essential(CASES, ("cp2_dp2_empty_microbatch", "dpo", False), ("tp2_pp2", "bradley_terry", False)),
    ids=str,
)
def test_updates_do_not_depend_on_the_layout(trainers, folder_of, pairs, layout, name, adapted):
    settings = {"lora": LoraConfig(rank=4)} if adapted else {}
    folder = folder_of(LOSSES[name])
    one = updates_of(trainers, folder, pairs, Layout(), LOSSES[name], **settings)
    many = updates_of(trainers, folder, pairs, LAYOUTS[layout], LOSSES[name], **settings)
    for found, expected, relative in zip(many, one, RELATIVE, strict=True):
        for key in ("loss", "grad_norm", "update_ratio"):
            assert found[key] == pytest.approx(expected[key], rel=relative), key
        assert found["preference/accuracy"] == pytest.approx(expected["preference/accuracy"], abs=1e-6)


@pytest.mark.parametrize("layout", cover.essential([*LAYOUTS], "cp2_dp2_empty_microbatch"))
def test_an_exported_reward_model_gives_transformers_the_same_scores(trainers, model_folder, pairs, layout, tmp_path):
    from transformers import AutoModelForSequenceClassification

    samples, references = pairs
    found = trainers.run(
        "preference_scenarios.train",
        LAYOUTS[layout].mesh.world_size,
        folder=model_folder,  # a language model, so that the head begins with zeros
        samples=samples,
        layout=LAYOUTS[layout],
        loss=LOSSES["bradley_terry"],
        logp_reference=margins(references),
        export=tmp_path / "hf",
    )
    own = {index: score for _, scores in found for index, score in scores.items()}
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    assert model.num_labels == 1
    model.config.pad_token_id = 0  # this model has neither a tokenizer nor an end of sequence
    longest = max(len(sample.tokens.ids) for sample in samples)
    rows = [np.pad(s.tokens.ids, (0, longest - len(s.tokens.ids))) for s in samples]
    mask = torch.tensor([[i < len(s.tokens.ids) for i in range(longest)] for s in samples]).long()
    with torch.no_grad():
        scores = model(torch.from_numpy(np.stack(rows)).long(), attention_mask=mask).logits[:, 0]
    assert [own[s.index] for s in samples] == pytest.approx(scores.tolist(), abs=1e-5)
    assert scores.abs().min() > 1e-4, "the head has learnt"
