"""LaTeX of the pages as MathML, which browsers draw themselves: the site loads nothing for it.

pymdownx.arithmatex puts a formula into an element of the class `arithmatex`, between `\\(` and `\\)`, or between `\\[`
and `\\]`.
"""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)
FUNCTION = re.compile(r"\\(log|exp|min|max)(?![a-z])")
BARE_FUNCTION = re.compile(r"(\\(?:log|exp|min|max))(?=\s*(?:[A-Z]|\\(?!big|left)|\s[a-z]))")
"""The name of a function without a bracket after it."""
UPRIGHT = re.compile(r"\\(?:mathrm|text)\{([A-Za-z][A-Za-z .-]*)\}")


def rendered(page: str) -> str:
    """The HTML of a page with its formulas as MathML.

    Raises:
        ValueError: a formula cannot be read.
    """
    return FORMULA.sub(_mathml, page)


def _mathml(found: re.Match[str]) -> str:
    latex = html.unescape(found["latex"]).strip()
    latex = UPRIGHT.sub(lambda words: rf"\text{{{words[1]}}}", latex)
    # Browsers put no space around these names.
    latex = FUNCTION.sub(r"\\,\\\1", BARE_FUNCTION.sub(r"\1\\,", latex))
    try:
        mathml = convert(latex, display="block" if found["open"] == "[" else "inline")
    except Exception as error:
        raise ValueError(f"the formula {latex!r} cannot be read: {error!r}") from error
    if "\\" in mathml or "&#x0005C;" in mathml:
        raise ValueError(f"the formula {latex!r} cannot be read: it has an unknown command")
    return mathml if found["open"] == "(" else f'<div class="formula">{mathml}</div>'
