"""The byte layout of a unit: where each of its tensors lies in one flat buffer.

Owns offsets, alignment and the views cut from a buffer; knows nothing of devices, hooks or who computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# The CUDA allocator aligns to 512 and vectorised kernels ask for 16; 256 keeps every tensor as well aligned as one
# that was allocated alone as far as any kernel looks, so that results do not depend on where a tensor lies.
ALIGNMENT = 256


@dataclass(frozen=True)
class Field:
    """One tensor's place in a flat buffer: `offset` and `nbytes` in bytes, shape and stride in elements."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def extent(tensor: torch.Tensor) -> int:
    """Number of elements from a tensor's first to its last in memory, gaps between strides included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `tensor` as an ordinary tensor, whatever a class of its own would make of being asked."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of `tensor` as a 1-D tensor of its dtype, so that it is copied as it lies, whatever its strides."""
    plain = bare(tensor)
    return plain.as_strided((extent(plain),), (1,))


def inference_twin(view: torch.Tensor) -> torch.Tensor:
    """`view` again, as an inference tensor over the same memory.

    A tensor that was made in inference mode loses its version counter for good when its data is set to an ordinary
    tensor, and then no operator takes it.
    """
    with torch.inference_mode(True):
        twin = torch.empty(0, dtype=view.dtype, device=view.device)
        return twin.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


@dataclass(frozen=True)
class Layout:
    """The places of a sequence of tensors in one buffer of `nbytes` bytes, each at a multiple of `ALIGNMENT`."""

    fields: tuple[Field, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Layout:
        fields, end = [], 0
        for tensor in map(bare, tensors):
            nbytes = extent(tensor) * tensor.element_size()
            fields.append(Field(end, nbytes, tuple(tensor.shape), tensor.stride(), tensor.dtype))
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(fields), end)

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of this layout inside `buffer` (1-D uint8, at least `nbytes` long, shares its storage)."""
        return [shaped(buffer[f.offset : f.offset + f.nbytes], f) for f in self.fields]


def shaped(piece: torch.Tensor, field: Field) -> torch.Tensor:
    """`piece` (the bytes of one field, 1-D uint8) with the dtype, shape and strides of `field`."""
    return piece.view(field.dtype).as_strided(field.shape, field.stride)
