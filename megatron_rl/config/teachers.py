"""Teachers: models whose distributions the policy learns on its own answers (on-policy distillation, Agarwal et al.
2024, arXiv:2306.13649; Lu et al. 2025, "On-Policy Distillation", thinkingmachines.ai).

A teacher is a folder (engines of its own, or the policy's trainer ranks), a server, or the policy itself behind
another prompt. `algorithm.distillation` says what becomes of its log-probs. Each row has the first teacher whose
`datasets` have it, or none.

What cannot be meant is refused here: a temperature or forbidden tokens that a teacher does not share, and a second KL.
Clip and importance correction apply to the sampled form, because it is part of the advantage. They do not apply to the
forms over several tokens, which are exact at each state and terms of the loss like a KL penalty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.reward import datasets_of
from megatron_rl.config.rollout import EngineParallel, RolloutConfig
from megatron_rl.config.section import Section

if TYPE_CHECKING:
    from megatron_rl.config.policy import ModelConfig
    from megatron_rl.config.schema import GrpoRunConfig


class DistillationConfig(Section):
    """How the policy learns from `teachers`. s and t are the probabilities of policy and teacher."""

    form: Literal["sampled", "forward", "reverse", "jensen_shannon"] = "sampled"
    """`sampled`: the advantage of a token is log t - log s, the reverse KL's estimate from the sampled token. The
    others are terms of the loss, over `top_k` tokens and all others together as one more: `forward` is KL(t || s),
    `reverse` KL(s || t), `jensen_shannon` half of KL(s || m) + KL(t || m) with m = (s + t) / 2. They need
    `by: trainer`."""
    by: Literal["engine", "trainer"] = "engine"
    """Who computes the teacher's log-probs. `engine`: engines of its own while others generate, its server, or the
    policy's engines. `trainer`: the policy's trainer ranks, in a pass before the update, with the teacher's weights in
    the nodes' memory otherwise; there is one teacher, of any family and size that `policy.parallel` divides."""
    support: Literal["teacher", "student"] | None = None
    """The model whose most probable tokens the forms over several tokens take. null: the teacher for `forward`, and for
    the others the policy at the step's start."""
    top_k: PositiveInt = 32
    """The number of these tokens."""
    outcome: bool = False
    """Whether the advantages of `adv_estimator` count, too. false: the policy learns only from teachers."""

    @property
    def follows(self) -> Literal["teacher", "student"]:
        """`support` if it is given, else the form's own."""
        return self.support or ("teacher" if self.form == "forward" else "student")

    @property
    def on_ranks(self) -> Literal["sampled", "teacher", "student"] | None:
        """See `passes.Needs.teacher`."""
        if self.by == "engine":
            return None
        return self.follows if self.in_loss else "sampled"

    @property
    def in_loss(self) -> bool:
        """Whether the teacher is a term of the loss, and not of the advantage."""
        return self.form != "sampled"

    @model_validator(mode="after")
    def _no_tokens_of_one_token(self) -> Self:
        if not self.in_loss and (unused := sorted({"support", "top_k"} & self.model_fields_set)):
            raise ValueError(f"{unused[0]} has no effect with form sampled, which takes the sampled token; remove it")
        return self

    def conflicts(self, run: GrpoRunConfig) -> Iterator[str]:
        algorithm, sampling = run.algorithm, run.rollout.sampling
        unlimited = next((i for i, one in enumerate(run.teachers) if one.datasets is None), None)
        if unlimited is not None and unlimited < len(run.teachers) - 1:
            yield (
                f"teachers[{unlimited}] has no datasets, so it teaches all rows that are left, and teachers"
                f"[{unlimited + 1}] none; give it datasets, or put it last"
            )
        if not run.teachers:
            yield "algorithm.distillation learns from teachers, and there are none; give teachers, or remove it"
        if algorithm.kl is not None or algorithm.loss.needs_reference:
            key = "kl" if algorithm.kl is not None else f"loss {algorithm.loss.kind}"
            yield (
                f"algorithm.{key} pulls the policy to its beginning, and algorithm.distillation to a teacher; change "
                "one of the two"
            )
        if run.rollout.active_sampling:
            yield (
                "rollout.active_sampling replaces groups whose rewards are equal, and a teacher teaches them, too; "
                "remove one of the two"
            )
        if self.in_loss and self.by == "engine":
            yield (
                f"algorithm.distillation.form {self.form} needs the teacher's log-probs of {self.top_k} tokens at each "
                "position, which engines give for the sampled token only; set by to trainer, or form to sampled"
            )
        if self.by == "engine" and sampling.temperature != 1:
            yield (
                f"rollout.sampling.temperature is {sampling.temperature:g}, but engines score a teacher at 1, so that "
                "the policy would learn another temperature; set it to 1, or algorithm.distillation.by to trainer"
            )
        if self.by == "trainer" and (len(run.teachers) > 1 or any(one.path is None for one in run.teachers)):
            yield "algorithm.distillation.by is trainer, which has room for one teacher, with a path; set it to engine"
        if not self.outcome and algorithm.is_per_token:
            yield (
                f"algorithm.distillation.outcome is false, so adv_estimator {algorithm.adv_estimator.kind} has no use; "
                "leave it out with its critic, or set outcome to true"
            )
        if algorithm.loss.level == "sequence" and not self.in_loss:
            yield (
                f"algorithm.distillation.form sampled gives each token an advantage, and loss {algorithm.loss.kind} "
                "has one ratio for each sample; choose a loss of tokens, such as dual_clip"
            )


class TeacherConfig(Section):
    """One teacher: `path`, or `server`, or neither: then it is the policy behind `prompt`."""

    path: Path | None = None
    """The teacher's folder in Hugging Face's format. Its tokens must be the policy's."""
    server: str | None = None
    """The address of a server that gives `prompt_logprobs` as vLLM's does, such as `http://node7:8000/v1`."""
    model: str | None = None
    """The model's name on the server; null means the only one that it has."""
    prompt: str | None = None
    """The column of the rows with the prompt, text or chat turns, that the teacher reads in place of the policy's, for
    example with the right answer. The policy's tokens follow it unchanged, so that no token is merged with another. It
    may be twice as long as `rollout.max_prompt_tokens`."""
    datasets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """The rows that it teaches, by their column `dataset`; null means all that no teacher before it has."""
    weight: PositiveFloat = 1.0
    """The factor of its advantage, or of its term of the loss."""
    num_engines: PositiveInt = 1
    """The number of its engines."""
    parallel: EngineParallel = EngineParallel()
    """How each of its engines is split over ranks. They have GPUs of their own, `cluster.gpus_per_engine_rank` each.
    With `cluster.colocate` they have the first GPUs of the trainers, and sleep in the nodes' memory except while they
    score, after the last answer of a step."""
    timeout_s: PositiveFloat = 600
    """The longest time of a request to the server, in seconds. It is made three times; then the run stops with its
    state saved."""

    @property
    def is_policy(self) -> bool:
        return self.path is None and self.server is None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path is not None and self.server is not None:
            raise ValueError("a teacher has a path or a server; remove one of the two")
        if self.is_policy and self.prompt is None:
            raise ValueError("a teacher without path and server is the policy, which needs another prompt; give prompt")
        if self.model is not None and self.server is None:
            raise ValueError("model is the name on a server; give server, or remove it")
        return self

    def teaches(self, columns: Mapping[str, Any]) -> bool:
        """Whether it may teach a row with these columns."""
        return self.datasets is None or any(name in self.datasets for name in datasets_of(columns))

    def conflicts(self, run: GrpoRunConfig) -> Iterator[str]:
        rollout = run.rollout
        if run.algorithm.distillation is None:
            yield "teachers have no effect without algorithm.distillation; give it, such as {form: sampled}"
            return
        if self.server is not None and rollout.sampling.forbid:
            yield "rollout.sampling.forbid forbids tokens that a teacher's server does not; remove one of the two"
        if self.prompt is not None and run.algorithm.distillation.by == "trainer":
            yield "teachers: a prompt of its own needs algorithm.distillation.by engine"
        if self.prompt is not None and rollout.environment is not None:
            yield "teachers: a prompt of its own is for answers of one turn; remove rollout.environment or the prompt"
        if rollout.beams is not None:
            yield "teachers score what the policy samples, and rollout.beams searches; remove one of the two"
        trainers, ranks = run.policy.parallel.mesh.world_size, self.parallel.num_ranks
        if run.cluster.colocate and self.path is not None and run.algorithm.distillation.by == "engine":
            if trainers % ranks or self.num_engines * ranks > trainers:
                yield (
                    f"teachers: with cluster.colocate the engines of {self.path} have GPUs of the {trainers} trainer "
                    f"ranks, and {self.num_engines} of {ranks} ranks do not fit; lower num_engines, or choose a "
                    f"parallel whose ranks divide {trainers}"
                )
            if run.cluster.pools.get("teacher") not in (None, run.cluster.pools.get("trainer")):
                yield "cluster.pools: teacher has no effect, because teachers share GPUs with trainers; remove it"
        if self.is_policy and rollout.backend is not None:
            yield "teachers: the policy scores itself with vLLM only; remove rollout.backend"


def teacher_of(teachers: Sequence[TeacherConfig], columns: Mapping[str, Any]) -> int | None:
    """The number of the teacher of a row with these columns: the first that teaches it."""
    return next((i for i, one in enumerate(teachers) if one.teaches(columns)), None)


def served_teachers(run: GrpoRunConfig) -> list[tuple[int, TeacherConfig]]:
    """The teachers that have processes of their own, with their numbers."""
    by = run.algorithm.distillation and run.algorithm.distillation.by
    return [(i, one) for i, one in enumerate(run.teachers) if by == "engine" and not one.is_policy]


def teacher_on_ranks(run: GrpoRunConfig) -> ModelConfig | None:
    """The teacher that the policy's ranks compute; None if there is none."""
    if run.algorithm.distillation is None or run.algorithm.distillation.by == "engine":
        return None
    return run.model.model_copy(update={"path": run.teachers[0].path, "weights": None})


def rollout_of_engines(run: GrpoRunConfig) -> RolloutConfig:
    """`rollout`, with room for the prompt of a teacher that is the policy."""
    if run.algorithm.distillation is None or not any(one.is_policy for one in run.teachers):
        return run.rollout
    return run.rollout.model_copy(update={"max_prompt_tokens": 2 * run.rollout.max_prompt_tokens + 1})


def engine_config(run: GrpoRunConfig, number: int) -> GrpoRunConfig:
    """The configuration of a teacher's engines: they load its folder, and score texts as long as the run's answers."""
    teacher, rollout = run.teachers[number], run.rollout
    plain = {"thinking": None, "environment": None, "prefix_values": None, "backend": None, "quantization": None}
    plain["speculative"] = None
    own = {"num_engines": teacher.num_engines, "parallel": teacher.parallel, "delimiter": "", "prefix_cache": "cleared"}
    longest = rollout.max_model_tokens + (rollout.max_prompt_tokens if teacher.prompt is not None else 0)
    lengths = {"max_prompt_tokens": longest, "max_response_tokens": 1, "max_lag": 0}
    changes: dict[str, Any] = {
        "teachers": (teacher,),
        "model": run.model.model_copy(update={"path": teacher.path or run.model.path, "weights": None}),
        "rollout": rollout.model_copy(update=plain | own | lengths),
        "policy": run.policy.model_copy(update={"lora": None, "routing_replay": False}),
        "observe": (),
    }
    return run.model_copy(update=changes)
