"""Compiled kernels: sources in C, how they are built, and how they are loaded."""
