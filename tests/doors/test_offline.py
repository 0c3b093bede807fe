"""TRL's own scripts for SFT, DPO and reward models with the import changed, and the arguments of public scripts, as dry
runs; and the ends of turns by chat templates of real families, which TRL's package has."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import real  # noqa: F401  # skips
import trl
from datasets import Dataset
from given import lora, model, scorer, tokenizer, wrapped
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.experimental import gkd, orpo
from trl.scripts import dpo as dpo_script
from trl.scripts import kto as kto_script
from trl.scripts import reward as reward_script
from trl.scripts import sft as sft_script

import megatron_rl.trl
from megatron_rl.data import load_supervised
from megatron_rl.trl import (
    CPOConfig,
    CPOTrainer,
    DPOConfig,
    DPOTrainer,
    GKDConfig,
    GKDTrainer,
    ORPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

USER, ANSWER = {"role": "user", "content": "hi there"}, {"role": "assistant", "content": "good day"}
THOUGHT = ANSWER | {"content": "<think>\nA greeting.\n</think>\n\ngood day"}
"""The templates of the tiny models open a thought."""
CHATS = Dataset.from_list([{"messages": [USER, THOUGHT]}] * 6)
TEXTS = Dataset.from_list([{"text": "Once upon a time."}] * 6)
PAIRS = Dataset.from_list([{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}] * 6)
WORSE = THOUGHT | {"content": THOUGHT["content"] + ", or not"}
CHAT_PAIRS = Dataset.from_list([{"chosen": [USER, THOUGHT], "rejected": [USER, WORSE]}] * 6)
LABELLED = Dataset.from_list([{"prompt": f"1 + {i} =", "completion": " 2", "label": i == 1} for i in range(6)])
WHOLE = Dataset.from_list([{"chosen": "Human: 1 + 1? Assistant: 2", "rejected": "Human: 1 + 1? Assistant: 3"}] * 6)
SIZES = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "8", "--report_to", "none"]
OF_SFT = "--learning_rate 2.0e-5 --num_train_epochs 1 --packing --eval_strategy steps --eval_steps 100"
OF_DPO = "--learning_rate 5.0e-7 --num_train_epochs 1 --max_steps 1000 --eval_strategy steps --eval_steps 50"
OF_REWARD = "--learning_rate 1.0e-5 --eval_strategy steps --eval_steps 50 --max_length 2048"
OF_HEAD = "--lora_task_type SEQ_CLS"
LORA = "--use_peft --lora_r 32 --lora_alpha 16 --lora_target_modules q_proj v_proj"


@pytest.mark.parametrize(
    ("kind", "words", "rows"),
    [
        ("sft", OF_SFT, CHATS),
        ("sft", f"{OF_SFT} {LORA}", TEXTS),
        ("dpo", OF_DPO, CHAT_PAIRS),
        ("dpo", f"{OF_DPO} {LORA} --no_remove_unused_columns", PAIRS),
        ("kto", "--beta 0.2 --desirable_weight 1.3", LABELLED),
        ("kto", f"--max_steps 3 {LORA}", CHAT_PAIRS),
        ("reward", f"{OF_REWARD} --center_rewards_coefficient 0.01", CHAT_PAIRS),
        ("reward", f"{OF_REWARD} {LORA} {OF_HEAD}", PAIRS),
        ("reward", OF_REWARD, WHOLE),
    ],
    ids=str,
)
def test_a_script_of_trl_with_the_import_changed(kind, words, rows, dry, tmp_path, monkeypatch):
    """The commands are those of the scripts' documentation. The last line fails, because a dry run has no model."""
    for split in ("train", "test"):
        rows.to_json(tmp_path / "rows" / f"{split}.jsonl")
    script, start, stem = {
        "sft": (sft_script, "SFT", "sft"),
        "dpo": (dpo_script, "DPO", "dpo"),
        "kto": (kto_script, "KTO", "dpo"),
        "reward": (reward_script, "Reward", "reward_model"),
    }[kind]
    for part in ("Config", "Trainer"):
        monkeypatch.setattr(trl, start + part, getattr(megatron_rl.trl, start + part))
    given = ["--dataset_name", str(tmp_path / "rows"), "--model_name_or_path", "qwen2", *SIZES, *words.split()]
    parsed = script.make_parser().parse_args_and_config([*given, "--output_dir", str(tmp_path / "out")])
    with warnings.catch_warnings(), pytest.raises(ValueError, match="there is no trained model yet"):
        warnings.simplefilter("ignore")
        script.main(*parsed)
    assert (tmp_path / "out" / "inputs" / f"{stem}.yaml").exists()


@pytest.mark.parametrize(
    ("args", "given", "rows"),
    [
        ({"max_seq_length": 512, "dataset_text_field": "text", "optim": "adamw_8bit"}, {}, TEXTS),
        (
            {"assistant_only_loss": True, "learning_rate": 2e-4},
            {"peft_config": lora(target_modules="all-linear")},
            CHATS,
        ),
        ({"packing": True, "lr_scheduler_type": "cosine", "warmup_ratio": 0.03}, {"model": model()}, CHATS),
        ({"group_by_length": True, "padding_free": True, "max_length": None}, {"model": wrapped(r=8)}, CHATS),
        (
            {"completion_only_loss": True},
            {"processing_class": tokenizer()},
            PAIRS.rename_column("chosen", "completion"),
        ),
    ],
)
def test_arguments_of_supervised_scripts(args, given, rows, dry, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = {name: value() for name, value in given.items()}
        rows = rows.remove_columns([name for name in ("rejected",) if name in rows.column_names])
        args = SFTConfig(str(tmp_path / "out"), report_to="none", **args)
        SFTTrainer(**{"model": "qwen2", **made}, args=args, train_dataset=rows, eval_dataset=rows).train()


@pytest.mark.parametrize("rows", [PAIRS, CHAT_PAIRS], ids=["texts", "chats"])
def test_preferences_with_the_objects_of_trl(rows, dry, tmp_path):
    args = orpo.ORPOConfig(str(tmp_path / "orpo"), report_to="none", bf16=False)
    ORPOTrainer(model()(), args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer()()).train()
    args = CPOConfig(str(tmp_path / "cpo"), loss_type="simpo", cpo_alpha=0.0)
    CPOTrainer("qwen2", args, train_dataset=rows, peft_config=LoraConfig(target_modules="all-linear")).train()


@pytest.mark.parametrize("rows", [CHATS, Dataset.from_list([{"prompt": "1 + 1 ="}] * 6)], ids=["chats", "texts"])
def test_a_student_learns_from_a_teacher_with_the_objects_of_trl(rows, dry, tmp_path):
    of_trl = {"lmbda": 1.0, "temperature": 1.0, "max_new_tokens": 8, "max_steps": 2, "bf16": False}
    args = gkd.GKDConfig(str(tmp_path / "one"), report_to="none", **of_trl)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        GKDTrainer(model()(), model()(), args, train_dataset=rows, processing_class=tokenizer()()).train()
        args = GKDConfig(str(tmp_path / "two"), beta=0.0, teacher_model_name_or_path="qwen2", **of_trl)
        GKDTrainer("qwen2", args=args, train_dataset=rows, peft_config=LoraConfig(target_modules="all-linear")).train()


@pytest.mark.parametrize("given", ["scorer", scorer("scorer")], ids=["folder", "object"])
def test_a_reward_model_begins_with_a_classifier_and_trains_its_head_beside_adapters(given, dry, tmp_path):
    args = RewardConfig(str(tmp_path / "out"), report_to="none")
    model = given if isinstance(given, str) else given()
    adapters = LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], modules_to_save=["score"])
    RewardTrainer(model, args, train_dataset=PAIRS, processing_class=tokenizer()(), peft_config=adapters).train()
    with pytest.raises(ValueError, match="modules_to_save=.'score'.: all other weights are frozen"):
        SFTTrainer("qwen2", train_dataset=TEXTS, peft_config=adapters)


@pytest.mark.parametrize("reference", [None, "qwen2", model()])
def test_a_reference_with_the_weights_of_the_model_is_the_usual_one(reference, dry, tmp_path):
    made = reference() if callable(reference) else reference
    args = DPOConfig(str(tmp_path / "out"), report_to="none")
    DPOTrainer(model()(), made, args, train_dataset=PAIRS, processing_class=tokenizer()()).train()
    with pytest.raises(ValueError, match="ref_model has other weights"):
        DPOTrainer("qwen2", "qwen3", args, train_dataset=PAIRS)


CALL = {"type": "function", "function": {"name": "get", "arguments": {"city": "Rome"}}}
AGENT = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "20"}, ANSWER]
GLM_CALL = "<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
FAMILIES = {
    "qwen2_5": (("<|im_end|>",), ["good day<|im_end|>"] * 2, "</tool_call><|im_end|>"),
    "qwen3": (("<|im_end|>",), ["<think>\n\n</think>\n\ngood day<|im_end|>"] * 2, "</tool_call><|im_end|>"),
    "qwen3_5_think": (("<|im_end|>",), ["\n</think>\n\ngood day<|im_end|>"] * 2, "</tool_call><|im_end|>"),
    "llama3": (("<|eot_id|>",), ["good day<|eot_id|>"] * 2, None),
    "llama3_1": (("<|eot_id|>", "<|eom_id|>"), ["good day<|eot_id|>"] * 2, "}<|eot_id|>"),
    "gemma3": (("<end_of_turn>",), ["good day<end_of_turn>"] * 2, None),
    "glm4moe": (
        ("<|user|>", "<|observation|>"),
        ["\n<think></think>\ngood day<|user|>"] * 2,
        f"{GLM_CALL}<|observation|>",
    ),
    "gptoss": (("<|return|>", "<|call|>"), ["<|channel|>final<|message|>good day<|return|>"] * 2, "}<|call|>"),
    "phi3": (("<|end|>",), ["good day<|end|>"] * 2, None),
}
"""The stop tokens in generation_config.json of each family's models; what is trained of two answers; and the end of a
call, if the template writes calls."""


@pytest.mark.parametrize("name", FAMILIES)
def test_the_answers_of_a_chat_end_as_the_family_ends_them(name, tmp_path):
    ends, expected, call = FAMILIES[name]
    core = Tokenizer(models.BPE({byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([*ends, "<doc>"])
    source = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<doc>", bos_token="<doc>", chat_template=source)

    def trained(turns) -> list[str]:
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps({"messages": turns}))
        [(_, samples)], _ = load_supervised(path, made, 9999, "fail", ends)
        runs: list[list[int]] = []
        for tokens in samples:
            for i in tokens.action_mask.nonzero()[0]:
                if not tokens.action_mask[i - 1]:
                    runs.append([])
                runs[-1].append(int(tokens.ids[i]))
        return [made.decode(run) for run in runs]

    assert trained([USER, ANSWER, USER, ANSWER]) == expected
    if call is not None:
        first, last = trained(AGENT)
        assert first.endswith(call) and last == expected[-1]
