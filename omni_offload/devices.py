"""Which device a pipeline computes on: names, defaults and what is said about them. Moves nothing."""

from __future__ import annotations

import logging

import torch

from .errors import OffloadConfigError, describe, wrong_type

logger = logging.getLogger(__name__)


def resolve_device(device: torch.device | str | int | None = None, gpu_id: int | None = None) -> torch.device:
    """The onload device, with its index.

    Args:
        device: a device, its name or an accelerator's index; None for the current accelerator, or the CPU without one.
        gpu_id: an accelerator's index, as in Diffusers.

    Raises:
        OffloadConfigError: no such device, or the two contradict each other.
    """
    if gpu_id is not None and (isinstance(gpu_id, bool) or not isinstance(gpu_id, int)):
        raise wrong_type("gpu_id", gpu_id, "the index of an accelerator")
    if isinstance(device, (bool, float)):
        raise wrong_type("device", device, "a device, its name, or the index of an accelerator")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if isinstance(device, int) and not isinstance(device, bool):
        device, gpu_id = None, device if gpu_id is None else gpu_id
    try:
        asked = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OffloadConfigError(f"{describe('device', device)} is not a device: {error}") from None
    if asked is None:
        if accelerator is None:
            if gpu_id is not None:
                raise OffloadConfigError(f"{describe('gpu_id', gpu_id)}: there is no accelerator on this machine")
            logger.warning(
                "No accelerator was found: the pipeline computes on the CPU, where offloading saves no memory. Pass "
                "device='cpu' to say that this is meant."
            )
            return torch.device("cpu")
        asked = accelerator
    if asked.type == "meta":
        raise OffloadConfigError(f"{describe('device', device)} cannot compute; name an accelerator or 'cpu'")
    if asked.type == "cpu":
        if gpu_id is not None or asked.index:
            raise OffloadConfigError(
                f"{describe('device', device)}: the CPU has no index{' and no gpu_id' if gpu_id is not None else ''}"
            )
        return torch.device("cpu")
    if accelerator is None or asked.type != accelerator.type:
        there = "no accelerator" if accelerator is None else f"{accelerator.type} devices"
        raise OffloadConfigError(f"{describe('device', device)}: this machine has {there}")
    if asked.index is not None and gpu_id is not None and asked.index != gpu_id:
        raise OffloadConfigError(
            f"{describe('gpu_id', gpu_id)} contradicts {describe('device', device)}; give one of them"
        )
    index = asked.index if asked.index is not None else gpu_id
    if index is None:
        index = torch.accelerator.current_device_index()
    count = torch.accelerator.device_count()
    if not 0 <= index < count:
        raise OffloadConfigError(
            f"{describe('device', f'{asked.type}:{index}')}: this machine has {count} of them, from 0"
        )
    return torch.device(asked.type, index)


def shares_memory_with_host(device: torch.device) -> bool:
    """Whether device and host have one memory, so that a host copy of the weights would only double them."""
    if device.type == "mps":
        return True
    if device.type == "cpu":
        return False
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    if properties is None:
        return False
    return bool(getattr(properties(device), "is_integrated", False))
