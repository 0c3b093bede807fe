"""Finds the errors that would stop a run in its first minutes. It takes a few seconds, and imports neither torch, Ray
nor vLLM.

Invariants (tests/unit/preflight): every reported fault would stop the run; all faults are reported together, and each
is one sentence that says what is wrong, where, and what to do; no file is left behind.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_rl.config.rewards import ReasoningGymReward
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig
from megatron_rl.data.saved_rollouts import require_step
from megatron_rl.loop.checkpoints import Checkpoints, Resume, find_checkpoints
from megatron_rl.models import check_text_alone, hub_hint, read_shape, scan
from megatron_rl.models.hub import MANIFEST
from megatron_rl.models.quantisation import check_unquantised
from megatron_rl.observe.provenance import check_own
from megatron_rl.observe.sink import check_unused
from megatron_rl.observe.trackers import missing_packages
from megatron_rl.planning.parameters import checkpoint_bytes, gigabytes
from megatron_rl.planning.shapes import planned_model
from megatron_rl.preflight.adapters import faults_of_resumed_base, notes_on_adapters
from megatron_rl.preflight.backend_source import faults_of_backend
from megatron_rl.preflight.critic import faults_of_critic
from megatron_rl.preflight.devices import faults_of_device, faults_of_start_timeout
from megatron_rl.preflight.engine_options import faults_of_engine_options
from megatron_rl.preflight.environment_source import faults_of_environment
from megatron_rl.preflight.model import faults_of_division, faults_of_model
from megatron_rl.preflight.multi_token import check_head, kept_bytes
from megatron_rl.preflight.reward_services import faults_of_services
from megatron_rl.preflight.rows import Tell, check_resumed_rows, faults_of_hub, faults_of_rows, missing_rows
from megatron_rl.preflight.teachers import faults_of_teachers
from megatron_rl.preflight.tokenizer_files import TokenizerFiles
from megatron_rl.rollout.plugins import fault_of_plugins
from megatron_rl.rollout.programs.budgets import Budgets
from megatron_rl.rollout.vocabulary import forbidden_ids
from megatron_rl.types import ModelShape
from megatron_rl.verifiers.reasoning_gym import missing_package

MUCH_SLOWER = 4
"""A product in bfloat16 or float16 that takes this many times as long as one in float32 is reported."""


def check_before_start(
    config: BaseConfig, console: Console, *, resume: Resume, planning: bool = False, in_job: bool = False
) -> None:
    """Run the preflight, print its notes, and raise all faults together.

    Raises:
        ValueError: the run would stop in its first minutes. The message has all faults.
    """
    tell = partial(console.print, style="yellow", markup=False, soft_wrap=True)
    faults = preflight(config, tell, resume=resume, planning=planning, in_job=in_job)
    if len(faults) == 1:
        raise ValueError(faults[0])
    if faults:
        raise ValueError(f"{len(faults)} faults would stop this run:\n" + "\n".join(f"  - {fault}" for fault in faults))


def preflight(
    config: BaseConfig, tell: Tell, *, resume: Resume = None, planning: bool = False, in_job: bool = False
) -> list[str]:
    """The faults of a run; an empty list if there are none.

    Args:
        tell: is called with a sentence about everything that is not checked, or that the run will skip.
        resume: how the run continues the run in its folder; None: it is a new one.
        planning: whether this is a dry run. The model's folder may then be missing if its sizes ship with the package,
            and so may the rows, because both lie where the run will be.
        in_job: whether the run will be a Slurm job. It has this Python environment, unless `slurm.container` or
            `slurm.environment` gives it another one.
    """
    faults: list[str] = []
    job = config.slurm if in_job else None
    if not (job and (job.container or job.environment)):
        faults += _of_python(config, tell, planning, in_job)

    def attempt(check: Callable[[], Any]) -> Any:
        """The result of the check. If it raises, the message is added to the faults, and the result is None."""
        try:
            return check()
        except (ValueError, OSError) as error:
            faults.append(str(error))
            return None

    folder = config.model.path
    elsewhere = planning and not folder.exists()
    shape: ModelShape | None = attempt(lambda: planned_model(config) if planning else read_shape(folder))
    splits = tokenizer = None
    if shape:
        splits = not (unfit := faults_of_division(config, shape))
        faults += unfit + faults_of_model(config, shape) + faults_of_start_timeout(config, shape)
        for note in notes_on_adapters(config):
            tell(note)
    if elsewhere:
        tell(
            f"not checked, because the folder {folder} is not there: weights, tokenizer, lengths of rows in tokens, "
            f"free disk space{hub_hint(folder)}"
        )
    elif folder.is_dir():
        if shape:
            attempt(lambda: _check_weights(config, shape))
            attempt(lambda: check_head(config, shape, tell))
        tokenizer = attempt(lambda: TokenizerFiles(folder))
    if tokenizer and shape:
        faults += _vocabulary(config, shape, tokenizer)
    if shape and isinstance(config, GrpoRunConfig) and config.critic is not None:
        if planning and config.critic.model is not None and not config.critic.model.path.exists():
            tell(f"not checked, because the folder {config.critic.model.path} is not there: the critic")
        else:
            faults += faults_of_critic(config, shape, tokenizer)
    faults += (broken := faults_of_environment(config, tokenizer, tell) if isinstance(config, GrpoRunConfig) else [])
    absent = missing_rows(config) if elsewhere else []
    if broken:
        tell("not checked, because rollout.environment has a fault: rows and reward functions")
    elif absent:
        tell(f"not checked, because {', '.join(map(str, absent))} is not there: rows and reward functions")
    else:
        faults += faults_of_rows(config, tokenizer, tell)
    num_updates = config.run.steps
    if isinstance(config, GrpoRunConfig):
        num_updates *= config.algorithm.num_updates
        faults += faults_of_backend(config, trains=True) + faults_of_teachers(config, tokenizer, tell)
        faults += faults_of_services(config, planning, tell)
        if (saved := config.rollout.replay) is not None:
            attempt(lambda: require_step(saved, config.run.steps - 1))
        if config.eval.every and config.data.eval is None:
            tell(f"eval.every is {config.eval.every}, but nothing is evaluated: data.eval gives no held-out rows")
    if config.policy.optimizer.warmup_steps >= num_updates:
        tell("policy.optimizer.warmup_steps: the learning rate rises until after the last step, and never reaches lr")
    faults += _sampling(config) + faults_of_engine_options(config, tell)
    _compare_products(config, tell)
    faults += (named := _name(config))
    if not named:
        usable = attempt(lambda: _check_folder(config, resume))
        if usable and splits and not elsewhere and shape is not None:
            faults += _disk(config, shape) + faults_of_resumed_base(config, resume)
    return faults + missing_packages(config) + _packages(config, shape, planning)


def _of_python(config: BaseConfig, tell: Tell, planning: bool, in_job: bool) -> list[str]:
    """The faults of this Python environment. A plan only tells of a job that it could not submit."""
    if not planning:
        return faults_of_device(config) + faults_of_hub(config)
    if in_job and (unfit := faults_of_device(config)):
        tell(f"this Python cannot submit the job: {unfit[0]}")
    return []


def _check_weights(config: BaseConfig, shape: ModelShape) -> None:
    check_unquantised(config.model.path)
    if isinstance(config, GrpoRunConfig) and config.served_adapters:
        check_text_alone(config.model.path)
    if config.model.weights:
        _check_manifest(config.model.weights, shape)
    else:
        scan(config.model.path, shape)


def _check_manifest(folder: Path, shape: ModelShape) -> None:
    """Check the folder of `model.weights`, as far as its files need not be read."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"model.weights: {folder} has no {MANIFEST}; give a folder that `megatron-rl convert to-megatron` has "
            f"written, or a checkpoint of a run"
        )
    try:
        fields = json.loads(path.read_text())
        saved, files = fields["shape"], {folder / name: entry["bytes"] for name, entry in fields["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"model.weights: {path} cannot be read ({error!r}); copy the folder again") from error
    for key in ("family", "num_layers", "hidden_size", "vocab_size"):
        if saved.get(key) != (mine := getattr(shape, key)):
            raise ValueError(
                f"model.weights: {folder} holds a model with {key} {saved.get(key)}, but model.path has {mine}"
            )
    wrong = [file for file, size in files.items() if not file.is_file() or file.stat().st_size != size]
    if wrong:
        raise ValueError(
            f"model.weights: {wrong[0]} is missing or has another size than the manifest says ({len(wrong)} of "
            f"{len(files)} files); copy the folder again"
        )


def _vocabulary(config: BaseConfig, shape: ModelShape, tokenizer: TokenizerFiles) -> list[str]:
    """Compare the tokenizer with the model's vocabulary and with the thinking budget, and return the faults."""
    folder = config.model.path
    if tokenizer.core is None:
        needs = isinstance(config, GrpoRunConfig) and config.rollout.delimiter
        return [f"{folder} has no tokenizer.json; save it with transformers' save_pretrained"] if needs else []
    faults = []
    largest = max(tokenizer.core.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= shape.vocab_size:
        faults.append(
            f"{folder / 'tokenizer.json'} has the token id {largest}, but the model's vocabulary ends at "
            f"{shape.vocab_size - 1} (vocab_size of config.json); take the tokenizer that belongs to these weights"
        )
    if not isinstance(config, GrpoRunConfig):
        return faults
    checks: list[Callable[[], object]] = [lambda: forbidden_ids(folder, shape.vocab_size, config.rollout)]
    if config.rollout.delimiter:
        checks.append(lambda: Budgets(folder, config.rollout, on_gpu=config.cluster.gpus_per_engine_rank > 0))
    for check in checks:
        try:
            check()
        except ValueError as error:
            faults.append(str(error))
    return faults


def _compare_products(config: BaseConfig, tell: Tell) -> None:
    """Tell it if this CPU needs much longer for a product in the model's type than in float32. A step would hardly
    end."""
    if config.model.dtype == "float32" or config.cluster.gpus_per_trainer > 0:
        return
    import torch

    def seconds(dtype: torch.dtype, form: int) -> float:
        a, b = torch.ones(2, 256, 256, dtype=dtype)
        left, right = ((a, b.t()), (a, b), (a.t(), b))[form]
        start = time.perf_counter()
        left @ right
        return time.perf_counter() - start

    # A layer's product, and its backward pass's two. Libraries have fast kernels for some of them.
    name, forms, num_threads = config.model.dtype, range(3), torch.get_num_threads()
    types = (getattr(torch, name), torch.float32)
    torch.set_num_threads(1)  # threads wait for each other where other processes have the cores
    times = [max(min(seconds(dtype, form) for _ in range(3)) for form in forms) for dtype in types]
    torch.set_num_threads(num_threads)
    if times[0] > MUCH_SLOWER * times[1]:
        speeds = [2e-9 * 256**3 / time_s for time_s in times]
        tell(
            f"model.dtype is {name}. This CPU multiplies such matrices at {speeds[0]:.1f} GFLOP/s, and at "
            f"{speeds[1]:.0f} in float32: each step will take many times as long; remove model.dtype, or set float32"
        )


def _sampling(config: BaseConfig) -> list[str]:
    """A gradient of the full distribution at tokens that were sampled from a part of it is no policy gradient."""
    if not isinstance(config, GrpoRunConfig) or config.rollout.replay is not None:
        return []
    sampling = config.rollout.sampling
    if sampling.top_p == 1 and sampling.top_k == 0:
        return []
    return [
        f"rollout.sampling: with top_p {sampling.top_p:g} and top_k {sampling.top_k} the engines would sample from a "
        "part of the model's distribution, and the trainer computes log-probs and gradients of all of it; set top_p to "
        "1 and top_k to 0"
    ]


def _packages(config: BaseConfig, shape: ModelShape | None, planning: bool) -> list[str]:
    """Check that the packages of trainers and engines, which a plan does not need, and of the rewards are installed.
    Returns the faults."""
    faults = []
    on_gpus = config.cluster.gpus_per_trainer > 0 and not planning
    if on_gpus and shape is not None and shape.has_delta_rule and find_spec("fla") is None:
        faults.append(
            f"{config.model.path} has linear attention, whose kernels for GPUs are not installed; install fla-core "
            "with the version of requirements/gpu.lock, as make gpu-env does"
        )
    if not isinstance(config, GrpoRunConfig):
        return faults
    if not planning and config.rollout.replay is None and config.rollout.backend is None:
        if find_spec("vllm") is None:
            faults.append(
                "vLLM is not installed, and the engines are vLLM's. It is no dependency of the package, because its "
                "build must fit the machine: install the files of requirements/ as tools/setup.sh does, or vLLM's own "
                "wheel"
            )
        elif fault := fault_of_plugins():
            faults.append(fault)
    labels = [reward.label for reward in config.rewards if isinstance(reward, ReasoningGymReward)]
    return faults + ([f"rewards: {labels[0]}: {fault}"] if labels and (fault := missing_package()) else [])


def _name(config: BaseConfig) -> list[str]:
    """Check that run.name can be the name of a folder, and return the faults."""
    name = config.run.name
    longest = max((len(part.encode()) for part in Path(name).parts), default=0)
    if longest > 255:
        return [f"run.name has a part of {longest} bytes, and a folder's name has 255 at most; shorten it"]
    parts = Path(name).parts
    if not name.strip() or "\0" in name or Path(name).is_absolute() or ".." in parts or not parts:
        return [f"run.name {name!r} names no folder below run.folder; write a relative name, like `gsm8k/first`"]
    return []


def _check_folder(config: BaseConfig, resume: Resume) -> bool:
    """Returns True.

    Raises:
        ValueError: the folder cannot be written, it belongs to something else, it has an earlier run that is not
            resumed, it has no checkpoint of the step to resume from, or its rows are not the checkpoint's.
    """
    folder = config.run_folder
    there = _nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(
            f"run.folder: {folder} cannot be written ({there}: {error.strerror}); choose another run.folder, or "
            f"correct its permissions"
        ) from error
    check_own(folder)
    if resume is None:
        check_unused(folder)
    if resume != "auto":
        Checkpoints(folder / "checkpoints", config.absolute(), resume=resume)
    check_resumed_rows(config, resume)
    return True


def _disk(config: BaseConfig, shape: ModelShape) -> list[str]:
    """Check that the disk has room for two checkpoints, because a new one is complete before an older one is deleted.
    If there is a checkpoint already, room for one more is enough. Returns the faults."""
    is_resumed = bool(find_checkpoints(config.run_folder / "checkpoints"))
    number, told = (1, "a further checkpoint needs") if is_resumed else (2, "two checkpoints need")
    adapted = config.policy.adapted(shape)
    one = checkpoint_bytes(adapted, config.model.dtype, config.policy.optimizer) + kept_bytes(config, shape)
    needed = number * one
    free = shutil.disk_usage(_nearest(config.run_folder)).free
    if free >= needed:
        return []
    return [
        f"run.folder: the disk of {config.run_folder} has {gigabytes(free)} free, and {told} {gigabytes(needed)}; free "
        f"some space, or choose another run.folder"
    ]


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
