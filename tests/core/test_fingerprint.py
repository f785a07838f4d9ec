"""Fingerprints: the formula, its independence of layout, and what it must never miss."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ntp_core.fingerprint import (
    fingerprint,
    index_keys,
    mix64,
    signed,
    sum_by_cols,
    sum_by_rows,
)

MASK = (1 << 64) - 1
ODD = 0x9E3779B97F4A7C15
ROWS, COLS = 24, 40
Bits = npt.NDArray[Any]


def slow_mix(value: int) -> int:
    """The finaliser of splitmix64 in Python's integers."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def slow_key(seed: int, check: int, tensor: int, axis: int, index: int) -> int:
    """The key of one logical index."""
    base = seed & MASK
    for part in (check, tensor, axis):
        base = slow_mix((base * ODD + part + ODD) & MASK)
    return slow_mix((index * ODD + base) & MASK)


def slow_fingerprint(bits: Bits, seed: int, check: int, tensor: int) -> int:
    """Sum over all elements, one by one."""
    total = 0
    for r in range(bits.shape[0]):
        row = slow_key(seed, check, tensor, 0, r)
        for c in range(bits.shape[1]):
            word = (int(bits[r, c]) * ODD + row & MASK) ^ slow_key(seed, check, tensor, 1, c)
            total += slow_mix(word)
    return total & MASK


def keys(rows: int = ROWS, cols: int = COLS, check: int = 0) -> tuple[Any, Any]:
    """Keys of all rows and all columns of one tensor."""
    return (
        index_keys(7, check, 3, 0, np.arange(rows)),
        index_keys(7, check, 3, 1, np.arange(cols)),
    )


def values(seed: int, dtype: type = np.uint32) -> Bits:
    """Random words."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, np.iinfo(dtype).max, (ROWS, COLS), dtype, endpoint=True)


def of(bits: Bits) -> int:
    """The fingerprint of a whole array."""
    return fingerprint(bits, *keys(*bits.shape))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (3, 700), (200, 2)])
def test_fingerprint_equals_the_formula_in_plain_integers(
    dtype: type, shape: tuple[int, int]
) -> None:
    """Whole, by rows and by columns, at any word size and over more than one chunk."""
    generator = np.random.default_rng(1)
    bits = generator.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    row_keys = index_keys(-5, 9, 2, 0, np.arange(shape[0]))
    col_keys = index_keys(-5, 9, 2, 1, np.arange(shape[1]))
    expected = slow_fingerprint(bits, -5, 9, 2)
    assert expected == fingerprint(bits, row_keys, col_keys)
    for sums in (sum_by_rows(bits, row_keys, col_keys), sum_by_cols(bits, row_keys, col_keys)):
        assert expected == int(sums.sum(dtype=np.uint64))


def test_mix64_is_splitmix64() -> None:
    """The published first outputs of the generator seeded with 0."""
    states = np.array([ODD * i & MASK for i in (1, 2, 3)], dtype=np.uint64)
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert published == [int(v) for v in mix64(states)]


def test_fingerprint_of_many_rows_does_not_depend_on_chunks() -> None:
    """More elements than one chunk holds: the parts add up."""
    generator = np.random.default_rng(2)
    bits = generator.integers(0, 2**32, (700, 100), np.uint32)
    row_keys, col_keys = keys(700, 100)
    parts = [fingerprint(bits[a : a + 7], row_keys[a : a + 7], col_keys) for a in range(0, 700, 7)]
    assert sum(parts) & MASK == fingerprint(bits, row_keys, col_keys)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("seed", range(20))
def test_fingerprint_does_not_depend_on_the_cut(dim: int, seed: int) -> None:
    """Any split of rows or columns over ranks, in any order, adds up to the same number."""
    draw = random.Random(seed)
    bits, all_keys = values(seed), keys()
    owners = [draw.randrange(4) for _ in range(bits.shape[dim])]
    total = 0
    for rank in range(4):
        held = [i for i, o in enumerate(owners) if o == rank]
        draw.shuffle(held)
        local = bits.take(held, axis=dim)
        cut = [k[held] if d == dim else k for d, k in enumerate(all_keys)]
        total += fingerprint(local, cut[0], cut[1])
    assert fingerprint(bits, *all_keys) == total & MASK


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_fingerprint_sees_every_bit_of_an_element(dtype: type) -> None:
    """No single flip is missed, at any bit, wherever it is."""
    draw = random.Random(5)
    for bit in range(np.iinfo(dtype).bits):
        for _ in range(10):
            bits = values(bit, dtype)
            before = of(bits)
            bits[draw.randrange(ROWS), draw.randrange(COLS)] ^= dtype(1 << bit)
            assert before != of(bits)


def test_fingerprint_sees_pairs_of_flips_and_rectangles() -> None:
    """Flips that cancel in a plain sum, a XOR or an odd weight do not cancel here."""
    draw = random.Random(6)
    for bit in range(32):
        for _ in range(10):
            bits, before = values(1), of(values(1))
            r, s = draw.sample(range(ROWS), 2)
            c, d = draw.sample(range(COLS), 2)
            flip = np.uint32(1 << bit)
            bits[r, c] ^= flip
            bits[s, d] ^= flip
            assert before != of(bits)
            bits[r, d] ^= flip
            bits[s, c] ^= flip
            assert before != of(bits)


def test_fingerprint_sees_swaps_and_runs_of_zeros() -> None:
    """Elements, rows, columns in each other's place; part of a row that was never written."""
    draw = random.Random(7)
    for seed in range(50):
        bits, before = values(seed), of(values(seed))
        r, s = draw.sample(range(ROWS), 2)
        c, d = draw.sample(range(COLS), 2)
        for other in (
            np.where(np.arange(ROWS)[:, None] == r, bits[s], bits),
            bits[[s if i == r else r if i == s else i for i in range(ROWS)]],
            bits[:, [d if i == c else c if i == d else i for i in range(COLS)]],
            np.roll(bits, 1, axis=0),
            np.roll(bits, 1, axis=1),
        ):
            assert before != of(other)
        swapped = bits.copy()
        swapped[r, c], swapped[s, d] = bits[s, d], bits[r, c]
        assert before != of(swapped)
        swapped = bits.copy()
        swapped[r, : draw.randint(1, COLS)] = 0
        assert before != of(swapped)


@pytest.mark.parametrize(
    ("one", "other"),
    [(0x00000000, 0x80000000), (0x7FC00000, 0x7FC00001), (0x7F800000, 0xFF800000)],
    ids=["zeros of both signs", "NaN payload", "infinities"],
)
def test_fingerprint_takes_bits_as_they_are(one: int, other: int) -> None:
    """Values that compare equal, or not at all, are told apart by their bits."""
    a = np.full((2, 2), one, dtype=np.uint32)
    b = a.copy()
    b[1, 0] = other
    assert of(a) != of(b)
    assert of(b) == of(b.copy())


def test_index_keys_differ_in_every_part_of_the_key() -> None:
    """Another seed, check, tensor, axis or index is another key."""
    seen = {
        int(key)
        for seed in (0, 1, -1)
        for check in (0, 1)
        for tensor in (0, 1)
        for axis in (0, 1)
        for key in index_keys(seed, check, tensor, axis, np.arange(50))
    }
    assert len(seen) == 3 * 2 * 2 * 2 * 50


def test_fingerprint_of_another_check_is_another_number() -> None:
    """A fresh key for each check: what one would miss the next will not."""
    bits = values(3)
    assert len({fingerprint(bits, *keys(check=n)) for n in range(100)}) == 100


def test_fingerprint_of_nothing_is_zero() -> None:
    """An empty share adds nothing."""
    none, some = np.arange(0), np.arange(3)
    for rows, cols in ((none, some), (some, none)):
        bits = np.zeros((len(rows), len(cols)), dtype=np.uint32)
        row_keys, col_keys = index_keys(1, 1, 1, 0, rows), index_keys(1, 1, 1, 1, cols)
        assert fingerprint(bits, row_keys, col_keys) == 0


def test_signed_is_twos_complement() -> None:
    """Both ends and the middle."""
    pairs = {0: 0, 1: 1, (1 << 63) - 1: (1 << 63) - 1, 1 << 63: -(1 << 63), MASK: -1}
    assert pairs == {value: signed(value) for value in pairs}
