"""Proposes the table of a model that no family has yet, from its config.json and the names and extents of its tensors.

The nearest family is the one that leaves the fewest tensors over. Where it has rows that the model lacks they go, and
where another family has rows for what is left over they come, also for tensors that other modules hold here. What no
row of any family has is told, and so is every key of config.json that nothing read: there a model may differ without a
tensor that shows it, such as in a rotation.
Invariant (tests/unit/models): without the family of a known model the proposal has that family's rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.models.config import shape_of
from megatron_rl.models.families import FAMILIES, module_of
from megatron_rl.models.families.biased_mixture import BIASED_MIXTURE, read_experts, sigmoid_scored
from megatron_rl.models.families.qwen3_moe import QWEN3_MOE
from megatron_rl.models.families.rows import first_name, renamed, rows_of, rows_without
from megatron_rl.models.family import Family
from megatron_rl.models.rule import HfTensor, Rule
from megatron_rl.models.traits import ROUTER_BIAS
from megatron_rl.types import ModelShape

Extents = tuple[int, ...]
KINDS = ("attention", "linear", "dense", "mixture")
"""The fields of a family that hold the rows of layers."""
HARMLESS = {
    *("architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version", "_name_or_path"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "initializer_range", "use_cache"),
    *("aux_loss_alpha", "ep_size", "output_router_logits", "pretraining_tp", "router_aux_loss_coef", "seq_aux"),
    "router_jitter_noise",
}
"""Keys of config.json that change no logits of a trained model."""
_SHARED = {
    "biased_mixture": ("BIASED_MIXTURE", "read_experts", "sigmoid_scored"),
    "rows": ("renamed", "rows_of", "rows_without"),
}
"""What the text of a file may use of modules that have no family."""
_UNPROVEN = """# Nothing here computes with these keys of config.json, and no log-probs have shown that they change
# none. Find out what each one does, and remove this comment:
"""


class _Read(dict[str, Any]):
    """A config.json that notes which of its keys are read."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.keys_read: dict[str, None] = {}
        """The keys, in the order in which they were read last."""

    def _note(self, key: object) -> None:
        self.keys_read.pop(str(key), None)
        self.keys_read[str(key)] = None

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)


@dataclass(frozen=True, slots=True)
class Proposal:
    family: Family
    """The proposed table, under the model's own `model_type`."""
    shape: ModelShape
    nearest: str
    """The family that it begins with."""
    reader: str
    """The text of `read_config`."""
    taken: tuple[tuple[str, str, str, str], ...]
    """(kind of row, family, the row's first HF name there, and here) of each row that comes from another family."""
    dropped: tuple[str, ...]
    """The first HF names of the nearest family's rows that the model does not have."""
    understood: int
    """The number of tensors that rows describe, with the same extents."""
    ignored: dict[str, str]
    """The reason of each tensor that the family declares as not needed."""
    unknown: dict[str, Extents]
    """The tensors that no row of any family describes."""
    missing: dict[str, Extents]
    """The tensors that the rows ask for and the files do not have."""
    differing: dict[str, tuple[Extents, Extents]]
    """The extents that the rows ask for, and other ones that the files have."""
    unread: dict[str, Any]
    """The keys of config.json that nothing reads, without `HARMLESS`."""
    refused: dict[str, str]
    """What is wrong with config.json for each family that has more of the tensors' names than the nearest one. If no
    family can read config.json: why the nearest one did not read a key that is `unread`."""

    @property
    def is_known(self) -> bool:
        """Whether this is the table of a family that is there, unchanged."""
        return self.nearest == self.family.name

    def source(self, is_compared: bool = True) -> str:
        """The text of the file `models/families/<model_type>.py`.

        Args:
            is_compared: whether log-probs show that the keys that nothing reads change none.
        """
        name, begin = self.family.name, FAMILIES[self.nearest]
        base, biased = self.nearest.upper(), self.reader == "read_experts"
        imported = {self.nearest, *(family for _, family, *_ in self.taken)}
        changes = [f'name="{name}"', f'vllm_model="{self.family.vllm_model}"']
        if begin.published_model:
            changes.append("published_model=None")
        for kind in KINDS:
            other = begin
            if getattr(self.family, kind) and not getattr(begin, kind) and not biased:
                other = QWEN3_MOE
                imported.add(other.name)
            rows = "BIASED_MIXTURE" if biased and kind == "mixture" else f"{other.name.upper()}.{kind}"
            names = [first_name(rule) for rule in getattr(other, kind) if first_name(rule) in self.dropped]
            rows = f"rows_without({rows}, {names})" if names else rows
            added = "".join(
                f", *rows_of({of}, {hf!r})" if hf == own else f", renamed(rows_of({of}, {hf!r})[0], {own!r})"
                for of, hf, own in ((of.upper(), hf, own) for at, of, hf, own in self.taken if at == kind)
            )
            if added:
                changes.append(f"{kind}=(*{rows}{added})")
            elif rows != f"{base}.{kind}":
                changes.append(f"{kind}={rows}")
        if self.reader != f"{base}.read_config":
            changes.append(f"read_config={self.reader}")
        if (share := self.shape.attention.rope.share) != (begin.rotary_share or 1.0):
            changes.append(f"rotary_share={share}")
        if pinned := [f"{key!r}: {value!r}" for key, value in self.unread.items() if key in self.family.known]:
            changes.append(f"known={{**{base}.known, {', '.join(pinned)}}}")
        text = "\n".join(f"    {change}," for change in changes)
        modules = {family: module_of(family) for family in imported}
        lines = [f"from megatron_rl.models.families.{modules[one]} import {one.upper()}" for one in imported]
        for module, shared in _SHARED.items():
            if used := [name for name in shared if re.search(rf"\b{name}\b", text)]:
                lines.append(f"from megatron_rl.models.families.{module} import {', '.join(used)}")
        return (
            f'"""{name}: like {self.nearest}. Name the paper here, and what differs."""\n\n'
            "from __future__ import annotations\n\nfrom dataclasses import replace\n\n"
            + "\n".join(sorted(lines))
            + ("" if is_compared or not self.unread else f"\n\n{_UNPROVEN}# {', '.join(self.unread)}")
            + f"\n\n{name.upper()} = replace(\n    {base},\n{text}\n)\n"
        )


def propose(config: Mapping[str, Any], tensors: Mapping[str, Extents]) -> Proposal:
    """
    Args:
        config: config.json.
        tensors: the extents of the tensors of the files, by name.

    Raises:
        ValueError: no family can read this config.json, not even without the keys that it refuses; the message has what
            each of them misses.
    """
    read = [(nearest, family, *_read(nearest, family, config)) for nearest, family in _candidates(config)]
    faults = dict[str, str]()
    for nearest, *_, fault in read:
        if fault:
            faults.setdefault(nearest, fault)
    whole = [one for one in read if not one[-1]]
    found = [
        _complete(nearest, family, shape, dict(config), keys, tensors)
        for nearest, family, shape, keys, _ in whole or read
        if shape
    ]
    if not found:
        raise ValueError(f"no family can read config.json:\n{told_once(faults)}")
    best = min(
        found,
        key=lambda one: (
            len(one.unknown) + len(one.missing) + len(one.differing),
            len(one.taken) + len(one.dropped),
            len(one.unread),
        ),
    )
    num_named = _num_named(best.family, tensors)
    refused = faults.keys() - {one.nearest for one in found}  # some were read with another mixture
    nearer = [name for name in FAMILIES if name in refused and _num_named(FAMILIES[name], tensors) > num_named]
    return replace(best, refused={name: faults[name] for name in nearer}) if whole else best


def _read(nearest: str, family: Family, config: Mapping[str, Any]) -> tuple[ModelShape | None, set[str], str]:
    """The sizes that a family finds in config.json, the keys that it read, and its first fault, "" if there is none. A
    value that it refuses is left out, which is the one of the key that was read last; None if that does not help."""
    read = _Read({key: value for key, value in config.items() if key not in family.known})
    refused, first = set[str](), ""
    while True:
        try:
            return shape_of(family, read), read.keys_read.keys() - refused, first
        except (ValueError, KeyError, TypeError) as error:
            fault = str(error).replace(f"the family {nearest}", "the family")
            first = first or (f"the key {fault} is missing" if isinstance(error, KeyError) else fault)
            last = next((key for key in reversed(read.keys_read) if key in read.keys()), None)
            if not isinstance(error, ValueError) or last is None or read.pop(last) is None:
                return None, set(), first
            refused.add(last)


def told_once(faults: Mapping[str, str]) -> str:
    """Each fault in a line, after the families that have it."""
    of_fault = {fault: [name for name, own in faults.items() if own == fault] for fault in faults.values()}
    return "\n".join(f"{', '.join(names)}: {fault}" for fault, names in of_fault.items())


def _candidates(config: Mapping[str, Any]) -> Iterator[tuple[str, Family]]:
    """(the family that it begins with, a table): the model's own family if there is one, or every family, and dense
    ones with each kind of mixture. Heads may be rotated in part."""
    if (own := config.get("model_type")) in FAMILIES:
        yield own, FAMILIES[own]
        return
    share = _rotary_share(config)
    for name, family in FAMILIES.items():
        whole = replace(family, rotary_share=share or family.rotary_share or 1.0)
        yield name, whole
        if not family.mixture:
            yield name, replace(whole, mixture=BIASED_MIXTURE, read_config=read_experts)
            yield name, replace(whole, mixture=QWEN3_MOE.mixture, read_config=QWEN3_MOE.read_config)


def _rotary_share(config: Mapping[str, Any]) -> float | None:
    """The share of each head's dims that `rotary_dim` of config.json counts; None without it."""
    dims, head = config.get("rotary_dim"), config.get("head_dim")
    return dims / head if isinstance(dims, int) and isinstance(head, int) and 0 < dims <= head else None


def _complete(
    nearest: str,
    family: Family,
    shape: ModelShape,
    config: dict[str, Any],
    read: set[str],
    tensors: Mapping[str, Extents],
) -> Proposal:
    """The proposal that begins with a family."""
    expected = {name: tensor.extents for name, tensor in family.file_tensors(shape).items()}
    prefix = _layer(family)
    fitting = {name for name, extents in expected.items() if tensors.get(name) == extents}
    over: dict[str, set[Extents]] = {}
    for name in tensors.keys() - fitting:
        over.setdefault(_pattern(prefix, name), set()).add(tensors[name])
    lost = {_pattern(prefix, name) for name in expected.keys() - fitting}
    dropped = tuple(dict.fromkeys(first_name(rule) for rule in family.rules if all(_is_in(t, lost) for t in rule.hf)))
    taken = tuple(_taken(family, shape, dropped, over))
    if config.get("model_type") == nearest:  # its own table is checked as it is
        dropped, taken = (), ()
    rows: dict[str, Any] = {kind: rows_without(getattr(family, kind), list(dropped)) for kind in KINDS}
    for kind, other, hf_name, own in taken:
        of_other = rows_of(FAMILIES[other], hf_name)
        rows[kind] += of_other if own == hf_name else (renamed(of_other[0], own),)
    name = str(config.get("model_type"))
    of_vllm = (config.get("architectures") or [family.published_model or family.vllm_model])[0]
    whole = replace(replace(family, **rows), name=name, vllm_model=of_vllm, published_model=None)
    own = nearest if family.read_config is FAMILIES[nearest].read_config else "qwen3_moe"
    reader = "read_experts" if family.read_config is read_experts else f"{own.upper()}.read_config"
    biased = any(rule.megatron == ROUTER_BIAS for rule in whole.mixture)
    if biased and shape.mixture and shape.mixture.score != "sigmoid":
        whole, reader = replace(whole, read_config=sigmoid_scored(family.read_config)), f"sigmoid_scored({reader})"
    again, read, fault = _read(nearest, whole, config)  # its rows and its reader say more of the layers
    shape = again or replace(shape, family=name)
    unread = {
        key: value
        for key, value in config.items()
        if (key not in read | HARMLESS and value is not None) or family.known.get(key, value) != value
    }
    pinned = {key: value for key, value in unread.items() if key in family.known or _is_switch(value)}
    described = {key: tensor.extents for key, tensor in whole.file_tensors(shape).items()}
    understood = [key for key, extents in described.items() if tensors.get(key) == extents]
    ignored = {
        key: one.reason for key in tensors.keys() - described.keys() for one in whole.ignored if one.matches(key, shape)
    }
    return Proposal(
        family=replace(whole, known={**family.known, **pinned}),
        shape=shape,
        nearest=nearest,
        reader=reader,
        taken=taken,
        dropped=dropped,
        understood=len(understood),
        ignored=ignored,
        unknown={key: tensors[key] for key in sorted(tensors.keys() - described.keys() - ignored.keys())},
        missing={key: extents for key, extents in described.items() if key not in tensors},
        differing={
            key: (extents, tensors[key]) for key, extents in described.items() if tensors.get(key, extents) != extents
        },
        unread=unread,
        refused={nearest: fault} if fault else {},
    )


def _is_switch(value: Any) -> bool:
    """Whether a value of config.json turns something on or off, or chooses it. All other values may be sizes, which
    differ between the models of a family."""
    return isinstance(value, bool | str | float) or value == 0


def _num_named(family: Family, tensors: Iterable[str]) -> int:
    """The number of names that rows of a family have and whose tensors are there, with any extents."""
    prefix = _layer(family)
    names = {_pattern(prefix, name) for name in tensors}
    return len({first_name(rule) for rule in family.rules if all(_is_in(tensor, names) for tensor in rule.hf)})


def _layer(family: Family) -> re.Pattern[str]:
    return re.compile(re.escape(family.hf_layer).replace(re.escape("{}"), r"\d+"))


def _taken(
    family: Family, shape: ModelShape, dropped: Collection[str], over: Mapping[str, set[Extents]]
) -> Iterator[tuple[str, str, str, str]]:
    """The rows of other families whose tensors are all left over, with the extents that the model has. Then the rows of
    one tensor, for a tensor that is left over, has these extents and is called so in another module.

    Args:
        over: the extents of the tensors that are left over, by pattern.
    """
    known = {first_name(rule) for rule in rows_without(family.rules, dropped)}
    sizes = {name: size for layer in set(shape.layers) for name, size in shape.sizes(layer).items()}
    rows = [(kind, other, rule) for other in FAMILIES.values() for kind in KINDS for rule in getattr(other, kind)]
    rows = [row for row in rows if row[2].when is None]
    for kind, other, rule in rows:
        if first_name(rule) not in known and _fits(rule, sizes, over):
            known.add(first_name(rule))
            yield kind, other.name, first_name(rule), first_name(rule)
    for kind, other, rule in rows:
        if len(rule.hf) == 1 and rule.vllm is None and not rule.per_expert:
            for own in over.keys() - known:
                if _end(own) == _end(first_name(rule)) and _fits(renamed(rule, own), sizes, over):
                    known.add(own)
                    yield kind, other.name, first_name(rule), own


def _end(name: str) -> str:
    """The part of a name that tells what the tensor is."""
    parts = name.split(".")
    return ".".join(parts[-2:] if parts[-1] in ("weight", "bias") else parts[-1:])


def _fits(rule: Rule, sizes: Mapping[str, int], over: Mapping[str, set[Extents]]) -> bool:
    try:
        extents = rule.extents(sizes)
    except KeyError:  # of a dim that this model does not have
        return False
    return all(
        own in over.get(tensor.name, ()) or (tensor.file is not None and tensor.file.name in over)
        for tensor, own in zip(rule.hf, extents, strict=True)
    )


def _pattern(prefix: re.Pattern[str], name: str) -> str:
    """The name as rows have it: without the prefix of the layer, and with `{}` for the number of an expert."""
    return re.sub(r"\.\d+\.", ".{}.", prefix.sub("", name))


def _is_in(tensor: HfTensor, patterns: set[str]) -> bool:
    return tensor.name in patterns or (tensor.file is not None and tensor.file.name in patterns)
