"""Reward models in a process of the run: their scores are those of transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny_chat
import torch
from answering import answered

from megatron_rl.cluster.reward_model import RewardModel
from megatron_rl.config.rewards import RewardModelReward
from megatron_rl.types import Prompt

CHAT = ({"role": "user", "content": "hi there"},)


class Letters:
    """The policy's tokens: token i is the character with this code."""

    def decode(self, ids, *, skip_special_tokens):
        return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

    folder = tmp_path_factory.mktemp("reward_model")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_chat.characters(), eos_token="<end>", pad_token="<turn>")
    tokenizer.chat_template = tiny_chat.KEEPS
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "intermediate_size": 64, "vocab_size": len(tokenizer), "max_position_embeddings": 64}
    model = Qwen3ForSequenceClassification(Qwen3Config(**sizes, num_labels=1, pad_token_id=tokenizer.pad_token_id))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def score(folder):
    def score(*answers, **keys):
        cfg = RewardModelReward(**{"path": folder, "unfinished_score": -9, **keys})
        return RewardModel(cfg, Letters(), "</think>").score(answers)

    return score


def answer(text, question=CHAT, finish="stop", columns=None):
    return answered(Prompt("rows.jsonl:7", (1,), question, columns or {}), [*map(ord, text)], finish)


def of_transformers(folder, text):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits.item()


def test_scores_of_a_batch_are_those_of_transformers(folder, score):
    from transformers import AutoTokenizer

    chat, text = answer("so</think>good day"), answer("so</think>good", "hi ")
    same_prompt = replace(chat, response_ids=[*map(ord, "</think>a much longer answer")])
    found = score(chat, same_prompt, text)
    write = AutoTokenizer.from_pretrained(folder).apply_chat_template
    turns = [[*CHAT, {"role": "assistant", "content": text}] for text in ("good day", "a much longer answer")]
    texts = [*(write(one, tokenize=False) for one in turns), "hi good<end>"]
    expected = [of_transformers(folder, text) for text in texts]
    assert [verdict.score for verdict in found] == pytest.approx(expected, abs=1e-5)
    assert len({round(one, 4) for one in expected}) == 3, "each score is its own"


def test_the_bits_of_a_score_do_not_depend_on_other_prompts(score):
    first = [answer("</think>" + "ab" * n) for n in (1, 9)]
    first[1] = replace(first[1], prompt=first[0].prompt)
    others = [answer("</think>" + "c" * n, question=f"{n}") for n in range(1, 30)]
    alone = [verdict.score for verdict in score(*first)]
    assert [verdict.score for verdict in score(*others, *first, *others)][29:31] == alone


def test_an_answer_without_an_end_has_the_score_of_the_configuration(score):
    found = score(answer("no delimiter"), answer("so</think>cut", finish="length"), answer("</think>"))
    assert [verdict.score for verdict in found[:2]] == [-9, -9]
    assert found[2].score not in (None, -9), "an empty text is scored, too"


def test_what_cannot_be_scored_has_failed_and_touches_no_other_answer(score):
    found = score(answer("</think>" + "x" * 99), answer("</think>good"))
    assert found[0].failed and found[0].score is None and "64 positions" in found[0].reason
    assert found[1].score is not None
    clamped, squashed = score(answer("</think>good"), clamp=(5, 6)), score(answer("</think>good"), activation="sigmoid")
    assert clamped[0].score == 5 and 0 < squashed[0].score < 1


def test_a_model_with_several_classes_is_refused(folder, tmp_path, score):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, ignore_mismatched_sizes=True)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="3 classes"):
        score(answer("x"), path=tmp_path)
