"""Random damage to JSON that stays JSON."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    2**31,
    2**40,
    2**63,
    -(2**63),
    10**30,
    0.5,
    1e308,
    -0.0,
]
VALUES += [float("nan"), float("inf"), "", "x", "..", "../../elsewhere", "/dev/null", "é\x00\ud800"]
VALUES += ["y" * 5000, [], {}, [[]], [None], {"": {}}, [2**40, 2**40]]
LEVELS = 3000  # more than Python recurses
DEEP = {  # what stands for it in a document, and in its text
    "<deep list>": "[" * LEVELS + "]" * LEVELS,
    "<deep object>": '{"a":' * LEVELS + "1" + "}" * LEVELS,
}


def changed(document: Any, random: Random, values: tuple[Any, ...] = ()) -> Any:
    """A document with one change or a few.

    Args:
        document: what json.loads returned; it stays as it is.
        random: decides.
        values: more values and names that may replace others, such as those the reader knows.
    """
    holder = [copy.deepcopy(document)]
    for _ in range(random.choice((1, 1, 2, 3))):
        places = list(_places(holder))
        parent, key = random.choice(places)
        if random.random() < 0.02:
            parent[key] = random.choice([*DEEP])
        elif random.random() < 0.2 and parent is not holder:
            del parent[key]
        elif random.random() < 0.2:
            other, name = random.choice(places)
            parent[key] = copy.deepcopy(other[name])
        elif isinstance(parent, dict) and random.random() < 0.2:
            names = [word for word in values if isinstance(word, str)]
            parent[random.choice(["x", "", key + "_", *names])] = parent.pop(key)
        elif isinstance(parent[key], int) and random.random() < 0.5:
            parent[key] += random.choice((-1, 1, 7, 1000))
        else:
            parent[key] = copy.deepcopy(random.choice([*VALUES, *values]))
    return holder[0]


def _places(holder: Any) -> Any:
    """Every container in a document with every key or index in it."""
    stack = [holder]
    while stack:
        parent = stack.pop()
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        for key in keys:
            yield parent, key
            if isinstance(parent[key], dict | list):
                stack.append(parent[key])


def text_of(document: Any) -> str:
    """A document as JSON."""
    text = json.dumps(document)
    for word, deep in DEEP.items():
        text = text.replace(json.dumps(word), deep)
    return text
