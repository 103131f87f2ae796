"""Units: the tensors that arrive and leave together, and the tensors that stay (the shell of a component).

Owns the link between tensors of a model and their memory: layout, host store, faces, and the check that nobody has
changed the model behind our back. Knows nothing of when a unit is wanted or which slot it gets.

[Note: faces]
A parked tensor points at its host store, an acquired one at a slot; the switch is `tensor.data = view`, which keeps
the Parameter object and so every tie, optimizer, adapter and user reference. Parked tensors are therefore real:
state_dict, save_pretrained, numel and shapes never see a placeholder.

Being real, they can be edited. Before a unit is shown on the device it is compared with what was left:
  - another structure, tensor, address or dtype (`.half()`, a LoRA layer, `load_state_dict(assign=True)`): the unit is
    laid out anew from what is there (`absorb`);
  - a version counter that moved (`weight.mul_(2)`): the host bytes are right, a device copy made earlier is not.
`weight.data += x` moves neither. Calls that are known to do this park and drop device copies first (see the mixin).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import OffloadConfigError
from .layout import Layout, bare, inference_twin
from .stores import HostAllocator, return_freed_memory
from .transfer import Slot

logger = logging.getLogger(__name__)
_NormBase = nn.modules.batchnorm._NormBase
_PLAIN_TYPES = (torch.Tensor, nn.Parameter)
_identity = attrgetter("dtype")
_version = attrgetter("_version")


def walk(roots: Iterable[nn.Module], stop: Iterable[nn.Module] = ()) -> Iterator[nn.Module]:
    """`roots` and everything below them, each once, without the modules in `stop` and what is only below those."""
    seen = {id(module) for module in stop}
    pending: list[nn.Module | None] = [*roots]
    pending.reverse()
    while pending:
        module = pending.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        yield module
        pending.extend(list(module._modules.values())[::-1])


def own_tensors(modules: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """`(name, tensor)` of everything that holds bytes of `modules` themselves, each tensor once.

    That is their parameters and buffers, and for quantised ones the tensors that those consist of (see `leaves`).
    """
    seen: set[int] = set()
    for module in modules:
        for held in (module._parameters, module._buffers):
            for name, whole in held.items():
                if whole is None:
                    continue
                for tensor in (whole,) if type(whole) in _PLAIN_TYPES else leaves(whole):
                    if id(tensor) not in seen:
                        seen.add(id(tensor))
                        yield name, tensor


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of torch's own classes, so that its bytes are all there is to it."""
    return type(tensor) in _PLAIN_TYPES


def leaves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors whose bytes `tensor` consists of: itself, or data, scales and the like of a quantised one.

    They are the objects that its operators read, so pointing their `data` elsewhere moves the whole.
    """
    if is_plain(tensor):
        yield tensor
    elif is_traceable_wrapper_subclass(tensor):  # torchao, quanto: nothing but tensors of other classes
        for name in tensor.__tensor_flatten__()[0]:
            yield from leaves(getattr(tensor, name))
    else:  # bitsandbytes, GGUF: a parameter with bytes of its own, and perhaps a state with more tensors
        yield tensor
        yield from _tensors_beside(tensor, type(tensor).__module__.partition(".")[0])


def _tensors_beside(value: object, package: str) -> Iterator[torch.Tensor]:
    for beside in vars(value).values():
        if isinstance(beside, torch.Tensor):
            yield from leaves(beside)
        elif isinstance(beside, nn.Module) or type(beside).__module__.partition(".")[0] != package:
            continue
        elif hasattr(beside, "__dict__"):
            yield from _tensors_beside(beside, package)


def is_parameter_with_more(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is of a Parameter class that others derived, with ordinary memory of its own."""
    return isinstance(tensor, nn.Parameter) and issubclass(type(tensor), nn.Parameter) and not is_lazy(tensor)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same view of the same memory."""
    return (one.data_ptr(), one.dtype, one.shape, one.stride()) == (
        other.data_ptr(),
        other.dtype,
        other.shape,
        other.stride(),
    )


def refuse_unmanageable(tensor: torch.Tensor, where: str) -> None:
    """Raise `OffloadConfigError` for a tensor whose bytes the engine cannot move by a flat copy."""
    kind = type(tensor)
    reason = None
    if not is_plain(tensor) and not is_parameter_with_more(tensor):
        reason = f"is a {kind.__module__}.{kind.__qualname__}, a tensor subclass that is not known"
    elif tensor.is_meta:
        reason = "is on the meta device and has no data"
    elif tensor.layout != torch.strided:
        reason = f"has the layout {tensor.layout}"
    elif tensor.is_conj() or tensor.is_neg():
        reason = "is a lazily conjugated or negated view"
    if reason:
        raise OffloadConfigError(
            f"{where} {reason}, which cannot be offloaded yet. Leave its component out of `components`, or load the "
            "component with plain weights."
        )


class Members:
    """The modules that a unit or a shell consists of, and a quick answer to whether their structure is as it was.

    Args:
        name: for messages and reports.
        roots: modules whose tensors, with everything below them, belong together.
        stop: modules below `roots` that do not belong to it.
        excluded: tensors below `roots` that live elsewhere (shared with another unit).
    """

    def __init__(
        self,
        name: str,
        roots: Sequence[nn.Module],
        *,
        stop: Sequence[nn.Module] = (),
        excluded: Sequence[torch.Tensor] = (),
    ) -> None:
        self.name = name
        self.roots = tuple(roots)
        self.tensors: list[torch.Tensor] = []
        self._stop = tuple(stop)
        self._excluded = list(excluded)
        self._scan()

    def _scan(self) -> None:
        # The modules are held so that none of their ids can come back as another module's.
        self._modules = list(walk(self.roots, self._stop))
        self._held = [d for m in self._modules for d in (m._modules, m._parameters, m._buffers)]
        self._sizes = list(map(len, self._held))
        self._filled = [d for d in self._held if d]
        self._composed = [
            t for d in self._filled for t in d.values() if isinstance(t, torch.Tensor) and not is_plain(t)
        ]
        self._ids = self._current_ids()
        excluded = {id(t) for t in self._excluded}
        found = own_tensors(self._modules)
        self._names = []
        self.tensors = []
        for name, tensor in found:
            if id(tensor) not in excluded:
                refuse_unmanageable(tensor, f"{self.name}: {name}")
                self._names.append(name)
                self.tensors.append(tensor)

    def _current_ids(self) -> list[int]:
        ids = list(map(id, chain.from_iterable([d.values() for d in self._filled])))
        return [*ids, *(id(leaf) for tensor in self._composed for leaf in leaves(tensor))] if self._composed else ids

    def restructured(self) -> bool:
        """Whether a module, parameter or buffer has come, gone or been replaced since the last scan."""
        return list(map(len, self._held)) != self._sizes or self._current_ids() != self._ids

    def keep_out_only(self, modules: Iterable[nn.Module]) -> None:
        """Forget what was kept out, but for `modules`: the rest is not there any more."""
        kept = {id(module) for module in modules}
        self._stop = tuple(module for module in self._stop if id(module) in kept)

    def exclude(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave `tensors` out from now on."""
        self._excluded.extend(tensors)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class Shell(Members):
    """Tensors that live on the onload device for as long as offload is on; the device is their truth."""

    def __init__(
        self,
        name: str,
        roots: Sequence[nn.Module],
        device: torch.device,
        *,
        stop: Sequence[nn.Module] = (),
        extra: Sequence[torch.Tensor] = (),
        excluded: Sequence[torch.Tensor] = (),
    ) -> None:
        self.device = device
        self._extra = list(extra)
        super().__init__(name, roots, stop=stop, excluded=excluded)

    def _scan(self) -> None:
        super()._scan()
        present = {id(t) for t in self.tensors}
        self.tensors += [t for t in self._extra if id(t) not in present]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(t.nbytes for t in self.tensors)

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take `tensors` in."""
        self._extra.extend(tensors)
        self._scan()

    def place(self) -> None:
        """Bring every tensor to the device, also those that have come since the last time."""
        if self.restructured():
            self._scan()
        move(self.tensors, self.device)

    def astray(self) -> bool:
        """Whether something has come in that may not be on the device."""
        device = self.device
        return self.restructured() or any(t.device != device for t in self.tensors)

    def bring_back(self) -> None:
        """Bring every tensor to the host."""
        if self.restructured():
            self._scan()
        move(self.tensors, torch.device("cpu"))


@torch.inference_mode(False)
@torch.no_grad()
def move(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move the data of `tensors` to `device` one by one; the tensor objects stay."""
    for tensor in tensors:
        if tensor.device != device:
            with torch.inference_mode(tensor.is_inference()), torch._C.DisableTorchFunctionSubclass():
                tensor.data = tensor.detach().to(device)


class Unit(Members):
    """Tensors that arrive and leave together, their host store, and whichever face they show."""

    def __init__(
        self,
        name: str,
        roots: Sequence[nn.Module],
        allocator: HostAllocator,
        *,
        stop: Sequence[nn.Module] = (),
        extra: Sequence[torch.Tensor] = (),
        excluded: Sequence[torch.Tensor] = (),
    ) -> None:
        self._allocator = allocator
        self._extra = list(extra)
        self.on_device = False
        self.oversize = False
        self.copies = 0
        super().__init__(name, roots, stop=stop, excluded=excluded)
        self.store = allocator.store(self.tensors)
        self._adopt_host_face()
        return_freed_memory()

    def _scan(self) -> None:
        super()._scan()
        present = {id(t) for t in self.tensors}
        self.tensors += [t for t in self._extra if id(t) not in present]
        self._inspect()

    def _inspect(self) -> None:
        self._inference = [t.is_inference() for t in self.tensors]
        self._tracked = [i for i, inference in enumerate(self._inference) if not inference]
        self._versioned = [self.tensors[i] for i in self._tracked]
        buffers = {id(buffer) for module in self._modules for buffer in module._buffers.values()}
        statistics = {
            id(buffer)
            for module in self._modules
            if isinstance(module, _NormBase) and module.training and module.track_running_stats
            for buffer in (module.running_mean, module.running_var)
        }
        # Batch norm in training writes its statistics without moving their version counters; inference tensors have
        # none. What a forward may have written unseen is taken as written.
        self._unseen = {
            i
            for i, (tensor, inference) in enumerate(zip(self.tensors, self._inference, strict=True))
            if id(tensor) in statistics or (inference and id(tensor) in buffers)
        }

    @property
    def nbytes(self) -> int:
        """Size of its store in bytes, alignment included."""
        return self.store.nbytes

    # --- faces -----------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def _adopt_host_face(self) -> None:
        self._host_face = self._kind_of_tensors(self.store.views)
        self.park()
        self._host_addresses = [view.data_ptr() for view in self._host_face]
        self._dtypes = [view.dtype for view in self.store.views]
        self.stamp()

    def show(self, slot: Slot) -> None:
        """Point the tensors at `slot`."""
        face = slot.faces.get(self.store)
        if face is None:
            face = slot.add_face(self.store, self._device_views)
        self.on_device = True
        self._face = face
        for tensor, view in zip(self.tensors, face):  # noqa: B905 -- equal by construction, and this is hot
            tensor.data = view

    @torch.inference_mode(False)
    def _device_views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return self._kind_of_tensors(self.store.layout.views(buffer))

    def _kind_of_tensors(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        pairs = zip(views, self._inference, strict=True)
        return [inference_twin(view) if inference else view for view, inference in pairs]

    def park(self) -> None:
        """Point the tensors back at the host store. Nothing is copied."""
        for tensor, view in zip(self.tensors, self._host_face):  # noqa: B905 -- as above
            tensor.data = view
        self._face = self._host_face
        self.on_device = False

    # --- what others did -------------------------------------------------------------------------------------

    def _current_versions(self) -> list[int]:
        return list(map(_version, self._versioned))

    def stamp(self) -> None:
        """Remember the state of the host bytes: a copy of them is about to be made."""
        self._versions = self._current_versions()

    def edited(self) -> bool:
        """Whether a tensor was written in place since `stamp`."""
        return self._current_versions() != self._versions

    def replaced(self) -> bool:
        """Whether a parked unit is no longer what was parked: other tensors, other memory, other dtypes."""
        return (
            list(map(torch.Tensor.data_ptr, self.tensors)) != self._host_addresses
            # Shape and strides too. (Behind the addresses: between devices the question itself may be an error.)
            or not all(map(torch.Tensor.is_set_to, self.tensors, self._host_face))
            or list(map(_identity, self.tensors)) != self._dtypes
            or self.restructured()
        )

    def astray(self) -> bool:
        """Whether the tensors no longer show the face they were given, on the host or the device."""
        return not all(map(_same_memory, self.tensors, self._face)) or self.restructured()

    def written(self) -> list[int]:
        """Indices of the tensors that were, or may have been, written since `stamp`: by a forward, behind one."""
        now = self._current_versions()
        if now == self._versions and not self._unseen:
            return []
        moved = zip(self._tracked, now, self._versions, strict=True)
        return sorted(self._unseen | {i for i, new, old in moved if new != old})

    def write_back(self, indices: Sequence[int]) -> None:
        """Copy what the tensors `indices` hold now (on the device) into the host store; waits for the device."""
        with torch.inference_mode(False), torch.no_grad():
            for index in indices:
                self.store.fill(index, self.tensors[index])

    def absorb(self) -> None:
        """Lay the unit out anew from what its modules hold now.

        Tensors that are still ours give the host's bytes, unless they were written on the device; all others give what
        they hold, wherever that is. Nothing may be copying from the old store.
        """
        own = {id(t): i for i, t in enumerate(self.tensors)}
        written = set(self.written()) if self.on_device else set()
        old = self.store
        shows = list(map(_same_memory, self.tensors, self._face))
        self._scan()
        self._leave_to_the_device(own)
        sources = []
        for tensor in self.tensors:
            i = own.get(id(tensor), -1)
            ours = i >= 0 and i not in written and shows[i]
            sources.append(old.views[i] if ours else bare(tensor))
        in_place = not self.on_device and all(own.get(id(t), i) == i for i, t in enumerate(self.tensors))
        if in_place and Layout.of(sources) == old.layout:
            foreign = [i for i, source in enumerate(sources) if source.data_ptr() != old.views[i].data_ptr()]
            twins = [self._host_face[i] is not old.views[i] for i in foreign]
            # Whoever took a weight out, to put it back later, still looks at its bytes: those are not to be written.
            in_place = not any(old.seen_by_others(i, twin) for i, twin in zip(foreign, twins, strict=True))
        else:
            in_place = False
        if in_place:
            with torch.inference_mode(False), torch.no_grad():
                for i in foreign:  # the same places: the memory, locked already, can stay
                    old.fill(i, sources[i])
        else:
            self.store = self._allocator.store(sources)
        self._adopt_host_face()
        if self.store is not old:
            old.release()

    def _leave_to_the_device(self, own: dict[int, int]) -> None:
        """Leave out new buffers that are on the device: a forward assigned them, and will do so again."""
        onload = self._allocator.device
        if onload.type == "cpu":
            return
        buffers = {id(b) for module in self._modules for b in module._buffers.values()}
        kept = [t for t in self.tensors if id(t) in own or id(t) not in buffers or t.device != onload]
        if len(kept) < len(self.tensors):
            self.tensors = kept
            self._inspect()

    def rebuild_without(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave `tensors` (resident from now on) out of this parked unit."""
        self.exclude(tensors)
        self.absorb()

    def release(self) -> None:
        """Give up the locked memory. The tensors stay on the host, parked, and belong to nobody."""
        if self.replaced():
            try:
                self.absorb()
            except OffloadConfigError as refusal:  # somebody's meta or quantised tensor: theirs to look after
                logger.warning("%s is left as it is: %s", self.name, refusal)
        else:
            self.park()
        self.store.release()
