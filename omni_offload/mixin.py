"""What a pipeline inherits: the calls that turn offload on and off, and what a pipeline answers meanwhile.

Owns the public methods; which components there are is discovery's matter, what happens to them the policies'.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from .config import LayerOptions, OffloadConfig
from .declarations import MUTATORS
from .devices import resolve_device, shares_memory_with_host
from .discovery import components_of, declared_plan, find_components, is_split, resolve
from .errors import OffloadConfigError, OffloadStateError, describe
from .plan import OffloadPlan
from .policies.component import refuse_other_device, relocate
from .policies.layerwise import LayerwiseOffload
from .policies.memory import (
    MEMORY,
    has_memory,
    note_for_later,
    offloads_on,
    owners_beside,
    remember,
    to_enable_again,
)
from .policies.model_level import ModelLevelOffload
from .policies.offload import Offload, State
from .report import OffloadReport

logger = logging.getLogger(__name__)

Self = TypeVar("Self", bound="OffloadMixin")
_PACKAGE = __name__.partition(".")[0]
_WRAPPED = "_offload_wrapped"


class OffloadMixin:
    """Offloading for a Diffusers pipeline, or for a pipeline that is a plain `torch.nn.Module`.

    Put it in front of the pipeline class:

        class OffloadMyPipeline(OffloadMixin, MyPipeline):
            _dit_modules = ["transformer"]
            _encoder_modules = ["text_encoder"]
            _vae_modules = ["vae"]

    Class attributes (all optional; what is not declared is taken by name and class, and said in a notice):
        _dit_modules, _encoder_modules, _vae_modules, _resident_modules: dotted paths of components, by role.
        _offload_plan: an `OffloadPlan` for what the lists cannot say.
    """

    # Without values: the mixin stands in front of the pipeline class, whose own declarations must not be hidden.
    _dit_modules: ClassVar[Sequence[str]]
    _encoder_modules: ClassVar[Sequence[str]]
    _vae_modules: ClassVar[Sequence[str]]
    _resident_modules: ClassVar[Sequence[str]]
    _offload_plan: ClassVar[OffloadPlan | None]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        first = next(base for base in cls.__mro__ if "enable_model_cpu_offload" in base.__dict__)
        if not issubclass(first, OffloadMixin):
            raise OffloadConfigError(
                f"{cls.__name__}: {first.__name__} stands before OffloadMixin and hides its methods. Write "
                f"class {cls.__name__}(OffloadMixin, {first.__name__})."
            )
        _wrap(cls, "__call__", _with_idle_level_behind)
        for name in MUTATORS:
            _wrap(cls, name, functools.partial(_with_weights_parked, name))

    # --- turning it on ---------------------------------------------------------------------------------------

    def enable_layerwise_offload(
        self,
        components: Sequence[str] = ("dit",),
        *,
        device: torch.device | str | int | None = None,
        layer_options: Mapping[str, LayerOptions | Mapping[str, Any]] | None = None,
        pin_memory: bool | None = None,
    ) -> OffloadReport:
        r"""
        Stream the blocks of the selected components: one computes on the device while the next is on its way.
        Everything else (shells, VAEs, unselected encoders) stays on the device.

        Args:
            components (`Sequence[str]`, defaults to `("dit",)`):
                Roles (`"dit"`, `"text_encoder"`, `"image_encoder"`, `"controlnet"`) or component paths.
            device (`torch.device`, `str` or `int`, *optional*):
                Where to compute. Defaults to the current accelerator, and to the CPU (with a notice) without one.
            layer_options (`Mapping`, *optional*):
                For an entry of `components`: `{"resident_layers": n}` keeps `n` evenly spaced units on the device.
            pin_memory (`bool`, *optional*):
                `False` leaves host memory pageable. By default it is locked where the device can copy from it.

        Returns:
            [`OffloadReport`]: what was done.

        Raises:
            [`OffloadConfigError`]: something asked for cannot be done; nothing has been touched.
        """
        config = OffloadConfig(
            "layer",
            components=_names(components),
            pin_memory=pin_memory,
            layer_options=layer_options or {},  # type: ignore[arg-type]
        )
        return self.enable_offload(config, device=device)

    def enable_model_cpu_offload(
        self,
        gpu_id: int | None = None,
        device: torch.device | str | int | None = None,
        *,
        components: Sequence[str] | None = None,
        pin_memory: bool | None = None,
    ) -> OffloadReport:
        r"""
        Keep one DiT or encoder on the device at a time, as a whole; VAEs and residents stay. Replaces Diffusers' method
        of this name. A pipeline with a split module is handed to `enable_omni_model_cpu_offload`.

        Args:
            gpu_id (`int`, *optional*): Index of the accelerator.
            device (`torch.device`, `str` or `int`, *optional*): Where to compute; see `enable_layerwise_offload`.
            components (`Sequence[str]`, *optional*): Roles or paths; all DiTs and encoders without it.
            pin_memory (`bool`, *optional*): See `enable_layerwise_offload`.

        Raises:
            [`OffloadConfigError`]: as above; also where a DiT or an encoder to take turns with is missing.
        """
        if self._runs_in_parts():
            # The pipeline's own lifecycle, which a pipeline may override: rolled back through its other half.
            onload = resolve_device(device, gpu_id)
            chosen = None if components is None else frozenset(_names(components) or ())
            try:
                self.enable_omni_model_cpu_offload(
                    device=onload, pin_memory=pin_memory is not False, use_hsdp=False, offload_components=chosen
                )
            except OffloadConfigError:
                raise  # refused before anything was touched
            except BaseException:
                self.disable_omni_model_cpu_offload()
                raise
            return self.offload_report()
        config = OffloadConfig("module", components=_names(components), pin_memory=pin_memory)
        return self.enable_offload(config, device=device, gpu_id=gpu_id)

    def enable_omni_model_cpu_offload(
        self,
        *,
        device: torch.device | str | int | None,
        pin_memory: bool = True,
        use_hsdp: bool = False,
        offload_components: Iterable[str] | None = None,
    ) -> None:
        r"""
        Model-level offload for a pipeline with a split module (`SplitOffloadMixin`): its parts, the other DiTs and the
        encoders take turns on the device.

        Args:
            device (`torch.device` or `str`): Where to compute.
            pin_memory (`bool`, defaults to `True`): Whether host memory is locked where the device can copy from it.
            use_hsdp (`bool`, defaults to `False`): Sharded parameters; refused until they are served.
            offload_components (`Iterable[str]`, *optional*): Roles or paths; all DiTs and encoders without it.
        """
        if use_hsdp:
            raise OffloadConfigError(
                f"{describe('use_hsdp', use_hsdp)}: parameters sharded over devices (DTensor) are not served yet; pass "
                "use_hsdp=False with unsharded weights"
            )
        chosen = None if offload_components is None else tuple(sorted(offload_components))
        self.enable_offload(OffloadConfig("module", components=chosen, pin_memory=pin_memory), device=device)

    def disable_omni_model_cpu_offload(self) -> None:
        """Undo `enable_omni_model_cpu_offload`, also one that failed half-way."""
        self.disable_offload()

    def enable_offload(
        self,
        config: OffloadConfig | Mapping[str, Any] | str,
        *,
        device: torch.device | str | int | None = None,
        gpu_id: int | None = None,
    ) -> OffloadReport:
        r"""
        Turn offload on as a configuration says; see `OffloadConfig` for its form.

        Args:
            config ([`OffloadConfig`], `Mapping` or `str`): The configuration, as a mapping or as JSON.
            device, gpu_id: See `enable_layerwise_offload` and `enable_model_cpu_offload`.

        Raises:
            [`OffloadConfigError`]: something asked for cannot be done; nothing has been touched.
        """
        config = OffloadConfig.parse(config)
        onload = resolve_device(device, gpu_id)
        present = offloads_on(self)
        same = [o for o in present if o.state is State.ON and (o.plan.config, o.plan.device) == (config, onload)]
        if same == present and same and same[0].fits(self):
            same[0].refresh()
            return same[0].report()
        with torch.inference_mode(False):
            plan = resolve(self, config, onload, all_stay=_why_nothing_is_offloaded(onload))
            untold = [notice for notice in plan.notices if (type(self), notice) not in _told]
            if untold:
                _told.update((type(self), notice) for notice in untold)
                logger.warning("%s: %s", type(self).__name__, "; ".join(untold))
            beside = owners_beside(self, present)
            for offload in present:
                offload.disable()
            offload = LayerwiseOffload(plan) if config.mode == "layer" else ModelLevelOffload(plan)
            try:
                offload.enable()
            except BaseException:
                for former in present:
                    if former.fits(self):
                        again = type(former)(former.plan)
                        again.enable()
                        remember(self, again)
                raise
        remember(self, offload)
        for owner, wanted, where in beside:
            note_for_later(owner, wanted, where)
        return offload.report()

    def disable_offload(self) -> None:
        """Turn offload off: all weights on the host, in ordinary memory, with every class and forward the original one.

        Does nothing where it is off. Afterwards `.to()` works as ever.
        """
        to_enable_again(self)
        for offload in offloads_on(self):
            offload.disable()

    # --- while it is on --------------------------------------------------------------------------------------

    def offload_refresh(self) -> None:
        """Take in every change made to weights from outside, also those that leave no trace (`weight.data += x`).

        Raises:
            [`OffloadStateError`]: offload is off.
        """
        self._offload_or_raise("offload_refresh()").refresh()

    def offload_report(self) -> OffloadReport:
        """What offload has done so far: per component role, units, bytes streamed and resident, host and device bill.

        Raises:
            [`OffloadStateError`]: offload is off.
        """
        return self._offload_or_raise("offload_report()").report()

    def _offload_or_raise(self, what: str) -> Offload:
        offload = self._current_offload()
        if offload is None:
            raise OffloadStateError(
                f"{what} needs offload to be on; call enable_layerwise_offload() or another enable first"
            )
        return offload

    def _current_offload(self) -> Offload | None:
        """The offload that is on; made anew if components have come or been swapped, undone if it was interrupted."""
        present = offloads_on(self)
        for interrupted in [o for o in present if o.state is not State.ON]:
            interrupted.disable()
            present.remove(interrupted)
        for offload in present:
            offload.let_go(self)
        if not present:
            again = to_enable_again(self)
            if again is None:
                return None
            logger.warning(
                "%s: its offload was turned off when another pipeline with some of its components was offloaded; "
                "enabling it anew",
                type(self).__name__,
            )
            self.enable_offload(again[0], device=again[1])
            return offloads_on(self)[0]
        if len(present) == 1 and (present[0].fits(self) or present[0].inside_call()):
            return present[0]
        logger.warning("%s has other components than when offload was enabled; enabling it anew", type(self).__name__)
        config, device = present[0].plan.config, present[0].plan.device
        try:
            self.enable_offload(config, device=device)
        except OffloadConfigError as refusal:
            logger.warning("%s: offload is off now, what is left cannot be offloaded: %s", type(self).__name__, refusal)
            self.disable_offload()
            return None
        return offloads_on(self)[0]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if value is None and has_memory(self):  # a component that is given up, for its memory as a rule
            self._current_offload()

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        """A copy with weights of its own, on the host, and without offload."""
        offload = self._current_offload()
        if offload is not None:
            offload.park("copying the pipeline")
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        twin.__dict__.pop(MEMORY, None)
        if offload is not None:
            for module in components_of(twin).values():
                relocate(module, torch.device("cpu"))
        return twin

    def _runs_in_parts(self) -> bool:
        if type(self).enable_omni_model_cpu_offload is not OffloadMixin.enable_omni_model_cpu_offload:
            return True  # the pipeline has a lifecycle of its own
        found, _ = find_components(self, declared_plan(self))
        return any(is_split(component.module) for component in found)

    @property
    def _execution_device(self) -> torch.device:
        offload = self._current_offload()
        return super()._execution_device if offload is None else offload.plan.device  # type: ignore[misc]

    @property
    def device(self) -> torch.device:
        """Where the pipeline computes: while offload is on, the onload device."""
        offload = self._current_offload()
        return super().device if offload is None else offload.plan.device  # type: ignore[misc]

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """As for the pipeline class. While offload is on, the onload device is where it is already, a dtype is served,
        and another device is refused (`OffloadStateError`): call `disable_offload()` first.
        """
        offload = self._current_offload()
        if offload is None:
            return super().to(*args, **kwargs)  # type: ignore[misc]
        rest = list(args)
        device = kwargs.pop("device", None)
        if rest and not isinstance(rest[0], torch.dtype):
            device = rest.pop(0) if device is None else device
        if device is not None:
            refuse_other_device(type(self).__name__, torch.device(device), offload.plan.device)
        if rest or kwargs.get("dtype") is not None:
            with offload.changing("to(dtype)"):
                return super().to(*rest, **kwargs)  # type: ignore[misc]
        offload.absorb_changes()
        return self

    def maybe_free_model_hooks(self) -> None:
        """Called by Diffusers at the end of a pipeline call: go to the idle level."""
        parent = getattr(super(), "maybe_free_model_hooks", None)
        offload = self._current_offload()
        if parent is not None:
            parent()
        if offload is not None:
            offload.park("maybe_free_model_hooks()")

    def remove_all_hooks(self) -> None:
        """Turn offload off, whoever does it: this package's, or Diffusers'."""
        self.disable_offload()
        parent = getattr(super(), "remove_all_hooks", None)
        if parent is not None:
            parent()

    def enable_sequential_cpu_offload(self, *args: Any, **kwargs: Any) -> None:
        """Diffusers' method; refused while this package's offload is on."""
        self._refuse_beside("enable_sequential_cpu_offload")
        super().enable_sequential_cpu_offload(*args, **kwargs)  # type: ignore[misc]

    def enable_group_offload(self, *args: Any, **kwargs: Any) -> None:
        """Diffusers' method; refused while this package's offload is on."""
        self._refuse_beside("enable_group_offload")
        super().enable_group_offload(*args, **kwargs)  # type: ignore[misc]

    def _refuse_beside(self, what: str) -> None:
        if offloads_on(self):
            raise OffloadStateError(
                f"{what}() cannot work beside the offload that is on. Call disable_offload() first; "
                "enable_layerwise_offload() serves the same purpose."
            )

    # --- loading and saving ----------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls: type[Self],
        *args: Any,
        enable_cpu_offload: bool = False,
        diffusion_offload_config: OffloadConfig | Mapping[str, Any] | str | None = None,
        offload_device: torch.device | str | int | None = None,
        **kwargs: Any,
    ) -> Self:
        r"""
        As for the pipeline class, with offload turned on behind it.

        Args:
            enable_cpu_offload (`bool`, defaults to `False`): Call `enable_model_cpu_offload()`.
            diffusion_offload_config ([`OffloadConfig`], `Mapping` or `str`, *optional*): Call `enable_offload(config)`.
            offload_device (`torch.device`, `str` or `int`, *optional*): The device for either.

        Raises:
            [`OffloadConfigError`]: both are given, or the configuration is not valid; before anything is loaded.
        """
        if not isinstance(enable_cpu_offload, bool):
            raise OffloadConfigError(f"{describe('enable_cpu_offload', enable_cpu_offload)} must be true or false")
        config = None if diffusion_offload_config is None else OffloadConfig.parse(diffusion_offload_config)
        if enable_cpu_offload and config is not None:
            raise OffloadConfigError(
                "enable_cpu_offload and diffusion_offload_config are both given: the first is model-level offload, the "
                "second says which. Give one of them."
            )
        wanted = enable_cpu_offload or config is not None
        if offload_device is not None and not wanted:
            raise OffloadConfigError(
                f"{describe('offload_device', offload_device)} without enable_cpu_offload or diffusion_offload_config"
            )
        device = resolve_device(offload_device) if wanted else None
        if wanted and kwargs.get("device_map") is not None:
            raise OffloadConfigError(
                f"{describe('device_map', kwargs['device_map'])} and offload exclude each other. Leave one out."
            )
        pipeline = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]
        if config is not None:
            pipeline.enable_offload(config, device=device)
        elif enable_cpu_offload:
            pipeline.enable_model_cpu_offload(device=device)
        return pipeline

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As for the pipeline class. What is saved is the plain pipeline, under the name of the class it extends."""
        offload = self._current_offload()
        if offload is not None:
            offload.park("save_pretrained()")
        return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]

    def to_json_string(self) -> str:
        """The configuration as `model_index.json` holds it, with a class name that plain Diffusers can load."""
        saved = json.loads(super().to_json_string())  # type: ignore[misc]
        saved["_class_name"] = upstream_class(type(self)).__name__
        return json.dumps(saved, indent=2, sort_keys=True) + "\n"


# Notices that have been given, so that each is given once for a class. The report holds them all.
_told: set[tuple[type, str]] = set()


def _why_nothing_is_offloaded(device: torch.device) -> str | None:
    if not shares_memory_with_host(device):
        return None
    return (
        f"{device} shares its memory with the host, where a host copy of the weights would only double them: nothing "
        "is offloaded, all of it is on the device"
    )


def upstream_class(cls: type) -> type:
    """The class that loads what `cls` saves without this package: the pipeline that the mixin was put in front of.

    A class that has an `__init__` of its own has components of its own, and stands for itself.
    """
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] != _PACKAGE and (
            "__init__" in base.__dict__ or not issubclass(base, OffloadMixin)
        ):
            return base
    return cls


def _names(components: Any) -> Any:
    """Names as a tuple, if they come as another collection; a string and everything else is the grammar's to refuse."""
    return tuple(components) if isinstance(components, (frozenset, set)) else components


def _wrap(cls: type, name: str, wrapping: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrapping` around a method of `cls`, its own or an inherited one, if nothing above it has done so."""
    current = next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), None)
    if not callable(current) or hasattr(current, _WRAPPED):
        return

    def inherited(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(cls, self), name)(*args, **kwargs)  # looked up now: somebody may have replaced it

    method = current if name in cls.__dict__ else functools.wraps(current)(inherited)
    wrapper = wrapping(method)
    setattr(wrapper, _WRAPPED, True)
    setattr(cls, name, wrapper)


_CALLBACKS = ("callback_on_step_end", "callback")


def _with_idle_level_behind(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(self: OffloadMixin, *args: Any, **kwargs: Any) -> Any:
        offload = self._current_offload()
        if offload is None:
            return call(self, *args, **kwargs)
        watched = any(kwargs.get(name) is not None for name in _CALLBACKS)
        token = offload.begin_call(sys._getframe(), watched)
        try:
            return call(self, *args, **kwargs)
        finally:
            offload.end_call(token)
            if not offload.inside_call():
                offload.let_go(self)  # what a callback has set to None

    return wrapper


def _with_weights_parked(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: OffloadMixin, *args: Any, **kwargs: Any) -> Any:
        offload = self._current_offload()
        if offload is None:
            return method(self, *args, **kwargs)
        with offload.changing(f"{name}()"):
            return method(self, *args, **kwargs)

    return wrapper
