"""Checks `rollout.environment` before anything starts: whether its class or tools can be loaded, and whether the chat
template can offer the tools and continue a transcript. An agent is not imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from megatron_rl.config.rewards import EnvironmentReward
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.environments import ChangedHistory, Render, format_of, kinds_of_objects, require_offered, schemas_of
from megatron_rl.environments.environment import class_of
from megatron_rl.environments.sandbox.box import FOLDER, Box, BoxError, BoxLimits, container
from megatron_rl.environments.sandbox.workspace import Workspace
from megatron_rl.preflight.reward_source import fault_of_function
from megatron_rl.preflight.tokenizer_files import ChatTemplate, TokenizerFiles
from megatron_rl.rollout.programs.chat_template import OTHER_FORMAT, continuation_of, ends_of


class _Unknown(Exception):
    """Only transformers can render the template."""


def faults_of_environment(
    config: GrpoRunConfig, tokenizer: TokenizerFiles | None, tell: Callable[[str], None]
) -> list[str]:
    """
    Args:
        tokenizer: the model's; None: it is not known, and the chat template is not checked.
        tell: is called with a sentence about what is not checked.
    """
    environment = config.rollout.environment
    if environment is None:
        return []
    if environment.kind == "tools":
        found = [fault_of_function(path, "rollout.environment.paths") for path in environment.paths]
        found += [fault_of_function(path, "rollout.environment.objects") for path in environment.object_paths]
    else:
        found = [fault_of_function(environment.path, "rollout.environment.path")]
    if faults := [fault for fault in found if fault]:
        return faults
    if environment.kind == "class":
        try:
            class_of(environment)
        except ValueError as error:
            if not isinstance(error.__cause__, ModuleNotFoundError):
                return [str(error)]
            tell(f"rollout.environment: the class is not checked, because a module is not installed here: {error}")
    try:
        schemas = schemas_of(environment)
        _require_rewards(config)
        for kind in kinds_of_objects(environment).values():
            if isinstance(made := kind.make(), Workspace):
                tell(f"{kind.where}: its sandboxes on this machine: {_confinement(made.image)}")
        if tokenizer is not None and tokenizer.core is not None:
            for rewrite in _check_template(config, tokenizer, schemas, tell):
                tell(
                    f"rollout.environment: {rewrite}. The run trains on what the model has sampled, so whoever uses "
                    "the model should keep its answers as they are, or the template should"
                )
    except ValueError as error:
        return [str(error)]
    except (_Unknown, TemplateError):
        tell("the chat template is not checked for rollout.environment: it can be rendered by transformers alone")
    return []


def _confinement(image: str | None) -> str:
    """What makes sandboxes. bubblewrap is tried, because a kernel may forbid it; an image may have to be fetched."""
    try:
        if image is not None:
            return container(image, BoxLimits(), FOLDER)[0]
        Box().close()
        return "bubblewrap"
    except BoxError as error:
        return f"none, so each answer would fail: {error}"


def _require_rewards(config: GrpoRunConfig) -> None:
    """
    Raises:
        ValueError: the reward `environment` would abstain on every answer.
    """
    kinds = kinds_of_objects(config.rollout.environment).values()
    asked = [reward.label for reward in config.rewards if isinstance(reward, EnvironmentReward)]
    if asked and kinds and not any(kind.owns_reward for kind in kinds):
        raise ValueError(
            f"rewards: {asked[0]} is what get_reward returns, and no class of rollout.environment.objects has this "
            f"method ({', '.join(kind.type_name for kind in kinds)}); write it, or choose another reward"
        )


def _check_template(
    config: GrpoRunConfig, tokenizer: TokenizerFiles, schemas: Sequence[Mapping[str, Any]], tell: Callable[[str], None]
) -> list[str]:
    """How the chat template rewrites answers in the history.

    Raises:
        ValueError: the chat template cannot offer the tools, or cannot continue a transcript.
    """
    folder = config.model.path
    if tokenizer.template is None:
        raise ValueError(
            f"rollout.environment: the tokenizer of {folder} has no chat template; add chat_template.jinja"
        )
    template = ChatTemplate(tokenizer.template, tokenizer.special)

    def with_arguments(arguments: Mapping[str, Any]) -> Render:
        def render(turns: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
            text = template.render(turns, add_generation_prompt, arguments)
            if text is None:
                raise _Unknown
            return text

        return render

    plain = dict(config.data.chat_template)
    offering = with_arguments({**plain, "tools": schemas} if schemas else plain)
    if schemas:
        try:
            require_offered(offering, with_arguments(plain), schemas)
        except ValueError as error:
            raise ValueError(f"rollout.environment: {folder}: {error}") from error
    environment = config.rollout.environment
    if environment is not None and environment.kind == "tools" and environment.format is None:
        form = format_of(offering, ends_of(folder), schemas[0]["function"]["name"])
        if form == "other":
            raise ValueError(f"rollout.environment: {folder}: {OTHER_FORMAT}")
        if form == "unknown":
            tell(
                "rollout.environment: the chat template does not say how a call of a tool is written, so that calls "
                "in the format hermes count; rollout.environment.format chooses another one"
            )
    if environment is not None and environment.kind == "agent":  # one that never goes on needs nothing of the template
        return []
    try:
        return continuation_of(folder, config.rollout, offering).rewrites
    except ChangedHistory as error:
        if environment is None or environment.history == "refuse":
            raise
        tell(
            f"{str(error).partition('. The tokens')[0]}. So an answer of several turns has several samples, each with "
            "the history that the template writes (rollout.environment.history: split)"
        )
        return []
