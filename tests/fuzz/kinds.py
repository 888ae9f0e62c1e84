"""All kinds, by name."""

from __future__ import annotations

from tests.fuzz.inputs import INPUTS
from tests.fuzz.kind import Kind
from tests.fuzz.runs import WorkFolders
from tests.fuzz.saved import Models, States
from tests.fuzz.tables import Encodings, StateFiles

ALL: tuple[type[Kind], ...] = (Models, States, StateFiles, Encodings, WorkFolders, *INPUTS)
KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in ALL}
