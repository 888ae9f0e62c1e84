"""The data sets of the experiments: what is read, what is made up, and how files are prepared.

Prepared files lie in the folder that the environment variable SETFOLD_DATA names. No data comes
with this repository: the licences of most sets forbid to pass them on.
"""

from experiments.data.store import MissingDataError

__all__ = ["MissingDataError"]
