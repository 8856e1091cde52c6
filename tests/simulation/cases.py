"""What is simulated: a small job of each kind, and of some kinds other protections, and jobs that survive a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from nvflare_plugins.flare.kinds import KINDS
from nvflare_plugins.site.memory.forgetting import Forgetting
from nvflare_plugins.site.policy import SitePolicy
from tests.conformance.kind_cases import CASES, DATA, KindCase
from tests.golden.jobs import breast, rows_over_sites
from tests.support import survival
from tests.support.federation import Parties, succeed

CONTINUE, STOP, WAIT = "continue", "stop", "wait"
DEADLINE_S = 150.0
"""For how long a job waits for a lost site."""


@dataclass(frozen=True)
class Simulated:
    """A job that is simulated.

    Attributes:
        kind: of the job.
        on_loss: what it does when a site is lost.
    """

    kind: str
    case: KindCase
    on_loss: str = STOP


def _consenting(give: Callable[[Path], Parties], policy: dict[str, Any], *consents: str) -> Callable[[Path], Parties]:
    def given(folder: Path) -> Parties:
        parties = give(folder)
        for site in parties.sites:
            known = parties.policy_of(site).get("consents", {})
            parties.set_policy(site, consents={**known, **dict.fromkeys(consents, True)}, **policy)
        return parties

    return given


def _other(kind: str, on_loss: str = STOP, **fields: Any) -> Simulated:
    case = CASES[kind]
    if on_loss != STOP:
        fields |= {"on_lost_site": on_loss, "lost_site_deadline_s": DEADLINE_S}
    give = case.give
    if "key_bits" in fields:
        give = _consenting(give, {"min_key_bits": fields["key_bits"]})
    if on_loss == CONTINUE:  # two sites may be left, and few rows
        fields["min_clients"] = 2
        floors = {"min_effective_rows": 10, "min_sites": 2, "max_colluders": 0}
        give = _consenting(give, floors, "continue_without_site", "fewer_than_three_sites")
    return Simulated(kind, replace(case, fields={**case.fields, **fields}, give=give), on_loss)


def _with_times(folder: Path) -> Parties:
    frame = breast(4).drop(columns="y")
    return rows_over_sites(folder, frame.join(survival.times("events", len(frame))[["days", "death"]]), DATA)


def _cox(on_loss: str) -> Simulated:
    params = {**CASES["horizontal"].fields["params"], "objective": "survival:cox"}
    found = _other("horizontal", on_loss, label=survival.FORMS["events"], params=params, num_rounds=3)
    return replace(found, case=replace(found.case, give=_with_times))


def _with_queries(folder: Path) -> Parties:
    frame = breast(4)
    queries = [f"{'aaabbc'[n % 6]}{n // 36}" for n in range(len(frame))]  # each at one site
    give = lambda folder: rows_over_sites(folder, frame.assign(query=queries, w=2.0), DATA)  # noqa: E731
    return _consenting(give, {}, "compare_queries")(folder)


def _ranking(on_loss: str) -> Simulated:
    params = {**CASES["horizontal"].fields["params"], "objective": "rank:ndcg", "lambdarank_pair_method": "mean"}
    ranked = {"params": params, "query": "query", "weight": "w", "compare_queries": True, "arithmetic": "3.3"}
    found = _other("horizontal", on_loss, num_rounds=3, **ranked)
    return replace(found, case=replace(found.case, give=_with_queries))


EARLIER, N_ASKED = "august", 5
"""The job that one of these trains again, and how many persons have asked each of its sites to be forgotten."""


def _asked(folder: Path) -> Parties:
    """Return sites that have trained on persons, of whom the first have asked to be forgotten."""
    parties, case = _consenting(CASES["horizontal"].give, {}, "recompute_with_changes")(folder), CASES["horizontal"]
    for site in parties.sites:
        path = parties.workspace(site) / f"{DATA}.parquet"
        frame = pd.read_parquet(path)
        parties.give(site, DATA, frame.assign(mrn=range(len(frame))), id="mrn")
    kind = KINDS["horizontal"]
    succeed(parties.run(kind.run, kind.job.from_dict(dict(case.fields)), EARLIER))
    for site in parties.sites:
        policy = SitePolicy.load(parties.workspace(site), site)
        Forgetting(policy).add(DATA, [str(number) for number in range(N_ASKED)])
    return parties


def _forgets() -> Simulated:
    case = CASES["horizontal"]
    return Simulated("horizontal", replace(case, fields={**case.fields, "forgets": EARLIER}, give=_asked))


JOBS: dict[str, Simulated] = {
    **{kind: Simulated(kind, case) for kind, case in CASES.items()},
    # Three jobs fit into the sites' budgets: the one that is lost, its twin, and one more when all are back.
    **{kind: _other(kind, epsilon=2.5) for kind in ("dpboost", "federboost_vertical")},
    "horizontal_bfv": _other("horizontal", profile="bfv"),
    "horizontal_ckks": _other("horizontal", profile="ckks", num_rounds=1),
    "vertical_elgamal": _other("vertical", profile="elgamal"),
    "vertical_paillier": _other("vertical", profile="paillier", key_bits=2048, num_rounds=1),
    "horizontal_forgets": _forgets(),
    "horizontal_wait": _other("horizontal", WAIT),
    "horizontal_cox": _cox(WAIT),
    "horizontal_ranking": _ranking(WAIT),
    "vertical_wait": _other("vertical", WAIT, num_rounds=3),
    "private_trees_wait": _other("private_trees", WAIT, components={"n_trees": 3}),
    "dpboost_wait": _other("dpboost", WAIT),
    "horizontal_continue": _other("horizontal", CONTINUE, num_rounds=5),
}

FOUND: tuple[tuple[str, int], ...] = (
    ("dpboost", 320002),
    ("horizontal_continue", 300183),
    ("horizontal_continue", 200154),
    ("horizontal", 201062),
    ("dpboost", 203965),
    ("alignment", 204767),
    ("horizontal_continue", 205914),
    ("dpboost", 287),
)
"""Runs that found something once, beside those of the first seeds."""

_DEAR = ("horizontal_bfv", "horizontal_ckks", "vertical_elgamal", "vertical_paillier")
"""Jobs whose arithmetic takes most of their time: one seed in forty is for them."""


def job_of(seed: int) -> str:
    """Return which job a seed is for, where it is for any."""
    others = [name for name in JOBS if name not in _DEAR]
    n_dear = (seed + 1) // 40
    return _DEAR[n_dear % len(_DEAR)] if seed % 40 == 39 else others[(seed - n_dear) % len(others)]
