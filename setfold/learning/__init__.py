"""Train set models on tables: data sets, candidates, the training loop, baselines and reports."""
