"""Writes generated images and videos as files: one PNG per frame, or one animation, with Pillow alone.

Owns the reading of the layouts that Diffusers pipelines return. Writes only where the caller says.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch

_ANIMATION_FORMATS = {".gif": "GIF", ".webp": "WEBP", ".png": "PNG", ".apng": "PNG"}
# Rounding in half precision puts values a little outside of 0 to 1; anything more is another scale.
_RANGE_TOLERANCE = 0.01


def write_frames(frames: Any, directory: str | os.PathLike[str]) -> list[Path]:
    """Write `frames` as `frame_0000.png`, `frame_0001.png`, ... and return their paths in order.

    Args:
        frames: what a pipeline's `images` or `frames` holds with output type "pt", "np" or "pil":

            - a tensor of shape (C, H, W), (frames, C, H, W) or (1, frames, C, H, W);
            - an array of shape (H, W, C), (frames, H, W, C) or (1, frames, H, W, C);
            - a Pillow image, a list of them, or a list that holds one such list;
            - a list of single-frame tensors or arrays;
            - a pipeline's output object itself, with one of the above as its `frames` or `images`.

            C is 1, 3 or 4. Values are floats from 0 to 1, or uint8 from 0 to 255.
        directory: where to write; made if missing. Files of the same names are replaced.

    Raises:
        TypeError: `frames` is none of the kinds above.
        ValueError: a shape or a value does not fit.
    """
    images = _to_images(frames)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for index, image in enumerate(images):
        path = folder / f"frame_{index:04d}.png"
        image.save(path, format="PNG")
        paths.append(path)
    return paths


def write_animation(frames: Any, path: str | os.PathLike[str], fps: float = 8.0) -> Path:
    """Write `frames` as one looping animation and return its path.

    Args:
        frames: as for `write_frames`, all of one size.
        path: ends in .gif, .webp, .png or .apng; its directory is made if missing.
        fps: frames per second. A GIF stores each frame's time in whole hundredths of a second.

    Raises:
        TypeError, ValueError: as `write_frames`; also for another suffix, a rate that is not above zero, or
            frames of differing sizes.
    """
    target = Path(path)
    image_format = _ANIMATION_FORMATS.get(target.suffix.lower())
    if image_format is None:
        raise ValueError(f"{target.name!r} must end in one of: {', '.join(_ANIMATION_FORMATS)}")
    if not fps > 0 or not np.isfinite(fps):
        raise ValueError(f"fps must be above zero, got {fps}")
    images = _to_images(frames)
    sizes = sorted({image.size for image in images})
    if len(sizes) > 1:
        raise ValueError(f"an animation needs frames of one size, got widths and heights {sizes}")
    target.parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {
        "save_all": True,
        "append_images": images[1:],
        "duration": max(1, round(1000 / fps)),
        "loop": 0,
    }
    if image_format == "WEBP":
        options["lossless"] = True
    images[0].save(target, format=image_format, **options)
    return target


def _to_images(frames: Any) -> list[PIL.Image.Image]:
    """All frames in order as 8-bit Pillow images, at least one."""
    if isinstance(frames, PIL.Image.Image):
        return [frames if frames.mode in ("L", "RGB", "RGBA") else frames.convert("RGB")]
    if isinstance(frames, torch.Tensor):
        tensor = frames.detach().to("cpu")
        # NumPy knows no bfloat16.
        array = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        return _array_to_images(np.moveaxis(array, -3, -1) if array.ndim >= 3 else array, frames.shape)
    if isinstance(frames, np.ndarray):
        return _array_to_images(frames, frames.shape)
    for name in ("frames", "images"):
        if hasattr(frames, name):
            return _to_images(getattr(frames, name))
    if isinstance(frames, Sequence) and not isinstance(frames, (str, bytes)):
        if not frames:
            raise ValueError("there are no frames to write")
        if isinstance(frames[0], (list, tuple)):
            if len(frames) > 1:
                raise ValueError(f"got {len(frames)} videos; write one at a time")
            return _to_images(frames[0])
        images = []
        for index, frame in enumerate(frames):
            single = _to_images(frame)
            if len(single) > 1 and len(frames) > 1:
                raise ValueError(f"item {index} holds {len(single)} frames; write one video at a time")
            images += single
        return images
    raise TypeError(
        f"frames must be a tensor, an array, a Pillow image or a list of these, got {type(frames).__name__}"
    )


def _array_to_images(array: np.ndarray, given_shape: Sequence[int]) -> list[PIL.Image.Image]:
    """`array` has its channels last; `given_shape` is the caller's shape, for the error messages."""
    shape = tuple(given_shape)
    if array.ndim == 5:
        if array.shape[0] != 1:
            raise ValueError(f"shape {shape} holds {array.shape[0]} videos; write one at a time")
        array = array[0]
    if array.ndim == 3:
        array = array[None]
    if array.ndim != 4 or array.shape[-1] not in (1, 3, 4):
        raise ValueError(
            f"shape {shape} is no image or video: tensors are (..., C, H, W) and arrays (..., H, W, C) with"
            " 1, 3 or 4 channels (are these latents, not yet decoded?)"
        )
    if 0 in array.shape:
        raise ValueError(f"there are no frames to write in shape {shape}")
    if np.issubdtype(array.dtype, np.floating):
        if not np.isfinite(array).all():
            raise ValueError("the frames hold values that are not finite (NaN or infinity)")
        low, high = float(array.min()), float(array.max())
        if low < -_RANGE_TOLERANCE or high > 1 + _RANGE_TOLERANCE:
            raise ValueError(
                f"float frames must lie between 0 and 1, got {low:.4g} to {high:.4g}"
                " (are these latents, not yet decoded?)"
            )
        array = (np.clip(array, 0.0, 1.0) * 255).round().astype(np.uint8)
    elif array.dtype != np.uint8:
        raise ValueError(f"frames must be floats or uint8, got {array.dtype}")
    if array.shape[-1] == 1:
        array = array[..., 0]
    return [PIL.Image.fromarray(np.ascontiguousarray(frame)) for frame in array]
