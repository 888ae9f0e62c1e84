"""Whole jobs on files: encode, update, merge, read out; within a bound of memory, and restartable."""
