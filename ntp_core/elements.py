"""Of what type the gradients' elements are, tensor by tensor: what a step really sends.

Parameters of one job may be of several types (bfloat16 matrices beside float32 gains), their
gradients of yet others, and some are not trained at all. A sum has one type, so types decide how
many sums there are and how many bytes each has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ntp_core.errors import ModelMismatch
from ntp_core.units import ModelUnits

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

UNNAMED = ""
"""The one type of a model of which nothing is known but the size of its elements."""


@dataclass(frozen=True, slots=True)
class Elements:
    """Types of the gradients in the order of the model's tensors.

    Attributes:
        dtypes: name of each type; None: not trained, so never summed.
        sizes: bytes of one element.
    """

    dtypes: tuple[str | None, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of_model(cls, model: ModelUnits) -> Elements:
        """All of the model's own size, all trained."""
        count = len(model.tensors)
        return cls((UNNAMED,) * count, (model.dtype_bytes,) * count)

    @classmethod
    def named(cls, dtypes: Sequence[str | None]) -> Elements:
        """By name, one for each tensor.

        Raises:
            ModelMismatch: for a type that gradients cannot have.

        >>> Elements.named(["bfloat16", "float32", None]).sizes
        (2, 4, 0)
        """
        unknown = sorted({d for d in dtypes if d is not None and d not in DTYPE_BYTES})
        if unknown:
            raise ModelMismatch(f"gradients of type {unknown}; they may be {sorted(DTYPE_BYTES)}")
        sizes = tuple(0 if d is None else DTYPE_BYTES[d] for d in dtypes)
        return cls(tuple(dtypes), sizes)

    def is_summed(self, tensor: int) -> bool:
        """Whether a tensor is trained."""
        return self.dtypes[tensor] is not None

    def kind_of(self, tensor: int) -> str:
        """Type of a trained tensor's gradient."""
        dtype = self.dtypes[tensor]
        assert dtype is not None
        return dtype

    def num_bytes(self, tensor: int, numel: int) -> int:
        """Bytes of some elements of a tensor's gradient."""
        return self.sizes[tensor] * numel
