"""Default settings of the recipes: each task's training at each size, and the encoders.

Size "paper" uses the paper's settings. Size "small" was tuned on validation splits, with the same
effort for all methods: learning rates, schedules and norms were chosen once for all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.pools import (
    PMA,
    Attention,
    Combine,
    DeepSets,
    Hierarchy,
    Pool,
    Slots,
    Transformer,
    Universal,
)
from experiments.recipe import Cosine, Size, Training
from experiments.recipes.common import with_task
from experiments.tasks.centroids import DigitCentroids, FeatureCentroids
from experiments.tasks.classification import PointClouds
from experiments.tasks.clustering import Clustering
from experiments.tasks.maximum import Maximum
from experiments.tasks.networks import Activation
from experiments.tasks.reconstruction import Reconstruction

# ---- image completion --------------------------------------------------------------------------

SLOTS_APART = Slots(
    8,
    aggregate=("weighted_mean", "mass"),
    slots="learned",
    attention="softmax",
    similarity="cosine",
)
AS_PRINTED = Slots(1, aggregate="sum", apart=False)  # as in the paper's Table 3
COMPLETION: dict[Size, Training[Reconstruction]] = {
    Size.SMOKE: Training(
        Reconstruction(
            SLOTS_APART, context=60, targets=32, normalise=True, standardise=True, made_up=True
        ),
        epochs=1,
        batch_size=48,
        validations=1,
    ),
    Size.SMALL: Training(
        Reconstruction(SLOTS_APART, context=200, targets=32, normalise=True, standardise=True),
        epochs=6,
        batch_size=16,
        rate=3e-3,
        weight_decay=0.0,
        schedule=Cosine(),
        clip=1.0,
        validations=4,
    ),
    Size.PAPER: Training(Reconstruction(SLOTS_APART, context=200)),
}
COMPLETION_METHODS: dict[str, dict[str, Any]] = {
    "Deep Sets": {"pool": DeepSets("mean")},
    "PMA": {"pool": PMA()},
    "SSE, as printed": {"pool": AS_PRINTED},
    "SSE, slots apart": {"pool": SLOTS_APART},
    "SSE, slots attended": {"pool": SLOTS_APART, "attentive": True},
    "Attention, slots apart": {"pool": Attention(8)},
}
# Baselines of SSE with attended slots: 62,000 to 70,000 parameters, as it has.
ATTENDED_METHODS: dict[str, dict[str, Any]] = {
    "Deep Sets, matched": {"pool": DeepSets("mean"), "hidden": 112},
    "PMA, attended": {"pool": PMA(num_seeds=8, width=32), "attentive": True},
    "Attention, slots attended": {"pool": Attention(8), "attentive": True},
}
NLL = "NLL (nats per dimension)"

# Ablations compare settings of one encoder, so they train for fewer epochs.
ABLATION: dict[Size, Training[Reconstruction]] = {
    **COMPLETION,
    Size.SMALL: replace(COMPLETION[Size.SMALL], epochs=3, validations=2),
    Size.PAPER: with_task(COMPLETION[Size.PAPER], context=1000, side=64),
}

# ---- point clouds ------------------------------------------------------------------------------

_CLOUD_SLOTS = Slots(4, 64, "max", slots="learned", attention="softmax", similarity="cosine")
_PRINTED_CLOUD_SLOTS = Slots(16, 256, "max", apart=False, combine=Combine.MAX)
CLOUD_METHODS: dict[str, dict[str, Any]] = {
    "Deep Sets, max": {"pool": DeepSets("max")},
    "Deep Sets, max, matched": {  # as many parameters as SSE as printed
        "pool": DeepSets("max"),
        "widths": (128, 128, 480),
        "dim": 480,
    },
    "Set Transformer": {
        "pool": Transformer(dropout=0.2, dim=128),
        "widths": (),
        "hidden": False,
    },
    "SSE, as printed, learned": {"pool": replace(_PRINTED_CLOUD_SLOTS, slots="learned")},
    "SSE, as printed, random": {"pool": _PRINTED_CLOUD_SLOTS},
    "SSE, slots apart": {"pool": _CLOUD_SLOTS},
    "SSE → Set Transformer": {
        "pool": Universal(
            replace(_CLOUD_SLOTS, num_slots=16, width=64),
            Transformer(1, dim=128, last=DeepSets("max")),
        )
    },
    "ISAB, max": {"pool": Transformer(1, dim=128, last=DeepSets("max")), "widths": (128, 128)},
}
PAPER_CLOUD_METHODS: dict[str, dict[str, Any]] = {
    **CLOUD_METHODS,
    "Deep Sets, max, matched": {
        "pool": DeepSets("max"),
        "widths": (256, 256, 456),
        "dim": 456,
    },
    "Set Transformer": {"pool": Transformer(dropout=0.5), "widths": (), "hidden": False},
}
CLOUDS: dict[Size, Training[PointClouds]] = {
    Size.SMOKE: Training(
        PointClouds(
            DeepSets("max"),
            points=20,
            dim=32,
            widths=(16, 32),
            activation=Activation.RELU,
            layer_norm=True,
            batch_norm=True,
            made_up=True,
        ),
        epochs=1,
        batch_size=32,
        validations=1,
    ),
    Size.SMALL: Training(
        PointClouds(
            DeepSets("max"),
            widths=(128, 128, 256),
            activation=Activation.RELU,
            layer_norm=True,
            batch_norm=True,
            dropout=0.2,
        ),
        epochs=20,
        batch_size=64,
        rate=2e-3,
        weight_decay=0.0,
        schedule=Cosine(0.1),
        validations=4,
    ),
    Size.PAPER: Training(PointClouds(DeepSets("max")), batch_size=64),
}
# For more points, models are fine-tuned; size "paper" trains from scratch for each number.
FINE_TUNING: dict[Size, Training[PointClouds]] = {
    size: replace(
        training, epochs=max(1, training.epochs // 20), rate=training.rate / 5, validations=1
    )
    for size, training in CLOUDS.items()
    if size is not Size.PAPER
}

# ---- centroids ---------------------------------------------------------------------------------

_WIDE_SLOTS = Slots(
    4, 128, "mean", slots="learned", attention="softmax", similarity="cosine", width=128
)
_SECOND_LEVEL = Slots(16, 128, apart=False, combine=Combine.SUM)
DIGIT_METHODS: dict[str, dict[str, Any]] = {
    "Deep Sets": {"pool": DeepSets("mean")},
    # as many parameters as wide slots
    "Deep Sets, matched": {"pool": DeepSets("mean"), "channels": 144},
    "SSE, as printed": {
        "pool": Hierarchy((Slots(32, 128), _SECOND_LEVEL), activation=False),
    },
    # A slot of the first level holds about 1/32 of a mean. A sum over the 32 slots restores it.
    "SSE, as printed, scaled": {
        "pool": Hierarchy(
            (Slots(32, 128), replace(_SECOND_LEVEL, aggregate="sum")), activation=False
        ),
    },
    "SSE, wide slots": {"pool": _WIDE_SLOTS},
}
DIGITS: dict[Size, Training[DigitCentroids]] = {
    Size.SMOKE: Training(
        DigitCentroids(DeepSets(), support=3, query=3, episodes=8, made_up=True),
        epochs=1,
        batch_size=4,
        validations=1,
    ),
    Size.SMALL: Training(
        DigitCentroids(DeepSets()),
        epochs=1,
        batch_size=1,
        rate=2e-3,
        weight_decay=0.0,
        schedule=Cosine(),
        validations=5,
    ),
    Size.PAPER: Training(DigitCentroids(DeepSets()), epochs=50, batch_size=1),
}
IMAGE_METHODS: dict[str, dict[str, Any]] = {
    "Deep Sets": {"pool": DeepSets("mean"), "layers": 2},
    # as many parameters as wide slots
    "Deep Sets, matched": {"pool": DeepSets("mean"), "layers": 2, "hidden": 386},
    "Linear, mean": {"pool": DeepSets("mean"), "layers": 0},
    "SSE, as printed": {
        "pool": Slots(
            128, 128, apart=False, combine=Combine.SUM
        ),  # a mean would be 128 times smaller
        "layers": 0,
    },
    "SSE, wide slots": {"pool": _WIDE_SLOTS, "layers": 0},
}
IMAGES: dict[Size, Training[FeatureCentroids]] = {
    Size.SMOKE: Training(
        FeatureCentroids(DeepSets(), way=5, episodes=8, made_up=True),
        epochs=1,
        batch_size=4,
        validations=1,
    ),
    Size.SMALL: Training(
        FeatureCentroids(DeepSets()),
        epochs=2,
        batch_size=1,
        schedule=Cosine(),
        validations=4,
    ),
    Size.PAPER: Training(FeatureCentroids(DeepSets()), epochs=50, batch_size=1),
}

# ---- generated sets of numbers and points ------------------------------------------------------

_CLUSTER_TRANSFORMER = Transformer(dim=128, last=PMA(num_seeds=4))
CLUSTER_POOLS: dict[str, Pool] = {
    "Deep Sets": DeepSets("mean"),
    "PMA": PMA(num_seeds=4),
    "Set Transformer": _CLUSTER_TRANSFORMER,
    "SSE, slots apart": replace(SLOTS_APART, num_slots=32),
    "SSE → Set Transformer": Universal(
        replace(SLOTS_APART, num_slots=64, width=64), _CLUSTER_TRANSFORMER
    ),
}
CLUSTERS: dict[Size, Training[Clustering]] = {
    Size.SMOKE: Training(
        Clustering(DeepSets(), sets=20, least=20, most=40, tested=2),
        epochs=1,
        batch_size=10,
        validations=1,
    ),
    Size.SMALL: Training(
        Clustering(DeepSets()),
        epochs=3,
        batch_size=10,
        weight_decay=0.0,
        schedule=Cosine(),
        clip=1.0,
        validations=3,
    ),
    Size.PAPER: Training(Clustering(DeepSets()), epochs=50, batch_size=10),
}
MAXIMUM_POOLS: dict[str, Pool] = {
    "Deep Sets": DeepSets("mean"),
    "Deep Sets, sum": DeepSets("sum"),
    "Deep Sets, max": DeepSets("max"),
    "PMA": PMA(),
    "Set Transformer": Transformer(),
    "SSE, as printed": AS_PRINTED,
    "SSE, slots apart": Slots(8, 64, "max", slots="learned", similarity="cosine"),
}
MAXIMA: dict[Size, Training[Maximum]] = {
    Size.SMOKE: Training(
        Maximum(DeepSets(), sets=256, tested=100), epochs=1, batch_size=128, validations=1
    ),
    Size.SMALL: Training(
        Maximum(DeepSets()),
        epochs=3,
        batch_size=128,
        rate=2e-3,
        weight_decay=0.0,
        schedule=Cosine(),
        validations=3,
    ),
    Size.PAPER: Training(Maximum(DeepSets()), epochs=20, batch_size=128),
}
