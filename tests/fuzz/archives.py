"""Damage inside zip and gzip files, whose checksums are right afterwards."""

from __future__ import annotations

import gzip
import io
import zipfile
from random import Random

from tests.fuzz.mutations import mutated


def mutated_gzip(content: bytes, random: Random) -> bytes:
    """A gzip file with other content."""
    return gzip.compress(mutated(gzip.decompress(content), random), mtime=0)


def mutated_zip(content: bytes, random: Random) -> bytes:
    """A zip file with a member that was damaged, renamed, repeated, removed or compressed."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [
            (info.filename, archive.read(info), info.compress_type) for info in archive.infolist()
        ]
    place = random.randrange(len(members))
    name, inside, compression = members[place]
    match random.randrange(8):
        case 0:
            del members[place]
        case 1:
            members.append((members[random.randrange(len(members))][0], inside, compression))
        case 2:
            members[place] = (random.choice(("a", "../a.npy", name + "x")), inside, compression)
        case 3:
            members[place] = (
                name,
                inside,
                random.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED)),
            )
        case _:
            members[place] = (name, mutated(inside, random), compression)
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for filename, inside, compression in members:
            archive.writestr(zipfile.ZipInfo(filename), inside, compression)
    return written.getvalue()
