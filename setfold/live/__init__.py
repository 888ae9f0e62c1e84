"""Live sets: sets that grow all day, kept durably in a database, each batch counted once.

sets = setfold.live.create("live.db", "model.safetensors")
sets.update(rows, set="user", batch=("orders", 17))
sets.encode(["ann", "bob"])
"""

from setfold.live.api import create, open
from setfold.live.batches import Applied, Offsets
from setfold.live.sets import LiveSets

__all__ = ["Applied", "LiveSets", "Offsets", "create", "open"]
