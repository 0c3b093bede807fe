"""The door follows the statements of a script as bash does: the same words, or a sentence that says why not."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from megatron_rl.migrate.verl.lexer import ADVICE, ScriptError
from megatron_rl.migrate.verl.shell import read_script

CALL = "python3 -m verl.trainer.main_ppo"
ENDING = f'\n{CALL} "${{EXTRA[@]}}" a.b=$X\n'

# What stands before the call, with EXTRA and X in it -> the words of the call.
KNOWN: dict[str, tuple[str, str]] = {
    ":=": (': "${X:=5}"', "a.b=5"),
    ":= of a set variable": ('X=4\n: "${X:=5}"', "a.b=4"),
    "a group behind &&": ("N=1\n[ $N = 1 ] && { X=1; EXTRA=(c.d=2); }", "c.d=2 a.b=1"),
    "the idiom for full arrays": ('M=(c.d=1 "e.f=2 3")\nX=1\nEXTRA=(${M[@]+"${M[@]}"})', "c.d=1|e.f=2 3|a.b=1"),
    "all elements as one word": ('M=(1 2)\nX=0\nEXTRA=("c.d=${M[*]}")', "c.d=1 2|a.b=0"),
    "a function that nobody calls": ("X=1\nf() { X=2; }\nfunction g { X=3; }", "a.b=1"),
    "a loop that does not run": ("X=1\nif [ $X = 2 ]; then for k in a b; do X=$k; done; fi", "a.b=1"),
    "an array that stays empty": ("EXTRA=()\nX=1", "a.b=1"),
    "an array that nobody sets": ("X=1", "a.b=1"),
    "case, the other branch": ('A=gpu\nX=1\ncase "$A" in npu) EXTRA+=(x.y=1);; gpu) X=2;; esac', "a.b=2"),
    "case with | and globs": ('A=qwen3_8b\ncase $A in kimi|qwen[23]*) X=1;; *) X=2;; esac', "a.b=1"),
    "case with a quoted glob": ('A=ab\ncase $A in "a*") X=1;; a?) X=2;; esac', "a.b=2"),
    "case with a bracket before": ("A=x\ncase $A in (x) X=1 ;; (y | z) X=2 ;; esac", "a.b=1"),
    "case without a match": ("A=1\nX=5\ncase $A in 2) X=6;; esac", "a.b=5"),
    "case in case": ("A=1\nB=2\ncase $A in\n1)\n case $B in\n 2) X=7 ;;\n esac\n ;;\n*) X=8 ;;\nesac", "a.b=7"),
    "&& and ||": ('N=2\n[ "$N" -gt 1 ] && X=big || X=small', "a.b=big"),
    "&& and ||, the other way": ('N=1\n[ "$N" -gt 1 ] && X=big || X=small', "a.b=small"),
    "groups in a condition": ("A=b\nif [ 1 = 1 ] && { [ $A = a ] || [ $A = b ]; }; then X=1; else X=2; fi", "a.b=1"),
    "[[ with a glob": ("A=qwen3\nif [[ $A == qwen* ]]; then X=1; else X=2; fi", "a.b=1"),
    "[[ with a quoted glob": ('A=qwen3\nif [[ $A == "qwen*" ]]; then X=1; else X=2; fi', "a.b=2"),
    "[[ with !": ("if [[ ! -z 1 ]]; then X=1; else X=2; fi", "a.b=1"),
    "! before a command": ("if ! [ 1 = 2 ]; then X=1; else X=2; fi", "a.b=1"),
    "((": ("N=8\nif (( N % 3 != 0 && N > 2 )); then X=1; else X=2; fi", "a.b=1"),
    ":+ of a set variable": ("A=1\nX=v${A:+_set}", "a.b=v_set"),
    ":+ of an unset variable": ("X=v${A:+_set}", "a.b=v"),
    "the idiom for empty arrays": ('X=1\nEXTRA=(${MORE[@]+"${MORE[@]}"})', "a.b=1"),
    "a subshell sets nothing": ("X=1\n(X=2)", "a.b=1"),
    "a pipe sets nothing": ("X=1\nX=2 | true\nprintf 1 | { X=3; }", "a.b=1"),
    "unset": ("X=1\nA=2\nunset A\nX=${A:-3}", "a.b=3"),
    "a word over lines": ("X='a'\\\n'b'\\\n'c'", "a.b=abc"),
    "exit of the other branch": ("A=gpu\ncase $A in gpu|npu) X=1;; *) echo no >&2; exit 1;; esac", "a.b=1"),
    "a line that goes on after &&": ("[ 1 = 1 ] &&\n  X=1 ||\n  X=2", "a.b=1"),
    "a list in double quotes": ("F=/x\nX=\"['$F','y']\"", "a.b=['/x','y']"),
}  # fmt: skip


@pytest.mark.parametrize("form", KNOWN)
def test_the_words_are_those_of_bash(form):
    before, expected = KNOWN[form]
    if bash := shutil.which("bash"):
        script = f"{before}{ENDING}".replace(CALL, "printf '%s|'")
        told = subprocess.run([bash, "-c", script], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
        assert told.stdout.split("|")[:-1] == _words(expected), told.stderr
    found = [f"{one.key}={one.text}" for one in read_script(before + ENDING, {}).overrides]
    assert found == _words(expected)


def _words(text: str) -> list[str]:
    return text.split("|" if "|" in text else " ")


# What stands before the call -> a part of what is said.
NOT_KNOWN: dict[str, tuple[str, str]] = {
    "elements that are not known": ('M=($(probe))\nX="${M[*]}"', "$(probe) needs a shell"),
    "case": ("D=$(probe)\nX=1\ncase $D in npu) EXTRA+=(x.y=1);; esac", "give D with --set D=VALUE"),
    "case of a value": ("D=$(probe)\nX=1\ncase $D in npu) X=2;; esac", "X depends on line 3 (line 1: $(probe) needs"),
    "a pattern": ("D=$(probe)\nX=1\ncase 1 in $D) X=2;; esac", "give D with --set D=VALUE"),
    "a file": ("X=1\n[ -f x ] && X=2", "X depends on line 2, which needs a shell; give it with --set X=VALUE"),
    "a command": ("X=1\ncommand -v nvcc && EXTRA+=(x.y=1)", "EXTRA depends on line 2, which needs a shell"),
    "=~": ("A=1\nX=1\nif [[ $A =~ ^(1|2)$ ]]; then X=2; fi", "X depends on line 3, which needs a shell"),
    "another base": ("X=$((2#101))", "((2#101)) is a form of bash that is not read here"),
    "! before a comparison": ("N=1\nX=$((! N == 1))", "is a form of bash that is not read here"),
    "a minus before a power": ("X=$((-2 ** 2))", "is a form of bash that is not read here"),
    "++": ("X=1\n((X++))", "((X++)) is a form of bash that is not read here"),
    "a slice of an array": ("M=(1 2 3)\nX=1\nEXTRA=(${M[@]:1})", "is a form of bash that is not read here"),
    "a reference": ("A=B\nX=${!A}", "is a form of bash that is not read here"),
    "braces": ("X=1\nEXTRA=(k.{a,b}=1)", "k.{a,b}=1 is a form of bash that is not read here"),
    ":+ of an unknown value": ("D=$(probe)\nX=1\nEXTRA=(${D:+x.y=1})", "give D with --set D=VALUE"),
    "unset in a branch": ("X=1\n[ -f x ] && unset X", "X depends on line 2"),
    ":?": (': "${X:?give it}"', "line 1: the variable X is not set; give it with --set X=VALUE"),
    "the end of the script": ("exit 1", "line 1: the script ends here, before it has called verl's trainer"),
    "a case without esac": ("case 1 in 1) X=1", "line 1: the `case` has no `esac`; complete the script"),
    "a bracket at a wrong place": ("X=1 )", "line 1: `)` is not read at this place"),
    "two calls": (f"if [ -f x ]; then {CALL} a=1; fi\nX=1", "which of them runs depends on line 1"),
}  # fmt: skip


@pytest.mark.parametrize("form", NOT_KNOWN)
def test_what_is_not_known_is_said_and_never_an_empty_word(form):
    before, sentence = NOT_KNOWN[form]
    try:
        told = [one.problem or "" for one in read_script(before + ENDING, {}).overrides]
        assert all(one.text or one.problem for one in read_script(before + ENDING, {}).overrides)
    except ScriptError as error:
        told = [str(error)]
    assert sentence in "\n".join(told)


# What stands before the call, and is not read.
NOT_READ = {
    "a process substitution": "true > >(true) 2>&1\nX=1",
    "case that falls through": "A=1\ncase $A in 1) X=1;& 2) X+=2;; 3) X+=3;; esac",
    "case that tests on": "A=1\nX=\ncase $A in 1) X+=1;;& 2) X+=2;; *) X+=3;; esac",
    "-a and -o": "A=1\nif [ $A = 2 -o $A = 1 -a 3 -gt 2 ]; then X=1; else X=2; fi",
    "[[ with && and brackets": "A=1\nif [[ $A == 2 || ( $A == 1 && -n $A ) ]]; then X=1; else X=2; fi",
    "[[ with <": "if [[ a < b ]]; then X=1; else X=2; fi",
    "for over words": "for k in a b; do EXTRA+=(k.$k=1); done\nX=1",
    'for over an array': 'L=(a "b c")\nfor k in "${L[@]}"; do EXTRA+=("k=$k"); done\nX=1',
    "break and continue": "for k in 1 2 3 4; do [ $k = 2 ] && continue; [ $k = 4 ] && break; X+=$k; done",
    "while": "N=1\nwhile [ $N -lt 20 ]; do N=$((N * 2)); done\nX=$N",
    "until": "N=1\nuntil [ $N = 4 ]; do N=$((N + 1)); done\nX=$N",
    "an element by an expression": "M=(1 2)\nI=1\nX=${M[I]}${M[I - 1]}",
    "an element by a number": "M=(1 2)\nI=1\nX=${M[$I]}${M[0]}${#M[@]}",
    "an element is set": "M=(1 2)\nM[1]=7\nX=${M[1]}",
    'a function': 'X=1\nfunction f { X=$1$#; local Y=3; EXTRA+=("c=$2" e=$Y); }\nf 8 "9 9"',
    'eval': 'V=X\neval "$V=4"',
    'set --': 'set -- 3 4\nX=$2\nEXTRA=("c.d=$1")',
    'ANSI quotes': "X=$'v w'\nX=${X% w}",
    "an arithmetic for": "X=1\nfor ((i = 0; i < 2; i++)); do X=$i; done",
    "read": "X=1\nread -r X < f",
    "mapfile": "X=1\nmapfile -t EXTRA < f",
    "select": "X=1\nselect x in a b; do X=2; break; done",
    "printf -v": "X=1\nprintf -v X %d 5",
    "let": "X=1\nlet X=3+4",
    "an associative array": "declare -A M=([a]=1)\nX=${M[a]}",
    "the length of an unknown value": "D=$(probe)\nX=${#D}",
    "the exit of a command": "X=$?",
    "a loop without an end": "while true; do X=1; done",
}  # fmt: skip


@pytest.mark.parametrize("form", NOT_READ)
def test_a_form_that_is_not_read_is_refused_with_its_line(form):
    try:
        told = "\n".join(one.problem or "" for one in read_script(NOT_READ[form] + ENDING, {}).overrides)
    except ScriptError as error:
        told = str(error)
    assert re.match(r"\s*line [123]: ", told)
    assert ADVICE in told or "needs a shell; give it with --set X=VALUE" in told


def test_a_file_that_is_sourced_is_named():
    call = read_script(f"source setup.sh\n. more.sh\n{CALL} a.b=1", {})
    assert [note.partition(";")[0] for note in call.notes] == [
        "line 1: the file of `source setup.sh` is not read",
        "line 2: the file of `source more.sh` is not read",
    ]


def test_an_array_may_be_given():
    script = f'D=$(probe)\nEXTRA=()\ncase $D in npu) EXTRA+=(x.y=1);; esac\n{CALL} "${{EXTRA[@]}}" a.b=1'
    for given, expected in ({"D": "gpu"}, 1), ({"D": "npu"}, 2), ({"EXTRA": ""}, 1), ({"EXTRA": "c.d=1 e.f='2 3'"}, 3):
        assert len(read_script(script, given).overrides) == expected
