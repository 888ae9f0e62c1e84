"""Point clouds: LAS and LAZ."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from setfold.files.readers.column import arrow_of
from setfold.files.readers.reader import Reader, import_optional

COMPRESSED = 0x80  # a bit of the point format
ITEMS = 32  # where the record of LASzip has the number of items; each has type, size and version
LAYERED = 3  # a kind of compression: the points of a chunk are split into layers
LAYERS = {10: 9, 11: 1, 12: 2, 13: 1}  # of items by type; extra bytes have one for each byte
RAW = ("X", "Y", "Z")  # integers; x, y, z are computed from them by scale and offset


class LasReader(Reader):
    """LAS and LAZ: x, y and z in the unit of the file, then all other dimensions by name."""

    suffixes: ClassVar = (".las", ".laz")

    def _open(self) -> None:
        self._laspy = import_optional("laspy", "las")
        self._check_records()
        with self._laspy.open(self.path, read_evlrs=False) as file:
            header = file.header
        self.num_rows = header.point_count
        self._chunk_bytes = 0  # of points that are compressed together
        if header.are_points_compressed:
            self._check_chunks(header)
        else:
            self._check_points(header)
        others = [n for n in header.point_format.dimension_names if n not in RAW]
        empty = self._laspy.ScaleAwarePointRecord.zeros(0, header=header)
        names = ["x", "y", "z", *others]
        self.schema = pa.schema([(n, _dimension(empty, n).type) for n in names])

    def block_bytes(self, columns: Sequence[str]) -> int:
        return self._chunk_bytes

    def _check_points(self, header: Any) -> None:
        """Raise ValueError if the header lists more or fewer points than are stored.

        A program that was stopped before it could update the header lists fewer.
        """
        start, size = header.offset_to_point_data, header.point_format.size
        ends = (header.start_of_first_evlr, header.start_of_waveform_data_packet_record)
        end = min([e for e in ends if e > start], default=self.path.stat().st_size)
        _check_count(header.point_count, (end - start) // size, (end - start) // size)

    def _check_chunks(self, header: Any) -> None:
        """Raise ValueError if the compressed points are not what the header lists.

        lazrs believes sizes, and would fill the memory, or abort the process.
        """
        lazrs = import_optional("lazrs", "las")
        record, size = header.vlrs.get("LasZipVlr")[0].record_data, header.point_format.size
        (count,) = struct.unpack_from("<H", record, ITEMS)
        flat = struct.unpack_from("<" + "HH2x" * count, record, ITEMS + 2)
        items = list(zip(flat[::2], flat[1::2], strict=True))
        if (width := sum(nbytes for _, nbytes in items)) != size:
            raise ValueError(f"its points have {size} bytes, or {width} when compressed")
        with self.path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(header.offset_to_point_data)
            table = lazrs.read_chunk_table(file, lazrs.LazVlr(record))
        points, nbytes = zip(*table, strict=True) if table else ((), ())
        if sum(nbytes) > end:
            raise ValueError("its compressed points are larger than the file")
        _check_count(header.point_count, sum(points[:-1]) + min(len(points), 1), sum(points))
        self._chunk_bytes = size * max(points, default=0)
        if record[0] == LAYERED:
            layers = sum(LAYERS.get(kind, nbytes) for kind, nbytes in items)
            self._check_layers(header.offset_to_point_data + 8, nbytes, size, layers)

    def _check_layers(self, start: int, chunks: Sequence[int], size: int, layers: int) -> None:
        """Raise ValueError if the layers of a chunk are larger than the chunk."""
        with self.path.open("rb") as file:
            for nbytes in chunks:
                file.seek(start + size + 4)  # after the first point, and the number of points
                if sum(struct.unpack(f"<{layers}I", file.read(4 * layers))) > nbytes:
                    raise ValueError("a chunk has layers that are larger than the chunk")
                start += nbytes

    def _check_records(self) -> None:
        """Raise ValueError for impossible counts, for which laspy would fill the memory."""
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            head = file.read(247)
            (points,) = struct.unpack_from("<I", head, 96)
            (records,) = struct.unpack_from("<I", head, 100)
            # From version 1.4 on there may be more records at the end.
            (extended,) = struct.unpack_from("<I", head, 243) if head[25] >= 4 else (0,)
            chunks = 0
            if head[104] & COMPRESSED and points + 8 <= size:
                file.seek(points)
                (place,) = struct.unpack("<q", file.read(8))
                if 0 <= place <= size - 8:  # otherwise lazrs raises an error
                    file.seek(place + 4)
                    (chunks,) = struct.unpack("<I", file.read(4))
        if records * 54 + extended * 60 > size or chunks > size:
            raise ValueError("its header lists more records than fit into the file")

    def _batches(
        self, columns: list[str], start: int, stop: int | None, rows: int
    ) -> Iterator[pa.RecordBatch]:
        left = (stop or 0) - start
        with self._laspy.open(self.path, read_evlrs=False) as file:
            if 0 < start < start + left:
                file.seek(start)
            while left > 0:
                points = file.read_points(min(rows, left))
                if not len(points):
                    return
                left -= len(points)
                arrays = [_dimension(points, name) for name in columns]
                yield pa.RecordBatch.from_arrays(arrays, names=columns)


def _check_count(listed: int, least: int, most: int) -> None:
    """Raise ValueError unless as many points are stored as are listed."""
    if listed < least:
        raise ValueError(f"its header lists {listed} points; the file has at least {least}")
    if listed > most:
        raise ValueError(f"its header lists {listed} points; the file has at most {most}")


def _dimension(points: Any, name: str) -> pa.Array:
    return arrow_of(np.asarray(points[name]))
