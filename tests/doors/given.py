"""What the scripts of the tests give to GRPOTrainer: rows, rewards, tools, and objects that are made when asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset, Image, List
from image_models import drawing
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

QUESTIONS = [f"What is {number} plus {number + 1}?" for number in range(17)]
Turns = list[dict[str, str]]


def texts() -> Dataset:
    return Dataset.from_dict({"prompt": QUESTIONS, "number": list(range(17))})


def chats() -> Dataset:
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in QUESTIONS]})


def pictures(column: str = "image", numbers: tuple[int, ...] = (1, 1, 1, 1)) -> Dataset:
    """Rows with so many images each."""
    drawn = [[drawing(16, 24, 3 * i + k) for k in range(number)] for i, number in enumerate(numbers)]
    images = drawn if column == "images" else [next(iter(one), None) for one in drawn]
    turns = [[{"role": "user", "content": text}] for text in QUESTIONS[: len(numbers)]]
    kind = Image() if column == "image" else List(Image())
    made = Dataset.from_dict({"prompt": turns, column: images})
    return made.cast_column(column, kind)


def few() -> Dataset:
    return Dataset.from_dict({"prompt": QUESTIONS[:2]})


def length(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [float(len(one)) for one in completions]


def distinct(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [float(len(set(one))) for one in completions]


async def slow(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def words(completions: Sequence[Turns], **columns: Any) -> list[float]:
    return [float(len(turns[0]["content"])) for turns in completions]


def abstains(completions: Sequence[Any], **columns: Any) -> list[None]:
    return [None] * len(completions)


def near(completions: Sequence[str], number: Sequence[int], **columns: Any) -> list[float]:
    return [-abs(len(one) - float(wanted)) for one, wanted in zip(completions, number, strict=True)]


def reports(completions: Sequence[Any], trainer_state: Any, log_metric: Any, log_extra: Any, **kw: Any) -> list[float]:
    log_metric("share", trainer_state.global_step / trainer_state.max_steps)
    log_extra("beginning", [one[:5] for one in completions])
    return [0.0] * len(completions)


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def photograph(number: int) -> list[dict[str, Any]]:
    """Takes a photograph.

    Args:
        number: The number of the camera.
    """
    return [{"type": "image", "image": drawing(8, 8, number)}, {"type": "text", "text": f"camera {number}"}]


class Counter:
    def reset(self, **row: Any) -> str:
        self.total, self.row = 0, sorted(row)
        return "Count."

    def increment(self, step: int) -> int:
        """Increments the counter.

        Args:
            step: What is added.
        """
        self.total += step
        return self.total


class Scored(Counter):
    def get_reward(self) -> float:
        return float(self.total)


class Words:
    def reset(self, **row: Any) -> str:
        return "Guess the word."

    async def shout(self, text: str) -> str:
        """Shouts.

        Args:
            text: What is shouted.
        """
        return text.upper()


def of_environments(*names: str) -> Callable[[], Dataset]:
    return lambda: Dataset.from_dict({"environment": [*names] * 4})


def totals(completions: Sequence[Turns], environments: Sequence[Any], **columns: Any) -> list[float]:
    assert all(turn["role"] in ("assistant", "tool") for turns in completions for turn in turns)
    return [float(one.total) for one in environments]


async def add_slowly(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def model(name: str = "qwen2", **options: Any) -> Callable[[], Any]:
    return lambda: AutoModelForCausalLM.from_pretrained(name, dtype="float32", **options)


def scorer(name: str) -> Callable[[], Any]:
    return lambda: AutoModelForSequenceClassification.from_pretrained(name)


def tokenizer(name: str = "qwen2", template: str | None = None) -> Callable[[], Any]:
    def make() -> Any:
        made = AutoTokenizer.from_pretrained(name)
        if template is not None:
            made.chat_template = template
        return made

    return make


def lora(**values: Any) -> Callable[[], Any]:
    return lambda: LoraConfig(**values)


def wrapped(name: str = "qwen2", **values: Any) -> Callable[[], Any]:
    return lambda: get_peft_model(AutoModelForCausalLM.from_pretrained(name, dtype="float32"), LoraConfig(**values))


def prompt_tuning() -> Any:
    return PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=8)
