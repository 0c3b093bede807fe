"""Propose the table of a model that no family has yet, and check it. For a family that is there, check its own table.

    megatron-rl family models/New-30B [--json]

It reads config.json and the headers of the weights, and prints the nearest family, the tensors that rows describe, the
ones that no row describes, the keys of config.json that nothing reads, and the text of a file for models/families/.
Then it makes a tiny random model of the same config.json with transformers' own class and checks the proposal with it:
the table has each tensor once; converted for TP2 x PP2 and back the weights have the same bits; the log-probs of
Megatron on one process equal transformers'. A key that nothing reads and log-probs that differ belong together:
the forward pass needs what the key says. The exit status is 0 if all checks hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_rl.config.policy import ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.models import FAMILIES, read_shape
from megatron_rl.models.composite import COMPOSITES
from megatron_rl.models.config import read_fields
from megatron_rl.models.hub import read_header, weight_files
from megatron_rl.processes import message_of, piped
from megatron_rl.tools.bench.compare_layouts import deal_rows, random_rows
from megatron_rl.tools.bench.family.proposal import Proposal, propose, told_once
from megatron_rl.types import Mesh

TOLERANCE, NOISE = 1e-4, 3
"""The log-prob of a row of at most 24 tokens, in fp32, may differ from transformers' in fp64 by TOLERANCE nats, or by
NOISE times what transformers' own in fp32 differs by, if that is more. In models whose norms are stored minus 1 it
differs by more than 1e-4."""
VOCAB_SIZE, NUM_LAYERS = 64, 4
_TINY = {
    **{"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "vocab_size": VOCAB_SIZE},
    **{"num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8},
    **{"qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8},
    **{"num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"shared_expert_intermediate_size": 16, "sliding_window": 12, "max_position_embeddings": 128},
    **{"num_hidden_layers": NUM_LAYERS, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    **{"initializer_range": 0.2, "max_window_layers": 2},
}
"""The keys that are made small where a config.json has them."""
LOG_PROBS = "Megatron's log-probs equal transformers'"
"""The last check."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a Hugging Face folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    given = parser.parse_args(arguments)
    try:
        config = read(given.folder)
        tensors = {name: held[1] for path in weight_files(given.folder) for name, held in read_header(path).items()}
        if not tensors:
            raise ValueError("it has no *.safetensors; download the weights, of which only the headers are read")
        proposal = propose(config, tensors)
    except (OSError, ValueError) as error:
        said = message_of(error)
        named = "" if str(given.folder) in said else f"{given.folder}: "
        print(f"error: {named}{said}", file=sys.stderr)
        return 1
    checks = check(proposal, config)
    if given.json:
        source = proposal.source(checks[LOG_PROBS] is None)
        print(json.dumps({"nearest": proposal.nearest, "source": source, "checks": checks, **counts(proposal)}))
    else:
        tell(proposal, len(tensors), checks, Console())
    return 0 if all(fault is None for fault in checks.values()) else 1


def read(folder: Path) -> dict[str, Any]:
    """config.json, which names its class: if it does not, the one that transformers has for its `model_type`.

    Raises:
        ValueError: there is none, or it is no model's, or of a composite, or names no class that is known.
    """
    config = read_fields(folder / "config.json")
    if not isinstance(kind := config.get("model_type"), str):
        raise ValueError('config.json has no model_type, such as "llama"; is it the one of a model?')
    if kind in COMPOSITES:
        raise ValueError(
            f"{kind} is a model with other parts than text, and its family is there already: `megatron-rl convert` "
            "takes the text model out"
        )
    if "text_config" in config:
        raise ValueError(
            f"config.json has a text_config: {kind} has other parts than text. Write an entry of COMPOSITES for it "
            "(docs/add_a_model.md); if no family has its text model, make a folder of that alone for a proposal"
        )
    named = config.get("architectures")
    if named is None or named == []:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

        if kind not in CLASSES:
            raise ValueError(
                f"config.json has no architectures, and transformers has no class for {kind}; add the name of vLLM's "
                'class, such as "architectures": ["LlamaForCausalLM"]'
            )
        return config | {"architectures": [CLASSES[kind]]}
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ValueError(f"architectures of config.json must be a list of names, but it is {json.dumps(named)}")
    return config


def counts(proposal: Proposal) -> dict[str, Any]:
    return {
        "understood": proposal.understood,
        "ignored": patterns(proposal.ignored),
        "unknown": patterns(proposal.unknown),
        "missing": patterns(proposal.missing),
        "differing": patterns(proposal.differing),
        "unread": proposal.unread,
        "refused": proposal.refused,
    }


def patterns(names: Mapping[str, Any]) -> dict[str, int]:
    """The names with `{}` for numbers, and how many there are of each."""
    return dict(Counter(map(pattern, names)))


def with_extents(tensors: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The same, and the extents of the first one of each."""
    first = {pattern(name): list(extents) for name, extents in [*tensors.items()][::-1]}
    return {name: f"{number} of {first[name]}" for name, number in patterns(tensors).items()}


def pattern(name: str) -> str:
    return ".".join("{}" if part.isdigit() else part for part in name.split("."))


def check(proposal: Proposal, config: Mapping[str, Any]) -> dict[str, str | None]:
    """What is wrong with the proposal, by the name of each check; None: nothing."""
    name = proposal.family.name
    whole = None
    if proposal.unknown or proposal.missing or proposal.differing:
        whole = (
            f"{len(proposal.unknown)} tensors have no row, {len(proposal.missing)} rows have no tensor, "
            f"{len(proposal.differing)} tensors have other extents"
        )
    checks: dict[str, str | None] = {"every tensor has its row": whole}
    before = FAMILIES.get(name)
    FAMILIES[name] = proposal.family
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "tiny"
            checks["a tiny model can be made by transformers"] = fault = _make_tiny(config, folder)
            for what, part in (
                ("converted to TP2 x PP2 and back it has the same bits", _round_trip),
                (LOG_PROBS, _logprobs),
            ):
                checks[what] = fault = "not checked" if fault else _faulty(part, folder, Path(temporary))
    finally:
        del FAMILIES[name]
        if before:
            FAMILIES[name] = before
    return checks


def _faulty(part: Any, *arguments: Any) -> str | None:
    """What a check says, or the error that it ends with: a proposal may be wrong in any way."""
    try:
        found: str | None = part(*arguments)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return found


def tiny_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config.json with small sizes, and with `NUM_LAYERS` layers, of each kind that lists of layers name."""
    tiny: dict[str, Any] = {key: _TINY.get(key, value) if value is not None else None for key, value in config.items()}
    if config.get("num_key_value_heads") != config.get("num_attention_heads"):
        tiny["num_key_value_heads"] = 2
    elif "num_key_value_heads" in tiny:
        tiny["num_key_value_heads"] = _TINY["num_attention_heads"]
    if "head_dim" in tiny and config["head_dim"] == config.get("qk_rope_head_dim"):  # one size by two names
        tiny["head_dim"] = tiny["qk_rope_head_dim"]
    if tiny.get("rotary_dim") and config.get("head_dim"):
        tiny["rotary_dim"] = config["rotary_dim"] * _TINY["head_dim"] // config["head_dim"]
    num_layers = config.get("num_hidden_layers", len(config.get("layers_block_type", ())))
    of_layers = {
        key: value
        for key, value in config.items()
        if (isinstance(value, list) or key == "hybrid_override_pattern") and len(value) == num_layers
    }
    kinds = [*zip(*of_layers.values(), strict=True)]
    first = [n for n, kind in enumerate(kinds) if kinds.index(kind) == n]  # one layer of each kind
    kept = sorted([*first, *(n for n in range(len(kinds)) if n not in first)][:NUM_LAYERS])
    kept += kept[-1:] * (NUM_LAYERS - len(kept))
    for key, value in of_layers.items():
        tiny[key] = [value[n] for n in kept] if isinstance(value, list) else "".join(value[n] for n in kept)
    return tiny


def _make_tiny(config: Mapping[str, Any], folder: Path) -> str | None:
    """Write a tiny random model; returns why it cannot be made."""
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    theirs: Any = transformers  # it has few types
    torch.manual_seed(0)
    theirs.utils.logging.disable_progress_bar()
    if config["model_type"] not in theirs.CONFIG_MAPPING:
        return f"transformers {transformers.__version__} has no {config['model_type']}; compare with its own code"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config(config)))
    try:
        known = theirs.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = theirs.AutoModelForCausalLM.from_config(known, dtype=torch.float32)
    except (ValueError, KeyError, TypeError, StrictDataclassError) as error:
        return f"transformers makes none of this config.json: {' '.join(str(error).split())[:300]}"
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name:  # ones and zeros would hide what is lost
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.data.uniform_(-0.2, 0.2)
        elif name.endswith("gate.weight"):
            parameter.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    return None


def _round_trip(folder: Path, temporary: Path) -> str | None:
    from safetensors.torch import load_file

    from megatron_rl.convert import Options, carry_out, open_checkpoint, to_hub, to_ranks

    mesh = Mesh(tensor=2, pipeline=2)
    carry_out(to_ranks(open_checkpoint(folder), mesh, False, Options()), temporary / "ranks", 1, lambda _: None)
    carry_out(to_hub(open_checkpoint(temporary / "ranks"), Options()), temporary / "again", 1, lambda _: None)
    before, after = (load_file(path / "model.safetensors") for path in (folder, temporary / "again"))
    lost = [name for name in before if name not in after or not before[name].equal(after[name])]
    return f"{lost[0]} has other bits" if lost else None


def _logprobs(folder: Path, _: Path) -> str | None:
    import torch
    import torch.distributed as dist
    import transformers

    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.spec import ActorSpec
    from megatron_rl.actor.weights import load_weights
    from megatron_rl.algorithms import SupervisedObjective

    rows = random_rows(VOCAB_SIZE, num_rows=16, longest=24, seed=0)
    spec = ActorSpec(
        shape=read_shape(folder),
        model=ModelConfig(path=folder, dtype="float32"),
        policy=PolicyConfig(),
        objective=SupervisedObjective(),
        temperature=1.0,
        total_steps=1,
        seed=0,
    )
    actor = MegatronActor(spec, rank=0, world_size=1, store=dist.HashStore())
    load_weights(actor, folder)
    (share,) = deal_rows(folder, ParallelConfig(), rows, 1)
    found = actor.score(share)
    actor.close()
    theirs: Any = transformers.AutoModelForCausalLM

    def of_rows(dtype: torch.dtype) -> list[float]:
        """The log-probs of the rows by transformers."""
        model, sums = theirs.from_pretrained(folder, dtype=dtype, experts_implementation="eager"), []
        for row in rows:
            ids_T = torch.from_numpy(row.ids.astype(np.int64))
            with torch.no_grad():
                logp_TV = model(ids_T[None]).logits[0].double().log_softmax(-1)
            sums.append(logp_TV[:-1].gather(1, ids_T[1:, None]).sum().item())
        return sums

    exact = of_rows(torch.float64)
    noise = _largest(of_rows(torch.float32), exact)
    difference, allowed = _largest([found[number] for number in range(len(rows))], exact), max(TOLERANCE, NOISE * noise)
    if difference < allowed:
        return None
    return (
        f"they differ by up to {difference:.2g} nats in a row of 24 tokens, where {allowed:.2g} are rounding; the "
        "forward pass is another one: by a key that nothing reads, or see transformers' "
        f"modeling_{spec.shape.family}.py"
    )


def _largest(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def tell(proposal: Proposal, num_tensors: int, checks: Mapping[str, str | None], console: Console) -> None:
    whose = "family" if proposal.is_known else "nearest family"
    console.print(
        f"{whose}: [bold]{proposal.nearest}[/]. Rows describe {proposal.understood:,} of {num_tensors:,} tensors.",
        highlight=False,
    )
    table = Table(title="left over", title_justify="left")
    for heading in ("what", "name", "number or value"):
        table.add_column(heading, overflow="fold")
    differing = {pattern(name): both for name, both in reversed(proposal.differing.items())}
    told: list[tuple[str, Mapping[str, Any]]] = [
        ("no row describes it", with_extents(proposal.unknown)),
        ("a row asks for it", with_extents(proposal.missing)),
        ("ignored", patterns(proposal.ignored)),
        (
            "it has other extents",
            {name: f"{list(there)}, where a row asks for {list(asked)}" for name, (asked, there) in differing.items()},
        ),
        ("nothing reads this key", proposal.unread),
    ]
    for what, entries in told:
        for name, value in entries.items():
            table.add_row(what, name, str(value))
    if table.row_count:
        console.print(table)
    if proposal.refused:
        console.print(f"What of config.json these families refuse:\n{told_once(proposal.refused)}\n")
    for what, fault in checks.items():
        console.print("yes" if fault is None else "[red]NO [/]", "", what, "" if fault is None else f"({fault})")
    if not proposal.is_known:
        console.print(f"\nmodels/families/{proposal.family.name}.py:\n", highlight=False)
        print(proposal.source(checks[LOG_PROBS] is None))


if __name__ == "__main__":
    sys.exit(piped(main))
