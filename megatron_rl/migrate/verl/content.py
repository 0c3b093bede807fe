"""The meaning of verl's settings of a run's content: model, rows, rewards, evaluations, steps, names, checkpoints."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_rl.migrate.verl import adapters
from megatron_rl.migrate.verl.machine import num_steps
from megatron_rl.migrate.verl.settings import ACTOR, ROLLOUT, Meaning, Settings, implied, mapped, refused, used
from megatron_rl.models.vision import vision_of

HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FOLDERS = ("models", "model", "data", "checkpoints", "ckpts", "runs", "outputs", "hf_models", "huggingface.co")
"""First parts of paths that are folders and no owners on the hub."""
IMAGES = "it reads images, and no model of its kind does here"
SEES_IMAGES = re.compile(r"(?i)qwen(2[._-]?5|3)[-_.]?vl|qwen3[._]5(?!.*text)")
"""Names of models that train with images."""
TEXT = "a model of text alone reads no images"
MISSING = {
    r"(?i)[-_]vl\b|[-_]vl[-_]|minicpm|glm-?4\.\dv|vla\b|pixtral|mistral-small-3\.[1-9]": IMAGES,
    r"(?i)gemma(?!-?3(?!n))|phi-?\d|seed-?oss|minimax(?!-?m2)|falcon|mimo|baichuan|internlm|qwen1\.5-moe|qwen2[-_.].*a14b|"
    r"glm-?5|chatglm|glm-?4(?![.-]?[567])|nemotron.*(super|ultra)|nemotron-?4|deepseek-?v4|hunyuan|"
    r"^hy-?\d": "its family is not here",
}
"""Names of models of families that do not exist here, and why."""
WITH_TOWER = re.compile(r"(?i)kimi-k2\.[5-9]")
"""Names of models that are trained as their text model, and whose published folders also have what reads images."""
SEES_MORE = re.compile(r"(?i)gemma-?3-(4|12|27)b|omni|kimi-k2\.[5-9]|[-_]vl\b|llama-4|mistral-small-3\.[1-9]")
"""Names of models that read images elsewhere."""
TRACKERS = {"wandb": "project", "tensorboard": None, "mlflow": "experiment"}
NEVER = "verl never evaluates with this test_freq"
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
    path, name = str(value), PurePosixPath(str(value)).name
    if path.startswith(("hdfs:", "s3:", "gs:")):
        why = "copy the folder to a file system that all nodes see"
        return Meaning("refused", {f"{section}.path": f"models/{name}"}, why)
    folder, command = local_model(path)
    to = {f"{section}.path": str(folder)}
    if section == "critic.model":
        to["critic.model.dtype"] = "bfloat16"
        if settings["actor_rollout_ref.model.enable_gradient_checkpointing"] and not settings.is_megatron:
            to["critic.model.recompute"] = "full"
    if section == "model" and sees_images(settings):
        told = ""
        if f"{ACTOR}.freeze_vision_tower" not in settings and not adapters.has_adapters(settings, key):
            told, to["policy.vision_tower"] = "verl trains the vision tower, too, unless told otherwise", "trained"
        return mapped(to, "; ".join(filter(None, (command, told))))
    missing = next((why for pattern, why in MISSING.items() if re.search(pattern, name)), None)
    if missing and not (folder / "config.json").exists():
        return Meaning("refused", to, f"{missing}; docs/models.md has the families that are")
    if WITH_TOWER.search(name) and not path.rstrip("/").endswith("text"):
        tower = "a published folder also reads images: take out its model of text once (docs/models.md)"
        return mapped(to, f"{command}; {tower}" if command else tower)
    return Meaning("mapped" if command else "used", to, command)


def image_key(settings: Settings, key: str, value: Any) -> Meaning:
    if not sees_images(settings):
        if SEES_MORE.search(PurePosixPath(str(settings["actor_rollout_ref.model.path"])).name):
            return Meaning("left out", {}, "it is trained as its model of text, and rows with images are refused")
        return implied(TEXT)
    if value in ("images", "image"):
        return implied("the column is found by its name")
    return used({"data.columns.images": value})


def image_processor(settings: Settings, key: str, value: Any) -> Meaning:
    if not sees_images(settings) or value in (None, {}):
        return implied("the processor is the model's")
    return refused("write it into preprocessor_config.json in the model's folder")


def frozen_tower(settings: Settings, key: str, value: Any) -> Meaning:
    if not sees_images(settings):
        return implied(TEXT)
    return used({"policy.vision_tower": "frozen" if value else "trained"})


def sees_images(settings: Settings) -> bool:
    """Whether the model trains with images: its folder says so, or, if there is none, its name."""
    folder, _ = local_model(path := str(settings["actor_rollout_ref.model.path"]))
    if (folder / "config.json").exists():
        return vision_of(folder) is not None
    return bool(SEES_IMAGES.search(PurePosixPath(path).name))


def granularity(settings: Settings, key: str, value: Any) -> Meaning:
    """Megatron's keys of recomputation, which belong together."""
    names = [f"recompute_{name}" for name in ("granularity", "method", "num_layers", "modules")]
    kind, method, layers, modules = (settings[f"{key.rpartition('.')[0]}.{name}"] for name in names)
    if kind not in ("full", "selective"):
        return implied("nothing is recomputed by default")
    if kind == "full" and method in (None, "uniform") and layers in (None, 1):
        return mapped({"model.recompute": "full"}, "every layer is recomputed")
    chosen = (kind, method, layers, None) if kind == "full" else (kind, None, None, modules or ["core_attn"])
    switches = zip(names, chosen, strict=True)
    return used({f"policy.megatron.transformer.{name}": one for name, one in switches if one})


def files_of(value: Any) -> list[str]:
    return [os.path.expanduser(str(one)) for one in (value if isinstance(value, list) else [value])]


def train_rows(settings: Settings, key: str, value: Any) -> Meaning:
    files = files_of(value)
    if len(files) == 1:
        return used({"data.train": files[0]})
    if settings.rows is None or len(settings.rows) != len(files):
        why = f"verl mixes {len(files)} files by their numbers of rows; give them, in this order, as --rows N,M,..."
        return refused(why)
    paths = [PurePosixPath(one) for one in files]
    stems, folders = [one.stem for one in paths], [one.parent.name for one in paths]
    short = next((one for one in (stems, folders) if len(set(one)) == len(files)), [str(n) for n in range(len(files))])
    named = zip(files, settings.rows, short, strict=True)
    sources = [{"path": one, "weight": float(number), "name": name} for one, number, name in named]
    return mapped({"data.train": sources}, "the weights are the numbers of rows")


def never_evaluates(settings: Settings) -> bool:
    return bool(settings["trainer.test_freq"] <= 0 and not settings["trainer.val_before_train"])


def eval_rows(settings: Settings, key: str, value: Any) -> Meaning:
    files, most = files_of(value), settings["data.val_max_samples"]
    if never_evaluates(settings):
        return Meaning("implied", {"data.eval": None}, NEVER)
    to = {"data.eval": files[0], "eval.num_prompts": ALL_ROWS if most in (None, 0, -1) else most}
    if len(files) > 1:
        return Meaning("left out", to, "evaluations read one file or folder; put the files into one folder")
    return used(to, "all its rows")


def long_prompts(settings: Settings, key: str, value: Any) -> Meaning:
    """`filter_overlong_prompts` and `truncation`."""
    is_filtered, cut = settings["data.filter_overlong_prompts"], settings["data.truncation"]
    is_cut = key == "data.truncation" and cut != "error" and not is_filtered
    why = "no prompt is cut: a run ends at a row whose prompt is too long" if is_cut else ""
    return mapped({"data.on_bad_row": "skip" if is_filtered else "fail"}, why)


def total_steps(settings: Settings, key: str, value: Any) -> Meaning:
    """`total_training_steps` and `total_epochs`."""
    steps, rows, prompts = num_steps(settings), settings.num_rows, settings["data.train_batch_size"]
    if key.endswith("total_training_steps"):
        why = "" if steps == value else f"verl ends after {settings['trainer.total_epochs']} epochs of {rows} rows"
        return Meaning("mapped" if why else "used", {"run.steps": steps}, why)
    if settings["trainer.total_training_steps"] is not None:
        return implied("total_training_steps says when the run ends")
    if steps is None:
        return refused(
            f"the steps are {value} x (rows of data.train_files // {prompts}); give --rows N (verl rounds each epoch "
            "down, and run.epochs does not)"
        )
    if steps == 0:
        return refused(f"{rows} rows are fewer than the {prompts} of a step; give trainer.total_training_steps")
    return mapped({"run.steps": steps}, f"{value} epochs x ({rows} rows // {prompts})")


def rewards(settings: Settings, key: str, value: Any) -> Meaning:
    """The reward of the run, wherever verl has it from."""
    path, name = settings["custom_reward_function.path"], settings["custom_reward_function.name"]
    prefix = "custom_reward_function.reward_kwargs."
    arguments = {one.removeprefix(prefix): settings[one] for one in settings.given if one.startswith(prefix)}
    names = " ".join(files_of(settings["data.train_files"])).lower()
    ours: dict[str, Any] = {"kind": "mathematics", "require_stop": False}
    why = "verl's own functions compare the number after #### or in a box, as this reward does"
    if settings["reward_model.enable"]:
        ours = {"kind": "reward_model", "model": str(settings["reward_model.model.path"] or "reward-model")}
        why = "serve it with vLLM as a classifier, and add url and unfinished_score"
    elif path is not None:
        ours, why = {"kind": "compute_score", "path": f"{path}:{name}"}, ""
        ours |= {"arguments": arguments} if arguments else {}
    elif settings["reward_model.reward_manager"] == "dapo" or "dapo" in names:
        ours |= {"mode": "lenient", "weight": 2.0}
        why = "verl's own function gives 1 and -1; here 2 and 0 differ by as much"
    elif "gsm8k" not in names and "math" not in names:
        ours = {"kind": "compute_score", "path": "verl.utils.reward_score:default_compute_score"}
        why = "verl's own function, which it chooses by data_source; it needs verl to be installed"
    return mapped({"rewards": [ours]}, why)


def reward_part(settings: Settings, key: str, value: Any) -> Meaning:
    """A key that `rewards` has read, if its reward is the one of the run."""
    if key.startswith("reward_model.") != bool(settings["reward_model.enable"]):
        return implied("the reward of the run is another one")
    return rewards(settings, key, value)


def manager(settings: Settings, key: str, value: Any) -> Meaning:
    if value == "batch" and settings["custom_reward_function.path"] is not None:
        return refused("the function gets one answer in a call here; write one that takes one answer")
    if value in ("naive", "batch", "prime", "dapo"):
        return implied("each answer is scored as soon as its group is complete")
    return refused("there is no such manager; write its scores as a reward of kind function")


def overlong_buffer(settings: Settings, key: str, value: Any) -> Meaning:
    """DAPO's soft penalty of long answers; the keys belong together."""
    prefix = "reward_model.reward_kwargs.overlong_buffer_cfg"
    if f"{prefix}.enable" not in settings:
        prefix = "reward_model.overlong_buffer"
    if not settings[f"{prefix}.enable"] or settings["reward_model.enable"]:
        return implied("the penalty is off")
    if key.endswith(".log"):
        return implied("metrics have the shaped reward")
    factor = settings[f"{prefix}.penalty_factor"]
    if factor not in (None, 1):
        return refused(f"the largest penalty is 1 here, not {factor}; write it as a reward of kind function")
    length = settings["reward_model.reward_kwargs.max_resp_len"] or settings["data.max_response_length"]
    shaping = {"kind": "soft_overlong", "max_tokens": length, "cache_tokens": settings[f"{prefix}.len"]}
    return mapped({"algorithm.shaping": [shaping]})


def evaluation(settings: Settings, key: str, value: Any) -> Meaning:
    """`test_freq` and `val_before_train`."""
    if key.endswith("test_freq"):
        why = "" if value > 0 else "before the first step and after the last one"
        return Meaning("mapped" if why else "used", {"eval.every": max(int(value), 0)}, why)
    if value:
        return implied("every run evaluates before its first step")
    if never_evaluates(settings):
        return mapped({"data.eval": None}, NEVER)
    return Meaning("left out", {}, "every run with data.eval evaluates before its first step too")


def eval_sampling(settings: Settings, key: str, value: Any) -> Meaning:
    """The sampling of evaluations, which is the sampling of training here."""
    if never_evaluates(settings):
        return implied(NEVER)
    name = key.rpartition(".")[2]
    usual = {"top_p": (1, 1.0, None), "top_k": (-1, 0, None), "do_sample": (True,)}
    same = usual.get(name, (settings[f"{ROLLOUT}.temperature"],))
    if value in same:
        return implied("evaluations sample as training does")
    return Meaning("left out", {}, f"evaluations sample as training does, with {name} {same[0]}")


def names(settings: Settings, key: str, value: Any) -> Meaning:
    """Project, experiment and folder, which together are our `run.name` and `run.folder`."""
    name = f"{settings['trainer.project_name']}/{settings['trainer.experiment_name']}"
    local = settings["trainer.default_local_dir"]
    folder = "runs" if local is None else os.path.expanduser(str(local)).rstrip("/").removesuffix(f"/{name}")
    to = {"run.name": name.replace(" ", "_"), "run.folder": folder}
    return mapped(to, "the first part of run.name" if key.endswith("project_name") else "")


def loggers(settings: Settings, key: str, value: Any) -> Meaning:
    given, project = value if isinstance(value, list) else [value], settings["trainer.project_name"]
    known = [(kind, TRACKERS[kind]) for kind in given if kind in TRACKERS]
    trackers = [{"kind": kind, **({argument: project} if argument else {})} for kind, argument in known]
    to: dict[str, Any] = {"observe": trackers} if trackers else {}
    if unknown := [kind for kind in given if kind not in (*TRACKERS, "console", "file")]:
        return Meaning("left out", to, f"there is no tracker {', '.join(map(str, unknown))}; see observe")
    return mapped(to) if trackers else implied("metrics are printed and in metrics.jsonl")


def save_every(settings: Settings, key: str, value: Any) -> Meaning:
    to = {"checkpoint.every": max(int(value), 0)}
    if value <= 0:
        return mapped(to, "one checkpoint at the end, while verl writes none")
    if settings["trainer.max_actor_ckpt_to_keep"] is None:
        return mapped({**to, "checkpoint.keep_every": value}, "all are kept, as in verl")
    return used(to)


def save_contents(settings: Settings, key: str, value: Any) -> Meaning:
    every = settings["trainer.save_freq"]
    if "hf_model" in str(value) and every > 0:
        return mapped({"checkpoint.export_every": every}, "a Hugging Face folder at every checkpoint")
    return implied("checkpoints have weights, optimizer and the state of the run")


def engine(settings: Settings, key: str, value: Any) -> Meaning:
    """`model_engine`, whose value is one of verl's."""
    other = "" if settings.is_megatron else f", and not {settings.trainer}; {settings.mesh_reason}"
    return implied(f"the trainer is Megatron-Core{other}")


def engine_of_actor(settings: Settings, key: str, value: Any) -> Meaning:
    """`actor.model_engine`, which no engine of verl reads."""
    why = f"verl reads model_engine at the top alone, and its trainer is {settings.trainer}"
    return Meaning("implied" if value == settings.engine else "refused", {}, why)


def engine_length(settings: Settings, key: str, value: Any) -> Meaning:
    """Lengths that verl gives to its engines, which are sums of the lengths of prompts and answers by default."""
    lengths = {"prompt_length": "data.max_prompt_length", "response_length": "data.max_response_length"}
    same = lengths.get(key.rpartition(".")[2])
    if same and value != settings[same]:
        return refused(f"engines read {same} here, which is {settings[same]}; give both the same value")
    if not same and value is not None and value < settings.longest:
        return refused(f"verl's engines cut a sequence after it; here one may have {settings.longest} tokens")
    return implied("prompt and answer lengths give the longest sequence")


def critic_warmup(settings: Settings, key: str, value: Any) -> Meaning:
    if not settings.has_critic or value <= 1:
        return implied("no step trains the critic alone")
    return mapped(
        {"critic.warmup_steps": value - 1}, "verl counts steps from 1, and the policy trains from step critic_warmup on"
    )


def batch_of_generation(settings: Settings, key: str, value: Any) -> Meaning:
    if value == settings["data.train_batch_size"] or settings["algorithm.filter_groups.enable"] or not value:
        return implied("prompts are requested until the batch is full")
    return refused("a step has as many prompts as data.train_batch_size says")


def multi_turn(settings: Settings, key: str, value: Any) -> Meaning:
    prefix = f"{ROLLOUT}.multi_turn"
    if value in (None, False, 0) or not (settings[f"{prefix}.enable"] or settings[f"{prefix}.tool_config_path"]):
        return implied("an answer is one turn")
    return refused("write the tools as typed functions in rollout.environment (docs/environments.md)")
