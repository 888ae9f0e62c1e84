"""Encode sets that are stored in files, within a memory bound."""
