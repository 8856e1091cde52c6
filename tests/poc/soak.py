"""Jobs of all kinds in a row in one POC, each under a fault that a seed draws: ``make soak HOURS=2 SEED=1 [FROM=K]``.

Kind, fault, site and moment of a job follow from the seed and the job's number alone, so that ``--from K`` goes on at
job K. Every job waits for lost sites where its kind can. What must hold: a job that waits is not lost; another ends
well, or by name, and is submitted again once; what ends well equals the same job in one process without a fault;
ledgers pay for each job once; no process, file handle, memory, disk or temporary file is left behind. The first
violation ends the run and leaves all logs.

Each job adds a line to ``soak.jsonl``; the last line printed is the summary as one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
from cryptography import x509
from nvflare.fuel.flare_api.flare_api import Session

from dp_components.ledger import JobSpending, Ledger
from nvflare_plugins.attempt.job_context import LOST_SITE_FIELDS
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.flare.kept_jobs import NOTE
from nvflare_plugins.flare.kinds import KINDS
from nvflare_plugins.recipes.poc_env import wait_for_sites
from nvflare_plugins.recipes.recipe import write_folder
from nvflare_plugins.site.memory.store import Memory, read_arrays
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.setup import set_up
from poc_workspace.run_poc import ADMIN, DEFAULT_PORT, HERE, SITES, Poc
from tests.conformance.kind_cases import CASES, DATA
from tests.poc.test_lost_sites import started_by
from tests.poc.test_poc import command_lines, job_processes, machine
from tests.support.federation import Parties, succeed

NONE, KILL_JOB, KILL_FLARE, KILL_MACHINE = "none", "kill_job", "kill_flare", "kill_machine"
KILL_SERVER_JOB, CUT, STOP, FULL_DISK = "kill_server_job", "cut", "stop", "full_disk"
FAULTS = {NONE: 1, KILL_JOB: 4, KILL_FLARE: 3, KILL_MACHINE: 3, KILL_SERVER_JOB: 2, CUT: 4, STOP: 2, FULL_DISK: 3}
"""How often each befalls a job, in parts."""
WAITING = sorted(
    name
    for name, kind in KINDS.items()
    if set(LOST_SITE_FIELDS) <= set(kind.job.__dataclass_fields__)
    and name != "vertical_inference"  # but where it stays
)
LONGER: dict[str, dict[str, Any]] = {
    "bagging": {"num_rounds": 20},
    "dpboost": {"n_trees": 24, "epsilon": 0.25},
    "federboost_vertical": {"num_rounds": 15, "epsilon": 0.25},
    "horizontal": {"num_rounds": 60},
    "private_trees": {"epsilon": 0.25, "delta": 1e-9, "components": {"n_trees": 20}},
    "selection": {"num_rounds": 15},
    "tuning": {"num_rounds": 25},
    "vertical": {"num_rounds": 20},
    "vertical_tuning": {"num_rounds": 8},
}
"""Fields beside those of the suite of all kinds: more exchanges, at prices of which a budget pays a hundred jobs."""
BUDGET = {"epsilon": 64.0, "delta": 1e-5, "own_persons": True}  # of all kinds' invented persons, in one memory
SURVIVED_S = 60.0  # a shorter silence ends no job, which flare/timeouts.py promises
START_S, JOB_S, LEFTOVERS_S, BACK_S = 900.0, 1200.0, 300.0, 600.0  # what hangs, on the busiest of machines
DISK_BYTES = 96 << 20
COMPLETED, BY_NAME = "FINISHED:COMPLETED", "by name, then completed"


class Violation(AssertionError):
    """Something that must hold does not."""


# -- what befalls a job -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """One job of the run.

    Attributes:
        moment: the share of the job's evidence at ``site`` that is written when the fault comes; 0 is the start of its
            process, before it takes part.
        lasts_s: until a machine is started again, a line mended, a disk freed.
    """

    index: int
    kind: str
    fault: str
    site: str
    moment: float
    lasts_s: float

    @property
    def waits(self) -> bool:
        return self.kind in WAITING

    @property
    def may_end(self) -> bool:
        """Whether the job may end without a result, by name."""
        if self.fault == FULL_DISK:
            return not self.waits
        if self.fault == KILL_SERVER_JOB:  # DPBoost's server draws noise, and never again for what it has answered
            return not self.waits or self.kind == "dpboost" or self.moment == 0
        is_survived = self.fault == NONE or (self.fault in (CUT, STOP) and self.lasts_s < SURVIVED_S)
        return not is_survived and (not self.waits or self.moment == 0)


def drawn(seed: int, index: int) -> Draw:
    """Return what befalls a job; each dozen of jobs has every kind once."""
    of_dozen = random.Random(f"{seed} {index // len(KINDS)}")
    kind = of_dozen.sample(sorted(KINDS), len(KINDS))[index % len(KINDS)]
    own = random.Random(f"{seed} job {index}")
    fault = own.choices(list(FAULTS), list(FAULTS.values()))[0]
    site, moment = own.choice(SITES), own.choice((0.0, *(own.random() for _ in range(7))))
    lasts_s = own.uniform(2, 20)
    if fault == CUT and own.random() < 0.2:
        lasts_s = own.uniform(100, 120)
    return Draw(index, kind, fault, site, round(moment, 3), round(lasts_s, 1))


# -- the jobs, and what they must come to -----------------------------------------------------------------------------


def give(kind: str, folder: Path) -> Parties:
    """Make a kind's sites with data and policies below a folder; the data set is called as the kind."""
    parties = CASES[kind].give(folder)
    for site in parties.sites:
        policy = parties.policy_of(site)
        entry = policy["data_sets"].pop(DATA)
        entry["path"] = str(parties.workspace(site) / entry["path"])
        if kind in ("dpboost", "federboost_vertical"):  # whom one budget pays for is in no other data set
            rows = pd.read_parquet(entry["path"])
            rows.assign(**{entry["id"]: kind + rows[entry["id"]].astype(str)}).to_parquet(entry["path"])
        if "privacy" in entry:
            entry["privacy"] = {**BUDGET, **({"pure_epsilon": 64.0} if "pure_epsilon" in entry["privacy"] else {})}
        caps = dict.fromkeys(("max_sums_per_row", "max_split_bits_per_row", "predictions_per_row"), 10**6)
        policy["vertical"] = {**policy.get("vertical", {}), **caps}
        path = parties.workspace(site) / "local" / "veilboost.json"
        path.write_text(json.dumps({**policy, "data_sets": {kind: entry}}))
    return parties


def fields_of(kind: str) -> dict[str, Any]:
    """Return the fields of a kind's job; it waits for lost sites if it can."""
    text = json.dumps(dict(CASES[kind].fields))
    named = json.loads(text.replace(f'"{DATA}"', f'"{kind}"'))
    return {**named, **LONGER.get(kind, {}), **({"on_lost_site": "wait"} if kind in WAITING else {})}


def plant_secret(policy: SitePolicy) -> None:
    """Give a site the key that it has in every run: it decides which rows are in which fold."""
    policy.registry.mkdir(mode=0o700, parents=True, exist_ok=True)
    Memory(policy.registry, policy.site, None).secret("registry", hashlib.sha256(policy.site.encode()).digest())


def _table(path: Path) -> list[dict[str, str]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(path.open())]


def _n_trees(path: Path) -> int:
    return len(json.loads(path.read_bytes())["learner"]["gradient_booster"]["model"]["trees"])


def _matches(runs: Mapping[str, Path]) -> list[list[int]]:
    places = [read_arrays(run / "alignment.npz")["positions_0"].tolist() for _, run in sorted(runs.items())]
    return sorted(map(list, zip(*places, strict=True)))


def _counts(run: Path) -> list[Any]:
    features = json.loads((run / "profile.json").read_bytes())["features"]
    return [
        [one["name"], [[each["low"], each["high"], each["missing"], each["counts"]] for each in one["bins"]]]
        for one in features
    ]


def _each(read: Callable[[Path], Any], file: str = "") -> Callable[[Mapping[str, Path]], Any]:
    return lambda runs: {site: read(run / file) for site, run in runs.items()}


def _first(read: Callable[[Path], Any], file: str) -> Callable[[Mapping[str, Path]], Any]:
    return lambda runs: read(runs[SITES[0]] / file)


def _private(runs: Mapping[str, Path]) -> int:
    """Noise is drawn anew: all sites must have one model, of so many trees."""
    if len({(run / "model.json").read_bytes() for run in runs.values()}) != 1:
        raise Violation("the sites' models differ")
    return _n_trees(runs[SITES[0]] / "model.json")


def _parts(runs: Mapping[str, Path]) -> list[str]:
    return sorted(
        f"{site}/{path.name}" for site, run in runs.items() for path in run.glob("*.json") if path.name != "run.json"
    )


RESULT: dict[str, Callable[[Mapping[str, Path]], Any]] = {
    "alignment": _matches,
    "bagging": _each(Path.read_bytes, "model.json"),
    "dpboost": _private,
    "federboost_vertical": _parts,
    "horizontal": _each(Path.read_bytes, "model.json"),
    "private_trees": _private,
    "profile": _each(_counts),
    "selection": _each(_table, "selection.csv"),
    "tuning": _each(_table, "tuning.csv"),
    "vertical": _first(Path.read_bytes, "masked_model.json"),
    "vertical_inference": _first(Path.read_bytes, "predictions.csv"),
    "vertical_tuning": _first(_table, "tuning.csv"),
}
"""What of a kind's result is the same in every run of its job: run folders by site -> any value."""


@dataclass(frozen=True)
class Expected:
    """What an undisturbed job in one process left: its result, lines of evidence by site, spending by site."""

    result: Any
    lines: Mapping[str, int]
    spent: Mapping[str, JobSpending]


@cache
def expected(kind: str) -> Expected:
    """Run a kind's job in this process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parties = give(kind, folder)
        policies = {site: SitePolicy.load(parties.workspace(site), site) for site in SITES}
        for policy in policies.values():
            plant_secret(policy)
        job = KINDS[kind].job.from_dict(fields_of(kind))
        server = KINDS[kind].answer_sum(job, len(SITES), folder)
        answer = None if server is None else lambda frame, total: server(frame, total, lambda *spend: None)
        succeed(parties.run(KINDS[kind].run, job, "job", answer))
        runs = {site: parties.run_folder(site) for site in SITES}
        lines = {site: n_lines(run) for site, run in runs.items()}
        return Expected(
            RESULT[kind](runs), lines, {site: one for site in SITES for one in spending(policies[site].ledgers)}
        )


def n_lines(run: Path) -> int:
    """Return how many lines of evidence a run has so far: until it ends the file has another name."""
    found = 0
    for path in (*run.glob("evidence/*.jsonl"), *run.glob("evidence/*.jsonl.partial")):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found += path.read_bytes().count(b"\n")
    return found


def spending(ledgers: Path) -> list[JobSpending]:
    """Return what all ledgers in a folder say of jobs."""
    return [one for path in sorted(ledgers.rglob("*.ledger")) for one in Ledger(path).history().jobs]


# -- the federation ---------------------------------------------------------------------------------------------------


class Line:
    """A site's line to the server, which can be cut: all connections of the site go through this port.

    Where it is cut, and before the server listens, connections are refused. One that is taken and closed at once can
    leave FLARE's connector without another try.
    """

    def __init__(self, port: int) -> None:
        self._to, self._is_cut, self._is_over, self._ends = port, False, False, list[socket.socket]()
        self._listener = _bound(0)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        """End all connections and take no further one."""
        self._is_cut = True
        _shut(self._listener)
        self._listener.close()
        self._listener = _bound(self.port)  # nobody else gets the port
        for end in self._ends:
            _shut(end)

    def mend(self) -> None:
        """Take connections again."""
        self._is_cut = False

    def close(self) -> None:
        """End it for good."""
        self._is_over = True
        self.cut()
        self._listener.close()

    def _serve(self) -> None:
        while not self._is_over:
            try:
                socket.create_connection(("127.0.0.1", self._to), 10).close()
                if not self._is_cut:
                    self._listener.listen()
                    while True:
                        self._join(self._listener.accept()[0])
            except OSError:
                pass  # cut, or the server does not listen
            time.sleep(0.2)

    def _join(self, near: socket.socket) -> None:
        far = socket.create_connection(("127.0.0.1", self._to), 10)
        far.settimeout(None)
        self._ends = [end for end in self._ends if end.fileno() >= 0] + [near, far]
        left = [2]
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=self._pump, args=(source, sink, left), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        _shut(source)
        _shut(sink)
        left[0] -= 1
        if not left[0]:
            source.close()
            sink.close()


def _bound(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    return listener


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


class SoakPoc(Poc):
    """Three sites with the data of all kinds, each behind a line of its own, and with a disk of its own for results."""

    def _prepare(self) -> None:
        self.lines = {site: Line(self.port) for site in SITES}
        text = (HERE / "project.yml").read_text()
        text = text.replace(f"fed_learn_port: {DEFAULT_PORT}", f"fed_learn_port: {self.port}")
        for site, line in self.lines.items():
            text = text.replace(f"name: {site},", f"name: {site}, connect_to: {{host: localhost, port: {line.port}}},")
        (self.folder / "project.yml").write_text(text)
        (self.folder / "tmp").mkdir()
        self._environment["TMPDIR"] = str(self.folder / "tmp")
        self._nvflare("poc", "prepare", "-i", str(self.folder / "project.yml"), "--force")
        parties = [give(kind, self.folder / "data" / kind) for kind in KINDS]
        for site in SITES:
            self.kept(site).mkdir(parents=True)
            if has_disks():
                subprocess.run([*MOUNT, f"size={DISK_BYTES},mode=0700", "tmpfs", self.kept(site)], check=True)
            policy = self._policy(site, [one.policy_of(site) for one in parties])
            (self.kits / site / "local" / "veilboost.json").write_text(json.dumps(policy))
            for inputs in (one.workspace(site) / "inputs" for one in parties):
                if inputs.is_dir():
                    shutil.copytree(inputs, self.kits / site / "inputs", dirs_exist_ok=True)
        set_up(self.folder / "poc")
        for site in SITES:
            plant_secret(self.policy(site))

    def __enter__(self) -> SoakPoc:
        try:
            self._prepare()
            self._nvflare("poc", "start", "--no-wait")
            wait_for_sites((self.kits / site for site in SITES), START_S)
        except BaseException:
            self.stop()
            raise
        self.starts = {site: started_by(self, site) for site in SITES}
        return self

    def _policy(self, site: str, policies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return one policy that allows what those of all kinds do."""
        folders = {"runs": "runs", "registry": "registry", "ledgers": "ledgers", "ledger_heads": "registry/heads"}
        return {
            "data_sets": {name: entry for one in policies for name, entry in one["data_sets"].items()},
            "allowed_profiles": policies[0]["allowed_profiles"],
            "consents": {
                "exact_use_of_budgeted_data": True,  # of data sets without ids, while others have budgets
                **{name: value for one in policies for name, value in one["consents"].items()},
            },
            "vertical": policies[0]["vertical"],
            "min_effective_rows": min(one["min_effective_rows"] for one in policies if "min_effective_rows" in one),
            **{name: str(self.kept(site) / folder) for name, folder in folders.items()},
        }

    def kept(self, site: str) -> Path:
        """Return where a site keeps what outlives a job."""
        return self.folder / "kept" / site

    def policy(self, site: str) -> SitePolicy:
        return SitePolicy.load(self.kits / site, site)

    def run_of(self, site: str, job_id: str) -> Path:
        return self.kept(site) / "runs" / job_id

    def stop(self) -> None:
        """Stop all, those that are stopped already too."""
        _kill(self.pids(), signal.SIGCONT)
        Poc.stop(self)
        for line in getattr(self, "lines", {}).values():
            line.close()

    def give_disks_back(self, is_copied: bool) -> None:
        """Unmount the disks; their files are copied to folders beside them, or gone."""
        for site in SITES:
            if os.path.ismount(self.kept(site)):
                if is_copied:
                    shutil.copytree(self.kept(site), self.kept(site).with_name(f"{site}.left"))
                subprocess.run([UMOUNT, self.kept(site)], check=True)


MOUNT, UMOUNT = ("/bin/mount", "-t", "tmpfs", "-o"), "/bin/umount"


@cache
def has_disks() -> bool:
    """Return whether small disks can be mounted here."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run([*MOUNT, "mode=0700", "tmpfs", folder], capture_output=True, check=False)
        return mounted.returncode == 0 and subprocess.run([UMOUNT, folder], check=False).returncode == 0


# -- faults -----------------------------------------------------------------------------------------------------------


def _parents(poc: Poc, participant: str, which: str = r"(client|server)_train") -> list[int]:
    """Return FLARE's own processes of a participant."""
    lines = command_lines(poc).items()
    return [pid for pid, line in lines if str(poc.kits / participant) in line and re.search(which, line)]


def _kill(pids: Sequence[int], how: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)


def targets_of(poc: SoakPoc, draw: Draw, job_id: str) -> list[int]:
    """Return the processes that a fault is meant for; looking them up takes longer than some jobs."""
    if draw.fault in (KILL_MACHINE, STOP):
        return machine(poc, draw.site)
    if draw.fault == KILL_FLARE:
        return _parents(poc, draw.site)
    return job_processes(poc, job_id, str(poc.kits / ("server" if draw.fault == KILL_SERVER_JOB else draw.site)))


@contextlib.contextmanager
def struck(poc: SoakPoc, draw: Draw, targets: Sequence[int], children: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Let the fault come, and last while the block runs."""
    site = draw.site
    if draw.fault in (KILL_JOB, KILL_SERVER_JOB):
        _kill(targets)
        yield
    elif draw.fault in (KILL_FLARE, KILL_MACHINE):
        start, before = poc.starts[site], _registrations(poc, site)
        _kill(targets)
        yield
        if not _parents(poc, site, r"(sub_start|client_train)"):  # FLARE's own script starts it again, in 5 s
            children.append(start())
        until(lambda: _registrations(poc, site) > before, BACK_S, f"{site} is back")
    elif draw.fault == STOP:
        _kill(targets, signal.SIGSTOP)
        yield
        _kill(targets, signal.SIGCONT)
    elif draw.fault == CUT:
        poc.lines[site].cut()
        yield
        poc.lines[site].mend()
    elif draw.fault == FULL_DISK:
        fill(poc.kept(site), 0)
        yield
        (poc.kept(site) / FILLING).unlink()


FILLING = "filling"


def fill(disk: Path, free: int) -> None:
    """Fill a disk up to so many free bytes."""
    for size in (1 << 20, 1 << 10):
        with (disk / FILLING).open("ab") as file, contextlib.suppress(OSError):
            while shutil.disk_usage(disk).free >= free + size or not free:
                os.write(file.fileno(), bytes(size))


def _registrations(poc: Poc, site: str) -> int:
    return (poc.kits / site / "log.txt").read_text(errors="replace").count("Successfully registered client")


def until(condition: Callable[[], Any], timeout_s: float, what: str) -> None:
    """Wait for a condition. Raises: Violation."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise Violation(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.2)


# -- what must hold ---------------------------------------------------------------------------------------------------


def check_result(kind: str, runs: Mapping[str, Path]) -> None:
    """Compare a result with that of the undisturbed job. Raises: Violation."""
    if RESULT[kind](runs) != expected(kind).result:
        raise Violation(f"the result of {kind} is not that of the undisturbed job")


def check_charges(kind: str, job_id: str, ledgers: Mapping[str, Path], is_whole: bool) -> None:
    """Hold that every site's ledger has the job once, at the price of the undisturbed one or less where it ended."""
    for site, folder in ledgers.items():
        found = [one for one in spending(folder) if one.job_id == job_id]
        price = expected(kind).spent.get(site)
        if price is None and found:
            raise Violation(f"{site} was charged for a job that is free")
        if price is None or (not found and not is_whole):
            continue
        if len(found) != 1:
            raise Violation(f"{site} has {len(found)} entries for one job")
        most = Counter(dict(price.events))
        spent = Counter(dict(found[0].events))
        if spent - most or (is_whole and (spent != most or found[0].state != "closed")):
            raise Violation(
                f"{site} was charged {found[0].n_releases} of {price.n_releases} releases: {found[0].state}"
            )


def check_none_held(ledgers: Mapping[str, Path]) -> None:
    """Hold that no ended job keeps a part of a budget."""
    held = [(site, one.job_id) for site, folder in ledgers.items() for one in spending(folder) if one.state == "open"]
    if held:
        raise Violation(f"jobs that have ended hold a part of a budget: {held}")


NAMED = {
    KILL_SERVER_JOB: "server|aborted by an operator, or by FLARE|EXECUTION_EXCEPTION",
    FULL_DISK: "the disk is full|disk space|not written",
}


LATE = "other sites had finished by then"
"""A job that waits ends, too, where a site is lost after others had finished: their results are whole."""


def check_ended_by_name(draw: Draw, said: Sequence[str]) -> None:
    """Hold that a job's end says what was lost."""
    wanted = NAMED.get(draw.fault, re.escape(draw.site))
    if not any(re.search(wanted, text) for text in said):
        raise Violation(f"the job ended, and no reason names {wanted!r}: {said}")


def check_no_errors(kits: Path, job_id: str) -> None:
    """Hold that no log calls anything of a job an error that nothing befell."""
    of_job = [path.read_text(errors="replace") for path in kits.glob(f"*/{job_id}/error_log.txt")]
    of_parents = [path.read_text(errors="replace") for path in kits.glob("*/error_log.txt")]
    said = [*filter(None, of_job), *(line for text in of_parents for line in text.splitlines() if job_id in line)]
    if said:
        raise Violation(f"nothing befell the job, and logs call it an error: {said}")


# -- growth -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Idle:
    """What is there while no job runs. Attributes: pids: of FLARE's processes by party; numbers: by what and where."""

    pids: Mapping[str, int]
    numbers: Mapping[str, float]


def idle(poc: SoakPoc) -> Idle:
    """Measure it."""
    pids = {name: _parents(poc, name)[0] for name in ("server", *SITES)}
    twice = [name for name in pids if len(_parents(poc, name)) > 1]
    if twice:
        raise Violation(f"more than one FLARE process of {twice}")
    numbers: dict[str, float] = {"processes": len(poc.pids())}
    numbers["temporary"] = sum(1 for _ in (poc.folder / "tmp").rglob("*"))
    for name, pid in pids.items():
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        numbers[f"handles of {name}"] = len(os.listdir(f"/proc/{pid}/fd"))
        numbers[f"threads of {name}"] = len(os.listdir(f"/proc/{pid}/task"))
        numbers[f"children of {name}"] = len(_children(pid))
        numbers[f"resident_mb of {name}"] = round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
        kept = (poc.folder / "poc").glob("*-storage") if name == "server" else [poc.kept(name)]
        numbers[f"disk_mb of {name}"] = round(sum(map(_bytes, (poc.kits / name, *kept))) / 1e6, 2)
    return Idle(pids, numbers)


def _children(pid: int) -> list[str]:
    """Return the states of processes that another one has started, also where it has not noticed that they ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
            found += [state] if int(parent) == pid else []
    return found


def _bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


MOST_A_JOB = {"handles": 0.5, "threads": 0.5, "resident_mb": 1.5, "disk_mb": 3.0, "temporary": 0.5}
MOST_A_JOB |= {"processes": 0.2, "children": 0.2}
"""What may be added a job, over a dozen of jobs and more: less is the noise of the measurement."""
FEWEST, WARM_UP = 16, 10


def growth(values: Sequence[float]) -> float:
    """Return by how much a number grows a job: the median of the last third less that of the first, over the jobs."""
    third = len(values) // 3
    if third < 2:
        return 0.0
    return (statistics.median(values[-third:]) - statistics.median(values[:third])) / (len(values) - third)


def series(measured: Sequence[Idle]) -> dict[str, list[float]]:
    """Return each number over the jobs; where another process took a process's place, it goes on as before."""
    found = {name: [value] for name, value in measured[0].numbers.items()} if measured else {}
    for before, now in pairwise(measured):
        for name, values in found.items():
            party = "" if name.startswith("disk") else name.rpartition(" ")[2]
            is_same = before.pids.get(party) == now.pids.get(party)
            values.append(values[-1] + (now.numbers[name] - before.numbers[name] if is_same else 0.0))
    return found


def added(values: Sequence[float]) -> list[float]:
    """Return what ten jobs add to a number, and the standard error of that: of what each job adds, after a warm-up."""
    steps = [after - before for before, after in pairwise(values[WARM_UP:])]
    if len(steps) < 2:
        return []
    return [round(10 * one, 2) for one in (statistics.mean(steps), statistics.stdev(steps) / len(steps) ** 0.5)]


def check_growth(measured: Sequence[Idle]) -> None:
    """Hold that nothing grows. Raises: Violation."""
    for name, values in series(measured).items():
        most = MOST_A_JOB[name.partition(" ")[0]]
        if len(values) >= FEWEST and growth(values) > most:
            raise Violation(f"{name} grows by {growth(values):.2f} a job, more than {most}: {values}")


# -- the run ----------------------------------------------------------------------------------------------------------


@dataclass
class Ended:
    """How a submitted job ended.

    Attributes:
        said: the reasons that server and sites give.
        befell: the share of the site's evidence that was written when the fault came; None where the job ended before.
    """

    job_id: str
    status: str
    said: list[str]
    attempts: int = 1
    befell: float | None = None

    @property
    def is_late(self) -> bool:
        return any(LATE in text for text in self.said)


@dataclass
class Soak:
    """A run. Attributes: measured: after each job."""

    poc: SoakPoc
    seed: int
    measured: list[Idle] = field(default_factory=list)
    _children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def job(self, draw: Draw) -> dict[str, Any]:
        """Run a job, and once more where it ended; return the line about it."""
        began = time.monotonic()
        if draw.fault == FULL_DISK and not has_disks():
            draw = dataclasses.replace(draw, fault=NONE)
        expected(draw.kind)
        first = self._submit(draw)
        submitted = [first]
        is_whole = self._check(draw, first)
        if not is_whole:
            submitted.append(self._submit(dataclasses.replace(draw, fault=NONE)))
            if not self._check(dataclasses.replace(draw, fault=NONE), submitted[-1]):
                raise Violation(f"submitted again, it ended as {submitted[-1].status}: {submitted[-1].said}")
            left = [
                path for ending in ("partial", "reserve") for path in self.poc.folder.glob(f"kept/*/runs/**/*.{ending}")
            ]
            if left:  # each site has had another job since
                raise Violation(f"left by a process that was killed: {left}")
        check_none_held(self._ledgers())
        self.measured.append(idle(self.poc))
        check_growth(self.measured)
        line = {"seed": self.seed, **dataclasses.asdict(draw), "waits": draw.waits, "befell": first.befell}
        how = "completed" if is_whole else "others had finished, then completed" if first.is_late else BY_NAME
        line |= {"ended": how, "attempts": first.attempts}
        line |= {"said": [] if is_whole else first.said, "jobs": [one.job_id for one in submitted]}
        line |= {"seconds": round(time.monotonic() - began, 1), "load": round(os.getloadavg()[0], 1)}
        return line | {"idle": dataclasses.asdict(self.measured[-1])}

    def _ledgers(self) -> dict[str, Path]:
        return {site: self.poc.policy(site).ledgers for site in SITES}

    def _submit(self, draw: Draw) -> Ended:
        poc = self.poc
        recipe = CASES[draw.kind].recipe(draw.kind, **fields_of(draw.kind), sites=list(SITES), min_clients=len(SITES))
        folder = write_folder(recipe, poc.folder / "jobs")
        with poc.session() as session:
            job_id = str(session.submit_job(str(folder)))
            targets = self._comes(draw, job_id, session) if draw.fault != NONE else None
            befell = None
            if targets is not None:
                written = n_lines(poc.run_of(draw.site, job_id))
                befell = round(written / expected(draw.kind).lines[draw.site], 3)
                with struck(poc, draw, targets, self._children):
                    time.sleep(draw.lasts_s if draw.fault not in (KILL_JOB, KILL_SERVER_JOB) else 0)
            until(lambda: _status(session, job_id).startswith("FINISHED"), JOB_S, f"the end of {draw.kind} {job_id}")
            until(lambda: not job_processes(poc, job_id), LEFTOVERS_S, f"the end of all processes of {job_id}")
            status = _status(session, job_id)
            ended = Ended(job_id, status, [f"FLARE: {status}"], befell=befell)
            self._read(ended, session)
        for child in self._children:
            child.poll()
        return ended

    def _comes(self, draw: Draw, job_id: str, session: Session) -> list[int] | None:
        """Wait for the fault's moment; return the job's processes that it is meant for, None if the job ends before."""
        run, lines = self.poc.run_of(draw.site, job_id), draw.moment * expected(draw.kind).lines[draw.site]
        if draw.fault == FULL_DISK:
            fill(self.poc.kept(draw.site), 4 << 20)
        looked = began = time.monotonic()
        targets = list[int]()
        while time.monotonic() - began < JOB_S:
            if targets and (draw.moment == 0 or n_lines(run) >= max(1, lines)):
                return targets
            time.sleep(0.005)
            if not targets or time.monotonic() - looked > 2:
                looked, had = time.monotonic(), bool(targets)
                is_there = bool(job_processes(self.poc, job_id, str(self.poc.kits / draw.site)))
                targets = targets_of(self.poc, draw, job_id) if is_there else []
                # While the site takes part the server is not asked: its answer takes as long as many rounds.
                if not is_there and (had or _status(session, job_id).startswith("FINISHED")):
                    (self.poc.kept(draw.site) / FILLING).unlink(missing_ok=True)
                    return None
        raise Violation(f"job {job_id} neither ends nor goes on")

    def _read(self, ended: Ended, session: Session) -> None:
        """Read what the server and the sites say of a job's end, and check the evidence of one that ended well."""
        downloads = self.poc.folder / "downloads"
        result = Path(session.download_job_result(ended.job_id, str(downloads)))
        for path in result.rglob("veilboost/summary.json"):
            summary = json.loads(path.read_text())
            ended.attempts = summary["attempts"]
            ended.said += [] if summary["reason"] is None else [f"server: {summary['reason']}"]
            if ended.status == COMPLETED:
                found = verify([path.parent], self._root)
                if not found.sound:
                    wrong = [*found.failures, *(text for one in found.attempts for text in one.failures)]
                    raise Violation(f"the evidence does not hold: {wrong}")
        for site in SITES:
            log = self.poc.kits / site / ended.job_id / "log.txt"
            text = log.read_text(errors="replace") if log.is_file() else ""
            ended.said += [f"{site}: {one}" for one in re.findall(r"the job ended with an error (.*)", text)]
            if "a defect of VeilBoost" in text:
                raise Violation(f"{site} reports a defect: see {log}")
        shutil.rmtree(downloads, ignore_errors=True)

    @cached_property
    def _root(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate((self.poc.kits / ADMIN / "startup" / "rootCA.pem").read_bytes())

    def _check(self, draw: Draw, ended: Ended) -> bool:
        """Hold all that a job's end promises; return whether it has a result."""
        is_whole = ended.status == COMPLETED
        check_charges(draw.kind, ended.job_id, self._ledgers(), is_whole)
        runs = {site: self.poc.run_of(site, ended.job_id) for site in SITES}
        # A log that nobody could end, of a process that was killed and that no other one followed, is evidence.
        is_torn = not is_whole and draw.fault in (KILL_JOB, KILL_FLARE, KILL_MACHINE)
        ended_logs = [run for site, run in runs.items() if not (is_torn and site == draw.site)]
        partial = [path for run in ended_logs for path in run.rglob("*.partial")]
        notes = [site for site in SITES if (self.poc.kits / site / ended.job_id / NOTE).exists()]
        if partial or (notes and is_whole):
            raise Violation(f"left behind: {partial} {notes}")
        if is_whole:
            check_result(draw.kind, runs)
            if ended.befell is None:
                check_no_errors(self.poc.kits, ended.job_id)
        elif ended.befell is not None and (draw.may_end or ended.is_late):
            check_ended_by_name(draw, ended.said)
        else:
            raise Violation(f"{draw.kind} ended as {ended.status} after {draw.fault} ({ended.befell=}): {ended.said}")
        return is_whole

    def summary(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return figures of the whole run."""
        ends = Counter(f"{'waits' if one['waits'] else 'ends'}: {one['ended']}" for one in lines)
        return {
            "seed": self.seed,
            "jobs": len(lines),
            "submitted": sum(len(one["jobs"]) for one in lines),
            "ends": dict(ends),
            "faults": dict(Counter(NONE if one["befell"] is None else one["fault"] for one in lines)),
            "attempts": sum(one["attempts"] for one in lines),
            "seconds": round(sum(one["seconds"] for one in lines)),
            "added_by_ten_jobs": {name: added(found) for name, found in series(self.measured).items()},
        }


def _status(session: Session, job_id: str) -> str:
    return str(session.get_job_meta(job_id)["status"])


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line to a file in one write, on the disk before the next job."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def run(folder: Path, seed: int, first: int, hours: float, jobs: int) -> int:
    """Run jobs until the time or their number is over, or something does not hold; return the exit code."""
    record, ends_at = folder / "soak.jsonl", time.monotonic() + 3600 * hours
    poc = SoakPoc(Path(tempfile.mkdtemp(prefix="federation_", dir=folder)))
    soak, lines, violation = Soak(poc, seed), list[dict[str, Any]](), ""
    try:
        with poc:
            for index in range(first, first + jobs):
                if time.monotonic() > ends_at:
                    break
                draw = drawn(seed, index)
                print(f"soak: {draw}", flush=True)
                try:
                    line = soak.job(draw)
                except Exception as error:  # whatever it is, the run ends here, with the logs
                    violation = f"{type(error).__name__}: {error}"
                    append(record, {"seed": seed, **dataclasses.asdict(draw), "violation": violation})
                    print(f"soak: seed {seed}, {draw}: {violation}\nsoak: logs are in {poc.folder}", flush=True)
                    break
                append(record, line)
                lines.append(line)
                print(f"soak: {line['ended']}, {line['seconds']} s, attempts {line['attempts']}", flush=True)
    finally:
        poc.give_disks_back(is_copied=bool(violation))
    if not violation:
        shutil.rmtree(poc.folder, ignore_errors=True)
    print(json.dumps({**soak.summary(lines), "violation": violation}), flush=True)
    return 1 if violation else 0


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--jobs", type=int, default=10**6, help="most jobs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--from", type=int, default=0, dest="first", help="number of the first job")
    parser.add_argument("--folder", type=Path, default=Path("build/soak"), help="for the record, and logs")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for one in (signal.SIGINT, signal.SIGTERM):  # a shell that starts it in the background has it ignore the first
        signal.signal(one, _interrupted)
    args.folder.mkdir(parents=True, exist_ok=True)
    return run(args.folder.resolve(), args.seed, args.first, args.hours, args.jobs)


if __name__ == "__main__":
    sys.exit(main())
