"""Compiled kernels: sources in C, how they are built, loaded and called.

    src/         the kernels, in C; vector.h is the only file that knows instruction sets
    build.py     compile them into one library, when setfold is installed
    library.py   load the library and choose an instruction set
    dispatch.py  the kernels as functions of tensors; None where plain torch must do
    placed.py    likewise, for attention by distance
    threads.py   parts of a large batch in several threads
    tables.py    the kernels as functions of columns of tables; None where NumPy or Arrow must do

`setfold.kernels` calls them and serves every other case.
"""
