"""The configuration grammar, the same in Python, JSON and on the command line.

Owns what a user may ask for and refuses everything else. Knows no pipeline: whether a component exists is for
discovery to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ._values import FrozenMapping, checked_mapping, checked_paths
from .errors import OffloadConfigError, describe, field_path, not_one_of, quoted, unknown_field, wrong_type

__all__ = [
    "MODES",
    "OFFLOADABLE_ROLES",
    "ROLES",
    "WEIGHT_TRANSFERS",
    "LayerOptions",
    "OffloadConfig",
    "refuse_unbuilt",
]

MODES = ("layer", "module")
WEIGHT_TRANSFERS = ("rank-local", "allgather")
OFFLOADABLE_ROLES = ("dit", "text_encoder", "image_encoder", "controlnet")
ROLES = (*OFFLOADABLE_ROLES, "vae", "resident")

_WHY_NOT_OFFLOADED = {
    "vae": "VAEs stay on the device in both modes",
    "resident": "it is the role of the modules that stay on the device",
}
_FIELDS = ("mode", "components", "pin_memory", "layer_options")
_LAYER_FIELDS = ("weight_transfer", "resident_layers")


@dataclass(frozen=True)
class LayerOptions:
    """How the blocks of one component stream in mode `"layer"`.

    Args:
        weight_transfer (`"rank-local"` or `"allgather"`, defaults to `"rank-local"`):
            How the bytes of a block reach the device: each process copies whole blocks from its own host
            memory, or each holds a share and the shares are gathered.
        resident_layers (`int`, defaults to `0`):
            How many blocks stay on the device.

    Raises:
        [`OffloadConfigError`]: A value is of the wrong type or not among the choices.
    """

    weight_transfer: Literal["rank-local", "allgather"] = "rank-local"
    resident_layers: int = 0

    def __post_init__(self) -> None:
        _check_layer_options("", self.weight_transfer, self.resident_layers)

    def to_dict(self) -> dict[str, Any]:
        """Return the options in the grammar's form, every field present."""
        return {"weight_transfer": self.weight_transfer, "resident_layers": self.resident_layers}


@dataclass(frozen=True)
class OffloadConfig:
    """What to offload and how. Every instance is valid in itself; it has not met a pipeline yet.

    Args:
        mode (`"layer"` or `"module"`):
            `"layer"` streams the blocks of the selected components, `"module"` lets whole components take
            turns on the device.
        components (`tuple[str, ...]`, *optional*):
            Roles (`"dit"`, `"text_encoder"`, `"image_encoder"`, `"controlnet"`) or dotted component paths, in a
            tuple or a list. Without it mode `"layer"` takes `("dit",)`, and mode `"module"` keeps `None`, which stands
            for all DiTs and encoders.
        pin_memory (`bool`, *optional*):
            Whether weights on the host are page-locked. `None` leaves it to the device and to free memory.
        layer_options (`Mapping[str, LayerOptions]`, *optional*):
            Options for entries of `components`, in mode `"layer"` only. A mapping in place of a
            [`LayerOptions`] is parsed.

    Raises:
        [`OffloadConfigError`]: Something is unknown, empty, doubled, of the wrong type, or contradictory.
    """

    mode: Literal["layer", "module"]
    components: tuple[str, ...] | None = None
    pin_memory: bool | None = None
    layer_options: Mapping[str, LayerOptions] = field(default_factory=FrozenMapping)

    def __post_init__(self) -> None:
        if not isinstance(self.mode, str) or self.mode not in MODES:
            raise not_one_of("mode", self.mode, MODES)
        components = _checked_components(self.mode, self.components)
        if self.pin_memory is not None and not isinstance(self.pin_memory, bool):
            raise wrong_type("pin_memory", self.pin_memory, "true or false")
        options = _checked_layer_options(self.mode, components, self.layer_options)
        object.__setattr__(self, "components", components)
        object.__setattr__(self, "layer_options", options)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> OffloadConfig:
        """Parse a mapping in the grammar's form.

        Args:
            value (`Mapping[str, Any]`):
                `{"mode": ..., "components": [...], "pin_memory": ..., "layer_options": {name: {...}}}`. Only
                `mode` is required; `None` for another field is the same as leaving it out.

        Raises:
            [`OffloadConfigError`]: As for the class; also for a missing `mode`, an unknown field, or an empty
                `layer_options`.
        """
        if not isinstance(value, Mapping):
            raise wrong_type("config", value, 'a mapping, such as {"mode": "layer"}')
        fields = dict(value)
        _refuse_unknown_fields("", fields, _FIELDS)
        if "mode" not in fields:
            raise OffloadConfigError(f"mode is missing. Give one of: {quoted(MODES)}.")
        if isinstance(fields.get("layer_options"), Mapping) and not fields["layer_options"]:
            raise OffloadConfigError("layer_options={} is empty. Name a component's options, or leave it out.")
        return cls(**fields)

    @classmethod
    def parse(cls, value: Mapping[str, Any] | str | OffloadConfig) -> OffloadConfig:
        """Make a config of whatever form it comes in.

        Args:
            value (`Mapping[str, Any]`, `str` or [`OffloadConfig`]):
                A mapping in the grammar's form, the same as JSON text, or a config, returned as it is.

        Raises:
            [`OffloadConfigError`]: As for [`~OffloadConfig.from_dict`]; also for text that is not JSON, or in
                which an object has a key twice.
        """
        if isinstance(value, OffloadConfig):
            return value
        if isinstance(value, str):
            return cls.from_dict(_load_json(value))
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        raise wrong_type("config", value, "a mapping, JSON text or an OffloadConfig")

    def to_dict(self) -> dict[str, Any]:
        """Return the config in the grammar's form: `OffloadConfig.from_dict(c.to_dict()) == c`.

        JSON can hold it as it is. What was left to its default of `None` or to no options is left out.
        """
        result: dict[str, Any] = {"mode": self.mode}
        if self.components is not None:
            result["components"] = list(self.components)
        if self.pin_memory is not None:
            result["pin_memory"] = self.pin_memory
        if self.layer_options:
            result["layer_options"] = {name: options.to_dict() for name, options in self.layer_options.items()}
        return result


def refuse_unbuilt(config: OffloadConfig) -> None:
    """Refuse what the grammar has a word for and the engine cannot do yet.

    Kept apart from parsing, so that a config can be written, read and compared anywhere.

    Raises:
        [`OffloadConfigError`]: `weight_transfer` is `"allgather"` for some component.
    """
    for name, options in config.layer_options.items():
        if options.weight_transfer == "allgather":
            where = f"layer_options.{name}.weight_transfer"
            raise OffloadConfigError(f"{describe(where, 'allgather')}: allgather is not built yet; use 'rank-local'.")


def _checked_components(mode: str, value: object) -> tuple[str, ...] | None:
    if value is None:
        return ("dit",) if mode == "layer" else None
    components = checked_paths("components", value)
    for index, name in enumerate(components):
        if name in _WHY_NOT_OFFLOADED:
            raise OffloadConfigError(
                f"{describe(f'components[{index}]', name)} cannot be offloaded: {_WHY_NOT_OFFLOADED[name]}. "
                f"Choose from {quoted(OFFLOADABLE_ROLES)}, or the path of a DiT or an encoder."
            )
    return components


def _checked_layer_options(mode: str, components: tuple[str, ...] | None, value: object) -> FrozenMapping[LayerOptions]:
    if value is None:
        return FrozenMapping()
    entries = checked_mapping("layer_options", value)
    if entries and mode != "layer":
        raise OffloadConfigError(
            f"{describe('layer_options', dict(entries))} contradicts mode={mode!r}: whole components move "
            "there. Leave it out, or use mode='layer'."
        )
    result = {}
    for name, entry in entries.items():
        if name not in (components or ()):
            advice = "Add it to components, or leave it out."
            raise unknown_field("layer_options", name, entry, components or (), advice=advice)
        result[name] = entry if isinstance(entry, LayerOptions) else _parse_layer_options(name, entry)
    return FrozenMapping(result)


def _parse_layer_options(name: str, value: object) -> LayerOptions:
    path = f"layer_options.{name}"
    if not isinstance(value, Mapping):
        raise wrong_type(path, value, "a mapping of options")
    fields = dict(value)
    if not fields:
        raise OffloadConfigError(f"{path}={{}} is empty. Give one of: {quoted(_LAYER_FIELDS)}, or leave it out.")
    _refuse_unknown_fields(path, fields, _LAYER_FIELDS)
    # Checked here, where the path is known; the constructor checks the same without it.
    _check_layer_options(f"{path}.", fields.get("weight_transfer", "rank-local"), fields.get("resident_layers", 0))
    return LayerOptions(**fields)


def _check_layer_options(prefix: str, weight_transfer: object, resident_layers: object) -> None:
    if not isinstance(weight_transfer, str) or weight_transfer not in WEIGHT_TRANSFERS:
        raise not_one_of(f"{prefix}weight_transfer", weight_transfer, WEIGHT_TRANSFERS)
    where = f"{prefix}resident_layers"
    if not isinstance(resident_layers, int) or isinstance(resident_layers, bool):
        raise wrong_type(where, resident_layers, "a whole number of blocks, 0 or more")
    if resident_layers < 0:
        raise OffloadConfigError(
            f"{describe(where, resident_layers)} is negative. Give how many blocks stay on the device, 0 or more."
        )


def _refuse_unknown_fields(path: str, fields: Mapping[Any, Any], choices: tuple[str, ...]) -> None:
    for name, value in fields.items():
        if not isinstance(name, str) or name not in choices:
            raise unknown_field(path, name, value, choices)


class _JsonObject:
    """A JSON object as it was written, doubled keys included."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs


def _load_json(text: str) -> Any:
    """Load JSON text, refusing doubled keys under their path. (NaN passes here; no field takes a float.)"""
    try:
        return _to_plain("", json.loads(text, object_pairs_hook=_JsonObject))
    except OffloadConfigError:
        raise
    except (ValueError, RecursionError) as error:
        advice = f'{{"mode": "{text}"}}' if text in MODES else '{"mode": "layer", "components": ["dit"]}'
        raise OffloadConfigError(f"{describe('config', text)} is not JSON ({error}). Write it as {advice}.") from None


def _to_plain(path: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_to_plain(f"{path}[{index}]", entry) for index, entry in enumerate(value)]
    if not isinstance(value, _JsonObject):
        return value
    result: dict[str, Any] = {}
    for key, entry in value.pairs:
        where = field_path(path, key)
        if key in result:
            raise OffloadConfigError(f"{describe(where, _to_plain(where, entry))} comes twice. Give it once.")
        result[key] = _to_plain(where, entry)
    return result
