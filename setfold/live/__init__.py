"""Live sets: sets that grow all day, kept durably in a database, each batch counted once.

>>> import pandas, setfold, tempfile
>>> rows = pandas.DataFrame({"user": ["ann", "bob", "ann"], "x": [1.0, 2.0, 3.0]})
>>> with tempfile.TemporaryDirectory() as folder:
...     with setfold.live.create(f"{folder}/live.db", setfold.Pool(1, "mean")) as sets:
...         print(sets.update(rows, set="user", batch=("orders", 17)).status)
...     with setfold.live.open(f"{folder}/live.db") as sets:
...         print(sets.update(rows, set="user", batch=("orders", 17)).status)
...         print(sets.encode(["ann", "bob"]).tolist())
applied
duplicate
[[2.0], [2.0]]
"""

from setfold.live.api import create, open
from setfold.live.batches import Applied, Offsets
from setfold.live.sets import LiveSets

__all__ = ["Applied", "LiveSets", "Offsets", "create", "open"]
