"""Convert every run script of a snapshot of verl, and dry-run the results.

SNAPSHOT is a git directory of github.com/volcengine/verl, bare or not. For each script that calls `main_ppo` it prints
the numbers of keys that are used, mapped, implied, left out and refused, the share of keys that have a row, and what
the dry run says. No script is run, and nothing of the snapshot is written anywhere but into a temporary folder.

With --bash, bash runs each script in a temporary folder, with a `python3` that only writes down its words, and without
the commands that would change anything; the words are compared with what from-verl has read. A script could still
write to a path of its own: look at the scripts before. It also says which keys of the configurations that verl has
generated have no row, and which of verl's own defaults are refused if a script gives them.

What a script leaves to its user is given here, and listed: a variable that is not set becomes a number or a folder, and
the number of training rows is --rows. The sizes of models without a file in configs/model are in `SIZES`; trackers are
left out, because their packages may not be installed.

    python tools/bench/verl_scripts.py SNAPSHOT --match 'examples/((grpo|ppo|gspo)_trainer|tuning)/' --bash
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "model"
CHOICES = {"DEVICE": "gpu", "INFER_BACKEND": "vllm"}
NAMES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
SIZES: dict[str, tuple[str, tuple[int, int, int, int, int], int, bool]] = {
    "Qwen2.5-0.5B": ("qwen2", (24, 896, 14, 2, 4864), 151936, True),
    "Qwen2.5-1.5B": ("qwen2", (28, 1536, 12, 2, 8960), 151936, True),
    "Qwen2.5-3B": ("qwen2", (36, 2048, 16, 2, 11008), 151936, True),
    "Qwen2.5-7B": ("qwen2", (28, 3584, 28, 4, 18944), 152064, False),
    "Qwen2.5-14B": ("qwen2", (48, 5120, 40, 8, 13824), 152064, False),
    "Qwen2.5-32B": ("qwen2", (64, 5120, 40, 8, 27648), 152064, False),
    "Qwen2-72B": ("qwen2", (80, 8192, 64, 8, 29568), 152064, False),
    "Qwen3-0.6B": ("qwen3", (28, 1024, 16, 8, 3072), 151936, True),
    "Qwen3-4B": ("qwen3", (36, 2560, 32, 8, 9728), 151936, True),
    "deepseek-llm-7b": ("llama", (30, 4096, 32, 32, 11008), 102400, False),
}
"""The families, NAMES, vocabulary, and whether the embeddings are tied, of models by the beginning of their names."""
DEEPSEEK_SHAPED = {
    "Moonlight-16B-A3B": {
        **{"num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16},
        **{"q_lora_rank": None, "intermediate_size": 11264, "moe_intermediate_size": 1408, "n_routed_experts": 64},
        **{"n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        **{"routed_scaling_factor": 2.446, "vocab_size": 163840, "rope_scaling": None, "rope_theta": 50000.0},
    },
}
"""What differs from DeepSeek-V3's configuration, by the model's name."""
ALIASES = {
    r"Qwen2-7B.*|Qwen2\.5-Math-7B": "Qwen2.5-7B",
    r"Qwen2\.5-Coder-14B.*": "Qwen2.5-14B",
    r"(?i)qwen3-4b.*": "Qwen3-4B",
    r"Qwen3-30B-(A3B|MoE).*": "Qwen3-30B-A3B",
    r"Qwen3\.5-(35B-A3B|397B-A17B)": r"Qwen3.5-\1-text",
    r"gpt-oss-(\d+b).*": r"gpt-oss-\1",
    r"DeepSeek-V3.*|<path_to_dsv3.*": "DeepSeek-V3",
    r"Qwen2\.5-72B.*": "Qwen2.5-72B-Instruct",
    "LLM": "Moonlight-16B-A3B",
    "model_path": "Qwen2-72B",
}
"""Names of models that have the sizes of others. The last two are variables that scripts leave to their users."""


def scripts(snapshot: str, match: str) -> Iterator[tuple[str, str]]:
    """The paths and texts of all shell scripts whose paths match, and that call verl's trainer or are examples."""
    for name in _git(snapshot, "ls-tree", "-r", "--name-only", "HEAD").split():
        if name.endswith(".sh") and re.search(match, name):
            text = _git(snapshot, "show", f"HEAD:{name}")
            if re.search(r"main_(ppo|dapo)", text) or name.startswith("examples/grpo_trainer"):
                yield name, text


def _git(snapshot: str, *words: str) -> str:
    return subprocess.run(["git", "-C", snapshot, *words], capture_output=True, text=True, check=True).stdout


RECORDER = """#!/bin/bash
[ "$1" = -c ] && exit 1
printf '%s\\0' "$@" >> "$RECORD"
"""
"""The `python3` of --bash: no module can be imported, and the words of a call are written down."""
STAND_INS = ("ray", "hf", "nvidia-smi", "npu-smi", "mkdir", "rm", "pip", "curl", "wget", "ssh", "pkill", "sudo", "git")
HARMLESS = ("cat", "date", "basename", "dirname", "env", "awk", "tee", "cut", "tr", "sed", "grep", "head", "tail", "wc")


def words_of_bash(text: str, variables: dict[str, str]) -> list[str]:
    """The words after the trainer's name, as bash passes them."""
    with tempfile.TemporaryDirectory() as folder:
        place, record = Path(folder), Path(folder) / "words"
        (place / "bin").mkdir()
        runner = '#!/bin/bash\nwhile [[ $# -gt 0 && $1 != python* ]]; do shift; done\nexec "$@"\n'
        contents = {"python3": RECORDER, "python": RECORDER, **dict.fromkeys(("uv", "nohup", "torchrun"), runner)}
        for name, content in {**dict.fromkeys(STAND_INS, "#!/bin/bash\n"), **contents}.items():
            (place / "bin" / name).write_text(content)
            (place / "bin" / name).chmod(0o755)
        for name in HARMLESS:
            if path := shutil.which(name):
                (place / "bin" / name).symlink_to(path)
        (place / "run.sh").write_text(text)
        env = {**variables, "PATH": str(place / "bin"), "RECORD": str(record)}
        subprocess.run(["/bin/bash", "run.sh"], cwd=folder, env=env, capture_output=True, timeout=60)
        words = record.read_text().split("\0")[:-1] if record.exists() else []
    starts = [number for number, word in enumerate(words) if re.search(r"main_(ppo|dapo)", word)]
    return [word.replace(folder, variables["PWD"]) for word in words[starts[0] + 1 :]] if starts else []


def differences(keys: Sequence[dict[str, Any]], words: list[str]) -> list[str]:
    """The words of one side that the other side does not have; the time of the day may differ."""
    ours = [one["key"] + ("" if one["key"][0] == "~" else f"={one['value']}") for one in keys]
    plain = [[re.sub(r"20\d{6}_\d{4,6}", "TIME", word) for word in side] for side in (ours, words)]
    return sorted(set(plain[0]) ^ set(plain[1])) or ([] if len(ours) == len(words) else ["a word is there twice"])


def from_verl(words: Sequence[str]) -> tuple[int, dict[str, Any], str]:
    """What the command says: its status, its JSON object (empty if there is none), and its errors."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        status = import_module("megatron_rl.__main__").main(["from-verl", *words, "--json"])
    return status, json.loads(output.getvalue() or "{}"), errors.getvalue()


def defaults_of(snapshot: str) -> Iterator[tuple[str, str, str]]:
    """The engine, the name and the value of every default in the configurations that verl has generated."""
    for engine, name in GENERATED.items():
        content = yaml.safe_load(_git(snapshot, "show", f"HEAD:verl/trainer/config/_generated_ppo_{name}.yaml"))
        places = [("", content)]
        while places:
            prefix, place = places.pop()
            for key, value in place.items():
                if isinstance(value, dict) and value:
                    places.append((f"{prefix}{key}.", value))
                elif key != "_target_":
                    yield engine, prefix + key, "null" if value is None else str(value)


def print_defaults(snapshot: str) -> None:
    """Say which keys have no row, and which defaults are refused."""
    found: dict[str, dict[str, str]] = {}
    for engine, key, text in defaults_of(snapshot):
        if "${" not in text and text != "???" and key != "model_engine":
            found.setdefault(engine, {})[key] = text
    for engine, defaults in found.items():
        words = [f"model_engine={engine}", *(f"{key}={text}" for key, text in defaults.items())]
        for sentence in from_verl([*words, "--rows", "100000"])[1]["refused"]:
            print(f"{engine}: {sentence}")


GENERATED = {
    "dp": "trainer",
    "megatron": "megatron_trainer",
    "veomni": "veomni_trainer",
    "torchtitan": "torchtitan_trainer",
}


def read_with_stand_ins(script: Path, rows: int) -> tuple[int, dict[str, Any], str, dict[str, str]]:
    """What the command says of a script, and the variables that it needed from outside."""
    given: dict[str, str] = {}
    shares = [rows]
    while True:
        pairs = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
        status, told, errors = from_verl([str(script), "--rows", ",".join(map(str, shares)), *pairs])
        text = "\n".join((errors, *told.get("refused", ())))
        files = re.search(r"mixes (\d+) files", text)
        if files is not None and len(shares) == 1:
            shares = [rows // int(files[1])] * int(files[1])
            continue
        new = {name: _stand_in(name) for name in re.findall(r"--set (\w+)=VALUE", text) if name not in given}
        if not new:
            return status, told, errors, given
        given |= new


SURROUNDINGS = {"HOME": "/home/user", "PWD": "/home/user/verl", "USER": "user"}


def _stand_in(name: str) -> str:
    upper = name.upper()
    if upper in CHOICES:
        return CHOICES[upper]
    if re.search(r"GPU", upper) and not re.search(r"NUM_NODES", upper):
        return "8"
    if re.search(r"NODE|NUM$|_NUM_", upper):
        return "1"
    if upper.startswith("USE_"):
        return "False"
    return "1" if re.search(r"SIZE$|^\w{1,2}$", upper) else f"/data/{name}"


def write_sizes(folder: Path, name: str) -> None:
    """Put a config.json with the model's sizes where the dry run looks for it, unless nobody knows them."""
    place = folder / "configs" / "model" / f"{name}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    plain = next(
        (re.sub(pattern, ours, name) for pattern, ours in ALIASES.items() if re.fullmatch(pattern, name)), name
    )
    shipped = CONFIGS / f"{plain}.json"
    known = next((one for one in SIZES if plain.startswith(one)), None)
    if plain in DEEPSEEK_SHAPED:
        like = json.loads((CONFIGS / "DeepSeek-V3.json").read_text())
        place.write_text(json.dumps({**like, **DEEPSEEK_SHAPED[plain]}))
    elif shipped.is_file():
        place.write_text(shipped.read_text())
    elif known is not None:
        family, sizes, vocabulary, is_tied = SIZES[known]
        content: dict[str, Any] = {"model_type": family, **dict(zip(NAMES, sizes, strict=True))}
        content |= {"vocab_size": vocabulary, "max_position_embeddings": 40960, "tie_word_embeddings": is_tied}
        content |= {"rms_norm_eps": 1e-6, "rope_theta": 1e6, **({"head_dim": 128} if family == "qwen3" else {})}
        place.write_text(json.dumps(content))


def dry_run(told: dict[str, Any], folder: Path) -> str:
    """What the dry run says: `passes`, or the beginning of its refusal."""
    problems = told["refused"] or told["to_add"]
    if problems:
        return f"refused: {problems[0]}"
    configuration = {key: value for key, value in told["configuration"].items() if key != "observe"}
    if not (folder / "configs" / "model" / f"{Path(configuration['model']['path']).name}.json").is_file():
        return "sizes are not known"
    (folder / "run.yaml").write_text(yaml.safe_dump(configuration))
    recipe = import_module(f"megatron_rl.commands.{told['command'].split()[1]}")
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        status = recipe.main(["run.yaml", "--dry-run"])
    if status == 0:
        return "passes"
    lines = [line for line in output.getvalue().splitlines() if line.strip()]
    start = next((place for place, line in enumerate(lines) if "error" in line or "not fit" in line), -3)
    return f"refused: {' '.join(lines[start:])[:300]}"


def outcome(name: str, text: str, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The row of one script."""
    script = folder / "run.sh"
    script.write_text(text)
    _, told, errors, variables = read_with_stand_ins(script, given.rows)
    if not told:
        return {"script": name, "dry_run": f"not read: {errors.strip()}"}
    values = {one["key"]: one["value"] for one in told["keys"]}
    write_sizes(folder, Path(values.get("actor_rollout_ref.model.path", "model")).name)
    _, told, _, variables = read_with_stand_ins(script, given.rows)
    return {
        "script": name,
        "trainer": values.get("model_engine") or values.get("actor_rollout_ref.actor.strategy", "dp"),
        "unlike_bash": differences(told["keys"], words_of_bash(text, SURROUNDINGS | variables)) if given.bash else None,
        "estimator": values.get("algorithm.adv_estimator", "gae"),
        "counts": told["counts"],
        "left_out": [f"{row['key']}: {row['why']}" for row in told["keys"] if row["status"] == "left out"],
        "refused": told["refused"],
        "given": variables,
        "notes": told["notes"],
        "dry_run": dry_run(told, folder),
    }


COUNTED = ("used", "mapped", "implied", "left out", "refused")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("snapshot", help="a git directory of verl")
    parser.add_argument("--match", default="", help="only scripts whose paths match this expression")
    parser.add_argument("--bash", action="store_true", help="compare the words of each script with what bash passes")
    parser.add_argument("--rows", type=int, default=100_000, help="the number of training rows (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line instead of a table")
    given = parser.parse_args(arguments)
    snapshot = os.path.abspath(given.snapshot)
    results = Counter[str]()
    print("" if given.json else "script | trainer, estimator | used | mapped | implied | left out | refused | dry run")
    os.environ.update(SURROUNDINGS)  # the command takes them from its shell
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for name, text in scripts(snapshot, given.match):
            row = outcome(name, text, given, Path(folder))
            results[row["dry_run"].partition(":")[0]] += 1
            if given.json:
                print(json.dumps(row), flush=True)
                continue
            numbers = [str(row["counts"][key]) if "counts" in row else "" for key in COUNTED]
            kind = f"{row.get('trainer', '')}, {row.get('estimator', '')}"
            print(" | ".join([name, kind, *numbers, row["dry_run"][:160]]), flush=True)
            for word in row.get("unlike_bash") or ():
                print(f"    only here or only in bash: {word}", flush=True)
    if given.bash:
        print_defaults(snapshot)
    print("; ".join(f"{number} {result}" for result, number in results.most_common()), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
