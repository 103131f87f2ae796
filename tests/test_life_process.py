"""The process around offloaded pipelines: how it ends, what a fork does, threads. Each in an interpreter of its own.

On the CPU, where a thread copies, and on the simulated device, where work is deferred for as long as is legal.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_accelerator_suite import child_environment, require_simulated_device

HERE = Path(__file__).resolve().parent
GIVE_UP = 60  # seconds until an interpreter that hangs is ended; none needs more than a few

BEGIN = """
import os, signal, sys, threading
import torch
torch.set_num_threads(1)
torch.set_grad_enabled(False)
import models
from omni_offload import OffloadStateError
from omni_offload.engine import transfer

if sys.argv[1] == "simulated":
    import simdev
    simdev.load()
    simdev.set(lazy_copy=True, lazy_compute=True)
    device = torch.device(simdev.NAME, 0)
else:
    device = torch.device("cpu")

def build():
    return models.seeded(lambda: models.SmallPipeline(models.Denoiser(models.Block(40) for _ in range(5))))

def run(pipe):
    return models.run(pipe, device)

expected = run(build().to(device))
pipes = {mode: build() for mode in sys.argv[2].split("+")}
for mode, pipe in pipes.items():
    models.enable(pipe, mode, device)
x = models.sample().to(device)

def in_a_pass(action):
    # While a block computes, with the copy of the next one under way.
    pipe.transformer.blocks[1].norm.register_forward_hook(lambda *_: action())

def leave_copies_under_way():
    # Outside of a pipeline call nobody waits for what was fetched ahead.
    for pipe in pipes.values():
        pipe.transformer(x)
"""

on_each = pytest.mark.parametrize("where", ["cpu", "simulated"])
modes = pytest.mark.parametrize("mode", ["layer", "module"])
BOTH = "layer+module"


def interpreter(script: str, where: str, mode: str) -> subprocess.CompletedProcess[str]:
    """Run `script` behind `BEGIN` in a fresh interpreter."""
    if where == "simulated":
        require_simulated_device()
    paths = [str(HERE.parent), str(HERE), str(HERE / "accelerator"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", BEGIN + script, where, mode],
        env=child_environment() | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=GIVE_UP,
    )


def printed(script: str, where: str, mode: str, code: int = 0) -> list[str]:
    """What `script` prints. It ends with exit code `code` and writes nothing to stderr."""
    done = interpreter(script, where, mode)
    assert (done.returncode, done.stderr) == (code, ""), done.stdout + done.stderr
    return done.stdout.splitlines()


# --- the end of the interpreter -------------------------------------------------------------------------------------

ENDS: dict[str, tuple[str, str, int]] = {
    "right behind enable": ("", BOTH, 0),
    "behind a call": ("[run(pipe) for pipe in pipes.values()]", BOTH, 0),
    "with copies under way": ("leave_copies_under_way(); sys.exit(5)", BOTH, 5),
    "sys.exit in a layer pass": ("in_a_pass(lambda: sys.exit(3)); run(pipe)", "layer", 3),
    "sys.exit in a module pass": ("in_a_pass(lambda: sys.exit(3)); run(pipe)", "module", 3),
}


@on_each
@pytest.mark.parametrize("end", ENDS)
def test_the_interpreter_ends_quietly(end: str, where: str) -> None:
    script, mode, code = ENDS[end]
    assert printed(script, where, mode, code) == []


# The first copies are quick, those fetched ahead last until the interpreter has begun to shut down.
SLOW_COPIES = """
ending = threading.Event()
threading._register_atexit(ending.set)
quick = [1] if mode == "layer" else [1, 1]  # the block, and the component's shell
copy = transfer._copy

def slow_copy(target, source):
    if quick:
        quick.pop()
    else:
        ending.wait()
    copy(target, source)

transfer._copy = slow_copy
pipe.transformer.blocks[0](x)
print(quick, pipe.offload_report().copies > 1)
"""


@modes
def test_the_interpreter_ends_while_a_thread_copies(mode: str) -> None:
    assert printed(SLOW_COPIES, "cpu", mode) == ["[] True"]


RAISED: dict[str, tuple[str, int, str]] = {
    "an error": ("in_a_pass(lambda: 1 / 0)", 1, "ZeroDivisionError: division by zero"),
    "an interrupt": ("in_a_pass(lambda: signal.raise_signal(signal.SIGINT))", -2, "KeyboardInterrupt"),
}


@on_each
@modes
@pytest.mark.parametrize("what", RAISED)
def test_what_is_raised_in_a_pass_is_all_that_is_said(what: str, mode: str, where: str) -> None:
    script, code, last_line = RAISED[what]
    done = interpreter(f"{script}\nrun(pipe)", where, mode)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("Traceback (most recent call last)") and done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1] == last_line


# --- threads --------------------------------------------------------------------------------------------------------

THREADS = """
def calls(pipe):
    if {outlive}:
        threading.main_thread().join()
    right = all(torch.equal(run(pipe), expected) for _ in range(3))
    os.write(1, f"{{right}}\\n".encode())  # in one piece: several threads write

sys.setswitchinterval(1e-6)  # threads change places as often as they may
threads = [threading.Thread(target=calls, args=(pipe,)) for pipe in pipes.values() for _ in range(2)]
for thread in threads:
    thread.start()
if not {outlive}:
    for thread in threads:
        thread.join()
"""


@on_each
@pytest.mark.parametrize("outlive", [False, True], ids=["joined", "behind the main thread's end"])
def test_two_threads_on_each_pipeline(outlive: bool, where: str) -> None:
    """A server's threads, say, go on when the script has ended: with a resident pipeline they do."""
    assert printed(THREADS.format(outlive=outlive), where, BOTH) == ["True"] * 4


@on_each
def test_a_daemon_thread_in_a_pass_does_not_hold_up_the_end(where: str) -> None:
    script = """
inside, never = threading.Event(), threading.Event()
in_a_pass(lambda: (inside.set(), never.wait()))
threading.Thread(target=run, args=(pipe,), daemon=True).start()
inside.wait()
"""
    assert printed(script, where, "layer") == []


# --- fork -----------------------------------------------------------------------------------------------------------

FORK = """
def in_a_child(action):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)  # one that hangs is ended
        action()
        sys.stdout.flush()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def still_right():
    return all(torch.equal(run(pipe), expected) for pipe in pipes.values())

print(still_right())
leave_copies_under_way()
"""


@on_each
def test_a_child_that_leaves_the_pipelines_alone(where: str) -> None:
    """Workers of a data loader, say. One that ends as programs do runs finalizers: they leave the parent's things."""
    script = "print(in_a_child(lambda: torch.ones(3).sum()), in_a_child(lambda: sys.exit(4)), still_right())"
    assert printed(FORK + script, where, BOTH) == ["True", "0 4 True"]


@on_each
def test_what_a_child_writes_to_weights_is_not_seen_by_the_parent(where: str) -> None:
    script = """
def zero():
    for pipe in pipes.values():
        for parameter in pipe.transformer.blocks.parameters():
            parameter.detach().zero_()

print(in_a_child(zero), still_right())
"""
    assert printed(FORK + script, where, BOTH) == ["True", "0 True"]


CALLS = ["run(pipe)", "pipe.transformer(x)", "pipe.transformer.blocks[0](x)", "pipe.offload_refresh()"]


@on_each
def test_a_child_that_uses_a_pipeline_is_told(where: str) -> None:
    """The copy thread and the device's state do not survive a fork: refused by name, and no hang."""
    script = f"""
def use(mode, pipe, what):
    try:
        eval(what)
        print(mode, what, "worked")
    except OffloadStateError as refusal:
        print(mode, what, "refused" if "fork" in str(refusal) else refusal)

for mode, pipe in pipes.items():
    for what in {CALLS}:
        print(in_a_child(lambda: use(mode, pipe, what)))
print(still_right())
"""
    refused = [line for mode in BOTH.split("+") for what in CALLS for line in (f"{mode} {what} refused", "0")]
    assert printed(FORK + script, where, BOTH) == ["True", *refused, "True"]
