"""Digits that arrive pixel by pixel, and ten million elements folded four ways: python -m demo."""
