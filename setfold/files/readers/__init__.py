"""Readers for files whose rows are elements of sets, one for each format."""
