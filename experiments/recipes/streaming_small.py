"""Completing CelebA while pixels arrive, 100 at a time (the paper's Figure 2c).

    python -m experiments run streaming-small --size small     # measures what `reconstruction` trains

Paper: the model trained on 1000 pixels also completes images from 100 to 500, better than Deep Sets and
the Set Transformer.
Here: nothing is run yet.
"""

from __future__ import annotations

from experiments.recipe import Recipe, Size
from experiments.recipes.streaming_large import (
    streaming_headline,
    streaming_runs,
    streaming_section,
)

CHUNKS = {Size.SMOKE: (20, 5), Size.SMALL: (100, 5), Size.PAPER: (100, 5)}

RECIPE = Recipe(
    number=5,
    name="streaming-small",
    title="Streaming fewer pixels than were trained on",
    claim="""The models trained on 1000 pixels are read after 100 to 500, in chunks of 100, and the Slot Set
    Encoder is significantly better than Deep Sets and the Set Transformer.""",
    runs=lambda size, seed: streaming_runs(CHUNKS[size], size, seed),
    section=streaming_section,
    headline=streaming_headline,
    holds="open",
    verdict="",
    cut="As for image completion.",
    minutes=5,
)
