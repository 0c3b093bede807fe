"""What the tools share that let engines answer without trainers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from megatron_rl.commands.defaults import read_config
from megatron_rl.commands.interrupt import Interrupt
from megatron_rl.commands.launch import note
from megatron_rl.commands.screen import console, tell_error, waiting
from megatron_rl.config.function import ImportPath, source_file
from megatron_rl.config.machine import num_cores, threads_of_ranks
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data.cache import contents_digest
from megatron_rl.data.files import files_of
from megatron_rl.loop.health.answers import common_reason
from megatron_rl.loop.rollouts import verdicts_of
from megatron_rl.models.composite import check_text_alone
from megatron_rl.models.peft import base_digest
from megatron_rl.ports import StopRequested
from megatron_rl.preflight.backend_source import faults_of_backend
from megatron_rl.preflight.row_sources import prompt_rules, training_sources
from megatron_rl.types import Group, GroupRequest, Prompt, Tokenizer

if TYPE_CHECKING:
    from megatron_rl.cluster.engines import EngineGroup
    from megatron_rl.cluster.verifier import VerifierGroup


SECTIONS = ("model", "data", "rollout", "rewards", "eval")
"""What the answers and their scores depend on."""
FREE = {"num_engines", "parallel", "gpu_memory_utilization", "max_sequences", "prompts_per_step"}
"""The keys of `rollout` that may change when a tool goes on."""
SMALL = 1 << 26
"""The largest file of a model, in bytes, that is read for its digest: a vocabulary has tens of MB."""
WAVES = 2
"""Twice as many answers run as the engines decode at once, so that the engines never wait."""
PATIENCE = 64
"""The answers on which the rewards may fail before anything has a score."""


def config_without_trainers(arguments: Sequence[str], out: Path) -> GrpoRunConfig:
    """The configuration of a run whose folder is `out`, for engines that load the weights of `model.path` themselves.

    Raises:
        ValueError: the configuration is wrong, or names weights that engines cannot load.
    """
    own = [f"run.folder={out.parent}", f"run.name={out.name}", "cluster.colocate=false", "policy.routing_replay=false"]
    own += ["rollout.replay=null", "run.epochs=null"]
    config = read_config(GrpoRunConfig, ["run.steps=1", *arguments, *own], note).absolute()
    if config.model.weights is not None:
        raise ValueError(
            f"the engines load Hugging Face's form, but model.weights is {config.model.weights}; convert it with "
            f"`megatron-rl convert to-hf`, give the result as model.path, and set model.weights=null"
        )
    if (config.model.path / "config.json").is_file():
        check_text_alone(config.model.path)
    return config


def configured(arguments: Sequence[str], out: Path, samples: int) -> GrpoRunConfig:
    """The configuration for tools that count right answers: `samples` answers to each row of `data.train`.

    Raises:
        ValueError: an error of `config_without_trainers`, or there are several sources of rows, or no reward decides
            which answers are right.
    """
    own = [f"rollout.samples_per_prompt={samples}", "data.easy_first_epochs=0", "rollout.prefix_values=null"]
    # Nothing is trained, so what an estimator needs is not asked: several answers, or a critic.
    own += ["critic=null", "algorithm=null", "algorithm.adv_estimator.kind=reinforce_plus_plus"]
    config = config_without_trainers([*arguments, *own], out)
    if isinstance(config.data.train, tuple):
        raise ValueError("data.train is a mixture; give its sources one by one: data.train=PATH, each with its --out")
    if not config.deciding_rewards:
        raise ValueError(
            "no reward compares answers with a ground truth, so none decides which answers are right; name the one "
            f"that does with eval.verifier, one of {[reward.label for reward in config.rewards]}"
        )
    return config


def settings_of(config: GrpoRunConfig) -> dict[str, Any]:
    """What the answers and their scores depend on, in JSON's types. `contents` has digests of the model's files, of the
    rows, and of the files of the user's functions. Rows of the hub have none; their name has to do.

    Raises:
        ValueError: the model's folder, the file of the rows or of a function is not there, or weights are damaged.
    """
    model = config.model.path
    rows = [source.path for source in training_sources(config.data, config.rollout.environment)]
    if not (model / "config.json").is_file():
        hint = f": it is a run, whose model is {model / 'hf'}" if (model / "hf").is_dir() else ""
        raise ValueError(f"model.path: {model} has no config.json, so it is no folder of a Hugging Face model{hint}")
    if missing := [path for path in rows if isinstance(path, Path) and not path.exists()]:
        raise ValueError(f"data.train: there is no {missing[0]}")
    whole = config.model_dump(mode="json")
    sections = {name: whole[name] for name in SECTIONS}
    sections["rollout"] = {key: value for key, value in sections["rollout"].items() if key not in FREE}
    contents = {str(path): [contents_digest(path)] for path in _function_files(config)}
    contents[str(model)] = list(_model_digests(model))
    for path in rows:
        if isinstance(path, Path):
            contents[str(path)] = [contents_digest(file) for file in files_of(path)]
    return sections | {"seed": config.run.seed, "contents": contents}


def _function_files(config: GrpoRunConfig) -> set[Path]:
    """The files of the functions and classes that the configuration names. What they import is not among them.

    Raises:
        ValueError: a file is not there.
    """
    values = (getattr(section, name) for section in config.sections() for name in type(section).model_fields)
    named = (one for value in values for one in (value if isinstance(value, tuple) else (value,)))
    found = {path for one in named if isinstance(one, ImportPath) if (path := source_file(one)) is not None}
    if missing := sorted(path for path in found if not path.is_file()):
        raise ValueError(f"there is no {missing[0]}, which the configuration names as the file of a function")
    return found


def _model_digests(folder: Path) -> Iterator[str]:
    """Digests of a model's files. Of safetensors files `base_digest` reads little; another large file counts with its
    size and the time of its last change."""
    weights = sorted(folder.glob("*.safetensors"))
    if weights:
        yield base_digest(folder)
    for path in sorted(path for path in folder.iterdir() if path.is_file() and path not in weights):
        status = path.stat()
        is_small = status.st_size <= SMALL
        yield f"{path.name} {contents_digest(path) if is_small else (status.st_size, status.st_mtime_ns)}"


def check_settings(path: Path, settings: Mapping[str, Any], results: Sequence[Path]) -> None:
    """Write the settings, or compare them with the settings of the earlier start if it has left results.

    Args:
        results: the files of results; some may be missing or empty.

    Raises:
        ValueError: they differ.
    """
    if not path.exists() or not any(one.exists() and one.stat().st_size for one in results):
        path.write_text(json.dumps(settings, indent=1))
        return
    earlier, now = dict(_leaves(json.loads(path.read_text()))), dict(_leaves(json.loads(json.dumps(settings))))
    changed = [
        f"the contents of {key[1]}" if key[0] == "contents" else f"{'.'.join(key)} from {old!r} to {new!r}"
        for key in sorted(earlier | now)
        if (old := earlier.get(key)) != (new := now.get(key))
    ]
    if changed:
        more = f" and {len(changed) - 4} more" if len(changed) > 5 else ""
        raise ValueError(
            f"{path.parent} has answers of other settings: {', '.join(changed[: 4 if more else 5])}{more} changed "
            f"({path.name} has the earlier ones); give another --out, or the earlier settings"
        )


def _leaves(value: Any, *above: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values in nested mappings, each with the keys that lead to it."""
    if not isinstance(value, dict):
        yield above, value
    else:
        for key, inner in value.items():
            yield from _leaves(inner, *above, key)


@contextmanager
def engines_alone(
    config: GrpoRunConfig, logs: Path, check: Callable[[], None]
) -> Iterator[tuple[EngineGroup, VerifierGroup]]:
    """Engines that have loaded their weights, and verifiers, as long as the context is open.

    Args:
        check: is called several times a second, and ends the work by raising.

    Raises:
        ValueError: `rollout.backend` is not able to do what the configuration asks for.
    """
    from megatron_rl.cluster.engines import EngineGroup
    from megatron_rl.cluster.nodes import RayPlacement
    from megatron_rl.cluster.restarts import Restarts
    from megatron_rl.cluster.session import ray_session
    from megatron_rl.cluster.verifier import VerifierGroup
    from megatron_rl.rollout.shared_memory import remove_leftovers

    if faults := faults_of_backend(config, trains=False):
        raise ValueError("; ".join(faults))
    with ExitStack() as cleaning:
        cleaning.callback(remove_leftovers)
        with waiting(console, "Ray starts") as tell:
            num_threads = threads_of_ranks(config, num_cores())
            cleaning.enter_context(ray_session(config.cluster, 1, logs, check, num_threads=num_threads))
            tell("the engines start vLLM (logs/engine_0.log), and the verifiers load the rewards")
            placement = RayPlacement(config, ("engine", "verifier", "reward_model"))
            restarts = Restarts(config.cluster.restarts_per_hour)
            engines = EngineGroup(config, logs, placement, restarts, loads_weights=True)
            cleaning.callback(engines.close)
            verifiers = VerifierGroup(config, logs, placement, restarts)
            engines.wait()
            verifiers.wait()
        yield engines, verifiers


def answer_all(
    config: GrpoRunConfig, out: Path, done: Collection[str], check: Callable[[], None]
) -> Iterator[tuple[Group, Tokenizer]]:
    """Answer and judge the prompts of `data.train` whose uids are not in `done`, and show the progress. The groups come
    as they are complete, each with its tokens as its payload. A prompt's answers depend on its number alone, so that a
    tool that goes on finds the same ones.

    Args:
        check: is called several times a second, and ends the work by raising.

    Raises:
        ValueError: a row is bad, or no answer gets a score.
    """
    from megatron_rl.data import load_prompts
    from megatron_rl.data.tokenizer import open_tokenizer

    data, tokenizer = config.data, open_tokenizer(config.model.path)
    [source] = training_sources(data, config.rollout.environment)
    prompts = load_prompts(source.path, tokenizer, prompt_rules(config), source.reading, data.cache, note)
    console.print(f"{source.path}: {prompts.tally}", markup=False, highlight=False, soft_wrap=True)
    decoder = cast(Tokenizer, tokenizer)  # it gives one text for one list of tokens
    waiting = [(number, prompt) for number, prompt in enumerate(prompts) if prompt.uid not in done]
    if not waiting:
        return
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("prompts", total=len(prompts), completed=len(prompts) - len(waiting))
        groups = _answered(config, out, waiting, check)
        for group in groups if done else from_first_score(groups):
            yield group, decoder
            progress.advance(task)


def from_first_score(groups: Iterator[Group]) -> Iterator[Group]:
    """The groups, held back until one of them has a score: answers of a reward that fails on all of them are not kept.

    Raises:
        ValueError: nothing has a score, after PATIENCE answers if the rewards fail, else at the end.
    """
    held: list[Group] = []
    for group in groups:
        held.append(group)
        verdicts = verdicts_of(held)
        if any(verdict.score is not None for verdict in verdicts):
            yield from held
            yield from groups
            return
        if len(verdicts) >= PATIENCE and all(verdict.failed for verdict in verdicts):
            break
    if held:
        verdicts = verdicts_of(held)
        raise ValueError(
            f"the rewards scored none of {len(verdicts)} answers{common_reason(verdicts)}. Correct the reward"
            f"{' (logs/rewards.log says more)' if any(verdict.failed for verdict in verdicts) else ''}"
        )


def _answered(
    config: GrpoRunConfig, out: Path, waiting_prompts: Sequence[tuple[int, Prompt]], check: Callable[[], None]
) -> Iterator[Group]:
    """The groups of prompts, which have numbers that seed their answers."""
    from megatron_rl.cluster.stream import RayStream

    rollout = config.rollout
    with engines_alone(config, out / "logs", check) as (engines, verifiers):
        stream = RayStream(config, engines, verifiers)
        left, under_way = list(reversed(waiting_prompts)), 0
        most = -(-WAVES * rollout.num_engines * rollout.max_sequences // rollout.samples_per_prompt)
        while left or under_way:
            asked = [left.pop() for _ in range(min(len(left), most - under_way))]
            under_way += len(asked)
            own = [-1 - number for number, _ in asked]  # below 0: not for a run's journal
            requests = [
                GroupRequest(number, prompt, rollout.samples_per_prompt, (number,))
                for number, (_, prompt) in zip(own, asked, strict=True)
            ]
            stream.ask(requests, version=0)
            groups = stream.collect(0).groups.values()
            under_way -= len(groups)
            yield from (replace(group, payload=stream.tokens(group)) for group in groups)


def run_tool(interrupt: Interrupt, work: Callable[[], None], stopped: Callable[[], str]) -> int:
    """Work until the end, a signal or an error, tell how it ended, and return the exit status.

    Args:
        stopped: what is there after a stop, as a sentence.
    """
    try:
        with interrupt.listening():
            work()
        return 0
    except (StopRequested, KeyboardInterrupt):
        console.print(f"Stopped. {stopped()}; the same command goes on.", markup=False, soft_wrap=True)
        return 128 + (interrupt.signal or signal.SIGINT)
    except (ValueError, OSError, RuntimeError) as error:
        return tell_error(error)


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; none if there is no file. A last line that a kill has cut is removed from
    the file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]
