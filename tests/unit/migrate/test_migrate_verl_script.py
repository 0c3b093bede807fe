"""The door reads a run script as bash does, without running it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from megatron_rl.migrate.verl.call import read_overrides
from megatron_rl.migrate.verl.lexer import ScriptError
from megatron_rl.migrate.verl.shell import read_script
from megatron_rl.migrate.verl.values import parse

HOME = {"HOME": "/home/ada", "PWD": "/work"}
CALL = "python3 -m verl.trainer.main_ppo"


def values(script: str, given: dict[str, str] | None = None) -> dict[str, str]:
    return {one.prefix + one.key: one.text for one in read_script(script, {**HOME, **(given or {})}).overrides}


FORMS = {
    "assignment": ("X=3", "a.b=$X", "3"),
    "braces": ("X=3", "a.b=${X}_7", "3_7"),
    "default of an unset variable": ("", "a.b=${X:-5}", "5"),
    "default is not taken": ("X=2", "a.b=${X:-5}", "2"),
    "default with another variable": ('R="/r"', 'a.b=${X:-"${R}/m"}', "/r/m"),
    "nested defaults": ("C=4", "a.b=${X:-${Y:-$C}}", "4"),
    "exported": ("export X=3", "a.b=$X", "3"),
    "arithmetic": ("a=1024\nb=$((a * 2))", "a.b=$((a + b))", "3072"),
    "arithmetic with brackets": ("p=2\nr=8", "a.b=$(((p + r) * 3))", "30"),
    "arithmetic with a dollar": ("p=7", "a.b=$(($p / 2))", "3"),
    "division towards zero": ("p=-7", "a.b=$((p / 2))", "-3"),
    "power": ("", "a.b=$((2 ** 10))", "1024"),
    "home": ("", "a.b=$HOME/data", "/home/ada/data"),
    "single quotes": ("X=3", "a.b='$X'", "$X"),
    "double quotes": ("X=3", 'a.b="v $X"', "v 3"),
    "quoted list": ("", """a.b='["console","wandb"]'""", '["console","wandb"]'),
    "bare list": ("", "a.b=['console','wandb']", "[console,wandb]"),
    "list of files": ("A=/x\nB=/y\nF=\"['$A', '$B']\"", 'a.b="$F"', "['/x', '/y']"),
    "escaped": ("", r"a.b=x\ y", "x y"),
    "lower case": ("X=AbC", "a.b=${X,,}", "abc"),
    "basename": ("X=Qwen/Qwen3-8B", 'a.b="$(basename "$X")"', "Qwen3-8B"),
    "appended": ("X=1\nX+=2", "a.b=$X", "12"),
    "condition": ('X=vllm\nif [ "$X" = "vllm" ]; then\n  Y=1\nelse\n  Y=2\nfi', "a.b=$Y", "1"),
    "other branch": ("X=4\nif [[ $X == 5 ]]; then\nY=1\nelif [ $X -eq 4 ]; then\nY=2\nelse\nY=3\nfi", "a.b=$Y", "2"),
    "inner condition": ("X=1\nif [ -z $X ]; then\nif [ 1 -eq 1 ]; then\nX=9\nfi\nfi", "a.b=$X", "1"),
    "comment after a value": ("X=3 # the number", "a.b=$X", "3"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_value_is_what_bash_passes(form):
    before, override, expected = FORMS[form]
    script = f"set -x\n{before}\n{CALL} \\\n    {override} $@\n"
    assert values(script) == {"a.b": expected}
    bash = shutil.which("bash")
    if bash is not None:  # the same words from bash itself, with a printer in the place of Python
        printer = script.replace(CALL, "printf '%s\\n'").replace("set -x\n", "")
        told = subprocess.run(
            [bash, "-c", printer], capture_output=True, text=True, env=HOME | {"PATH": "/usr/bin:/bin"}
        )
        assert told.stdout == f"a.b={expected}\n", told.stderr


def test_arrays_lines_and_prefixes():
    script = f"""
DATA=(
    data.train_files=$HOME/train.parquet   # a comment
    data.train_batch_size=64
)
MODEL="actor_rollout_ref.model.path=m \\
    +x.y=1"
DATA+=(++z.w=2)
{CALL} --config-path=./config --config-name='ppo_megatron_trainer'\\
    "${{DATA[@]}}" \\
    $MODEL ~q.r \\
    "$@" 2>&1 | tee log.txt
"""
    call = read_script(script, HOME)
    assert [(one.prefix, one.key, one.text) for one in call.overrides] == [
        ("", "data.train_files", "/home/ada/train.parquet"),
        ("", "data.train_batch_size", "64"),
        ("++", "z.w", "2"),
        ("", "actor_rollout_ref.model.path", "m"),
        ("+", "x.y", "1"),
        ("~", "q.r", ""),
    ]
    assert {name: word.text for name, word in call.options.items()} == {
        "--config-path": "./config",
        "--config-name": "ppo_megatron_trainer",
    }
    assert [one.line for one in call.overrides] == [10, 10, 10, 11, 11, 11]


@pytest.mark.parametrize(
    "command",
    [
        "PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo a.b=1",
        "nohup python -u -m verl.trainer.main_ppo a.b=1 > log 2>&1 &",
        "ray job submit --working-dir . -- python3 -m recipe.dapo.main_dapo a.b=1",
        'srun --nodes=1 bash -c "python3 -m verl.trainer.main_ppo a.b=1"',
        "python3 main_ppo_split.py a.b=1",
    ],
)
def test_the_call_is_found_behind_other_commands(command):
    assert values(f"echo 'python3 -m verl.trainer.main_ppo'\n{command}\n") == {"a.b": "1"}


def test_a_variable_that_is_not_set_has_its_name_and_line():
    with pytest.raises(ScriptError, match="line 2.*MODEL.*--set MODEL=VALUE"):
        values(f"set -x\nP=$MODEL\n{CALL} \\\n a.b=$P")
    assert values(f"P=$MODEL\n{CALL} a.b=$P", {"MODEL": "m"}) == {"a.b": "m"}
    assert values(f"MODEL=inside\n{CALL} a.b=$MODEL", {"MODEL": "outside"}) == {"a.b": "outside"}


@pytest.mark.parametrize("command", ["$(hostname)", "`date`", "$(cat <<< x)"])
def test_a_command_is_named_and_not_run(command):
    override = read_script(f"NOW={command}\n{CALL} a.b=run-$NOW c.d=1", HOME).overrides[0]
    assert override.problem is not None
    assert override.problem.startswith("line 1: ") and "needs a shell, which is not run" in override.problem


def test_what_an_undecided_condition_sets_is_not_known():
    script = f"X=1\nif [ -f /etc/motd ]; then\n  X=2\nfi\n{CALL} a.b=$X c.d=3"
    first, second = read_script(script, HOME).overrides
    assert first.problem == "line 3: X depends on line 2, which needs a shell; give it with --set X=VALUE"
    assert (second.text, second.problem) == ("3", None)


def test_a_comment_that_ends_the_command_loses_no_key():
    script = f"{CALL} \\\n    a.b=1 \\\n    # a.c=2 \\\n    a.d=3 \\\n    a.e=4\n"
    found = read_script(script, HOME).overrides
    assert [(one.key, one.problem is None) for one in found] == [("a.b", True), ("a.d", False), ("a.e", False)]
    assert found[1].problem is not None
    assert found[1].problem.startswith("the comment in line 3 ends the command, so the shell does not pass this word")


def test_a_backslash_that_does_not_end_its_line_loses_no_key():
    found = read_script(f"{CALL} \\\n    a.b=1 \\  # the first\n    a.c=2 \\\n    a.d=3\n", HOME).overrides
    assert [(one.key, one.line, one.problem is None) for one in found] == [
        ("a.b", 2, True),
        ("a.c", 3, False),
        ("a.d", 4, False),
    ]
    assert found[1].problem is not None and found[1].problem.startswith("line 2 ends the command")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("python train.py", "has no call such as `python3 -m verl.trainer.main_ppo"),
        (f"{CALL} a.b=1\n{CALL} a.b=2", "calls verl 2 times, in the lines 1, 2; give one run a file"),
        (f"{CALL} a.b='1", "line 1: ' is not closed"),
        (f"if [ 1 -eq 1 ]; then\n{CALL} a.b=1", "line 1: the `if` has no `fi`"),
        (f"A=(x y\n{CALL}", "line 1: the array A has no closing bracket"),
        (f"cat <<END\n{CALL} a.b=1\n", "the here-document does not end with END"),
        (f"{CALL} a.b=1 nonsense", "line 1: 'nonsense' is no override of the form key=value"),
    ],
)
def test_bad_scripts_are_refused(script, message):
    with pytest.raises(ScriptError) as error:
        read_script(script, HOME)
    assert message in str(error.value)


def test_one_of_two_calls_is_chosen_by_the_script_itself():
    script = f'S=fsdp2\nif [ "$S" == "fsdp2" ]; then\n{CALL} a.b=1\nelif [ "$S" == "megatron" ]; then\n{CALL} a.b=2\nfi'
    assert values(script) == {"a.b": "1"}


def test_a_here_document_is_no_part_of_the_script():
    assert values(f"cat > f.py <<EOF\n{CALL} a.b=0\nEOF\n{CALL} a.b=1") == {"a.b": "1"}


def test_overrides_without_a_script():
    assert [(one.key, one.text) for one in read_overrides(["a.b=1", "+c.d=[x,y]"]).overrides] == [
        ("a.b", "1"),
        ("c.d", "[x,y]"),
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("10", 10),
        ("-1", -1),
        ("True", True),
        ("false", False),
        ("null", None),
        ("", None),
        ("0.5", 0.5),
        ("'1'", "1"),
        ("[console,wandb]", ["console", "wandb"]),
        ('["a", "b"]', ["a", "b"]),
        ("[[1,2],[3]]", [[1, 2], [3]]),
        ("{a:1,b:[x]}", {"a": 1, "b": ["x"]}),
        ("/data/x.parquet", "/data/x.parquet"),
        ("[not closed", "[not closed"),
        ("0.5_2.0", "0.5_2.0"),
    ],
)
def test_values_follow_hydras_grammar(text, value):
    assert parse(text) == value and type(parse(text)) is type(value)
