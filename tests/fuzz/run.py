"""`make fuzz MINUTES=n`: any bytes to every parser. What is no answer and no refusal of the parser's own is a crash.

Each target runs in a process of its own, which a native crash may end. The last line is one JSON object: inputs and
seconds by target, the engine, and crashes, whose inputs lie in `runs/fuzz`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import mmap
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.fuzz import targets, targets_files
from tests.fuzz.mutation import Mutator

ROOT = Path(__file__).parents[2]
FOUND = ROOT / "runs" / "fuzz"
TARGETS = {**targets.TARGETS, **targets_files.TARGETS}
INPUT_S = 10.0  # of processor time for one input
MEMORY_BYTES = 6 << 30  # of addresses more than at the start
SILENCE_S = 180.0  # without one more input, on a busy machine
_WINDOW = 1 << 20
_RUNS = re.compile(rb"Done (\d+) runs|#(\d+)\s")


def _settle() -> None:
    """Let what a target writes to read it again lie in memory, and keep what the product logs to itself."""
    logging.disable(logging.CRITICAL)
    if Path("/dev/shm").is_dir():  # noqa: S108  # folders of their own are made in it
        tempfile.tempdir = "/dev/shm"  # noqa: S108


def fuzz(name: str, seconds: float, seed: int, window: mmap.mmap | None = None) -> dict[str, Any]:
    """Give inputs to a target for so long; return their number and the crashes."""
    target = TARGETS[name]()
    mutator, crashes, n = Mutator(target.corpus, seed, target.most), {}, 0
    for data in target.corpus:
        _try(target, data[: target.most], crashes)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(32):
            data = mutator.next()
            if window is not None:
                window[:16] = n.to_bytes(8, "little") + len(data).to_bytes(8, "little")
                window[16 : 16 + len(data)] = data
            n += 1
            if _try(target, data, crashes):
                mutator.accepted(data)
    return {"inputs": n, "seconds": round(seconds, 1), "crashes": list(crashes.values())}


def _try(target: targets.Target, data: bytes, crashes: dict[str, dict[str, str]]) -> bool:
    """Return whether the target accepts an input; note a crash, once for each place in the code."""
    began = time.process_time()
    try:
        target.parse(data)
        accepted, error = True, None
    except target.refusals:
        accepted, error = False, None
    except Exception as crash:
        accepted, error = False, crash
    if error is None and time.process_time() - began <= INPUT_S:
        return accepted
    place = "slow"
    if error is not None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}"
    if place not in crashes:
        crashes[place] = {"what": place, "error": str(error)[:300], "input": keep(data)}
    return False


def keep(data: bytes) -> str:
    """Keep an input that crashed; return the name of its file."""
    FOUND.mkdir(parents=True, exist_ok=True)
    path = FOUND / hashlib.sha256(data).hexdigest()[:16]
    path.write_bytes(data)
    return path.name


def _child(name: str, seconds: float, seed: int, window_path: str) -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    _settle()
    target = TARGETS[name]  # its libraries are loaded before the limit is set
    target()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, limit))
    with open(window_path, "r+b") as file, mmap.mmap(file.fileno(), _WINDOW) as window:
        print(json.dumps(fuzz(name, seconds, seed, window)))  # noqa: T201


def _watched(name: str, seconds: float, seed: int) -> dict[str, Any]:
    """Run a target in a process of its own."""
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(_WINDOW)
        command = [sys.executable, "-m", "tests.fuzz.run", "--child", name, "--seconds", str(seconds)]
        process = subprocess.Popen(
            [*command, "--seed", str(seed), "--window", file.name], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err, is_silent = _wait(process, Path(file.name))
        if process.returncode == 0:
            return dict(json.loads(out.splitlines()[-1]))
        content = Path(file.name).read_bytes()
    n, size = int.from_bytes(content[:8], "little"), int.from_bytes(content[8:16], "little")
    what = "no answer" if is_silent else f"exit {process.returncode}"
    crash = {"what": what, "error": err.decode(errors="replace")[-600:], "input": keep(content[16 : 16 + size])}
    return {"inputs": n, "seconds": seconds, "crashes": [crash]}


def _wait(process: subprocess.Popen[bytes], window: Path) -> tuple[bytes, bytes, bool]:
    seen, since = b"", time.monotonic()
    while True:
        try:
            return *process.communicate(timeout=5), False
        except subprocess.TimeoutExpired:
            with window.open("rb") as file:
                now = file.read(8)
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > SILENCE_S:
                process.kill()
                return *process.communicate(), True


def _guided(name: str, seconds: float, seed: int) -> dict[str, Any]:
    """Run a target under atheris, which looks for inputs that reach new code; it stops at its first crash."""
    with tempfile.TemporaryDirectory() as corpus:
        code = f"from tests.fuzz.run import guided; guided({name!r}, {max(1, int(seconds))}, {seed}, {corpus!r})"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        counts = [int(a or b) for a, b in _RUNS.findall(run.stderr)]
        crashes = []
        if run.returncode:
            found = sorted(Path(corpus).glob("crash-*")) + sorted(Path(corpus).glob("timeout-*"))
            data = found[0].read_bytes() if found else b""
            error = run.stderr.decode(errors="replace")[-1500:]
            crashes = [{"what": f"exit {run.returncode}", "error": error, "input": keep(data)}]
    return {"inputs": max(counts, default=0), "seconds": seconds, "crashes": crashes}


def guided(name: str, seconds: int, seed: int, folder: str) -> None:
    """Fuzz one target in this process under atheris, until it exits."""
    import atheris

    _settle()
    with atheris.instrument_imports(include=["he_processors", "dp_components", "nvflare_plugins"]):
        target = TARGETS[name]()
    for number, data in enumerate(target.corpus):
        (Path(folder) / str(number)).write_bytes(data[: target.most])

    def one(data: bytes) -> None:
        try:
            target.parse(data)
        except target.refusals:
            return

    options = [f"-max_total_time={seconds}", f"-seed={seed + 1}", f"-max_len={target.most}", "-rss_limit_mb=6000"]
    atheris.Setup(["fuzz", *options, "-timeout=60", f"-artifact_prefix={folder}/", folder], one)
    atheris.Fuzz()


def main() -> int:
    """Share the time among the targets and say what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--target", default="")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--engine", choices=["auto", "ours", "atheris"], default="auto")
    for option, kind in (("--child", str), ("--window", str), ("--seconds", float)):
        parser.add_argument(option, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(options.child, options.seconds, options.seed, options.window)
        return 0
    chosen = [name for name in TARGETS if not options.target or options.target in (name, name.replace(" ", "-"))]
    if not chosen:
        parser.error(f"no such target; there are {', '.join(name.replace(' ', '-') for name in TARGETS)}")
    engine = options.engine
    if engine == "auto":
        engine = "ours" if find_spec("atheris") is None else "atheris"
    found, seconds = {}, 60 * options.minutes / len(chosen)
    for number, name in enumerate(chosen):
        run = _guided if engine == "atheris" else _watched
        found[name] = run(name, seconds, options.seed + number)
        print(f"{name}: {found[name]['inputs']} inputs, {len(found[name]['crashes'])} crashes", flush=True)  # noqa: T201
    crashes = [{"target": name, **crash} for name, one in found.items() for crash in one["crashes"]]
    total = sum(one["inputs"] for one in found.values())
    by_target = {name: {"inputs": one["inputs"], "seconds": one["seconds"]} for name, one in found.items()}
    report = {"engine": engine, "seed": options.seed, "inputs": total, "targets": by_target, "crashes": crashes}
    print(json.dumps(report))  # noqa: T201
    return 1 if crashes else 0


if __name__ == "__main__":
    sys.exit(main())
