"""Write pairs of answers for `megatron-rl dpo`, from answers that runs have kept (`rollout.dump`) or that
`megatron-rl generate` has written.

With one folder, a prompt's answer with the largest reward is chosen, and the one with the smallest is rejected; prompts
whose answers all have the same reward give no pair. With `--rejected FOLDER`, the chosen answers are of a stronger
model and the rejected ones of a weaker model, whatever their rewards (delta learning, arXiv:2507.06187): prompts that
both folders have answered give pairs. Answers that a length limit has cut, and answers of several turns, are left out,
and counted.

    megatron-rl pairs runs/my_run --out pairs.jsonl
    megatron-rl pairs rollouts/large --rejected rollouts/small --tokenizer models/small --out pairs.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from megatron_rl.commands.screen import console, tell_error
from megatron_rl.data.rows import counted
from megatron_rl.data.saved_rollouts import path_of, read_step
from megatron_rl.observe.records import CONFIG
from megatron_rl.processes import open_text, piped
from megatron_rl.types import Group, Tokenizer


class KeptAnswer(NamedTuple):
    """An answer that can be one of a pair."""

    text: str
    reward: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of a run, or of its rollouts")
    parser.add_argument("--rejected", type=Path, metavar="FOLDER", help="the same with the answers of a weaker model")
    parser.add_argument("--tokenizer", type=Path, help="the folder of the model; by default the run's model.path")
    parser.add_argument("--out", type=Path, required=True, help="the file of the pairs, as JSON lines")
    options = parser.parse_args(arguments)
    left_out: Counter[str] = Counter()
    try:
        if options.out.suffix in (".parquet", ".arrow", ".csv"):
            raise ValueError(f"--out {options.out}: pairs are JSON lines; give a name that ends in .jsonl")
        if options.rejected is None:
            pairs = by_reward(options.folder, _tokenizer(options.folder, options.tokenizer), left_out)
        else:
            chosen, rejected = (
                _first_answers(one, _tokenizer(one, options.tokenizer), left_out)
                for one in (options.folder, options.rejected)
            )
            pairs = by_model(chosen, rejected, left_out)
        num_pairs, unfinished = 0, options.out.with_name(f"{options.out.name}.partial")
        with open_text(unfinished, "w") as file:
            for pair in pairs:
                file.write(json.dumps(pair, ensure_ascii=False) + "\n")
                num_pairs += 1
        os.replace(unfinished, options.out)
    except (ValueError, OSError) as error:
        return tell_error(error)
    console.print(f"{options.out}: {counted(num_pairs, 'pair')}", markup=False, soft_wrap=True)
    for reason, number in left_out.most_common():
        console.print(f"  {reason}: {number:,}", markup=False, soft_wrap=True)
    return 0 if num_pairs else 1


def by_reward(folder: Path, tokenizer: Tokenizer, left_out: Counter[str]) -> Iterator[dict[str, Any]]:
    """A pair of each prompt's best and worst answers."""
    for group in _groups(folder):
        scored = [one for one in _answers(group, tokenizer, left_out) if one.reward is not None]
        ranked = sorted(scored, key=lambda one: one.reward or 0.0)
        if not ranked or ranked[0].reward == ranked[-1].reward:
            left_out["prompts whose answers all have the same reward"] += 1
        else:
            yield _pair(group, ranked[-1], ranked[0])


def by_model(
    chosen: dict[str, tuple[Group, KeptAnswer]], rejected: dict[str, tuple[Group, KeptAnswer]], left_out: Counter[str]
) -> Iterator[dict[str, Any]]:
    """A pair of two models' first answers to each prompt, by the prompt's name."""
    for name, (group, answer) in chosen.items():
        if name not in rejected:
            left_out["prompts that only one of the folders has answered"] += 1
        elif answer.text == rejected[name][1].text:
            left_out["prompts with the same answer twice"] += 1
        else:
            yield _pair(group, answer, rejected[name][1])


def _pair(group: Group, chosen: KeptAnswer, rejected: KeptAnswer) -> dict[str, Any]:
    messages = group.prompt.messages
    columns = {name: group.prompt.columns[name] for name in ("tools", "dataset") if name in group.prompt.columns}
    return {
        "prompt": messages if isinstance(messages, str) else list(messages),
        "chosen": chosen.text,
        "rejected": rejected.text,
        "score_chosen": chosen.reward,
        "score_rejected": rejected.reward,
        **columns,
    }


def _first_answers(folder: Path, tokenizer: Tokenizer, left_out: Counter[str]) -> dict[str, tuple[Group, KeptAnswer]]:
    found: dict[str, tuple[Group, KeptAnswer]] = {}
    for group in _groups(folder):
        answers = _answers(group, tokenizer, left_out)
        if answers:
            found.setdefault(group.prompt.uid, (group, answers[0]))
    return found


def _answers(group: Group, tokenizer: Tokenizer, left_out: Counter[str]) -> list[KeptAnswer]:
    """The whole answers of a group. Their text ends before the stop token."""
    found = []
    for rollout, tokens in zip(group.rollouts, group.payload, strict=True):
        if rollout.episode is not None:
            left_out["answers of several turns"] += 1
        elif rollout.finish == "length":
            left_out["answers that a limit has cut"] += 1
        else:
            response = tokens.ids[rollout.num_prompt_tokens : -1].tolist()
            found.append(KeptAnswer(tokenizer.decode(response, skip_special_tokens=False), rollout.verdict.reward))
    return found


def _groups(folder: Path) -> Iterator[Group]:
    """
    Raises:
        ValueError: the folder has no answers.
    """
    rollouts = folder / "rollouts" if (folder / "rollouts").is_dir() else folder
    steps = sorted(int(path.stem.removeprefix("step_")) for path in rollouts.glob("step_*.groups"))
    if not steps:
        raise ValueError(f"{rollouts} has no answers; a run keeps them with rollout.dump=true: {path_of(rollouts, 0)}")
    for step in steps:
        yield from read_step(rollouts, step).groups


def _tokenizer(folder: Path, given: Path | None) -> Tokenizer:
    """
    Raises:
        ValueError: nothing tells which tokenizer has made the answers.
    """
    from megatron_rl.data.tokenizer import open_tokenizer  # transformers takes seconds

    if given is None:
        path = folder / CONFIG
        if not path.is_file():
            raise ValueError(f"{folder} has no {CONFIG}, which names its model; give --tokenizer, the model's folder")
        given = Path(json.loads(path.read_text(encoding="utf-8"))["config"]["model"]["path"])
    return cast(Tokenizer, open_tokenizer(given))


if __name__ == "__main__":
    sys.exit(piped(partial(main)))
