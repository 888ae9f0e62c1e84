"""A set of ten million elements, folded in four ways to one answer: python -m demo."""
