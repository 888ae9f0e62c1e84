"""Every streaming encoder against formulas in numpy, on random configurations in every dtype.

    arithmetic.py       float64 numbers that know how far rounding in a dtype may carry them
    formulas.py         the encoders, from their docstrings, as loops over elements
    placed.py           those of slots with places
    encoders.py         random encoders
    configurations.py   random elements, and how they reach the encoder
    routes.py           the ways through the library: forward, update, merge, fold, remove, files
    compare.py          either the right answer, or a SetfoldError where the dtype overflows

`python -m tests.differential 17` runs configuration 17; `0 1000` runs a range.
"""
