"""All kinds, by name."""

from __future__ import annotations

from tests.fuzz.inputs import INPUTS
from tests.fuzz.kind import Kind

KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in INPUTS}
