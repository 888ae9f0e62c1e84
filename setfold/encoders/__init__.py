"""The set encoders, one file per family."""
