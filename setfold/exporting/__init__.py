"""Models as graphs that run without setfold: ONNX, torch.export programs, AOTInductor packages."""
