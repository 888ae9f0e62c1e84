"""The paper's experiments, each with one command: python -m experiments list."""
