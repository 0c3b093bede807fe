"""How answers are rewarded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    FiniteFloat,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from megatron_rl.config.function import FunctionPath
from megatron_rl.config.reward import Reward
from megatron_rl.config.section import Section

if TYPE_CHECKING:
    from megatron_rl.config.schema import GrpoRunConfig


class GroundTruthReward(Reward):
    """A reward that compares the text after the reasoning with the row's `ground_truth`."""

    require_stop: bool = True
    """true: an answer that a token budget cut scores 0. false: it is compared like any other answer."""


class ExactAnswerReward(GroundTruthReward):
    """The score is 1 if the text after the reasoning equals the row's `ground_truth`, else 0."""

    kind: Literal["exact_answer"] = "exact_answer"
    answer: Literal["all", "last_number"] = "all"
    """What is compared. `all` is the whole text after the delimiter, without white space at its ends. `last_number` is
    the last number of that text, compared as a number."""


class JudgedReward(GroundTruthReward):
    """A reward with slow verdicts. It judges each answer in a process that can be killed
    (`cluster.verifier_workers`)."""

    answer_timeout_s: PositiveFloat = 10
    """The longest time, in seconds, that the verdict on one answer may take. After that its process is replaced. An
    answer to `mathematics` or `reasoning_gym` that took so much computing scores 0; else `on_error` decides."""


class TextReward(JudgedReward):
    """The text after the reasoning, without white space at its ends, is compared with the row's `ground_truth`. If that
    is a list, the best of its entries counts."""

    kind: Literal["text"] = "text"
    compare: Literal["exact", "normalised", "f1", "regex"] = "exact"
    """`exact`: 1 if the texts are equal, else 0. `normalised`: the same in lower case, without punctuation and the
    articles a, an and the, and with single spaces, as in SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250). `f1`: SQuAD's
    F1 of the words of these texts. `regex`: 1 if the ground truth, a pattern of Python's `re`, matches the whole text,
    else 0."""


class MathematicsReward(JudgedReward):
    """The score is 1 if the final answer of the text is mathematically equivalent to the row's `ground_truth`, or to
    one of its texts if it is a list, else 0."""

    kind: Literal["mathematics"] = "mathematics"
    mode: Literal["strict", "lenient"] = "strict"
    """What is a final answer. `strict`: the last `\\boxed{...}`, or what follows the last `####`, or the last "answer
    is". `lenient`: without these, the last formula or number."""


class CodeReward(JudgedReward):
    """The last fenced block of Python in the text is a program, which runs in a sandbox. `ground_truth` has its tests:
    Python code with asserts, mappings with the `input` and `output` of the program, or a mapping with the lists
    `inputs` and `outputs` and optionally a `fn_name`, as a list, a mapping or JSON text
    (`verifiers/sandbox/code_tests.py`)."""

    kind: Literal["code"] = "code"
    answer_timeout_s: PositiveFloat = 180
    """The longest time, in seconds, that the verdict on one answer may take. Its tests share four fifths of it; tests
    that have not run by then count as failed. See `cpu_s` for the time of a program."""
    score: Literal["share", "all"] | Annotated[float, Field(gt=0, le=1)] = "all"
    """`share`: the share of the tests that pass. `all`: 1 if all pass, else 0. A number: 1 if at least this share
    passes, else 0."""
    cpu_s: PositiveInt = 10
    """The CPU time, in seconds, that a program may use for its tests."""
    memory_mib: PositiveInt = 1024
    """The memory limit of a program, in MiB."""


class InstructionsReward(JudgedReward):
    """The row has verifiable instructions, as IFEval and IF-RLVR have them: `ground_truth` has `instruction_id`, a list
    of kinds, and `kwargs`, the arguments of each."""

    kind: Literal["instructions"] = "instructions"
    score: Literal["share", "all"] = "share"
    """`share`: the share of the instructions that are followed. `all`: 1 if all are followed, else 0."""


class ReasoningGymReward(JudgedReward):
    """The row is one of a task of the library reasoning-gym, as `megatron-rl reasoning-gym-rows` writes it, and the
    score is what the task's own scorer gives, from 0 to 1. It judges the content of the last `<answer>...</answer>` in
    the text after the reasoning, or else the whole text. It needs the library: `pip install
    'megatron-rl[reasoning-gym]'`."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"


class FormatReward(Reward):
    """The score is 1 if the answer is reasoning, the delimiter (`rollout.delimiter`) and a text, else 0. Reasoning and
    text must not be empty, there must be exactly one delimiter, and no token budget may have cut the answer. If the
    delimiter is a closing tag such as `</think>`, its opening tag may stand at the beginning and nowhere else. A
    delimiter that `rollout.thinking` has forced counts like one of the model's own."""

    kind: Literal["format"] = "format"

    def conflicts(self, run: GrpoRunConfig) -> Iterator[str]:
        if not run.rollout.delimiter:
            yield "rewards: the kind format looks for rollout.delimiter, which is empty; remove the reward"


class LengthReward(Reward):
    """The score of an answer with n tokens, the reasoning included, is max(0, 1 - |n - target| / target)."""

    kind: Literal["length"] = "length"
    target: PositiveInt | str = "ground_truth"
    """The number of tokens, or the name of the column that has it."""

    def target_of(self, columns: Mapping[str, Any]) -> Any:
        """The target for answers to a row with these columns, as it stands there."""
        if isinstance(self.target, int):
            return self.target
        return self.ground_truth(columns) if self.target == "ground_truth" else columns.get(self.target)


class EnvironmentReward(Reward):
    """The score is the sum of the rewards that the answer's environment (`rollout.environment`) gave for its turns. The
    answer has no reward if it gave none."""

    kind: Literal["environment"] = "environment"

    def conflicts(self, run: GrpoRunConfig) -> Iterator[str]:
        environment = run.rollout.environment
        if environment is None or (environment.kind == "tools" and environment.objects is None):
            yield (
                f"rewards: {self.label} needs the rewards of rollout.environment (kind class or agent, or tools with "
                "objects), which is "
                + ("null" if environment is None else "of kind tools, and functions give none")
                + "; remove one of the two"
            )


class ImportedReward(Reward):
    """A reward that is Python code of the user's own."""

    given: ClassVar[tuple[str, ...]]
    """The names of the arguments of every call."""
    path: FunctionPath
    """The place of the function: `package.module:function`, or `folder/file.py:function`. It may also be a callable
    object, or a class of callable objects; each verifier process then creates one instance."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments of every call, or of the class. In a call they replace arguments of the same name."""

    @property
    def label(self) -> str:
        return self.name or self.path.rpartition(":")[2]


class FunctionReward(ImportedReward):
    """A function with TRL's signature, which scores all answers of a step in one call: f(prompts, completions,
    completion_ids, trainer_state, log_metric, log_extra, **columns) -> list[float | None]. It may be asynchronous."""

    given = ("prompts", "completions", "completion_ids", "environments", "trainer_state", "log_metric", "log_extra")
    needs_all_answers = True
    kind: Literal["function"] = "function"


class ComputeScoreReward(ImportedReward):
    """A function with verl's signature, which scores one answer in a call: f(data_source, solution_str, ground_truth,
    extra_info) -> a number, or a mapping with `score`. It may be asynchronous."""

    given = ("data_source", "solution_str", "ground_truth", "extra_info")
    kind: Literal["compute_score"] = "compute_score"

    def ground_truth(self, columns: Mapping[str, Any]) -> Any:
        """The row's `ground_truth`, or `reward_model.ground_truth`, where verl's rows have it."""
        nested = columns.get("reward_model")
        if columns.get("ground_truth") is None and isinstance(nested, Mapping):
            return nested.get("ground_truth")
        return super().ground_truth(columns)

    def data_source(self, columns: Mapping[str, Any]) -> Any:
        """The row's `data_source`, or else its `dataset`; None if it has neither."""
        source = columns.get("data_source")
        return columns.get("dataset") if source is None else source


def _address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"must be the address of a server, such as http://host:8000, but it is {url!r}")
    if parts.username or parts.password:
        raise ValueError("must hold no password; put the key into the variable that `api_key_env` names")
    if parts.query or parts.fragment or parts.port == 0:  # `port` raises ValueError if it is no port
        raise ValueError(f"must end with the path, because a path is appended to it, but it is {url!r}")
    return url.rstrip("/")


Address = Annotated[str, AfterValidator(_address)]
"""An HTTP address, without a slash at its end."""


def _variable(name: str) -> str:
    if not (name.isascii() and name.isidentifier()):  # it may be the key itself, so it is not shown
        raise ValueError("must be the name of an environment variable, such as JUDGE_API_KEY, and never the key itself")
    return name


class ServiceReward(Reward):
    """A reward that a server computes over HTTP. The limits hold for each process that computes rewards
    (`cluster.verifiers`)."""

    url: Address
    """The address of the server."""
    model: str
    """The server's name for the model."""
    api_key_env: Annotated[str, AfterValidator(_variable)] | None = None
    """The name of the environment variable that has the server's key; null sends no key. It must be set on each node
    before Ray starts there."""
    require_stop: bool = True
    """true: the server is not asked about an answer that a token budget cut. false: it is judged like any other
    answer."""
    attempts: PositiveInt = 4
    """The largest number of requests for one answer. A request is retried if there is no connection, no reply in time,
    a reply with the status 408, 429 or 5xx, or a reply that cannot be parsed. Other errors are not retried."""
    answer_timeout_s: PositiveFloat = 120
    """The longest time, in seconds, that one request may take."""
    max_concurrency: PositiveInt = 64
    """The largest number of requests at the same time."""
    requests_per_minute: PositiveFloat | None = None
    """The largest number of requests per minute, sent at equal intervals; null means no limit."""

    def api_key(self, environment: Mapping[str, str]) -> str | None:
        """The server's key; None if none is configured.

        Raises:
            ValueError: the variable is not set, or holds no key. The message does not show it.
        """
        if self.api_key_env is None:
            return None
        key = environment.get(self.api_key_env, "").strip()
        if not key:
            raise ValueError(
                f"rewards: {self.label} needs the server's key in the environment variable {self.api_key_env}, which "
                "is not set; export it (on each node, before Ray starts there), or remove api_key_env"
            )
        if not (key.isascii() and key.isprintable()):
            raise ValueError(
                f"rewards: the environment variable {self.api_key_env} of {self.label} has characters that no header "
                "can carry; export the key alone"
            )
        return key


class Criterion(Section):
    """One thing that a judge gives a score for."""

    name: Annotated[str, Field(min_length=1)]
    """The criterion's name, as the judge uses it in its reply."""
    description: Annotated[str, Field(min_length=1)]
    """The description of the criterion that the judge reads."""
    weight: PositiveFloat = 1.0
    """The weight of this criterion in the mean."""


def _distinct(criteria: tuple[Criterion, ...]) -> tuple[Criterion, ...]:
    names = [one.name for one in criteria]
    if len(set(names)) < len(names):
        raise ValueError(f"the names of the criteria {names} are not distinct; rename some")
    return criteria


Rubrics = Annotated[tuple[Criterion, ...], Field(min_length=1), AfterValidator(_distinct)]
_RUBRICS: TypeAdapter[tuple[Criterion, ...]] = TypeAdapter(Rubrics)
_SENT = ("model", "messages", "response_format", "stream", "n")


def _free(parameters: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(parameters.keys() & set(_SENT)):
        raise ValueError(f"has {taken[0]!r}, which the judge sets itself; remove it")
    return parameters


class JudgeReward(ServiceReward):
    """A language model judges the text after the reasoning. It sees the question, the text and, if the row has one, the
    `ground_truth` as a reference. It gives each criterion an integer score; the reward is the weighted mean of
    (score - 1) / (scale - 1). An answer that a token budget cut, or that has no delimiter, scores 0."""

    kind: Literal["judge"] = "judge"
    url: Address
    """The address of a server with OpenAI's interface, up to the version: `http://host:8000/v1`."""
    rubrics: Rubrics = (
        Criterion(
            name="quality",
            description="The answer is correct, complete and clear, and does what the question asks for.",
        ),
    )
    """The criteria: `{name, description, weight}`. A row with a column `rubrics` in this form is judged by its own."""
    scale: Annotated[int, Field(ge=2)] = 10
    """The best score of a criterion; the worst one is 1. Scores outside of this range are clamped to it."""
    parameters: Annotated[dict[str, Any], AfterValidator(_free)] = {"temperature": 0}
    """Further fields of each request, such as `{temperature: 0, max_tokens: 2000}`."""

    def rubrics_of(self, columns: Mapping[str, Any]) -> tuple[Criterion, ...]:
        """The criteria for answers to a row with these columns.

        Raises:
            ValueError: the row's own criteria have the wrong form.
        """
        own = columns.get("rubrics")
        if own is None:
            return self.rubrics
        if isinstance(own, list | tuple):  # Parquet gives each entry all keys
            own = [{k: v for k, v in one.items() if v is not None} if isinstance(one, Mapping) else one for one in own]
        try:
            return _RUBRICS.validate_python(own)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(
                f"the row's `rubrics` must be a list of {{name, description, weight}}: {where}: {first['msg']}"
            ) from None


_OF_SERVERS = ServiceReward.model_fields.keys() - Reward.model_fields.keys() - {"require_stop", "url"}


class RewardModelReward(ServiceReward):
    """A reward model, which is a classifier with one class, scores the question and the text after the reasoning: in a
    process of the run (`path`), or in vLLM's server (`url`), which renders both with the model's own chat template
    (`POST /classify` with `messages`) and gets plain text as a turn of the user."""

    kind: Literal["reward_model"] = "reward_model"
    path: Path | None = None
    """The model's folder, as `megatron-rl reward-model` writes it: one that `AutoModelForSequenceClassification` of
    transformers loads, with a tokenizer. A process of the run scores with it, in the folder's own data type, on
    `cluster.gpus_per_reward_model` GPUs. Chats have the model's chat template; plain text is followed by the answer and
    the end-of-sequence token, as in training."""
    url: Address = ""
    """The address of vLLM's server, in place of `path`: `http://host:8000`, without `/v1`."""
    model: str = ""
    """The server's name for the model."""
    unfinished_score: FiniteFloat
    """The score of an answer that a token budget cut, or that has no delimiter. It has no default, because models have
    different scales; give one that is below the model's scores of bad answers."""
    activation: Literal["none", "sigmoid"] = "none"
    """`none`: the score is the model's logit. `sigmoid`: 1 / (1 + exp(-logit))."""
    clamp: tuple[FiniteFloat, FiniteFloat] | None = None
    """The smallest and the largest score, after the activation; null leaves the scores as they are."""

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if (self.path is None) == (not self.url):
            raise ValueError("give one of path, a folder that the run scores with, and url, a server's address")
        if self.url and not self.model:
            raise ValueError("model: give the server's name for the model")
        if self.path and (wrong := sorted(self.model_fields_set & _OF_SERVERS)):
            raise ValueError(f"{wrong[0]} is about a server, and path names a folder; remove one of them")
        return self

    @model_validator(mode="after")
    def _check_clamp(self) -> Self:
        if self.clamp is not None and self.clamp[0] >= self.clamp[1]:
            raise ValueError(f"clamp: {list(self.clamp)} is no range; give the smaller number first")
        return self


RewardConfig = Annotated[
    ExactAnswerReward
    | TextReward
    | MathematicsReward
    | CodeReward
    | InstructionsReward
    | ReasoningGymReward
    | FormatReward
    | LengthReward
    | EnvironmentReward
    | FunctionReward
    | ComputeScoreReward
    | JudgeReward
    | RewardModelReward,
    Field(discriminator="kind"),
]
