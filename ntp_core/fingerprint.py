"""Fingerprint: one 64-bit number per unit that is the same in any layout.

    F = sum over logical (row, col) of mix64((bits * ODD + R[row]) xor C[col])   mod 2^64

`mix64` is the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), a bijection, so a change
of one element is never missed, and any other change is missed with probability about 2^-64. R and C
are keyed by job seed, check number, tensor and logical index: not by where the bytes lie. Addition
does not care for order, so shards add up to the whole. XOR would miss swaps and sign pairs, a
multiply by odd weights alone misses pairs of top bits.

numpy only: uint64 arithmetic wraps, which is what the formula wants.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_ODD = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
# Elements hashed at a time: a few temporaries of 8 bytes each stay in a core's cache.
_CHUNK = 1 << 14


def mix64(values: U64) -> U64:
    """splitmix64's finaliser, element by element, in place; returns its argument.

    >>> [hex(int(v)) for v in mix64(np.array([0x9E3779B97F4A7C15, 1], dtype=np.uint64))]
    ['0xe220a8397b1dcdaf', '0x5692161d100b05e5']
    """
    values ^= values >> np.uint64(30)
    values *= _M1
    values ^= values >> np.uint64(27)
    values *= _M2
    values ^= values >> np.uint64(31)
    return values


def index_keys(seed: int, check: int, tensor: int, axis: int, index: npt.NDArray[Any]) -> U64:
    """64-bit keys of logical indices along one axis (0: rows, 1: columns) of one tensor."""
    base = np.array([seed & _MASK], dtype=np.uint64)
    for part in (check, tensor, axis):
        base = mix64(base * _ODD + np.uint64(part & _MASK) + _ODD)
    return mix64(index.astype(np.uint64) * _ODD + base[0])


def sum_by_rows(bits: npt.NDArray[Any], row_keys: U64, col_keys: U64) -> U64:
    """For each row of `bits` (unsigned integers, [rows, cols]) the sum of its mixed elements."""
    return _sums(bits, row_keys, col_keys, 1)


def sum_by_cols(bits: npt.NDArray[Any], row_keys: U64, col_keys: U64) -> U64:
    """For each column of `bits` the sum of its mixed elements."""
    return _sums(bits, row_keys, col_keys, 0)


def fingerprint(bits: npt.NDArray[Any], row_keys: U64, col_keys: U64) -> int:
    """Fingerprint of a whole [rows, cols] array of unsigned integers, 0 <= F < 2^64."""
    return int(sum_by_rows(bits, row_keys, col_keys).sum(dtype=np.uint64))


def signed(value: int) -> int:
    """0..2^64-1 -> two's complement, for carriers that have no unsigned type."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _sums(bits: npt.NDArray[Any], row_keys: U64, col_keys: U64, axis: int) -> U64:
    rows, cols = bits.shape
    out = np.zeros(rows if axis == 1 else cols, dtype=np.uint64)
    step = max(1, _CHUNK // max(1, cols))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        words = bits[start:stop].astype(np.uint64)
        words *= _ODD
        words += row_keys[start:stop, None]
        words ^= col_keys[None, :]
        part = mix64(words).sum(axis=axis, dtype=np.uint64)
        if axis == 1:
            out[start:stop] = part
        else:
            out += part
    return out
