"""Train a classifier of handwritten digits, each a set of pixels; save it and its test set."""

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from sklearn.datasets import load_digits
from torch import nn

import setfold

torch.manual_seed(0)
images, labels = map(torch.tensor, load_digits(return_X_y=True))  # ships with scikit-learn
line = torch.linspace(-1, 1, 8)
places = torch.cartesian_prod(line, line).expand(len(images), 64, 2)
pixels = torch.cat([places, images[..., None].float() / 16], dim=2)  # (1797, 64, 3): y, x, ink
mask = images > 0  # the paper is not part of the set, so digits differ in size
train, test = torch.randperm(len(images)).split([1500, 297])

model = setfold.Composition(
    features=nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()),
    encoder=setfold.SlotSetEncoder(
        64, num_slots=16, dim_slot=32, dim_out=32, aggregate="weighted_mean", slots="learned"
    ),
    head=nn.Sequential(nn.Flatten(), nn.Linear(16 * 32, 64), nn.ReLU(), nn.Linear(64, 10)),
)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for _ in range(30):
    for batch in train[torch.randperm(1500)].split(50):
        loss = nn.functional.cross_entropy(model(pixels[batch], mask[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

found = model.eval()(pixels[test], mask[test]).argmax(1)
print(f"test accuracy: {(found == labels[test]).float().mean():.0%}")
setfold.save(model, "digits.safetensors")

digit, place = mask[test].nonzero(as_tuple=True)  # one row per pixel, as point data often comes
y, x, ink = pixels[test][digit, place].T.numpy()
table = pa.table({"digit": test[digit].numpy(), "y": y, "x": x, "ink": ink})
pq.write_table(table, "pixels.parquet")
