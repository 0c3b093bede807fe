"""Print docs/coming_from_trl.md.

python -m megatron_rl.trl > docs/coming_from_trl.md
"""

# ruff: noqa: E501  (a paragraph of Markdown is one line)

from __future__ import annotations

from megatron_rl.trl import ARGUMENTS
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

- **Rows** are a list, or a data set of the library `datasets`, which `make setup` does not install: `pip install datasets`.
- **Models** are folders, names in the hub's cache, or models of transformers.
- **LoRA**: `peft_config` takes PEFT's `LoraConfig`, which becomes [`policy.lora`](lora.md): `r`, `lora_alpha`, `use_rslora`, and `target_modules`, which must be `"all-linear"` or a list of names such as `["q_proj", "v_proj"]`. Dropout, trained biases, other trained modules, and all else that changes what is trained are refused by name. `trainer.run.model` is the merged model, and its folder `adapters` has PEFT's form. The reference is the base model, as in TRL. PEFT itself has not been run with this.
- **GPUs and layouts** are in `GRPOConfig(sections={"policy": {"parallel": {"tensor": 4}}, "cluster": {...}})`, which takes every key of [configuration.md](configuration.md). `policy.parallel.data` takes the place of TRL's number of processes when batches are counted.
- **Reward models** are folders of models with one label, which score on a CPU; `rewards: [{kind: reward_model}]` asks a server.
- **Callbacks** of transformers see each step soon after it. `control.should_training_stop` stops the run with a checkpoint.
- **`train`** returns TRL's `TrainOutput`; `trainer.run` has the run's folder, metrics, report and model.
- **`evaluate`** returns the newest evaluation of the run; **`save_model`** copies the trained model.
"""


def page() -> str:
    lines = [HEAD, "## Refused arguments of GRPOTrainer", ""]
    lines += [f"- `{name}`: {why}" for name, why in REFUSED.items()]
    lines += ["", "## Metrics", "", "| TRL | here |", "|---|---|"]
    lines += [f"| `{theirs}` | `{ours}` |" for ours, theirs in NAMES.items()]
    lines += ["| `rewards/<name>/mean` | `reward/<name>/mean` |"]
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
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
