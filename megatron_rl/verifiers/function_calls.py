"""What the reward functions of both contracts have in common: how they are made and called, what they may ask about the
run, what they may report, and which values are scores.

Invariants (tests/unit/verifiers): a function gets only the arguments that its signature has; a class is made once; a
value that is no finite number gives a failed verdict, and is never the score 0; all that a function raises, also
`SystemExit`, `KeyboardInterrupt` and `CancelledError`, gives a failed verdict with its name and line.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from numbers import Real
from typing import Any

from megatron_rl.config.exception_text import place, said
from megatron_rl.config.function import load_function, short_path
from megatron_rl.config.rewards import ImportedReward
from megatron_rl.types import LARGEST_SCORE, Verdict

log = logging.getLogger(__name__)

RESERVED = ("seconds", "failed", "abstained", "mean", "std")
"""The last parts of the names `reward/<name>/...` that the run itself writes."""
MAX_SHOWN = 200
"""Characters of a value in a message."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The part of transformers' TrainerState that a verifier knows; TRL passes it as `trainer_state`."""

    global_step: int
    """The number of optimizer steps of the weights that gave the answers."""
    max_steps: int
    """The number of steps of the whole run."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this trainer_state has global_step and max_steps, but no {name}")


class Logged:
    """What one reward reports while it scores the answers of one call: metrics of the step, and columns with a value
    for each answer."""

    def __init__(self, label: str, num_answers: int) -> None:
        self._label, self._num_answers = label, num_answers
        self._values: dict[str, list[float]] = {}
        self._columns: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: Any) -> None:
        """Add a value; values of one name are averaged. TRL passes this method as `log_metric`.

        Args:
            value: a number, or a NumPy scalar or a tensor with one element.

        Raises:
            ValueError: the value is no number, or the name belongs to a metric of the run.
        """
        if name.rpartition("/")[2] in RESERVED:
            raise ValueError(f"the metric {name!r} has a name that the run uses itself; give it another one")
        number = as_number(value)
        if number is None:
            raise ValueError(f"the metric {name!r} is {shown(value)}, but it must be a number")
        self._values.setdefault(name, []).append(number)

    def log_extra(self, column: str, values: Any) -> None:
        """Set the values of a column, one for each answer. TRL passes this method as `log_extra`.

        Args:
            values: a list, a NumPy array or a tensor. A value that JSON does not have becomes text.

        Raises:
            ValueError: it is no list, or there is not one value for each answer.
        """
        plain = as_plain(values)
        if not isinstance(plain, list | tuple):
            raise ValueError(f"the column {column!r} is {type(values).__name__}, but it must be a list")
        if len(plain) != self._num_answers:
            raise ValueError(f"the column {column!r} has {len(plain)} values for {self._num_answers} completions")
        self._columns[column] = [as_json(value) for value in plain]

    def values(self) -> dict[str, list[float]]:
        """The values of each metric, by its name `reward/<label>/<name>`."""
        return {f"reward/{self._label}/{name}": values for name, values in self._values.items()}

    def onto(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """The verdicts, one for each answer, with the columns in their details."""
        return [
            replace(verdict, details={f"{self._label}/{name}": values[i] for name, values in self._columns.items()})
            for i, verdict in enumerate(verdicts)
        ]


class ImportedFunction:
    """The callable of a configuration.

    Raises:
        ValueError: it cannot be imported, its class cannot be made, or it does not take the configured arguments.

    All that a call raises is of the function, or of what the model wrote and the function runs: `exit()` raises
    SystemExit, and a test library's `fail` is no Exception either.
    """

    def __init__(self, cfg: ImportedReward) -> None:
        self.path = short_path(cfg.path)
        loaded = load_function(cfg.path)
        self._file = _file_of(loaded)
        self._arguments: Mapping[str, Any] = {} if inspect.isclass(loaded) else cfg.arguments
        self._function: Any = _made(loaded, cfg) if inspect.isclass(loaded) else loaded
        self.is_async = any(map(inspect.iscoroutinefunction, (self._function, type(self._function).__call__)))
        """Whether a call returns a coroutine, by the function's definition with `async def`."""
        self._names = _parameters(self._function)
        if self._names is not None and (unknown := sorted(self._arguments.keys() - self._names)):
            raise ValueError(f"function {cfg.path!r} does not take {unknown[0]!r}, which its `arguments` give")

    def call(self, offered: Mapping[str, Any]) -> Any:
        """Call it with the configured arguments, and with the offered ones that its signature has."""
        named = {**offered, **self._arguments}
        return self._function(**{name: named[name] for name in named if self._names is None or name in self._names})

    async def ended(self, offered: Callable[[], Mapping[str, Any]]) -> asyncio.Task[Any]:
        """Call an asynchronous function, and wait until it has ended. The task has its result, or what it raised.

        The function has a task of its own, so its own errors and cancellations stay in that task. Only a cancellation
        from outside is raised here.
        """

        async def call() -> Any:
            return await self.call(offered())

        task = asyncio.ensure_future(call())
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise
        return task

    def fault_of(self, error: BaseException) -> Verdict:
        """The verdict on answers whose call raised. The line is the last one in the function's own file, where
        somebody can change it."""
        return Verdict(None, f"{self.path} raised {said(error)}{place(error, self._file)}", failed=True)

    def verdict_of(self, score: Any, which: str = "") -> Verdict:
        """The verdict of one score; None is an abstention.

        Args:
            which: is added to the reason of a failed verdict.
        """
        if score is None:
            return Verdict(None, f"{self.path} returned None")
        found = f"{self.path} returned {shown(score)}{which}"
        try:
            number = as_number(score)
        except BaseException as error:  # a value's own methods may raise anything
            return Verdict(None, f"{found}, which raised {said(error)}", failed=True)
        if number is None or not math.isfinite(number):
            return Verdict(None, f"{found}, but it must return a finite number, or None for no reward", failed=True)
        if abs(number) > LARGEST_SCORE:
            return Verdict(None, f"{found}, but no score may be above {LARGEST_SCORE:g}", failed=True)
        return Verdict(number)


def as_plain(value: Any) -> Any:
    """A NumPy array or scalar or a tensor as lists and Python numbers; anything else as it is. Neither is imported,
    because most rewards use neither."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def as_number(value: Any) -> float | None:
    """A real number, NumPy scalar, tensor of one element or Decimal as a float, infinite if it is too large for one;
    None for anything else."""
    plain = as_plain(value)
    if not isinstance(plain, Real | Decimal):
        return None
    try:
        return float(plain)
    except OverflowError:
        return math.inf if plain > 0 else -math.inf  # type: ignore[operator]


def as_json(value: Any) -> Any:
    """The value after a round trip through JSON; as text if JSON cannot represent it, such as NaN."""
    plain = as_plain(value)
    try:
        return json.loads(json.dumps(plain, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return _text(str, plain)


def shown(value: Any) -> str:
    """A value and its type in a message."""
    text = _text(repr, value)
    cut = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
    return f"{cut} ({type(value).__name__})"


def _text(method: Callable[[Any], str], value: Any) -> str:
    """str() or repr() of a value, also if its own methods fail."""
    try:
        return method(value)
    except BaseException:
        return "a value that cannot be shown"


def _file_of(function: Any) -> str | None:
    try:
        return inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # a partial or an instance
        return None


def _made(cls: type, cfg: ImportedReward) -> Any:
    try:
        made = cls(**cfg.arguments)
    except BaseException as error:  # a user's class may raise anything
        where = place(error, _file_of(cls))
        raise ValueError(f"function {cfg.path!r}: its class raised {said(error)}{where}") from error
    if not callable(made):
        raise ValueError(f"function {cfg.path!r}: the class has no method __call__, which must score the answers")
    return made


def _parameters(function: Any) -> set[str] | None:
    """The names of the parameters that can be given by name; None if any name can, or if there is no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
