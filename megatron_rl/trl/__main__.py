"""Print docs/coming_from_trl.md.

python -m megatron_rl.trl > docs/coming_from_trl.md
"""

# ruff: noqa: E501  (a paragraph of Markdown is one line)

from __future__ import annotations

from megatron_rl.trl import ARGUMENTS
from megatron_rl.trl.arguments import FORMER
from megatron_rl.trl.coverage import BEFORE, CASES_REFUSED, SCRIPTS, TESTS, VERSIONS, Verdict, numbers
from megatron_rl.trl.metrics import NAMES
from megatron_rl.trl.trainer import REFUSED

HEAD = """# Coming from TRL

<!-- `python -m megatron_rl.trl > docs/coming_from_trl.md` writes this page. -->

A script that trains with TRL's `GRPOTrainer` needs another import, and `python` in the place of `accelerate launch`:

<!-- run -->
```python
from megatron_rl.trl import GRPOConfig, GRPOTrainer

rows = [{"prompt": "What is 2 + 2?", "ground_truth": "4"}, {"prompt": "What is 3 * 4?", "ground_truth": "12"}]


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


args = GRPOConfig(output_dir="short-answers", per_device_train_batch_size=16, max_completion_length=32, max_steps=2)
trainer = GRPOTrainer(model="models/tiny", reward_funcs=reward_len, args=args, train_dataset=rows)
trainer.train()
print(trainer.run.metrics[-1]["reward/mean"], trainer.run.report)
```

The run is the one that `megatron-rl grpo` starts: a process of its own, in the folder `output_dir`, with checkpoints, metrics and a report. `trainer.train(resume_from_checkpoint=True)` continues it, and Ctrl-C stops it with a checkpoint. Reward functions of the script are sent to the verifiers' processes by value, with the variables that they use.

- **Command lines**: `TrlParser` and `HfArgumentParser` read `GRPOConfig`, and a script may extend it with a dataclass of its own. `ModelConfig`, `ScriptArguments`, `get_peft_config` and TRL's rewards stay TRL's.
- **Rows** are a list, or a data set of the library `datasets`, which `make setup` does not install: `pip install datasets`. Several evaluation sets, as a mapping, get their names as the column `dataset`, and each has its own metrics.
- **Models** are folders, names in the hub's cache, or models of transformers. `processing_class` is the tokenizer of the run, with its chat template, also if the model is a folder.
- **Prompts** may be as long as the longest one. With `max_prompt_length` a longer one is refused and not cut. A prompt whose last turn is the assistant's, which TRL continues, is refused.
- **LoRA**: `peft_config` takes PEFT's `LoraConfig`, which becomes [`policy.lora`](lora.md): `r`, `lora_alpha`, `use_rslora`, and `target_modules`, which is `"all-linear"`, a list of names such as `["q_proj", "v_proj"]`, or None, which takes the names in PEFT's table. A model of PEFT has both parts in it. Trained biases, other trained modules, and all else that changes what is trained are refused by name; dropout is left out, and a warning says so. `trainer.run.model` is the merged model, and its folder `adapters` has PEFT's form. The reference is the base model, as in TRL.
- **GPUs and layouts** are in `GRPOConfig(sections={"policy": {"parallel": {"tensor": 4}}, "cluster": {...}})`, which takes every key of [configuration.md](configuration.md). `policy.parallel.data` takes the place of TRL's number of processes when batches are counted.
- **Steps** are counted as TRL's sampler does: the rows of an epoch that fill no batch of answers are left out. `shuffle_dataset=False` keeps their order. A `max_steps` that ends within a batch of answers is refused.
- **Reward functions** may abstain with None for as long as they like. One that raises on every answer ends the run after three steps.
- **Reward models** are folders, names or objects of models with one label, which score on a CPU with their `reward_processing_classes`; `rewards: [{kind: reward_model}]` asks a server.
- **Tools** are functions, and a completion has TRL's turns. The chat template must write `tools`, ask for calls in Hermes' form, and keep earlier turns as they were; TRL would replace it. Arguments must fit their types, an error is read as `Error: ...`, and a call may take a minute ([environments.md](environments.md)).
- **Environments**: `environment_factory` is a callable, or a mapping that the rows' column `environment` chooses from. `reset` may append to the prompt, or give all of it, `get_reward` is a reward of its own, and there need be no train_dataset, but `max_steps`. Objects are made in the engines' processes, a new one for each answer, so what they write into variables of the script stays there. Reward functions get `environments` with the attributes that JSON can hold, and without methods. Images are refused.
- **Callbacks** of transformers see each step soon after it. `control.should_training_stop` stops the run with a checkpoint. Methods that would never be called, and methods that need the model, are refused.
- **`train`** returns TRL's `TrainOutput`; `trainer.run` has the run's folder, metrics, report and model. `resume_from_checkpoint` may be True, or the path of the newest checkpoint.
- **After `train`**: `model` is loaded when it is first asked for. `evaluate` returns the newest evaluation of the run, or evaluates other rows in a run of its own, also before `train`; `save_model` copies the trained model, `push_to_hub` uploads it, and `create_model_card`, `log_metrics`, `save_metrics`, `save_state`, `processing_class` and `accelerator` are what scripts expect. All other attributes say what is in their place.
- **Other trainers** of TRL are not here. `megatron_rl.sft` trains on demonstrations.
"""


TITLES: dict[Verdict, str] = {
    "the same": "TRL's meaning",
    "different": "another meaning, or a part is left out",
    "refused": "refused by name",
    "internal": "about TRL's own classes",
}


def tried() -> list[str]:
    """What of TRL's tests and of public scripts works."""
    now, passed = numbers(), sum(passes for passes, _ in SCRIPTS.values())
    versions = ", ".join(f"{name} {number}" for name, number in VERSIONS.items())
    lines = [
        "## What was tried",
        "",
        f"`make test-trl` runs this with {versions}, as dry runs, and the scripts whose dry run passes also as runs of two steps with short answers.",
        "",
    ]
    lines += [f"The {sum(now.values())} tests that TRL has of its `GRPOTrainer`:", ""]
    lines += ["| | before these tests | now |", "|---|---|---|"]
    lines += [f"| {title} | {BEFORE[verdict]} | {now[verdict]} |" for verdict, title in TITLES.items()]
    lines += [f"| public scripts whose dry run passes, of {len(SCRIPTS)} | 2 | {passed} |", ""]
    lines += ["| tests | number | verdict |", "|---|---|---|"]
    lines += [f"| {group.says} | {len(group.tests)} | {TITLES[group.verdict]} |" for group in TESTS]
    cases = ", ".join(f"{name} of `test_{test}`" for test, names in CASES_REFUSED.items() for name in names)
    lines += ["", f"Refused cases of tests that otherwise have TRL's meaning: {cases}.", ""]
    lines += ["| public script | dry run | note |", "|---|---|---|"]
    return lines + [f"| {n} | {'passes' if passes else 'refused'} | {note} |" for n, (passes, note) in SCRIPTS.items()]


def page() -> str:
    lines = [HEAD, *tried(), "", "## Refused arguments of GRPOTrainer", ""]
    lines += [f"- `{name}`: {why}" for name, why in REFUSED.items()]
    lines += ["", "## Metrics", "", "| TRL | here |", "|---|---|"]
    lines += [f"| `{theirs}` | `{ours}` |" for ours, theirs in NAMES.items()]
    lines += ["| `rewards/<name>/mean`, `.../std` | `reward/<name>/mean`, `.../std` |"]
    lines += ["| `tools/failure_frequency` | `environment/tool_errors` divided by `environment/tool_calls` |"]
    lines += ["| a name of `log_metric` | `reward/<name>/` and this name |"]
    lines += ["| `eval_<set>_reward` | `eval/dataset/<set>/reward_mean` |"]
    titles = {
        "mapped": ("Mapped arguments of GRPOConfig", "here"),
        "implied": ("Arguments without meaning here", "why every value is right"),
        "refused": ("Arguments whose other values are refused", "why"),
    }
    for treatment, (title, column) in titles.items():
        lines += ["", f"## {title}", "", f"| argument | default | {column} |", "|---|---|---|"]
        lines += [
            f"| `{name}` | `{argument.default}` | {argument.says.replace('|', '/')} |"
            for name, argument in ARGUMENTS.items()
            if argument.treatment == treatment
        ]
    lines += ["", "## Arguments of earlier releases", "", "| argument | here |", "|---|---|"]
    lines += [f"| `{name}` | {argument.says} |" for name, argument in FORMER.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
