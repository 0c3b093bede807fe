"""The meaning of verl's settings of a run's content: model, rows, rewards, evaluations, steps, names, checkpoints."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_rl.migrate.verl.machine import num_steps
from megatron_rl.migrate.verl.settings import ACTOR, ROLLOUT, Meaning, Settings

HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FOLDERS = ("models", "model", "data", "checkpoints", "ckpts", "runs", "outputs", "hf_models", "huggingface.co")
"""First parts of paths that are folders and no owners on the hub."""
MISSING = {
    r"(?i)[-_]vl\b|[-_]vl[-_]|minicpm|glm-?4\.\dv|vla\b": "it reads images, and the models here are of text alone",
    r"(?i)pixtral|mistral-small-3\.[1-9]": "it reads images, and the models here are of text alone",
    r"(?i)gemma|phi-?\d|seed-?oss|minimax|falcon|mimo|baichuan|internlm": "its family is not here",
    r"(?i)glm-?5|chatglm|glm-?4(?![.-]?[567])|nemotron|deepseek-?v4|hunyuan|^hy-?\d": "its family is not here",
    r"(?i)qwen1\.5-moe|qwen2[-_.].*a14b": "its family is not here",
}
"""Names of models of families that do not exist here, and why."""
WITH_TOWER = re.compile(r"(?i)qwen3[._]5|kimi-k2\.[5-9]")
"""Names of models whose published folders also have what reads images."""
TRACKERS = {"wandb": "project", "tensorboard": None, "mlflow": "experiment"}
ALL_ROWS = 1_000_000
"""Evaluations of verl use all rows of a file; ours stop at the end of the file."""


def local_model(path: str) -> tuple[Path, str]:
    """The folder of a model, and for a name on the hub the command that downloads it."""
    if HUB.fullmatch(path) and path.partition("/")[0].lower() not in FOLDERS and not Path(path).exists():
        folder = f"models/{path.partition('/')[2]}"
        return Path(folder), f"hf download {path} --local-dir {folder}"
    return Path(os.path.expanduser(path)), ""


def model_path(settings: Settings, key: str, value: Any) -> Meaning:
    section = "critic.model" if key.startswith("critic.") else "model"
    path = str(value)
    if path.startswith(("hdfs:", "s3:", "gs:")):
        to = {f"{section}.path": f"models/{PurePosixPath(path).name}"}
        return Meaning("refused", to, "copy the folder to a file system that all nodes see")
    folder, command = local_model(path)
    to = {f"{section}.path": str(folder)}
    if section == "critic.model":
        to["critic.model.dtype"] = "bfloat16"
        if settings["actor_rollout_ref.model.enable_gradient_checkpointing"] and not settings.is_megatron:
            to["critic.model.recompute"] = "full"
    for pattern, why in MISSING.items():
        if re.search(pattern, PurePosixPath(path).name) and not (folder / "config.json").exists():
            return Meaning("refused", to, f"{why}; docs/models.md has the families that are")
    if WITH_TOWER.search(PurePosixPath(path).name) and not path.rstrip("/").endswith("text"):
        tower = "a published folder also reads images: take out its model of text once (docs/models.md)"
        return Meaning("mapped", to, f"{command}; {tower}" if command else tower)
    return Meaning("mapped" if command else "used", to, command)


def granularity(settings: Settings, key: str, value: Any) -> Meaning:
    """Megatron's keys of recomputation, which belong together."""
    prefix = key.rpartition(".")[0]
    kind, method = settings[f"{prefix}.recompute_granularity"], settings[f"{prefix}.recompute_method"]
    layers, modules = settings[f"{prefix}.recompute_num_layers"], settings[f"{prefix}.recompute_modules"]
    if kind not in ("full", "selective"):
        return Meaning("implied", {}, "nothing is recomputed by default")
    if kind == "full" and method in (None, "uniform") and layers in (None, 1):
        return Meaning("mapped", {"model.recompute": "full"}, "every layer is recomputed")
    switches = {"recompute_granularity": kind, "recompute_method": method, "recompute_num_layers": layers}
    if kind == "selective":
        switches = {"recompute_granularity": kind, "recompute_modules": modules or ["core_attn"]}
    return Meaning("used", {f"policy.megatron.transformer.{name}": one for name, one in switches.items() if one})


def train_rows(settings: Settings, key: str, value: Any) -> Meaning:
    files = [os.path.expanduser(str(one)) for one in (value if isinstance(value, list) else [value])]
    if len(files) == 1:
        return Meaning("used", {"data.train": files[0]})
    if settings.rows is None or len(settings.rows) != len(files):
        why = f"verl mixes {len(files)} files by their numbers of rows; give them, in this order, as --rows N,M,..."
        return Meaning("refused", {}, why)
    stems = [PurePosixPath(one).stem for one in files]
    folders = [PurePosixPath(one).parent.name for one in files]
    short = next((one for one in (stems, folders) if len(set(one)) == len(files)), [str(n) for n in range(len(files))])
    named = zip(files, settings.rows, short, strict=True)
    sources = [{"path": one, "weight": float(number), "name": name} for one, number, name in named]
    return Meaning("mapped", {"data.train": sources}, "the weights are the numbers of rows")


def eval_rows(settings: Settings, key: str, value: Any) -> Meaning:
    files = [os.path.expanduser(str(one)) for one in (value if isinstance(value, list) else [value])]
    if settings["trainer.test_freq"] <= 0 and not settings["trainer.val_before_train"]:
        return Meaning("implied", {"data.eval": None}, "verl never evaluates with this test_freq")
    to = {"data.eval": files[0], "eval.num_prompts": settings["data.val_max_samples"] or ALL_ROWS}
    if to["eval.num_prompts"] == -1:
        to["eval.num_prompts"] = ALL_ROWS
    if len(files) > 1:
        return Meaning("left out", to, "evaluations read one file or folder; put the files into one folder")
    return Meaning("used", to, "all its rows")


def long_prompts(settings: Settings, key: str, value: Any) -> Meaning:
    """`filter_overlong_prompts` and `truncation`."""
    is_filtered, cut = settings["data.filter_overlong_prompts"], settings["data.truncation"]
    to = {"data.on_bad_row": "skip" if is_filtered else "fail"}
    if key == "data.truncation" and cut != "error" and not is_filtered:
        return Meaning("mapped", to, "no prompt is cut: a run ends at a row whose prompt is too long")
    return Meaning("mapped", to)


def total_steps(settings: Settings, key: str, value: Any) -> Meaning:
    """`total_training_steps` and `total_epochs`."""
    if key.endswith("total_training_steps"):
        steps = num_steps(settings)
        if steps != value:
            why = f"verl ends after {settings['trainer.total_epochs']} epochs of {settings.num_rows} rows"
            return Meaning("mapped", {"run.steps": steps}, why)
        return Meaning("used", {"run.steps": value})
    if settings["trainer.total_training_steps"] is not None:
        return Meaning("implied", {}, "total_training_steps says when the run ends")
    prompts, steps = settings["data.train_batch_size"], num_steps(settings)
    if steps is None:
        why = f"the steps are {value} x (rows of data.train_files // {prompts}); give --rows N"
        return Meaning("refused", {}, why)
    if steps == 0:
        why = f"{settings.num_rows} rows are fewer than the {prompts} of a step; give trainer.total_training_steps"
        return Meaning("refused", {}, why)
    return Meaning("mapped", {"run.steps": steps}, f"{value} epochs x ({settings.num_rows} rows // {prompts})")


def rewards(settings: Settings, key: str, value: Any) -> Meaning:
    """The reward of the run, wherever verl has it from."""
    if settings["reward_model.enable"]:
        model = str(settings["reward_model.model.path"] or "reward-model")
        ours: dict[str, Any] = {"kind": "reward_model", "model": model}
        why = "serve it with vLLM as a classifier, and add url and unfinished_score"
        return Meaning("mapped", {"rewards": [ours]}, why)
    path = settings["custom_reward_function.path"]
    if path is not None:
        name, prefix = settings["custom_reward_function.name"], "custom_reward_function.reward_kwargs."
        ours = {"kind": "compute_score", "path": f"{path}:{name}"}
        arguments = {one.removeprefix(prefix): settings[one] for one in settings.given if one.startswith(prefix)}
        return Meaning("mapped", {"rewards": [{**ours, **({"arguments": arguments} if arguments else {})}]})
    files = settings["data.train_files"]
    names = " ".join(map(str, files if isinstance(files, list) else [files])).lower()
    if settings["reward_model.reward_manager"] == "dapo" or "dapo" in names:
        ours = {"kind": "mathematics", "mode": "lenient", "weight": 2.0, "require_stop": False}
        why = "verl's own function gives 1 and -1; here 2 and 0 differ by as much"
        return Meaning("mapped", {"rewards": [ours]}, why)
    if "gsm8k" in names or "math" in names:
        ours = {"kind": "mathematics", "require_stop": False}
        why = "verl's own functions compare the number after #### or in a box, as this reward does"
        return Meaning("mapped", {"rewards": [ours]}, why)
    ours = {"kind": "compute_score", "path": "verl.utils.reward_score:default_compute_score"}
    why = "verl's own function, which it chooses by data_source; it needs verl to be installed"
    return Meaning("mapped", {"rewards": [ours]}, why)


def reward_part(settings: Settings, key: str, value: Any) -> Meaning:
    """A key that `rewards` has read, if its reward is the one of the run."""
    is_model = bool(settings["reward_model.enable"])
    if key.startswith("reward_model.") != is_model:
        return Meaning("implied", {}, "the reward of the run is another one")
    found = rewards(settings, key, value)
    return Meaning(found.status, found.to, found.why)


def manager(settings: Settings, key: str, value: Any) -> Meaning:
    if value == "batch" and settings["custom_reward_function.path"] is not None:
        return Meaning("refused", {}, "the function gets one answer in a call here; write one that takes one answer")
    if value in ("naive", "batch", "prime", "dapo"):
        return Meaning("implied", {}, "each answer is scored as soon as its group is complete")
    return Meaning("refused", {}, "there is no such manager; write its scores as a reward of kind function")


def overlong_buffer(settings: Settings, key: str, value: Any) -> Meaning:
    """DAPO's soft penalty of long answers; the keys belong together."""
    prefix = "reward_model.reward_kwargs.overlong_buffer_cfg"
    if f"{prefix}.enable" not in settings:
        prefix = "reward_model.overlong_buffer"
    name = key.rpartition(".")[2]
    if not settings[f"{prefix}.enable"] or settings["reward_model.enable"]:
        return Meaning("implied", {}, "the penalty is off")
    if name == "log":
        return Meaning("implied", {}, "metrics have the shaped reward")
    factor = settings[f"{prefix}.penalty_factor"]
    if factor not in (None, 1):
        why = f"the largest penalty is 1 here, not {factor}; write it as a reward of kind function"
        return Meaning("refused", {}, why)
    length = settings["reward_model.reward_kwargs.max_resp_len"] or settings["data.max_response_length"]
    shaping = {"kind": "soft_overlong", "max_tokens": length, "cache_tokens": settings[f"{prefix}.len"]}
    return Meaning("mapped", {"algorithm.shaping": [shaping]})


def evaluation(settings: Settings, key: str, value: Any) -> Meaning:
    """`test_freq` and `val_before_train`."""
    every = settings["trainer.test_freq"]
    if key.endswith("test_freq"):
        why = "" if value > 0 else "before the first step and after the last one"
        return Meaning("used" if value > 0 else "mapped", {"eval.every": max(int(value), 0)}, why)
    if value:
        return Meaning("implied", {}, "every run evaluates before its first step")
    if every <= 0:
        return Meaning("mapped", {"data.eval": None}, "verl never evaluates with this test_freq")
    return Meaning("left out", {}, "every run with data.eval evaluates before its first step too")


def eval_sampling(settings: Settings, key: str, value: Any) -> Meaning:
    """The sampling of evaluations, which is the sampling of training here."""
    if settings["trainer.test_freq"] <= 0 and not settings["trainer.val_before_train"]:
        return Meaning("implied", {}, "verl never evaluates with this test_freq")
    name = key.rpartition(".")[2]
    usual = {"top_p": (1, 1.0, None), "top_k": (-1, 0, None), "do_sample": (True,)}
    same = usual.get(name, (settings[f"{ROLLOUT}.temperature"],))
    if value in same:
        return Meaning("implied", {}, "evaluations sample as training does")
    return Meaning("left out", {}, f"evaluations sample as training does, with {name} {same[0]}")


def names(settings: Settings, key: str, value: Any) -> Meaning:
    """Project, experiment and folder, which together are our `run.name` and `run.folder`."""
    project, experiment = str(settings["trainer.project_name"]), str(settings["trainer.experiment_name"])
    name, folder = f"{project}/{experiment}", "runs"
    local = settings["trainer.default_local_dir"]
    if local is not None:
        local = os.path.expanduser(str(local)).rstrip("/")
        folder = local.removesuffix(f"/{name}") if local.endswith(f"/{name}") else local
    to = {"run.name": name.replace(" ", "_"), "run.folder": folder}
    if key.endswith("project_name"):
        return Meaning("mapped", to, "the first part of run.name")
    return Meaning("mapped", to)


def loggers(settings: Settings, key: str, value: Any) -> Meaning:
    given = value if isinstance(value, list) else [value]
    project = settings["trainer.project_name"]
    trackers = [
        {"kind": kind, **({TRACKERS[kind]: project} if TRACKERS[kind] else {})} for kind in given if kind in TRACKERS
    ]
    unknown = [kind for kind in given if kind not in (*TRACKERS, "console", "file")]
    to: dict[str, Any] = {"observe": trackers} if trackers else {}
    if unknown:
        return Meaning("left out", to, f"there is no tracker {', '.join(map(str, unknown))}; see observe")
    return Meaning(
        "mapped" if trackers else "implied", to, "" if trackers else "metrics are printed and in metrics.jsonl"
    )


def save_every(settings: Settings, key: str, value: Any) -> Meaning:
    to = {"checkpoint.every": max(int(value), 0)}
    if value <= 0:
        return Meaning("mapped", to, "one checkpoint at the end, while verl writes none")
    if settings["trainer.max_actor_ckpt_to_keep"] is None:
        return Meaning("mapped", {**to, "checkpoint.keep_every": value}, "all are kept, as in verl")
    return Meaning("used", to)


def save_contents(settings: Settings, key: str, value: Any) -> Meaning:
    every = settings["trainer.save_freq"]
    if key.startswith(ACTOR) and "hf_model" in str(value) and every > 0:
        return Meaning("mapped", {"checkpoint.export_every": every}, "a Hugging Face folder at every checkpoint")
    return Meaning("implied", {}, "checkpoints have weights, optimizer and the state of the run")


def engine(settings: Settings, key: str, value: Any) -> Meaning:
    """`model_engine`, whose value is one of verl's."""
    if settings.is_megatron:
        return Meaning("implied", {}, "the trainer is Megatron-Core")
    return Meaning("implied", {}, f"the trainer is Megatron-Core, and not {settings.trainer}; {settings.mesh_reason}")


def engine_of_actor(settings: Settings, key: str, value: Any) -> Meaning:
    """`actor.model_engine`, which no engine of verl reads."""
    why = f"verl reads model_engine at the top alone, and its trainer is {settings.trainer}"
    return Meaning("implied" if value == settings.engine else "refused", {}, why)


def entry(settings: Settings, key: str, value: Any) -> Meaning:
    """A whole section as one mapping."""
    if value in (None, {}, "", []):
        return Meaning("implied", {}, "it is empty")
    return Meaning("refused", {}, f"give its entries one by one, as {key}.NAME=VALUE")


def engine_length(settings: Settings, key: str, value: Any) -> Meaning:
    """Lengths that verl gives to its engines, which are sums of the lengths of prompts and answers by default."""
    name = key.rpartition(".")[2]
    lengths = {"prompt_length": "data.max_prompt_length", "response_length": "data.max_response_length"}
    if name in lengths and value != settings[lengths[name]]:
        why = f"engines read {lengths[name]} here, which is {settings[lengths[name]]}; give both the same value"
        return Meaning("refused", {}, why)
    if name not in lengths and value is not None and value < settings.longest:
        why = f"verl's engines cut a sequence after it; here one may have {settings.longest} tokens"
        return Meaning("refused", {}, why)
    return Meaning("implied", {}, "prompt and answer lengths give the longest sequence")


def critic_warmup(settings: Settings, key: str, value: Any) -> Meaning:
    if not settings.has_critic or value <= 1:
        return Meaning("implied", {}, "no step trains the critic alone")
    why = "verl counts steps from 1, and the policy trains from step critic_warmup on"
    return Meaning("mapped", {"critic.warmup_steps": value - 1}, why)


def batch_of_generation(settings: Settings, key: str, value: Any) -> Meaning:
    if value == settings["data.train_batch_size"] or settings["algorithm.filter_groups.enable"] or not value:
        return Meaning("implied", {}, "prompts are requested until the batch is full")
    return Meaning("refused", {}, "a step has as many prompts as data.train_batch_size says")


def multi_turn(settings: Settings, key: str, value: Any) -> Meaning:
    prefix = f"{ROLLOUT}.multi_turn"
    if value in (None, False, 0):
        return Meaning("implied", {}, "an answer is one turn by default")
    if not (settings[f"{prefix}.enable"] or settings[f"{prefix}.tool_config_path"]):
        return Meaning("implied", {}, "an answer is one turn")
    why = "write the tools as typed functions in rollout.environment (docs/environments.md)"
    return Meaning("refused", {}, why)
