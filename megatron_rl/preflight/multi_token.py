"""What is wrong with the multi-token head of a run's model (`policy.multi_token`), before anything starts."""

from __future__ import annotations

from math import prod

from megatron_rl.config.schema import BaseConfig, GrpoRunConfig
from megatron_rl.models import FAMILIES
from megatron_rl.models.composite import read_config
from megatron_rl.models.hub import find_head, read_header
from megatron_rl.preflight.rows import Tell
from megatron_rl.types import ModelShape


def check_head(config: BaseConfig, shape: ModelShape, tell: Tell) -> None:
    """
    Raises:
        ValueError: a multi-token head is to be kept or trained, and there is none, or another one.
    """
    head, choice, family = find_head(config.model.path, shape), config.policy.multi_token, FAMILIES[shape.family]
    if family.multi_token is None:  # check_trainable tells it
        return
    key = family.multi_token.key
    if choice == "train" and (number := read_config(config.model.path).get(key)) not in (None, 1):
        raise ValueError(
            f"policy.multi_token is train, but {config.model.path / 'config.json'} has {key} {number!r}; a head of 1 "
            "layer can be trained, others can be kept or dropped"
        )
    if choice != "drop" and not head and not (choice == "train" and config.model.weights):
        raise ValueError(
            f"policy.multi_token is {choice}, but {config.model.path} has no multi-token head; convert the model with "
            f"--multi-token keep, or leave the key out"
        )
    if choice == "train":
        wanted = family.head_tensors(config.policy.adapted(shape))
        absent = [name for name in wanted if name not in head] if head else []
        if absent:
            raise ValueError(
                f"policy.multi_token is train, but {config.model.path} has no {absent[0]} ({len(absent)} of the "
                f"{len(wanted)} tensors of its multi-token head are missing); copy the checkpoint again, or use drop"
            )
        headers = {path: read_header(path) for path in set(head.values())}
        for name in wanted if head else ():
            if (found := headers[head[name]][name][1]) != wanted[name]:
                raise ValueError(
                    f"{head[name]}: {name} of the multi-token head has the extents {found}, but config.json means "
                    f"{wanted[name]}; take the files that belong together"
                )
        sent = "not sent to the engines (policy.multi_token)"
        if isinstance(config, GrpoRunConfig) and config.pushed(config.policy.adapted(shape)).multi_token:
            sent = "sent to the engines, which draft with them (rollout.speculative)"
        tell(f"the {len(wanted)} tensors of the model's multi-token head are trained, and {sent}")
    elif head:
        done = "have as they are" if choice == "keep" else "leave out"
        tell(
            f"checkpoints and exports {done} the {len(head)} tensors of the model's multi-token head, which is not "
            f"trained (policy.multi_token)"
        )


def kept_bytes(config: BaseConfig, shape: ModelShape) -> int:
    """The bytes of a multi-token head that is kept, in every checkpoint. One that is trained is among the model's
    weights."""
    if config.policy.multi_token != "keep":
        return 0
    head = find_head(config.model.path, shape)
    headers = {path: read_header(path) for path in set(head.values())}
    stored = [headers[path][name] for name, path in head.items()]
    return sum(prod(extents) * int(dtype.lstrip("BF")) // 8 for dtype, extents, _ in stored)  # such as BF16
