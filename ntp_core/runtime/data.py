"""Real text as bytes, present on every machine: the source of Python's own standard library.

A sequence is named by (step, place in the global batch) only, so every layout and every split of
the batch trains on the same data in the same order.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from ntp_core.errors import InvalidInput

MAX_CORPUS_BYTES = 8 << 20


def standard_library_text(max_bytes: int = MAX_CORPUS_BYTES) -> torch.Tensor:
    """The first `max_bytes` of the standard library's top-level modules, uint8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts, total = [], 0
    for path in sorted(folder.glob("*.py")):
        data = path.read_bytes()[: max_bytes - total]
        parts.append(data)
        total += len(data)
        if total >= max_bytes:
            break
    if total < 1 << 16:
        raise InvalidInput(f"only {total} bytes of text under {folder}; give a larger text file")
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that go through the model at a time.

    Attributes:
        step: of the job.
        first: number of the first sequence in the step's global batch.
        tokens: int64 [count, seq + 1].
    """

    step: int
    first: int
    tokens: torch.Tensor


class ByteText:
    """Sequences of byte tokens drawn from a text by logical number."""

    def __init__(self, text: torch.Tensor, seq: int, seed: int) -> None:
        if len(text) < seq + 2:
            raise InvalidInput(f"text of {len(text)} bytes is shorter than a sequence of {seq + 1}")
        self._text = text
        self._seq = seq
        self._seed = seed

    def batch(self, step: int, first: int, count: int) -> torch.Tensor:
        """Sequences first .. first + count - 1 of a step's global batch, int64 [count, seq + 1]."""
        rows = [self._sequence(step, first + i) for i in range(count)]
        return torch.stack(rows)

    def micro_batches(self, step: int, first: int, count: int, size: int = 0) -> list[MicroBatch]:
        """The same sequences, at most `size` at a time; 0: all at once."""
        parts = torch.split(self.batch(step, first, count), size or count)
        starts = range(first, first + count, size or count)
        return [MicroBatch(step, start, part) for start, part in zip(starts, parts, strict=True)]

    def _sequence(self, step: int, number: int) -> torch.Tensor:
        key = f"{self._seed}/{step}/{number}".encode()
        draw = int.from_bytes(hashlib.sha256(key).digest()[:8], "little")
        start = draw % (len(self._text) - self._seq - 1)
        return self._text[start : start + self._seq + 1].to(torch.int64)
