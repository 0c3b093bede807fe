r"""One spelling for what looks alike: the characters of Unicode, and HTML's tags, in ASCII and LaTeX.

Invariants: a text in ASCII without HTML's tags stays as it is; a second application changes nothing; a raised, lowered
or circled character, a fraction or the letter of a number set never becomes an ordinary digit or letter (10⁵ is 10^{5},
not 105).
"""

from __future__ import annotations

import re
import unicodedata

_TAG = re.compile(r"</?(?:b|i|u|p|em|strong|span|font|div|code|center|mark|big|small|answer|br)(?:\s[^<>]*|/)?>")
_RAISED_OR_LOWERED = re.compile(r"<(sup|sub)>([^<>]*)</\1>", re.IGNORECASE)

_ROOT = re.compile(r"([√∛∜])\s*(?:([0-9]+(?:\.[0-9]+)?)|\(([^()]*)\))")
_DEGREES = {"√": "", "∛": "[3]", "∜": "[4]"}
_FRACTION = re.compile(r"[¼-¾⅐-⅞↉]")
_CIRCLED = re.compile("[①-⑳⑴-⒇❶-❿➀-➓]")
_SQUARE = re.compile("[㎟-㎦]")
_RAISED = re.compile("[\u00b2\u00b3\u00b9\u02b0-\u02b8\u02e1-\u02e4\u1d2c-\u1d61\u2070-\u207f]+")
_LOWERED = re.compile("[\u1d62-\u1d6a\u2080-\u209c]+")
_RAISED_OVER_LOWERED = re.compile(r"\^\{([0-9]+)\}[/⁄∕]_\{([0-9]+)\}")

# fmt: off
_BEFORE = str.maketrans({"º": "°", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℕ": r"\mathbb{N}",
                         "ℂ": r"\mathbb{C}"})
_GREEK = dict(zip(
    "αβγδεζηθικλμνξπρστφχψωΓΔΘΛΞΠΣΦΨΩ",
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega".split(), strict=True,
))
_AFTER = str.maketrans(
    {"−": "-", "‐": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "÷": "/", "⁄": "/",
     "∕": "/", "∶": ":", "∣": "|", "∞": r"\infty ", "√": r"\sqrt ", "∛": r"\sqrt[3] ", "∜": r"\sqrt[4] ",
     "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ",
     "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ",
     "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ",
     "⌉": r"\rceil ", "⟨": r"\langle ", "⟩": r"\rangle ", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"', "。": ".",
     "、": ",", "٫": ".", "٬": ",", "\u200b": None, "\u200c": None, "\u200d": None, "\u2060": None, "\ufeff": None}
    | {letter: f"\\{name} " for letter, name in _GREEK.items()}
)
# fmt: on
_OTHER_DIGIT = re.compile(r"[^\W0-9]")


def in_latex(text: str) -> str:
    r"""A text in ASCII and LaTeX as far as possible: full-width forms and other digits as ASCII, x² as x^{2}, ⅓ as
    \frac{1}{3}, ≤ as \le, and all spaces alike; x<sup>2</sup> as x^{2}, and without HTML's tags for type."""
    if "<" in text:
        text = _RAISED_OR_LOWERED.sub(lambda tag: f"{'^' if tag[1].lower() == 'sup' else '_'}{{{tag[2]}}}", text)
        text = _TAG.sub("", text)
    if text.isascii():
        return text
    text = _ROOT.sub(lambda root: rf"\sqrt{_DEGREES[root[1]]}{{{root[2] or root[3]}}}", text.translate(_BEFORE))
    text = _FRACTION.sub(_fraction, text)
    text = _CIRCLED.sub(lambda sign: rf"\textcircled{{{unicodedata.numeric(sign[0]):.0f}}}", text)
    text = _SQUARE.sub(_unit, text)
    text = _RAISED.sub(lambda run: f"^{{{_ascii(run[0])}}}", text)
    text = _LOWERED.sub(lambda run: f"_{{{_ascii(run[0])}}}", text)
    return _ascii(_RAISED_OVER_LOWERED.sub(r"\\frac{\1}{\2}", text))


def _fraction(match: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _unit(match: re.Match[str]) -> str:
    """A unit of one character, as a word: its digit is a power."""
    return " " + re.sub("([23])$", r"^{\1}", unicodedata.normalize("NFKC", match[0]))


def _ascii(text: str) -> str:
    text = unicodedata.normalize("NFKC", text).translate(_AFTER)
    return _OTHER_DIGIT.sub(lambda match: str(unicodedata.decimal(match[0], match[0])), text)
