"""Point clouds: LAS and LAZ."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from setfold.files.readers.column import arrow_of
from setfold.files.readers.reader import Reader, import_optional

COMPRESSED = 0x80  # a bit of the point format
RAW = ("X", "Y", "Z")  # integers; x, y, z are computed from them by scale and offset


class LasReader(Reader):
    """LAS and LAZ: x, y and z in the unit of the file, then all other dimensions by name."""

    suffixes: ClassVar = (".las", ".laz")

    def _open(self) -> None:
        self._laspy = import_optional("laspy", "las")
        self._check_records()
        with self._laspy.open(self.path) as file:
            self.num_rows = file.header.point_count
            self._check_points(file.header)
            others = [n for n in file.header.point_format.dimension_names if n not in RAW]
            empty = self._laspy.ScaleAwarePointRecord.zeros(0, header=file.header)
        names = ["x", "y", "z", *others]
        self.schema = pa.schema([(n, _dimension(empty, n).type) for n in names])

    def _check_points(self, header: Any) -> None:
        """Raise ValueError if the header lists fewer points than are stored.

        A program that was stopped before it could update the header leaves such a file.
        """
        start, size = header.offset_to_point_data, header.point_format.size
        if header.are_points_compressed:
            lazrs = import_optional("lazrs", "las")
            record = header.vlrs.get("LasZipVlr")[0].record_data
            with self.path.open("rb") as file:
                file.seek(start)
                table = lazrs.read_chunk_table(file, lazrs.LazVlr(record))
            least = sum(points for points, _ in table[:-1]) + min(len(table), 1)
        else:
            ends = (header.start_of_first_evlr, header.start_of_waveform_data_packet_record)
            end = min([e for e in ends if e > start], default=self.path.stat().st_size)
            least = (end - start) // size
        if header.point_count < least:
            raise ValueError(
                f"its header lists {header.point_count} points; the file has at least {least}"
            )

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
        with self._laspy.open(self.path) as file:
            if left > 0:
                file.seek(start)
            while left > 0:
                points = file.read_points(min(rows, left))
                if not len(points):
                    return
                left -= len(points)
                arrays = [_dimension(points, name) for name in columns]
                yield pa.RecordBatch.from_arrays(arrays, names=columns)


def _dimension(points: Any, name: str) -> pa.Array:
    return arrow_of(np.asarray(points[name]))
