"""Write scikit-learn's digits as tables: a row per pixel, and a table of labels.

python docs/examples/tables.py     # train.parquet, train.csv, test.parquet, test.csv
"""

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
number, place = images.nonzero()  # without the paper, so that sets differ in size
columns = {"row": place // 8, "column": place % 8, "ink": images[number, place]}
pixels = pa.table({"image": number, **columns})
digits = pa.table({"image": range(len(labels)), "digit": labels})
for name, first, last in (("train", 0, 1400), ("test", 1400, 1797)):
    chosen = pc.is_in(pixels["image"], pa.array(range(first, last)))
    pq.write_table(pixels.filter(chosen), f"{name}.parquet")
    pa.csv.write_csv(digits.slice(first, last - first), f"{name}.csv")
