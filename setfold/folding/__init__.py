"""Fold chunks of sets that do not fit in memory: one call, exact gradients, several processes."""
