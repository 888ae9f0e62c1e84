"""Random damage to bytes."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from random import Random

EDGE = 256  # bytes at the start and at the end, where headers and footers are
INTEGERS = [0, 1, -1, 2, 127, 128, 255, 256, 2**15 - 1, 2**15, 2**16 - 1, 2**16, 2**20, 2**24]
INTEGERS += [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, -(2**31), -(2**63)]
NUMBER = re.compile(rb"\d+")
TEXTS = (b"0", b"-1", b"1e999", b"nan", b"99999999999", b"18446744073709551615", b"", b"\xff\xfe")


def mutated(content: bytes, random: Random) -> bytes:
    """Some bytes with one mutation or a few."""
    damaged = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        random.choice(MUTATIONS)(damaged, random)
    return bytes(damaged)


def _place(content: bytearray, random: Random) -> int:
    """A place in the content: often near the start or the end."""
    if not content:
        return 0
    part = random.random()
    if part < 0.25:
        return random.randrange(min(EDGE, len(content)))
    if part < 0.5:
        return len(content) - 1 - random.randrange(min(EDGE, len(content)))
    return random.randrange(len(content))


def _block(content: bytearray, random: Random) -> slice:
    start = _place(content, random)
    return slice(start, start + random.choice((1, 2, 4, 8, 16, 64, 512)))


def _flip_a_bit(content: bytearray, random: Random) -> None:
    if content:
        content[_place(content, random)] ^= 1 << random.randrange(8)


def _change_a_byte(content: bytearray, random: Random) -> None:
    if content:
        content[_place(content, random)] = random.choice(
            (0, 1, 127, 128, 255, random.randrange(256))
        )


def _truncate(content: bytearray, random: Random) -> None:
    del content[_place(content, random) :]


def _cut_the_start(content: bytearray, random: Random) -> None:
    del content[: random.choice((1, 2, 4, 8, 100))]


def _delete_a_block(content: bytearray, random: Random) -> None:
    del content[_block(content, random)]


def _insert_a_block(content: bytearray, random: Random) -> None:
    place = _place(content, random)
    content[place:place] = random.randbytes(random.choice((1, 2, 4, 8, 100, 5000)))


def _repeat_a_block(content: bytearray, random: Random) -> None:
    block, place = content[_block(content, random)], _place(content, random)
    content[place:place] = block * random.choice((1, 1, 2, 50))


def _swap_two_blocks(content: bytearray, random: Random) -> None:
    size = random.choice((1, 4, 8, 16, 64))
    first, second = sorted(_place(content, random) for _ in range(2))
    if second - first >= size:
        left, right = content[first : first + size], content[second : second + size]
        content[second : second + len(right)] = left[: len(right)]
        content[first : first + len(right)] = right


def _overwrite_a_block(content: bytearray, random: Random) -> None:
    block = _block(content, random)
    size = len(content[block])
    content[block] = random.choice((bytes(size), b"\xff" * size, random.randbytes(size)))


def _write_an_integer(content: bytearray, random: Random) -> None:
    size = random.choice((2, 4, 8))
    place = _place(content, random) // size * size
    if place + size <= len(content):
        chosen = random.choice([*INTEGERS, len(content), len(content) - 1, len(content) + 1])
        order = random.choice(("little", "big"))
        content[place : place + size] = (chosen % 256**size).to_bytes(size, order)


def _change_an_integer(content: bytearray, random: Random) -> None:
    form = random.choice(("<H", "<I", "<Q", ">H", ">I", ">Q"))
    size = struct.calcsize(form)
    place = _place(content, random)
    if place + size <= len(content):
        (before,) = struct.unpack_from(form, content, place)
        after = before + random.choice((-16, -1, 1, 16, 1 << 20, before))
        struct.pack_into(form, content, place, after % 256**size)


def _change_a_written_number(content: bytearray, random: Random) -> None:
    found = list(NUMBER.finditer(content, 0, 1 << 16))
    if found:
        start, stop = random.choice(found).span()
        content[start:stop] = random.choice(TEXTS)


MUTATIONS: tuple[Callable[[bytearray, Random], None], ...] = (
    _flip_a_bit,
    _flip_a_bit,
    _change_a_byte,
    _truncate,
    _cut_the_start,
    _delete_a_block,
    _insert_a_block,
    _repeat_a_block,
    _swap_two_blocks,
    _overwrite_a_block,
    _write_an_integer,
    _write_an_integer,
    _change_an_integer,
    _change_a_written_number,
)
