"""B20: the same output whatever the default device, the grad mode, the device index and the number of threads."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from models import MODES, Block, CountingBlock, Denoiser, ExpertsPipeline, MixedBlock, enable, run, seeded

from omni_offload.policies.memory import offloads_on

modes = pytest.mark.parametrize("mode", MODES)


# --- the user's default device ----------------------------------------------------------------------------------------


@pytest.fixture
def default_device() -> Iterator[Callable[[Any], None]]:
    """Sets torch's default device, for this test."""
    before = torch.get_default_device()
    yield torch.set_default_device
    torch.set_default_device(before)


@modes
@pytest.mark.parametrize("place", ["accelerator", "meta", "cpu"])
@pytest.mark.parametrize("pin", [None, False])
def test_default_device_does_not_matter(
    pin: bool | None,
    place: str,
    mode: str,
    device: torch.device,
    schedule: dict[str, bool],
    default_device: Callable[[Any], None],
) -> None:
    pipe = models.small(4, MixedBlock)
    expected = run(models.resident(pipe, device), device)
    default_device(device if place == "accelerator" else place)
    report = enable(pipe, mode, device, pin_memory=pin)
    assert report.device == str(device)
    for _ in range(2):
        assert torch.equal(run(pipe, device), expected)
    assert not models.on_device(pipe.transformer.blocks)
    pipe.disable_offload()
    assert {t.device.type for _, t in models.tensors(pipe)} == {"cpu"}
    assert torch.equal(run(pipe.to(device), device), expected)


# --- inference mode, grad mode, autocast ------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("used_inside", [False, True])
@pytest.mark.parametrize("built_inside", [False, True])
def test_enabled_inside_inference_mode(
    built_inside: bool, used_inside: bool, mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    def make() -> Any:
        with torch.inference_mode(built_inside):
            return models.small(4, CountingBlock)

    plain = models.small(4, CountingBlock).to(device)
    pipe = make()
    with torch.inference_mode():
        enable(pipe, mode, device)
    for _ in range(3):
        with torch.inference_mode(used_inside or built_inside):
            assert torch.equal(run(pipe, device), run(plain, device))
    with torch.inference_mode():
        pipe.disable_offload()
    assert not models.on_device(pipe)
    with torch.inference_mode(built_inside):  # torch moves such weights nowhere else
        assert torch.equal(run(pipe.to(device), device), run(plain, device))


@modes
def test_memory_taken_inside_inference_mode_serves_outside(
    mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    """Slots that are made while the user is in inference mode: a unit that has grown, a component that comes in."""
    pipe = models.small(4)
    plain = models.resident(pipe, device)
    enable(pipe, mode, device)
    for one in (pipe, plain):
        block = one.transformer.blocks[1]
        place = block.up.weight.device
        block.register_buffer("large", torch.ones(1 << 14, device=place))
    x = models.sample().to(device)
    for inside in (True, False, True, False):
        for _ in range(2):
            with torch.inference_mode(inside):
                assert torch.equal(pipe.transformer(x), plain.transformer(x))
    assert torch.equal(run(pipe, device), run(plain, device))


def contexts(device: torch.device) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    return {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "grad": torch.enable_grad,
        "autocast": lambda: torch.autocast(device.type, dtype=torch.bfloat16),
        "uncached": lambda: torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False),
    }


CONTEXTS = ("no_grad", "inference", "grad", "autocast", "uncached")


def call(pipe: Any, device: torch.device, context: str, seed: int) -> torch.Tensor:
    with contexts(device)[context]():
        return pipe(models.sample(seed).to(device), steps=3).detach().cpu()


@modes
def test_modes_may_alternate_between_calls(mode: str, device: torch.device, schedule: dict[str, bool]) -> None:
    pipe = models.small(4)
    assert all(p.requires_grad for p in pipe.parameters())  # as freshly loaded; autocast caches only these
    plain = models.resident(pipe, device)
    enable(pipe, mode, device)
    order = [*CONTEXTS, *(b for a in itertools.permutations(CONTEXTS, 2) for b in a)]
    for number, context in enumerate(order):
        expected = call(plain, device, context, number)
        assert torch.equal(call(pipe, device, context, number), expected), (number, context)


@modes
def test_autocast_around_several_calls_casts_every_block_anew(
    mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    """Autocast remembers casts by tensor; with slots in turns it would give one block another one's weights."""
    pipe = models.small(5)
    plain = models.resident(pipe, device)
    enable(pipe, mode, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        for number in range(3):
            expected = plain(models.sample(number).to(device)).detach()
            assert torch.equal(pipe(models.sample(number).to(device)).detach(), expected)
    assert not torch.equal(expected.cpu(), run(plain, device, models.sample(2)))  # autocast did something


@modes
def test_autocast_keeps_no_casts_of_what_has_left(mode: str, device: torch.device, memory: Any) -> None:
    """Its cache lives as long as the outermost context; the casts in it would be a second copy of all weights."""
    pipe = seeded(lambda: models.SmallPipeline(Denoiser([Block(300) for _ in range(6)])))
    enable(pipe, mode, device)
    x = models.sample().to(device)
    pipe(x)
    streamed = {c.path: c.streamed_bytes for c in pipe.offload_report().components}["transformer"]
    one, base = streamed // 6, memory.allocated()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        for _ in range(2):
            pipe(x)
            assert memory.allocated() - base < one
    assert memory.allocated() == base


@modes
def test_autocast_sees_weights_that_were_changed(mode: str, device: torch.device) -> None:
    pipe = models.small(3)
    plain = models.resident(pipe, device)
    enable(pipe, mode, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        before = pipe(models.sample().to(device)).detach()
        torch.clear_autocast_cache()
        with torch.no_grad():
            for one in (plain, pipe):
                for block in one.transformer.blocks:
                    block.up.weight.mul_(1.5)
                    block.up.weight.add_(0.01)
        result = pipe(models.sample().to(device)).detach()
        assert torch.equal(result, plain(models.sample().to(device)).detach())
        assert not torch.equal(result, before)


@modes
def test_grad_mode_alternates_within_a_call(mode: str, device: torch.device, schedule: dict[str, bool]) -> None:
    pipe = models.small(4)
    plain = models.resident(pipe, device)
    enable(pipe, mode, device)

    def passes(one: Any) -> torch.Tensor:
        x = models.sample().to(device)
        for context in ("grad", "no_grad", "autocast", "no_grad", "grad", "uncached", "grad"):
            with contexts(device)[context]():
                x = one.transformer(x.detach().clone()).detach().float()
        with torch.inference_mode():
            return one.transformer(x).cpu()

    for _ in range(2):
        assert torch.equal(passes(pipe), passes(plain))


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads change places as often as the interpreter lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(actions: list[Callable[[], None]]) -> None:
    """Run all of `actions` at once; whatever one of them raises is raised here."""
    start, errors = threading.Barrier(len(actions)), []

    def work(action: Callable[[], None]) -> None:
        try:
            start.wait(60)
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "the threads wait for one another"
    if errors:
        raise errors[0]


def experts() -> ExpertsPipeline:
    return seeded(lambda: ExpertsPipeline(*(Denoiser(map(Block, models.unequal(n))) for n in (4, 3, 2))))


def split() -> models.SplitPipeline:
    return seeded(
        lambda: models.SplitPipeline(models.SplitModel(map(Block, models.unequal(3)), map(Block, models.unequal(4))))
    )


THREADED: dict[str, tuple[Callable[[], Any], str]] = {
    "blocks, layer": (lambda: models.small(4), "layer"),
    "blocks, module": (lambda: models.small(4), "module"),
    "experts, layer": (experts, "layer"),
    "experts, module": (experts, "module"),
    "split, module": (split, "module"),
}


@pytest.mark.parametrize(("make", "mode"), THREADED.values(), ids=THREADED)
def test_two_threads_on_one_pipeline(
    make: Callable[[], Any], mode: str, device: torch.device, schedule: dict[str, bool], frequent_switches: None
) -> None:
    pipe = make()
    plain = models.resident(pipe, device)
    expected = [run(plain, device, models.sample(number)) for number in range(2)]
    enable(pipe, mode, device)
    results: list[list[torch.Tensor]] = [[], []]

    def calls(number: int) -> None:
        for _ in range(4):
            results[number].append(run(pipe, device, models.sample(number)))

    in_threads([lambda: calls(0), lambda: calls(1)])
    for number in range(2):
        assert all(torch.equal(result, expected[number]) for result in results[number])
    assert torch.equal(run(pipe, device, models.sample(0)), expected[0])
    assert not any(".blocks." in name or "layers" in name for name in models.on_device(pipe) if "encoder" not in name)


@modes
def test_two_threads_on_two_pipelines_of_the_same_components(
    mode: str, device: torch.device, schedule: dict[str, bool], frequent_switches: None
) -> None:
    pipe = models.small(4)
    other = models.SmallPipeline(pipe.transformer, pipe.text_encoder)
    other.vae = pipe.vae
    expected = [run(models.resident(pipe, device), device, models.sample(number)) for number in range(2)]
    enable(pipe, mode, device)
    results: list[list[torch.Tensor]] = [[], []]

    def calls(number: int) -> None:
        for _ in range(4):
            results[number].append(run((pipe, other)[number], device, models.sample(number)))

    in_threads([lambda: calls(0), lambda: calls(1)])
    for number in range(2):
        assert all(torch.equal(result, expected[number]) for result in results[number])


class Meeting:
    """Brings a first thread to a stand inside a module until a second one computes there, waits, or is through."""

    def __init__(self, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inside, self.met = threading.Event(), threading.Event()
        self.computed: list[str] = []
        offload = offloads_on(pipe)[0]
        for condition in (offload.streamer._lock, offload._call_ended):
            monkeypatch.setattr(condition, "wait", self._noticed(condition.wait))

    def _noticed(self, wait: Callable[[float | None], bool]) -> Callable[..., bool]:
        def waiting(timeout: float | None = None) -> bool:
            self.met.set()
            return wait(timeout)

        return waiting

    def pause_in(self, module: torch.nn.Module, *, until_computing: bool = True) -> None:
        def pause(*_: Any) -> None:
            self.computed.append(threading.current_thread().name)
            if threading.current_thread().name == "second":
                if until_computing:
                    self.met.set()
            elif not self.inside.is_set():
                self.inside.set()
                assert self.met.wait(20)

        module.register_forward_pre_hook(pause)

    def hold(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both; the second starts when the first one is where it pauses."""

        def run_first() -> None:
            threading.current_thread().name = "first"
            first()

        def run_second() -> None:
            threading.current_thread().name = "second"
            assert self.inside.wait(60)
            try:
                second()
            finally:
                self.met.set()

        in_threads([run_first, run_second])


@modes
def test_one_thread_waits_while_another_computes(
    mode: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held inside a block, the first thread keeps the second one out of the same component until it is done."""
    pipe = models.small(3)
    plain = models.resident(pipe, device)
    expected = [run(plain, device, models.sample(number), steps=1) for number in range(2)]
    enable(pipe, mode, device)
    meeting = Meeting(pipe, monkeypatch)
    meeting.pause_in(pipe.transformer.blocks[1].norm)
    results: dict[int, torch.Tensor] = {}
    at_release: list[list[str]] = []

    def first() -> None:
        handle = pipe.transformer.norm_out.register_forward_pre_hook(
            lambda *_: at_release.append(list(meeting.computed))
        )
        results[0] = run(pipe, device, models.sample(0), steps=1)
        handle.remove()

    def second() -> None:
        results[1] = run(pipe, device, models.sample(1), steps=1)

    meeting.hold(first, second)
    assert at_release[0] == ["first"]  # the second thread had not come to that block when the first left it
    assert meeting.computed == ["first", "second"]
    assert [torch.equal(results[number], expected[number]) for number in range(2)] == [True, True]


def test_weights_stay_where_one_thread_uses_them_when_another_ends_a_call(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`reason` of a split model runs no component's forward: its shell must not go while it computes with it."""
    pipe = split()
    plain = models.resident(pipe, device)
    expected = [run(plain, device, models.sample(number)) for number in range(2)]
    enable(pipe, "module", device)
    meeting = Meeting(pipe, monkeypatch)
    meeting.pause_in(pipe.transformer.embed, until_computing=False)
    results: dict[int, torch.Tensor] = {}

    def call(number: int) -> None:
        results[number] = run(pipe, device, models.sample(number))

    meeting.hold(lambda: call(0), lambda: call(1))
    assert [torch.equal(results[number], expected[number]) for number in range(2)] == [True, True]


# --- other devices ----------------------------------------------------------------------------------------------------


@modes
@pytest.mark.simulated_only
def test_where_memory_is_shared_with_the_host_everything_is_put_on_the_device(
    mode: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A host copy would only double the weights there: nothing is offloaded, and a notice says so."""
    module = torch.get_device_module(device)
    monkeypatch.setattr(module, "get_device_properties", lambda _: SimpleNamespace(is_integrated=True), raising=False)
    pipe = models.small(3)
    expected = run(models.resident(pipe, device), device)
    monkeypatch.setattr("omni_offload.mixin._told", set())
    with caplog.at_level("WARNING"):
        report = enable(pipe, mode, device)
    assert f"{device} shares its memory with the host" in caplog.text
    assert any("shares its memory" in notice for notice in report.notices)
    assert models.on_device(pipe) == {name for name, _ in models.tensors(pipe)}
    for _ in range(2):
        assert torch.equal(run(pipe, device), expected)
    assert pipe.offload_report().copies == 0
    pipe.disable_offload()
    assert not models.on_device(pipe)
    assert type(pipe.transformer) is Denoiser
    assert torch.equal(run(pipe.to(device), device), expected)


@modes
def test_the_current_accelerator_is_taken_where_none_is_named(mode: str, device: torch.device) -> None:
    pipe = models.small(3)
    expected = run(models.resident(pipe, device), device)
    named = {"layer": pipe.enable_layerwise_offload, "module": pipe.enable_model_cpu_offload}[mode]()
    assert named.device == str(device)
    assert torch.equal(run(pipe, device), expected)


@modes
@pytest.mark.parametrize("name", ["index", "text", "type", "device", "gpu_id"])
def test_a_device_may_be_named_in_any_form(name: str, mode: str, device: torch.device) -> None:
    if name == "gpu_id" and mode == "layer":
        pytest.skip("only enable_model_cpu_offload takes it")
    forms = {"index": 0, "text": str(device), "type": device.type, "device": device, "gpu_id": None}
    pipe = models.small(3)
    if name == "gpu_id":
        assert pipe.enable_model_cpu_offload(gpu_id=0).device == str(device)
    else:
        assert enable(pipe, mode, forms[name]).device == str(device)


SECOND_INDEX = """
import torch, simdev, models
torch.set_num_threads(1)
simdev.load()
first, second = (torch.device(simdev.NAME, index) for index in range(2))
for mode in models.MODES:
    expected = models.run(models.small(4), torch.device("cpu"))
    for named in (second, 1, f"{simdev.NAME}:1"):
        for default in (None, first, "cpu"):
            torch.set_default_device(default)
            pipe = models.small(4)
            report = models.enable(pipe, mode, named)
            assert report.device == str(second), report.device
            for _ in range(2):
                assert torch.equal(models.run(pipe, second), expected)
            assert report.copies < pipe.offload_report().copies
            pipe.disable_offload()
            torch.set_default_device(None)
            assert simdev.counters()["peak:0"] == 0, (mode, named, default)
    # Two pipelines at once, each on its own device.
    pipes = {device: models.small(4) for device in (second, first)}
    for device, pipe in pipes.items():
        models.enable(pipe, mode, device)
    for _ in range(2):
        for device, pipe in pipes.items():
            assert torch.equal(models.run(pipe, device), expected)
    for pipe in pipes.values():
        pipe.disable_offload()
    torch.accelerator.reset_peak_memory_stats(first)
    torch.accelerator.set_device_index(1)  # the current device's index, unnamed
    pipe = models.small(4)
    unnamed = pipe.enable_layerwise_offload() if mode == "layer" else pipe.enable_model_cpu_offload()
    assert unnamed.device == str(second)
    assert torch.equal(models.run(pipe, second), expected)
    pipe.disable_offload()
    torch.accelerator.set_device_index(0)
    assert simdev.counters()["peak:0"] == 0
    try:
        models.enable(models.small(3), mode, f"{simdev.NAME}:2")
    except ValueError as error:
        assert "device='simgpu:2'" in str(error) and "2 of them" in str(error), error
    else:
        raise SystemExit("an index that does not exist was taken")
assert simdev.races() == []
print("index 1 is fine")
"""


@pytest.mark.simulated_only
def test_device_index_one() -> None:
    here = Path(__file__).resolve().parent
    paths = [str(here), str(here.parent), str(here.parent.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "SIM_DEVICES": "2", "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    child = subprocess.run([sys.executable, "-c", SECOND_INDEX], env=env, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0 and "index 1 is fine" in child.stdout, child.stdout + child.stderr
