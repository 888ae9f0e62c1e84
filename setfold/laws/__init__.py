"""The laws of a fold, as checks that run on any model."""
