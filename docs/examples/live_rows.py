"""Write two models, and the orders of two days, for docs/live.md."""

import datetime

import numpy as np
import pandas as pd
import torch

import setfold

for seed, name in enumerate(["model", "better"]):
    torch.manual_seed(seed)
    encoder = setfold.SlotSetEncoder(2, num_slots=4, dim_slot=8, dim_out=8, aggregate="mean")
    setfold.save(encoder, f"{name}.safetensors")

generator, today = np.random.default_rng(0), datetime.datetime.now(datetime.UTC)
for age, name in [(10, "monday"), (1, "tuesday")]:
    orders = pd.DataFrame(generator.random((500, 2)), columns=["amount", "items"])
    orders["user"] = generator.choice(["ann", "bob", "eve"], 500)
    orders["at"] = today - datetime.timedelta(days=age)
    orders.to_parquet(f"{name}.parquet")
