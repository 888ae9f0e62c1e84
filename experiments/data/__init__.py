"""The data sets of the experiments: loaders, synthetic substitutes and preparation of files.

The environment variable SETFOLD_DATA names the folder with the prepared files. This repository
contains no data, because the licences of most data sets do not allow redistribution.
"""

from experiments.data.store import MissingDataError

__all__ = ["MissingDataError"]
