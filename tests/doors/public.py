"""The arguments of public scripts, with rows and rewards of their forms. Trackers are left out: their packages are no
part of these tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from given import length, lora, model, tokenizer, words, wrapped
from transformers import BitsAndBytesConfig, PrinterCallback
from trl import ModelConfig, ScriptArguments, TrlParser
from trl.rewards import accuracy_reward, think_format_reward

from megatron_rl.trl import GRPOConfig

SYSTEM = {"role": "system", "content": "Think, then answer."}
ALL_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SGD = {"adam_beta1": 0.9, "adam_beta2": 0.99, "weight_decay": 0.1, "max_grad_norm": 0.1}
COSINE = {"learning_rate": 5e-6, "warmup_ratio": 0.1, "lr_scheduler_type": "cosine", "logging_steps": 1}


def sums() -> Dataset:
    turns = [[SYSTEM, {"role": "user", "content": f"{i} + 1"}] for i in range(64)]
    return Dataset.from_dict({"prompt": turns, "answer": [str(i + 1) for i in range(64)]})


def proofs() -> Dataset:
    turns = [[SYSTEM, {"role": "user", "content": f"{i} + 1"}] for i in range(64)]
    return Dataset.from_dict({"prompt": turns, "solution": [f"$\\boxed{{{i + 1}}}$" for i in range(64)]})


def posts() -> Dataset:
    return Dataset.from_dict({"prompt": [f"Post {i}. In short:" for i in range(64)], "completion": ["x"] * 64})


def correct(prompts: Any, completions: Any, answer: Any, **columns: Any) -> list[float]:
    return [2.0 * (turns[0]["content"] == one) for turns, one in zip(completions, answer, strict=True)]


@dataclass
class Script:
    args: dict[str, Any]
    given: dict[str, Any]
    refused: str = ""


UNSLOTH = {
    **{"use_vllm": True, **SGD, **COSINE, "optim": "adamw_8bit", "per_device_train_batch_size": 1},
    **{"gradient_accumulation_steps": 1, "num_generations": 8, "max_prompt_length": 256, "max_steps": 250},
    **{"max_completion_length": 200, "save_steps": 250},
}


def scripts() -> dict[str, Script]:
    grader = {"reward_funcs": [words, correct], "train_dataset": sums()}
    return {
        "TRL's quick start, with its accuracy_reward": Script(
            {}, {"reward_funcs": accuracy_reward, "train_dataset": proofs()}
        ),
        "TRL's first documentation page, reward_len": Script(
            {"logging_steps": 10}, {"reward_funcs": length, "train_dataset": posts()}
        ),
        "a demonstration with max_prompt_length": Script(
            {"max_prompt_length": 128, "max_completion_length": 64, "num_generations": 8},
            {"reward_funcs": length, "train_dataset": posts()},
        ),
        "the GSM8K demonstration, four answers a step": Script(
            {
                **{**SGD, **COSINE, "bf16": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
                **{"num_generations": 8, "generation_batch_size": 8, "max_prompt_length": 256, "num_train_epochs": 1},
            },
            {**grader, "model": model()(), "processing_class": tokenizer()()},
            "an optimizer step has 4 answers, which is no whole number of groups of 8",
        ),
        "Unsloth's notebook for 3B": Script(
            UNSLOTH,
            {
                **grader,
                "model": wrapped(r=64, lora_alpha=64, target_modules=ALL_LAYERS)(),
                "processing_class": tokenizer()(),
            },
        ),
        "a script of Unsloth's form with 8-bit Adam": Script(
            UNSLOTH | {"optim": "paged_adamw_8bit"},
            {**grader, "model": wrapped(r=8, target_modules=ALL_LAYERS)(), "processing_class": tokenizer()()},
        ),
        "GSM8K with LoRA and dropout": Script(
            {
                **{"lr_scheduler_type": "cosine", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
                **{"max_steps": 250, "max_completion_length": 1024, "num_generations": 4, "beta": 0.04},
                **{"logging_dir": "./logs", "save_steps": 250, "overwrite_output_dir": "True"},
            },
            {
                **grader,
                "model": model()(),
                "peft_config": lora(r=32, target_modules=[*ALL_LAYERS, "dense"], lora_dropout=0.05)(),
                "callbacks": [PrinterCallback()],
            },
        ),
        "the cookbook's LoRA run": Script(
            {
                **{"learning_rate": 1e-5, "remove_unused_columns": False, "gradient_accumulation_steps": 16},
                **{"num_train_epochs": 1, "bf16": True, "max_completion_length": 64, "num_generations": 4},
                **{"max_prompt_length": 128, "push_to_hub": True, "save_strategy": "steps", "save_steps": 10},
            },
            {
                "model": wrapped(
                    task_type="CAUSAL_LM", r=8, lora_alpha=32, lora_dropout=0.1, target_modules=["q_proj"]
                )(),
                **{"reward_funcs": [think_format_reward, accuracy_reward], "train_dataset": proofs()},
            },
        ),
        "the course's PEFT model": Script(
            {
                **{"learning_rate": 2e-5, "gradient_accumulation_steps": 2, "max_prompt_length": 512},
                **{"max_completion_length": 96, "num_generations": 8, "optim": "adamw_8bit", "num_train_epochs": 1},
                **{"bf16": True, "remove_unused_columns": False, "logging_steps": 1},
            },
            {
                "model": wrapped(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")(),
                **{"reward_funcs": [length], "train_dataset": posts()},
            },
        ),
        "TRL's notebook in four bits": Script(
            {"optim": "paged_adamw_8bit", "push_to_hub": True},
            {**grader, "peft_config": lora(target_modules=["q_proj"])(), "quantization_config": BitsAndBytesConfig()},
            "quantization_config is not supported",
        ),
    }


PARSED = {
    "open-r1's grpo.py with a recipe": (
        "--bf16 true --use_vllm true --do_eval false --gradient_accumulation_steps 4 --hub_model_id x "
        "--hub_strategy every_save --learning_rate 2e-5 --log_completions true --log_level info "
        "--logging_first_step true --logging_strategy steps --lr_scheduler_type cosine --max_prompt_length 512 "
        "--max_completion_length 2048 --max_steps -1 --num_generations 16 --num_train_epochs 1 "
        "--overwrite_output_dir true --per_device_eval_batch_size 16 --per_device_train_batch_size 16 "
        "--push_to_hub true --reward_weights 1 1 --save_strategy epoch --save_total_limit 1 --warmup_ratio 0.1 "
        "--vllm_device auto"
    ).split()
    + ["--gradient_checkpointing_kwargs", '{"use_reentrant": false}'],
    "Countdown with a YAML file": (
        "--max_steps 450 --gradient_accumulation_steps 4 --gradient_checkpointing true --learning_rate 5e-7 "
        "--lr_scheduler_type cosine_with_min_lr --warmup_ratio 0.03 --beta 0.001 --max_prompt_length 256 "
        "--max_completion_length 1024 --num_generations 8 --use_vllm true --vllm_device cuda:3 "
        "--vllm_gpu_memory_utilization 0.5 --save_steps 25 --push_to_hub true --bf16 true --tf32 true"
    ).split()
    + ["--lr_scheduler_kwargs", '{"min_lr_rate": 0.1}'],
}


@dataclass
class OwnConfig(GRPOConfig):
    """As scripts extend TRL's class."""

    system_prompt: str | None = None


def parsed(name: str, folder: str) -> tuple[OwnConfig, ModelConfig]:
    """What a script's own parser makes of its command line."""
    words = ["--dataset_name", "rows", "--system_prompt", "Think.", "--output_dir", folder, *PARSED[name]]
    _, args, model_args = TrlParser((ScriptArguments, OwnConfig, ModelConfig)).parse_args_and_config(words)
    args.model_init_kwargs = {
        "revision": model_args.model_revision,
        **{"attn_implementation": "flash_attention_2", "dtype": "bfloat16", "use_cache": False},
    }
    return args, model_args
