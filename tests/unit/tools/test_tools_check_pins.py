"""Pins against hand-made metadata: every kind of conflict and its message, markers, extras, and the file's lines."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement

from megatron_rl.tools.check_pins import Findings, Metadata, active, check, main, read_pins


def wheel(*requires: str, extras: tuple[str, ...] = ()) -> Metadata:
    return Metadata(tuple(map(Requirement, requires)), frozenset(extras))


def found(pins: str, index: dict[str, Metadata | None], python: str = "3.12") -> Findings:
    return check(active(read_pins(pins, "pins.txt"), python), index, python)


def test_pins_that_meet_all_requirements_have_no_conflict():
    index = {"engine": wheel("Torch_Core==2.13.0", "numpy>=1.20,<3"), "torch-core": wheel()}
    findings = found("engine==1.0\ntorch.core==2.13.0  # the canonical name is torch-core\n", index)
    assert findings == Findings([], [], {"numpy": "<3,>=1.20 (required by engine==1.0)"})


def test_a_pin_that_does_not_meet_a_requirement_is_named_with_both_sides():
    findings = found("engine==1.0\ntorch==2.13.0", {"engine": wheel("torch>=2.14"), "torch": wheel()})
    assert findings.conflicts == ["engine==1.0 requires torch>=2.14, but torch==2.13.0 is pinned"]


def test_a_pinned_prerelease_can_meet_a_requirement():
    assert not found("a==1\nb==2.0rc1", {"a": wheel("b>=1.9"), "b": wheel()}).conflicts


def test_a_pin_that_is_not_on_the_index_is_a_conflict_and_one_without_a_wheel_is_unknown():
    findings = found("a==1\nsource-only==2.11.0", {"source-only": None})
    assert findings == Findings(["a==1 is not on the index for Python 3.12"], ["source-only==2.11.0"], {})


@pytest.mark.parametrize("python, conflicts", [("3.11", 0), ("3.12", 1)])
def test_markers_are_those_of_the_python_that_is_asked_for(python, conflicts):
    metadata = wheel("six>=2; python_version > '3.11'", "six>=3; sys_platform == 'win32'")
    assert len(found("a==1\nsix==1.17.0", {"a": metadata, "six": wheel()}, python).conflicts) == conflicts


def test_a_pin_whose_marker_does_not_hold_does_not_count():
    assert found("old==1; python_version < '3.12'", {}, "3.12") == Findings([], [], {})
    assert found("old==1; python_version < '3.12'", {}, "3.11").conflicts


def test_only_the_extras_that_are_asked_for_count_also_when_another_pin_asks():
    """`web` asks for api[standard], so the requirement of that extra counts; that of the extra `dev` does not."""
    api = wheel("server>=2; extra == 'standard'", "server>=9; extra == 'dev'", extras=("standard", "dev"))
    pins = "api==1\nserver==1.5\nweb==1"
    assert not found(pins, {"api": api, "server": wheel(), "web": wheel("api")}).conflicts
    findings = found(pins, {"api": api, "server": wheel(), "web": wheel("api[standard]")})
    assert findings.conflicts == ["api==1 requires server>=2, but server==1.5 is pinned"]


def test_extras_have_one_spelling_and_an_extra_that_does_not_exist_is_a_conflict():
    engine = wheel("core==2; extra == 'core-cu13'", extras=("core-cu13",))
    findings = found("engine[core_cu13,core_cu14]==2", {"engine": engine})
    assert findings.not_pinned == {"core": "==2 (required by engine==2)"}
    assert findings.conflicts == ["engine==2 has no extra 'core-cu14'"]


def test_two_packages_that_need_different_versions_of_a_third_are_a_conflict():
    findings = found("a==1\nb==1", {"a": wheel("c==0.1.11"), "b": wheel("c>=0.2")})
    assert findings.conflicts == ["no version of c meets ==0.1.11,>=0.2, which a==1, b==1 require together"]


@pytest.mark.parametrize(
    "line, words",
    [
        ("torch>=2.13", "is not an exact pin; write NAME==VERSION"),
        ("torch==2.13.*", "is not an exact pin; write NAME==VERSION"),
        ("torch", "is not an exact pin; write NAME==VERSION"),
        ("-r other.txt", "is not a requirement"),
    ],
)
def test_a_line_that_is_not_an_exact_pin_is_refused_with_its_place(line, words):
    with pytest.raises(ValueError, match=r"^pins.txt:2: .*" + words.replace("*", r"\*")):
        read_pins(f"# head\n{line}\n", "pins.txt")


def test_a_package_that_is_pinned_twice_is_refused():
    with pytest.raises(ValueError, match="a-b is pinned twice for Python 3.12; remove one of the pins"):
        active(read_pins("a_b==1\nA.b==1", "pins.txt"), "3.12")


def test_a_file_that_is_missing_is_told_with_status_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "none.txt")])
    assert ended.value.code == 2 and "none.txt" in capsys.readouterr().err
