"""Print docs/coming_from_trl.md.

python -m megatron_rl.trl > docs/coming_from_trl.md
"""

# ruff: noqa: E501  (a paragraph of Markdown is one line)

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_rl.trl import ARGUMENTS, DPOTrainer, GRPOTrainer
from megatron_rl.trl.arguments import (
    CPO_ARGUMENTS,
    DPO_ARGUMENTS,
    FORMER,
    GKD_ARGUMENTS,
    KTO_ARGUMENTS,
    ORPO_ARGUMENTS,
    REWARD_ARGUMENTS,
    SFT_ARGUMENTS,
    Argument,
    Treatment,
)
from megatron_rl.trl.coverage import CASES_REFUSED, SCRIPTS, TESTS, VERSIONS, Verdict, numbers
from megatron_rl.trl.metrics import NAMES

HEAD = """# Coming from TRL

<!-- `python -m megatron_rl.trl > docs/coming_from_trl.md` writes this page. -->

A script that trains with TRL's `GRPOTrainer` needs another import, and `python` in place of `accelerate launch`:

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

`train` starts a run of `megatron-rl grpo` in the folder `output_dir`; `trainer.run` has its folder, metrics, report and model. `train(resume_from_checkpoint=True)` continues it, and Ctrl-C stops it with a checkpoint.

| | what differs |
|---|---|
| GPUs and layouts | `GRPOConfig(sections={"policy": {"parallel": {"tensor": 4}}, "cluster": {...}})` takes every [key](configuration/index.md). `policy.parallel.data` counts as TRL's number of processes. |
| batches | Rows of an epoch that fill no batch of answers are left out, as in TRL. A `max_steps` that ends within a batch is refused. |
| rows | A list, or a data set of the library `datasets` (`pip install datasets`). Several evaluation sets are a mapping by name. |
| models | Folders, names in the hub's cache, or models of transformers. |
| prompts | With `max_prompt_length` a longer prompt is refused and not cut. A prompt that ends with the assistant's turn is refused. |
| rewards | Functions go to the verifiers' processes by value. One that raises on every answer ends the run after three steps. Reward models with one label score on a CPU. |
| LoRA | `peft_config` becomes [`policy.lora`](lora.md). Dropout is left out with a warning; trained biases or other modules are refused. `trainer.run.model` is the merged model, `adapters` in it has PEFT's form. |
| tools, `environment_factory` | The chat template must write `tools`, ask for calls in [a known format](environments.md#formats-of-calls). Objects live in the engines' processes, one for each answer ([environments](environments.md)). They may return [images](images.md#environments). |
| callbacks | They see each step soon after it; `should_training_stop` stops with a checkpoint. Methods that need the model are refused. |
| after `train` | `model`, `evaluate`, `save_model`, `push_to_hub` and the like work; other attributes say what replaces them. |
| command lines | `TrlParser` and `HfArgumentParser` read `GRPOConfig`. |

`DPOTrainer`, `KTOTrainer`, `ORPOTrainer`, `CPOTrainer`, `SFTTrainer`, `RewardTrainer` and `GKDTrainer` are imported in
the same way, with their configurations; other trainers are not here.
"""

OFFLINE = """
## Preferences, SFT, reward models and distillation

`train` starts a run of `megatron-rl dpo`, `sft` or `reward-model`, and of `megatron-rl grpo` with a
[teacher](algorithms.md#teachers-teachers-distillation) for GKD. Other arguments than these are treated as GRPOConfig's.
The losses of a tiny model are TRL's within 1e-5 (`make test-trl`). These definitions differ:

- A completion ends with the stop token. TRL also trains what a chat template writes after it, such as a line feed.
- The model's own chat template decides what `assistant_only_loss` trains: whole answers with their stop tokens.
- Plain prompts and completions are tokenized apart, so that no token is part of both.
- The last step of an epoch also takes rows of the next one, so that k epochs of n rows have k n / `rows_per_step` steps.
- `megatron-rl dpo`: IPO has means over tokens, as in TRL. ORPO's first term is over the chosen answer, in TRL also over
  its prompt. CPO's log-likelihood is a mean over the tokens of each answer, in TRL over all tokens of a pass. KTO's z
  takes the answer of the next row with another prompt, over the step; in TRL it takes the answer of the row before, over
  the batch of a pass.
- GKD: all answers are the student's own (`lmbda=1.0`), each trained once. The divergence is over the 32 most probable
  tokens and all others as one (`algorithm.distillation.top_k`), in TRL over the whole vocabulary. The loss is the mean
  over the sampled tokens; TRL divides their sum by the number of tokens of the rows' own answers.
- A reward model's head begins with zeros, or with the one of a classifier, and is also trained beside adapters.

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
    lines = ["## What was tried", ""]
    lines += [
        f"`make test-trl` runs this with {versions}: as dry runs, and the scripts that pass also as runs of two steps.",
        "",
    ]
    counts = ", ".join(f"{TITLES[verdict]} {number}" for verdict, number in now.items())
    lines += [f"Of the {sum(now.values())} tests that TRL has of its `GRPOTrainer`: {counts}. Refused are:", ""]
    lines += [f"- {group.says}: {len(group.tests)}" for group in TESTS if group.verdict == "refused"]
    cases = ", ".join(f"{name} of `test_{test}`" for test, names in CASES_REFUSED.items() for name in names)
    lines += [f"- cases of other tests: {cases}", "", f"Of {len(SCRIPTS)} public scripts {passed} pass:", ""]
    lines += [f"- {name}" + (f" ({note})" if note else "") for name, (passes, note) in SCRIPTS.items() if passes]
    return lines + [f"- refused: {name} ({note})" for name, (passes, note) in SCRIPTS.items() if not passes]


def together(reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The names with one reason."""
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(f"`{name}`")
    return ((", ".join(some), why) for why, some in names.items())


def by_meaning(arguments: Mapping[str, Argument], treatment: Treatment) -> Iterator[tuple[str, str]]:
    """The names of the arguments with one treatment, and what becomes of them. Arguments of one meaning are one row."""
    return together({name: one.says.replace("|", "/") for name, one in arguments.items() if one.treatment == treatment})


def page() -> str:
    lines = [HEAD, *tried(), OFFLINE, "| argument | here |", "|---|---|"]
    own = {**REWARD_ARGUMENTS, **ORPO_ARGUMENTS, **KTO_ARGUMENTS, **DPO_ARGUMENTS, **SFT_ARGUMENTS}
    known = {name: (one.says, one.treatment) for name, one in ARGUMENTS.items()}
    own = {name: one for name, one in own.items() if known.get(name) != (one.says, one.treatment)}
    own |= {"loss_type (DPO)": DPO_ARGUMENTS["loss_type"], "loss_type (SFT)": own.pop("loss_type")}
    own |= {"max_length (RewardConfig)": REWARD_ARGUMENTS["max_length"], "loss_type (KTO)": KTO_ARGUMENTS["loss_type"]}
    for name, arguments, before in (("CPO", CPO_ARGUMENTS, DPO_ARGUMENTS), ("GKD", GKD_ARGUMENTS, SFT_ARGUMENTS)):
        differ = {key: one for key, one in arguments.items() if own.get(key, before.get(key)) != one}
        own |= {f"{key} ({name})": one for key, one in differ.items() if known.get(key) != (one.says, one.treatment)}
    own["train_sampling_strategy (KTO)"] = KTO_ARGUMENTS["train_sampling_strategy"]
    kinds: dict[Treatment, str] = {"mapped": "", "refused": "other values are refused: ", "implied": "no meaning: "}
    for one, told in kinds.items():
        lines += [f"| {names} | {told}{says} |" for names, says in by_meaning(own, one)]
    refused = {**GRPOTrainer.refused, **DPOTrainer.refused}
    lines += ["", "## Refused arguments of trainers", ""]
    lines += [f"- {names}: {why}" for names, why in together(refused)]
    lines += ["", "## Metrics", "", "| TRL | here |", "|---|---|"]
    lines += [f"| `{theirs}` | `{ours}` |" for ours, theirs in NAMES.items()]
    lines += ["| `rewards/<name>/mean`, `.../std` | `reward/<name>/mean`, `.../std` |"]
    lines += ["| `tools/failure_frequency` | `environment/tool_errors` divided by `environment/tool_calls` |"]
    lines += ["| a name of `log_metric` | `reward/<name>/` and this name |"]
    lines += ["| `eval_<set>_reward` | `eval/dataset/<set>/reward_mean` |"]
    lines += ["", "## Mapped arguments of GRPOConfig", "", "| argument | here |", "|---|---|"]
    lines += [f"| {names} | {says} |" for names, says in by_meaning(ARGUMENTS, "mapped")]
    lines += ["", "## Arguments whose other values are refused", "", "| argument | why |", "|---|---|"]
    lines += [f"| {names} | {says} |" for names, says in by_meaning(ARGUMENTS, "refused")]
    lines += ["", "## Arguments without meaning here", "", "Every value is right:", ""]
    lines += [f"- {says}: {names}" for names, says in by_meaning(ARGUMENTS, "implied")]
    lines += ["", "Arguments of earlier releases may be given, too:", ""]
    lines += [f"- {names}: {says}" for names, says in by_meaning(FORMER, "mapped")]
    lines += ["- no meaning: " + ", ".join(names for names, _ in by_meaning(FORMER, "implied"))]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
