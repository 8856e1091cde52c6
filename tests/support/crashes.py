"""Ends a process at each of its writes, in two ways: half way through it, and by a loss of power before it.

``python -m tests.support.crashes`` is started with the library of ``crashing_system.c`` loaded first. For each call
that changes a file it forks, lets the action run into that call, and asks the judge about the folder that is left.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).with_name("crashing_system.c")
ROOT = Path(__file__).resolve().parents[2]
WAYS = ("writes half", "loses power")

Say = Callable[[str], None]


def crash_everywhere(module: str, action: str, judge: str, base: Path, work: Path, every: int = 1) -> dict[str, int]:
    """Let an action crash at each of its calls that change a file, over a copy of a folder each time.

    Args:
        module: where both functions are.
        action: name of ``(folder, say)``: does something and says what is over.
        judge: name of ``(folder, said)``: fails if the folder does not hold what was said.
        base: the folder before.
        work: for the library and the copies.
        every: 1 for each call; more for one of so many.

    Returns:
        The number of the calls by way.
    """
    library = work / "crash.so"
    compile_it = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(compile_it, check=True, capture_output=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.support.crashes",
            module,
            action,
            judge,
            str(base),
            str(work),
            str(library),
            str(every),
        ],
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise AssertionError(done.stdout[-3000:] + done.stderr[-6000:])
    return {way: int(number) for way, _, number in (line.partition(": ") for line in done.stdout.splitlines())}


def _main(module: str, action: str, judge: str, base: str, work: str, library: str, every: str) -> None:
    functions = importlib.import_module(module)
    act, judged = getattr(functions, action), getattr(functions, judge)
    arm = ctypes.CDLL(library).crash_arm
    arm.argtypes = (ctypes.c_char_p, ctypes.c_long, ctypes.c_int)
    for way, name in enumerate(WAYS):
        at, is_over = 1 - int(every), False
        while not is_over:
            at += int(every)
            folder = Path(work) / f"{way}-{at}"
            shutil.copytree(base, folder)
            is_over, said = _run(lambda say, folder=folder, at=at, way=way: _armed(arm, act, folder, at, way, say))
            try:
                judged(folder, said)
            except BaseException as wrong:
                raise AssertionError(f"{name} at call {at} after {said}") from wrong
            shutil.rmtree(folder)
        print(f"{name}: {at - 1}")


def _armed(
    arm: Callable[..., None], act: Callable[[Path, Say], None], folder: Path, at: int, way: int, say: Say
) -> None:
    arm(os.fsencode(folder), at, way)
    act(folder, say)


def _run(act: Callable[[Say], None]) -> tuple[bool, list[str]]:
    """Run in a process of its own; return whether it came to its end, and what it said."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            act(lambda text: os.write(writer, text.encode() + b"\n") and None)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as heard:
        said = heard.read().splitlines()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False, said
    if status:
        raise AssertionError(f"the action failed: {status}")
    return True, said


if __name__ == "__main__":
    _main(*sys.argv[1:])
