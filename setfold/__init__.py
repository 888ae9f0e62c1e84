"""setfold folds a set of any size into one vector.

The public names are listed in `__init__.pyi`. They are imported on first use, so that the command
line starts without loading torch.
"""

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
