"""The grammar of features: names of columns, with an offset and a factor, or columns to exclude.

    x                a column
    x*0.01           its numbers times 0.01
    (x-500000)       its numbers minus 500000
    (x-500000)*0.01  both
    !x               all numeric columns except x; cannot be combined with the others
    `x*2`            a column whose name is not plain: ` stands for itself if it is doubled

Outside of parentheses, - and + are part of a name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from setfold.errors import InputError

NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
NAME = r"(?:`(?P<quoted>(?:[^`]|``)+)`|(?P<plain>[^`]+?))"
FACTOR = rf"(?:\s*\*\s*(?P<factor>[+-]?{NUMBER}))?"
SHIFT = rf"(?P<sign>[-+])\s*(?P<offset>{NUMBER})"
SCALED = re.compile(rf"{NAME}{FACTOR}")
SHIFTED = re.compile(rf"\(\s*{NAME}\s*{SHIFT}\s*\){FACTOR}")
BARE_SHIFT = re.compile(rf"(?P<name>.+?)\s*{SHIFT}(?P<rest>\s*\*.*)?")
EXCLUDED = re.compile(rf"!\s*{NAME}")
PLAIN = re.compile(r"[^\s,`*(!]([^,`*]*[^\s,`*])?")  # a name that needs no quotes
PART = r"(?:`(?:[^`]|``)*`|[^,`])+"


class Feature(NamedTuple):
    """A column, and what its numbers become: (number - offset) * factor, in float64."""

    name: str
    factor: float = 1.0
    offset: float = 0.0

    def __str__(self) -> str:
        text = quote(self.name)
        if self.offset:
            text = f"({text}{'-' if self.offset > 0 else '+'}{_shortest(abs(self.offset))})"
        return text if self.factor == 1 else f"{text}*{_shortest(self.factor)}"


class Selection(NamedTuple):
    """The features of an element.

    Args:
        features: The columns, in order; None for all numeric columns.
        excluded: Columns to leave out, if `features` is None.
    """

    features: tuple[Feature, ...] | None = None
    excluded: tuple[str, ...] = ()


def parse_features(given: str | Sequence[str] | None) -> Selection:
    """Parse features from the command line or from an argument.

    Args:
        given: Comma-separated features, or a list of such texts; None for all numeric columns.

    Raises:
        InputError: The text does not follow the grammar, or a column is listed twice.

    >>> parse_features("(x-500)*0.01, intensity").features
    (Feature(name='x', factor=0.01, offset=500.0), Feature(name='intensity', factor=1.0, offset=0.0))
    >>> parse_features(["!weight", "!`a,b`"]).excluded
    ('weight', 'a,b')
    """
    if given is None:
        return Selection()
    texts = [given] if isinstance(given, str) else list(given)
    parts = [part for text in texts for part in _split(text)]
    excluded = [found for part in parts if (found := EXCLUDED.fullmatch(part)) is not None]
    if excluded and len(excluded) < len(parts):
        raise InputError(
            f"expected either the features or, with !, what to exclude; got {', '.join(parts)}. "
            "List all features instead."
        )
    features = [] if excluded else [_parse(part) for part in parts]
    names = [_name_of(found) for found in excluded] or [feature.name for feature in features]
    if len(set(names)) < len(names):
        raise InputError(f"expected each column once in the features; got {', '.join(parts)}.")
    return Selection(None, tuple(names)) if excluded else Selection(tuple(features))


def parse_names(given: str | Sequence[str]) -> tuple[str, ...]:
    """Parse names of columns: comma-separated, with quotes as in features, or a list of names.

    Raises:
        InputError: There is no name, or one is listed twice.

    >>> parse_names("run, `a,b`"), parse_names(["run", "a,b"])
    (('run', 'a,b'), ('run', 'a,b'))
    """
    names = list(given)
    if isinstance(given, str):
        is_list = re.fullmatch(f"{PART}(?:,{PART})*", given)
        parts = [part.strip() for part in re.findall(PART, given)] if is_list else []
        found = [re.fullmatch(NAME, part) for part in parts]
        names = ["" if each is None else _unquoted(each) for each in found]
    if not names or not all(names) or len(set(names)) < len(names):
        raise InputError(
            f"expected the columns of the set id, each once and separated by commas; got {given!r}. "
            "Put names with a comma or a backquote between backquotes."
        )
    return tuple(names)


def format_features(features: Sequence[Feature]) -> str:
    """Format features as on the command line. Parsing the text gives the same features.

    >>> format_features([Feature("x", 0.5, 500.0), Feature("y", 0.1), Feature("a,b")])
    '(x-500)*0.5,y*0.1,`a,b`'
    """
    return ",".join(map(str, features))


def suggest_shift(name: str, names: Sequence[str]) -> str:
    """Return advice if a name that is no column is meant as a column minus a number.

    >>> suggest_shift("x-500", ["x", "y"])
    ' To subtract a number, write (x-500).'
    """
    found = BARE_SHIFT.fullmatch(name)
    if found is None or found["name"] not in names:
        return ""
    verb = "subtract" if found["sign"] == "-" else "add"
    return f" To {verb} a number, write ({name})."


def quote(name: str) -> str:
    """Return the name of a column as it is written in features."""
    return name if PLAIN.fullmatch(name) else "`" + name.replace("`", "``") + "`"


def _split(text: str) -> list[str]:
    """Split text at commas that are not quoted."""
    if not re.fullmatch(f"{PART}(?:,{PART})*", text):
        raise _error(text)
    return [part.strip() for part in re.findall(PART, text)]


def _parse(part: str) -> Feature:
    found = SHIFTED.fullmatch(part) or SCALED.fullmatch(part)
    if found is None:
        raise _error(part)
    groups = found.groupdict()
    offset = float(groups.get("offset") or 0.0)
    factor = float(found["factor"] or 1.0)
    if not (math.isfinite(offset) and math.isfinite(factor)):
        raise _error(part)
    return Feature(_name_of(found), factor, -offset if groups.get("sign") == "+" else offset)


def _name_of(found: re.Match[str]) -> str:
    if found["plain"] is not None and not PLAIN.fullmatch(found["plain"]):
        raise _error(found.string)
    return _unquoted(found)


def _unquoted(found: re.Match[str]) -> str:
    return found["plain"] or found["quoted"].replace("``", "`")


def _shortest(number: float) -> str:
    """Return the shortest text that is parsed as the same number."""
    return repr(number).removesuffix(".0")


def _error(part: str) -> InputError:
    return InputError(
        f"cannot parse the feature {part!r}; expected the name of a column such as x, or x*0.01, "
        "(x-500) or (x-500)*0.01 with finite numbers, or !x to exclude x. Separate features by "
        "commas, and put names with special characters between backquotes."
    )
