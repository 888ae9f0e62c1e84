"""Demo of setfold: complete digits from arriving pixels, fold ten million elements."""
