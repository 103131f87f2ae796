"""What a pipeline class declares about its components.

Owns the declarations' form: the `_offload_plan` value and the class attributes with module paths. Knows no
module: whether a path leads anywhere is for discovery to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

from ._values import FrozenMapping, checked_mapping, checked_paths
from .errors import OffloadConfigError, describe, not_one_of

__all__ = ["ENCODER_CATEGORIES", "EncoderCategory", "OffloadPlan", "SupportsComponentDiscovery"]

EncoderCategory = Literal["text_encoder", "image_encoder"]
ENCODER_CATEGORIES = ("text_encoder", "image_encoder")

_PATH_LISTS = ("encoder_block_attrs", "block_attrs", "offload_submodules", "outside_calls")


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """What discovery cannot see for itself; a pipeline class gives one as `_offload_plan`.

    All paths are dotted. A component's path starts at the pipeline, the paths in a list start at that
    component. Stored as immutable mappings of tuples, so a plan can be shared, hashed and pickled.

    Args:
        encoder_component_types (`Mapping[str, str]`, defaults to `{}`):
            Component path to `"text_encoder"` or `"image_encoder"`.
        encoder_block_attrs (`Mapping[str, Sequence[str]]`, defaults to `{}`):
            Path of an encoder to the paths of its lists of blocks.
        block_attrs (`Mapping[str, Sequence[str]]`, defaults to `{}`):
            The same for a DiT. Wins over `_layerwise_offload_blocks_attrs` of the transformer class.
        offload_submodules (`Mapping[str, Sequence[str]]`, defaults to `{}`):
            Component path to the paths of single modules inside it that stream as units of their own, such as
            a large embedding table.
        outside_calls (`Mapping[str, Sequence[str]]`, defaults to `{}`):
            Component path to the paths of modules inside its blocks that are called from outside of their block,
            such as `blocks.0.norm1.emb`. A block's children need not be named.

    Raises:
        [`OffloadConfigError`]: A value is of the wrong type, empty, doubled or no path; a category is
            unknown; a component has its blocks declared both as an encoder's and as a DiT's; a module is
            declared both as a list of blocks and as a single unit.
    """

    encoder_component_types: Mapping[str, EncoderCategory] = field(default_factory=FrozenMapping)
    encoder_block_attrs: Mapping[str, Sequence[str]] = field(default_factory=FrozenMapping)
    block_attrs: Mapping[str, Sequence[str]] = field(default_factory=FrozenMapping)
    offload_submodules: Mapping[str, Sequence[str]] = field(default_factory=FrozenMapping)
    outside_calls: Mapping[str, Sequence[str]] = field(default_factory=FrozenMapping)

    def __post_init__(self) -> None:
        types = checked_mapping("encoder_component_types", self.encoder_component_types)
        for path, category in types.items():
            if not isinstance(category, str) or category not in ENCODER_CATEGORIES:
                raise not_one_of(f"encoder_component_types[{path!r}]", category, ENCODER_CATEGORIES)
        object.__setattr__(self, "encoder_component_types", FrozenMapping(types))
        for name in _PATH_LISTS:
            declared = checked_mapping(name, getattr(self, name))
            paths = {path: checked_paths(f"{name}[{path!r}]", value) for path, value in declared.items()}
            object.__setattr__(self, name, FrozenMapping(paths))
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        for path, blocks in self.encoder_block_attrs.items():
            if path in self.block_attrs:
                other = describe(f"block_attrs[{path!r}]", self.block_attrs[path])
                raise OffloadConfigError(
                    f"{describe(f'encoder_block_attrs[{path!r}]', blocks)} contradicts {other}: a component "
                    "is an encoder or a DiT. Keep one of the two."
                )
        for path, modules in self.offload_submodules.items():
            blocks = (*self.block_attrs.get(path, ()), *self.encoder_block_attrs.get(path, ()))
            for index, module in enumerate(modules):
                if module in blocks:
                    raise OffloadConfigError(
                        f"{describe(f'offload_submodules[{path!r}][{index}]', module)} is declared as a "
                        "list of blocks too. Its blocks stream one by one; take it out of offload_submodules."
                    )


@runtime_checkable
class SupportsComponentDiscovery(Protocol):
    """A pipeline, Diffusers' or a plain `nn.Module`, that names its components in class attributes.

    Each attribute holds dotted module paths that start at the pipeline. Use `isinstance` on an instance;
    `issubclass` is not defined for a protocol of attributes.
    """

    _dit_modules: ClassVar[Sequence[str]]
    _encoder_modules: ClassVar[Sequence[str]]
    _vae_modules: ClassVar[Sequence[str]]
    _resident_modules: ClassVar[Sequence[str]]
