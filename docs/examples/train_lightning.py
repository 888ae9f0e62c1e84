"""Train on sets that stay on disk: folds in a LightningModule, and the same as a plain loop.

    python docs/examples/train_lightning.py FOLDER
    torchrun --nproc-per-node 2 docs/examples/train_lightning.py FOLDER
    torchrun --nproc-per-node 2 docs/examples/train_lightning.py FOLDER --spread

FOLDER gets the sets, unless it has them, and the trained model. The second command shares out the
sets: each process folds its own. With --spread the processes share every set: each folds a part of
it. All three train the same model. It needs `pip install pytorch-lightning`.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import setfold

SETS, BATCH, EPOCHS = 8, 2, 2  # a step takes the mean loss of BATCH sets
Labelled = tuple[Path, Tensor]


def write_sets(folder: Path, rows: int) -> list[Labelled]:
    """Files with one set (1, rows, 3) each, and their classes: is the right half of it narrower?"""
    found = []
    for number in range(SETS):
        file, label = folder / f"set{number}.npy", number % 3 % 2
        if not file.exists():
            draw = np.random.default_rng(number).standard_normal((1, rows, 3), dtype=np.float32)
            draw[draw[..., 0] > 0, 1:] /= 1 + label
            np.save(file, draw[:, draw[0, :, 0].argsort()])  # sorted: no part is like the whole
        found.append((file, torch.tensor([label])))
    return found


def new_model() -> setfold.Composition:
    """The same untrained model each time."""
    torch.manual_seed(0)
    return setfold.Composition(
        features=nn.Sequential(nn.Linear(3, 32), nn.ReLU()),
        encoder=setfold.AttentionPool(32, num_queries=4, dim_out=16),
        head=nn.Sequential(nn.Flatten(), nn.Linear(64, 2)),
    )


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The same for both ways of training."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class FoldedClassifier(pl.LightningModule):
    """A model of sets that need not fit in memory."""

    def __init__(
        self, model: setfold.SetEncoder, sets: list[Labelled], spread: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.sets = sets
        self.spread = spread

    def train_dataloader(self) -> DataLoader[Labelled]:
        """One set at a time: a share of them for each process, or all for all."""
        share = (
            slice(None) if self.spread else slice(self.global_rank, None, self.trainer.world_size)
        )
        return DataLoader(self.sets[share], batch_size=None)

    def training_step(self, batch: Labelled, number: int) -> Tensor:
        """The loss of one whole set, of which one chunk at a time is in memory."""
        file, label = batch
        elements = np.load(file, mmap_mode="r")
        if self.spread:  # this process's part; all get the encoding of the whole set
            elements = np.array_split(elements, self.trainer.world_size, axis=1)[self.global_rank]
        group = dist.group.WORLD if self.spread else None
        classes = setfold.fold(self.model, elements, gradient="exact", group=group)
        return cross_entropy(classes, label)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any optimizer."""
        return new_optimizer(self)


def train_with_lightning(sets: list[Labelled], spread: bool) -> setfold.SetEncoder:
    """Train in this process, or in all processes of torchrun."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    module = FoldedClassifier(new_model(), sets, spread)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=DDPStrategy(process_group_backend="gloo") if processes > 1 else "auto",
        use_distributed_sampler=False,  # train_dataloader knows which sets are whose
        accumulate_grad_batches=BATCH if spread else BATCH // processes,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return module.model


def train_plainly(sets: list[Labelled]) -> setfold.SetEncoder:
    """The same, without Lightning."""
    model = new_model()
    optimizer = new_optimizer(model)
    for _ in range(EPOCHS):
        for first in range(0, SETS, BATCH):
            optimizer.zero_grad()
            for file, label in sets[first : first + BATCH]:
                elements = np.load(file, mmap_mode="r")
                loss = cross_entropy(setfold.fold(model, elements, gradient="exact"), label)
                (loss / BATCH).backward()  # frees what the fold holds, before the next set
            optimizer.step()
    return model


def main() -> None:
    """Train both ways, and compare the weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--spread", action="store_true")
    parser.add_argument("--rows", type=int, default=1_000_000)
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    sets = write_sets(arguments.folder, arguments.rows)
    model = train_with_lightning(sets, arguments.spread)
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    setfold.save(model, arguments.folder / "model.safetensors")
    weights = zip(model.parameters(), train_plainly(sets).parameters(), strict=True)
    apart = max(float((one - other).detach().abs().max()) for one, other in weights)
    print(f"largest difference from the plain loop: {apart:.0e}")


if __name__ == "__main__":
    main()
