"""What is wrong with the rows of a run, and with the functions that get them, before anything starts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from megatron_rl.config.advantages import FunctionAdvantage
from megatron_rl.config.losses import FunctionLoss
from megatron_rl.config.rewards import CodeReward, ImportedReward
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig, OfflineRunConfig, SftRunConfig
from megatron_rl.config.teachers import teacher_of
from megatron_rl.data.demonstrations import Template, TrainedTurns, demonstrations_of
from megatron_rl.data.files import check_hub, read_rows
from megatron_rl.data.forms import DESCRIPTIONS, Form, Question, Reading
from megatron_rl.data.preferences import answers_of, margin_of
from megatron_rl.data.prompts import ImageRules, check_columns, check_length, question_of
from megatron_rl.data.row_images import expanded
from megatron_rl.data.rows import BadRow, Row, counted
from megatron_rl.data.scored_texts import scored_text
from megatron_rl.data.supervised import check_length as check_demonstration
from megatron_rl.data.supervised import ids_of
from megatron_rl.data.template_coverage import require_turns
from megatron_rl.environments import object_columns
from megatron_rl.loop.checkpoints import Resume, find_checkpoints, read_extra
from megatron_rl.preflight.reward_source import fault_of_function, fault_of_reward
from megatron_rl.preflight.row_sources import RowSource, heldout_source, prompt_rules, training_sources
from megatron_rl.preflight.tokenizer_files import ChatTemplate, TokenizerFiles
from megatron_rl.types import Picture
from megatron_rl.verifiers.columns import fault_of_row, required_columns
from megatron_rl.verifiers.sandbox.code import idle
from megatron_rl.verifiers.sandbox.process import SandboxError, isolation

DELIMITER = RolloutConfig().delimiter
"""What ends the reasoning of an answer in most models."""
ROWS_S = 2.5
"""The time limit, in seconds, for checking the rows of all files. A note says which rows are left out."""
IDLE_ROWS = 200
"""How many rows of the code reward are tried with functions that do nothing."""
ROWS_AT_LEAST = 100
"""The number of rows that are checked in each file even if the time is over."""


Tell = Callable[[str], None]


class Unrendered(Exception):
    """Only transformers can render a chat, or nobody can."""


class _Lengths:
    """Checks what the chat template writes of rows, and counts their tokens, as far as this is possible without
    transformers."""

    def __init__(self, tokenizer: TokenizerFiles | None) -> None:
        self.without_template = False
        """Whether a row has chat turns, but the tokenizer has no chat template."""
        self.unknown = False
        """Whether a row has chat turns that only transformers can render."""
        self.fault: str | None = None
        """What is wrong with the chat template."""
        self._tokenizer = tokenizer if tokenizer and tokenizer.core else None
        self._ends = tokenizer.ends if tokenizer else ()
        self._template: ChatTemplate | None = None
        self._no_template = tokenizer is not None and tokenizer.template is None
        if tokenizer and tokenizer.template:
            # Some templates have tags that only transformers knows. The lengths of their rows are then unknown.
            try:
                self._template = ChatTemplate(tokenizer.template, tokenizer.special)
            except TemplateError:
                pass
            except ValueError as error:
                self.fault = f"model.path: {error}"

    def of_prompt(
        self, question: Question, bound: int, pictures: Sequence[Picture] = (), images: ImageRules | None = None
    ) -> int | None:
        """The number of a prompt's tokens; None if it is not known, or if it is certainly within the bound.

        Raises:
            BadRow: the text has other placeholders than the ones of its images.
        """
        if isinstance(question.messages, str):
            text = question.messages
        else:
            try:
                text = self._render(question.messages, True, question.template)
            except Unrendered:
                return None
            of_text = [turn for turn in question.messages if isinstance(turn["content"], str)]
            require_turns(of_text, text, lambda turns: self._render(turns, True, question.template))
        if self._tokenizer is None or images is None and len(text.encode()) <= bound:  # a token has one byte at least
            return None
        ids = self._tokenizer.ids(text)
        return len(expanded(ids, pictures, images.vision) if images else ids)

    def of_demonstration(self, row: Row, turns: TrainedTurns, bound: int, is_divisible: bool) -> int | None:
        """The number of tokens of a supervised row's longest text; None if it is not known, or if it is certainly
        within the bound."""
        try:
            found = demonstrations_of(row, Template(self._render, self._ends, turns, is_divisible))
        except Unrendered:
            return None
        longest = max(found, key=lambda one: sum(len(text) for part in one.parts for text in part))
        texts = "".join(text for part in longest.parts for text in part)
        if self._tokenizer is None or len(texts.encode()) < bound:  # a stop token may be added
            return None
        return len(ids_of(longest, self._tokenizer.ids, 0)[0])

    def of_scored(self, row: Row, bound: int) -> int | None:
        """The same of a reward model's row."""
        try:
            text = scored_text(row, self._render, "")
        except Unrendered:
            return None
        if self._tokenizer is None or len(text.encode()) < bound:
            return None
        return len(self._tokenizer.ids(text))

    def _render(self, turns: Sequence[Mapping[str, Any]], add_generation_prompt: bool, arguments: Row) -> str:
        self.without_template |= self._no_template
        text = self._template.render(turns, add_generation_prompt, arguments) if self._template else None
        self.unknown |= text is None
        if text is None:
            raise Unrendered
        return text


def missing_rows(config: BaseConfig) -> list[Path]:
    """The files and folders of rows that are not there."""
    return [path for path in _sources(config).values() if isinstance(path, Path) and not path.exists()]


def faults_of_hub(config: BaseConfig) -> list[str]:
    """The names of the hub that cannot be read: the package `datasets` is not installed, or the hub has no such data
    set or split, or does not answer and no copy of it is in the cache."""
    names = [(key, source) for key, source in _sources(config).items() if isinstance(source, str)]
    if names and find_spec("datasets") is None:
        key, name = names[0]
        install = "install it with `pip install datasets`, or give files"
        return [
            f"{key}: the rows of {name} can only be read with the package datasets, which is not installed; {install}"
        ]
    faults = []
    for key, name in names:
        try:
            check_hub(name)
        except ValueError as error:
            faults.append(f"{key}: {error}")
    return faults


def _sources(config: BaseConfig) -> dict[str, Path | str | None]:
    """The rows of a run by their keys, as files, folders and names of the hub; None if it has none for evaluations."""
    if isinstance(config, OfflineRunConfig):
        return {f"{config.section}.rows": config.offline.rows, f"{config.section}.eval": config.offline.eval}
    if not isinstance(config, GrpoRunConfig):
        return {}
    train, heldout = config.data.train, {"data.eval": config.data.eval}
    if isinstance(train, tuple):
        return {f"data.train.{i}": source.path for i, source in enumerate(train)} | heldout
    return {"data.train": train} | heldout


def faults_of_rows(config: BaseConfig, tokenizer: TokenizerFiles | None, tell: Tell) -> list[str]:
    """Check every file of rows, and the reward functions, which receive the columns of the rows. Returns the faults."""
    lengths, faults = _Lengths(tokenizer), list[str]()
    if isinstance(config, OfflineRunConfig):
        faults += _faults_of_offline_rows(config, lengths, tell)
    elif isinstance(config, GrpoRunConfig):
        required, images = required_columns(config.rewards), prompt_rules(config).images
        longest, data, environment = config.rollout.max_prompt_tokens, config.data, config.rollout.environment
        try:
            sources = training_sources(data, environment)
        except ValueError as error:
            return [f"data.train: {error}"]
        heldout, objects = heldout_source(data, environment), object_columns(environment)
        seconds = ROWS_S / (len(sources) + (heldout is not None))
        columns: set[str] = set()
        unscored: list[str] = []
        unhinted: dict[str, list[list[str]]] = {}
        forms, named = Counter[Form](), set[Any]()
        tests: list[Any] = []

        def check_prompt(row: Row, place: str, reading: Reading) -> None:
            question, pictures = question_of(row, required, reading), tuple[Picture, ...]()
            if images is not None:
                question, pictures = images.take(question, place, keep=False)
            given = question.columns
            check_columns(given, config.rollout.thought_column, config.rollout.prefix_values, objects)
            forms[question.form] += 1
            value = given.get("dataset")
            named.update(value if isinstance(value, list | tuple) else [value])
            columns.update(given)
            number = teacher_of(config.teachers, given)
            if number is not None and (column := config.teachers[number].prompt) not in (None, *given):
                unhinted.setdefault(f"teachers.{number}.prompt names the column {column}", []).append(sorted(given))
            if not any(reward.scores(given) for reward in config.rewards):
                unscored.append(f"no reward has the row's `dataset`, {given.get('dataset')!r}, in its `datasets`")
            for reward in config.rewards:
                if (fault := fault_of_row(reward, given)) is None:
                    if isinstance(reward, CodeReward) and reward.scores(given) and len(tests) < IDLE_ROWS:
                        tests.append(reward.ground_truth(given))
                    continue
                if reward.on_error == "stop":
                    raise ValueError(fault)
                unscored.append(fault)
            if (length := lengths.of_prompt(question, longest, pictures, images)) is not None:
                check_length(length, longest)

        def check_source(source: RowSource) -> list[str]:
            needs = config.algorithm.adv_estimator.needs
            is_rated = source.reading.rated or (source is not heldout and "pass_rate" in needs)
            seen = replace(source.reading, rated=is_rated, sees_images=images is not None)
            check = partial(check_prompt, reading=seen)
            return _file(source.key, source.path, check, data.on_bad_row, seconds, tell)

        for source in sources:
            faults += check_source(source)
        for form in sorted(forms.keys() - {"messages", "text"}):
            is_in = "is in" if forms[form] == 1 else "are in"
            tell(f"data.train: {forms[form]:,} of the rows that were checked {is_in} {DESCRIPTIONS[form]}")
        if unscored:
            tell(f"data.train: {len(unscored)} of the rows will have no reward; the first reason is: {unscored[0]}")
        for told, rows in unhinted.items():
            has = ", ".join(rows[0]) or "none"
            faults.append(f"{told}, which {len(rows):,} of the rows that were checked lack; the first has {has}")
        for key, sections in (("rewards", config.rewards), ("teachers", config.teachers)):
            if unseen := sorted({name for one in sections for name in one.datasets or ()} - named):
                tell(f"{key}: no row that was checked has the `dataset` {unseen[0]!r}, which `datasets` there names")
        known = frozenset(columns) if forms else None
        if heldout:
            faults += check_source(heldout)
        faults += _faults_of_functions(config, known, tests, tell)
    if lengths.fault:
        faults.append(lengths.fault)
    elif lengths.without_template:
        faults.append(
            f"the tokenizer of {config.model.path} has no chat template, and rows have `messages`; add "
            f"chat_template.jinja to the folder, or use rows with `prompt` (plain text)"
        )
    elif lengths.unknown and tokenizer:
        tell("the lengths of chats in tokens are not checked: the template can be rendered by transformers alone")
    return faults


def _faults_of_offline_rows(config: OfflineRunConfig, lengths: _Lengths, tell: Tell) -> list[str]:
    offline, turns = config.offline, config.sft.turns if isinstance(config, SftRunConfig) else "all"
    loss, reasons = config.preferences, set[str]()

    def check_row(row: Row, place: str) -> None:
        for answer, _ in answers_of(row, loss) if loss else [(row, 0.0)]:
            if loss and loss.has_head:
                margin_of(row)
                if DELIMITER in str(answer["completion"]):
                    reasons.add(place)
                length = lengths.of_scored(answer, offline.max_tokens)
            else:
                length = lengths.of_demonstration(answer, turns, offline.max_tokens, is_divisible=loss is None)
            if length is not None and offline.on_bad_row != "cut":
                check_demonstration(length, offline.max_tokens, config.section)

    given = {key: source for key, source in _sources(config).items() if source is not None}
    seconds = ROWS_S / len(given)
    faults = [
        fault
        for key, of_rows in given.items()
        for fault in _file(key, of_rows, check_row, offline.on_bad_row, seconds, tell)
    ]
    if reasons:
        tell(
            f"{DELIMITER} is in an answer of {counted(len(reasons), 'row')}, such as {min(reasons)}: "
            "a run scores the text after its rollout.delimiter, so train the reward model on the answers without their "
            "reasoning"
        )
    return faults


def check_resumed_rows(config: BaseConfig, resume: Resume) -> None:
    """Compare the number of supervised rows with the one at the checkpoint to resume from, whose stream has an order of
    just as many. Rows that are skipped are not counted there.

    Raises:
        ValueError: rows have come or gone.
    """
    saved = find_checkpoints(config.run_folder / "checkpoints")
    if not isinstance(config, OfflineRunConfig) or resume is None or not saved:
        return
    if config.preferences and not config.preferences.has_pairs:  # a pair may be two rows
        return
    rows, folder = config.offline.rows, saved[max(saved) if resume == "auto" else resume]
    if not isinstance(rows, Path) or not rows.exists():  # names of the hub may have to be downloaded first
        return
    try:
        before = sum(source["num_items"] for source in read_extra(folder)["stream"]["sources"])
        now = sum(1 for _ in read_rows(rows))
    except (ValueError, OSError, LookupError, TypeError):  # what cannot be read is told elsewhere
        return
    if now < before or (now > before and config.offline.on_bad_row == "fail"):
        raise ValueError(
            f"{config.section}.rows: {rows} has {counted(now, 'row')}, and at {folder} it had {before:,}, so the run "
            "cannot go on in the order of then; give the rows of then, or begin a run with another run.name and, as "
            f"model.path, what `megatron-rl export {config.run_folder} FOLDER` writes"
        )


def _faults_of_functions(
    config: GrpoRunConfig, columns: frozenset[str] | None, tests: Sequence[Any], tell: Tell
) -> list[str]:
    """Check what judges and trains: the sandbox, and the functions that the configuration names.

    Args:
        columns: of the training rows that were checked, without the question; None if no good row was.
        tests: ground truths of the code reward.
    """
    faults: list[str] = []
    if any(isinstance(reward, CodeReward) for reward in config.rewards):
        try:
            for missing in isolation().missing:
                tell(f"the code reward's sandbox on this machine: {missing}")
            num_tried, found = idle(tests, ROWS_S)
            if found:
                tell(
                    f"the code reward: the tests of {len(found)} of the {num_tried} rows that were tried pass if all "
                    f"functions return the same: {found[0]}; any program that does nothing may score 1"
                )
        except SandboxError as error:
            faults.append(f"the code reward has no sandbox on this machine: {error}")
    for reward in config.rewards:
        if isinstance(reward, ImportedReward) and (fault := fault_of_reward(reward, columns)):
            faults.append(fault)
    own = {"algorithm.loss": config.algorithm.loss, "algorithm.adv_estimator": config.algorithm.adv_estimator}
    for key, method in own.items():
        if isinstance(method, FunctionLoss | FunctionAdvantage) and (fault := fault_of_function(method.path, key)):
            faults.append(fault)
    return faults


def _file(
    key: str, source: Path | str, check: Callable[[Row, str], None], on_bad_row: str, seconds: float, tell: Tell
) -> list[str]:
    """The faults of one source of rows, from as many of its rows as can be checked in the given seconds.

    Args:
        check: gets a row and its place (`ReadRow.place`). It raises BadRow for a bad row, about which `on_bad_row`
            decides, and ValueError for a row that stops the run in any case.
    """
    if not isinstance(source, Path):
        tell(f"{key}: the rows of {source} are not checked, because they may have to be downloaded first")
        return []
    if not source.exists():
        return [f"{key}: there is no file {source}; correct the path (it is relative to {Path.cwd()})"]
    bad: list[str] = []
    num_rows, whole = 0, True
    deadline = time.monotonic() + seconds
    try:
        for _, place, row in read_rows(source):
            if num_rows >= ROWS_AT_LEAST and time.monotonic() > deadline:
                whole = False
                break
            num_rows += 1
            try:
                if isinstance(row, BadRow):
                    raise row
                check(row, place)
            except BadRow as error:
                bad.append(f"{place}: {error}")
            except ValueError as error:
                return [f"{key}: {place}: {error}"]
    except (ValueError, FileNotFoundError) as error:
        return [f"{key}: {error}"]
    except OSError as error:
        return [f"{key}: {source} cannot be read ({error.strerror}); correct its permissions or the path"]
    if not whole:
        tell(f"{key}: the first {num_rows:,} rows of {source} were checked, the others were left out to save time")
    if not num_rows:
        return [f"{key}: {source} holds no row; give a file with one JSON object in each line"]
    fails = on_bad_row != "skip"  # a row that is cut is not among the bad ones
    if bad and (fails or whole and len(bad) == num_rows):
        more = f" ({len(bad)} of {num_rows:,} rows that were checked are bad)" if len(bad) > 1 else ""
        section = key.partition(".")[0]
        hint = f"correct it, or set {section}.on_bad_row to skip" if fails else "no good row is left"
        return [f"{key}: {bad[0]}{more}; {hint}"]
    if bad:
        tell(f"{key}: {len(bad)} of {num_rows:,} rows of {source} will be skipped; the first one is {bad[0]}")
    return []
