"""The tasks: data, model, loss and metric of each problem, one module per task."""
