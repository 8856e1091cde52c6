"""A federation of the caller's own tables: every site a process of FLARE's simulator, with a policy and a reader."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from nvflare.recipe import SimEnv

from he_processors.errors import ConfigurationError
from nvflare_plugins.api.methods import Horizontal, Method, Private, Vertical
from nvflare_plugins.api.simulator import Progress, progress_line, run_watched
from nvflare_plugins.api.sources import (
    Reader,
    SiteTable,
    Source,
    checked_names,
    drafts_of,
    hinted,
    id_drafts,
    lacking,
    reader_of,
    stops,
    task,
)
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.attempt.plan import PlanRequest
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.base.files import make_folder, write_atomically, write_private, write_private_table
from nvflare_plugins.base.formatting import counted, near_name
from nvflare_plugins.cli.check import floors, use_of
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.identity import load_ids
from nvflare_plugins.data.labels import Label, checked_label, columns_of, words_of_label
from nvflare_plugins.flare.kinds import kind_of_job
from nvflare_plugins.kinds.vertical.job import VerticalJob
from nvflare_plugins.kinds.vertical.model import ACTIVE_FILE, PASSIVE_FILE, Part, read_part
from nvflare_plugins.pages.charts import page
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.preparation import allow
from nvflare_plugins.recipes import recipe as recipes
from nvflare_plugins.recipes.recipe import JobRecipe
from nvflare_plugins.recipes.run import SIMULATED, Run, SitesRefused
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.policy import SitePolicy, policy_of_simulated
from nvflare_plugins.site.policy_values import FOLDERS, POLICY_FILE, is_private
from nvflare_plugins.site.setup import SetupOptions, check_place, set_up
from nvflare_plugins.survey.agreement import Agreement, SiteDraft, agree
from nvflare_plugins.survey.columns import Use
from nvflare_plugins.survey.raw_file import read_raw
from nvflare_plugins.survey.survey import survey

_OF_THE_FILE = ("separator", "encoding", "rename", "names")
_KEYS_OF_COLUMNS = ("rename", "dates", "columns")
_NOT_OF_READING = ("path", "privacy", "drop_unlabelled")


def part_files(run: Run, folder: Path, sites: Sequence[str]) -> dict[str, Path]:
    """Return where each party's part of a run's model lies.

    Args:
        folder: of the federation, whose run it has to be.

    Raises:
        ConfigurationError: it is another's, no vertical training in the simulator, or a site's part is gone.
    """
    if not isinstance(run.job, VerticalJob):
        raise ConfigurationError(
            f"predict is for vertical trainings, and {run.name!r} is none. Remedy: run.model.predict_proba(rows)"
        )
    if not isinstance(run.exec_env, SimEnv):
        raise ConfigurationError(
            f"the sites of job {run.job_id} keep their parts of its model. Remedy: run the job "
            f"VerticalInferenceRecipe(name, model={run.job_id!r}, data_set=...) over them"
        )
    if not run.folder.absolute().is_relative_to(folder):
        raise ConfigurationError(f"{run.name!r} was not trained by this federation: call predict of the one that did")
    found = {}
    for site in sites:
        place = run.folder / site / FOLDERS["runs"] / SIMULATED
        name = ACTIVE_FILE if site == run.job.active else PASSIVE_FILE
        if not (place / name).is_file():
            raise ConfigurationError(f"{site}: its part of the model is gone from {place}. Remedy: train again")
        found[site] = place / name
    return found


def kept_part(site: str, file: Path, inputs: Path) -> Part:
    """Check a site's part, and place it where the site of another job looks for it. Raises: ConfigurationError."""
    part: Part = read_part(file, site, Part).part  # type: ignore[arg-type]  # either
    write_private(make_folder(inputs) / f"{SIMULATED}.{site}.json", file.read_bytes())
    return part


def reader_as_trained(site: str, source: Source, run: Run, part: Part, folder: Path) -> Reader:
    """Return how a site's new rows are read: as the training's were, but for what ``read`` says of them.

    Args:
        folder: takes a data frame.

    Raises:
        ConfigurationError: no such file, or no table.
    """
    stated = json.loads(policy_of_simulated(run.folder, site).read_text(encoding="utf-8"))
    trained = {k: v for k, v in stated["data_sets"][run.job.data_set].items() if k not in _NOT_OF_READING}
    reader = reader_of(site, source, folder, "new_rows")
    if isinstance(source, Reader):
        trained = {key: trained[key] for key in ("id", "id_form") if key in trained}
    elif reader.options["format"] != trained["format"]:
        trained = {key: value for key, value in trained.items() if key not in _OF_THE_FILE}
    used = {*part.columns, trained.get("id")}
    for key in set(_KEYS_OF_COLUMNS) & set(trained):
        trained[key] = {a: b for a, b in trained[key].items() if (b if key == "rename" else a) in used}
    return Reader(reader.path, {**trained, **reader.options})


def by_id(scores: pd.DataFrame, spec: DataSet) -> pd.DataFrame:
    """Return scores in the order of the active party's table, indexed by its ids as they stand there, or by position.

    Args:
        scores: what the job wrote: canonical ids, if there are any.
        spec: the active party's table.
    """
    scores = scores.drop(columns="row")
    if spec.id is None:
        return scores
    rows = {one.decode(): row for row, one in enumerate(load_ids(spec))}
    scores.index = pd.Index(scores.pop("id").map(rows))
    scores = scores.sort_index()
    raw = read_raw(spec)
    ids = raw.columns[raw.names.index(spec.id)].take(pa.array(scores.index))
    scores.index = pd.Index(ids.to_pandas(), name=spec.id)
    return scores


ROWS, HELD_OUT = "rows", "held_out"
SPENT = "spent.json"
_AGREED = ("rename", "columns", "id_form")
_BY_COLUMN = ("columns", "dates")  # these say something of columns by the names that jobs know
_DONE = "label_text"  # what asks for label_classes, which are taken from the tables here
_RENAME = "Remedy: vb.read(path, rename={'NAME IN THE FILE': 'NAME THAT ALL SITES SHARE'})"
_BOUNDS = "Each would count as a bound, and the column would tell nothing: give bounds in the column's own units."
_LABEL = "Remedy: vb.private(..., label_classes=[...]), or label_bounds=(low, high) where it is a number"
_FILE_KEYS = ("separator", "encoding", "rename", "format", "names")
_UNUSABLE = ("no_file", "unreadable", "not_text", "empty", "header", "no_such_column", "encoding", "separator")
"""Findings for which a private job is refused all the same."""


class Simulator(SimEnv):
    """FLARE's simulator with sites of these names, ended with the process that waits for it."""

    def __init__(self, sites: Sequence[str], workspace_root: Path, *, progress: bool) -> None:
        super().__init__(clients=list(sites), workspace_root=str(workspace_root))
        self._progress = progress

    def deploy(self, job: Any) -> str:
        """Run a job to its end. Raises: RuntimeError: it failed; KeyboardInterrupt: nothing of it runs any more."""
        workspace = Path(self.workspace_root) / job.name
        sites = list(self.clients or ())
        line = Progress(lambda: progress_line(workspace, sites)) if self._progress else None
        with tempfile.TemporaryDirectory(prefix="veilboost-") as folder:
            job.export_job(folder)
            module = "nvflare_plugins.flare.simulator"
            command = ["-m", module, str(Path(folder) / job.name), "-w", str(workspace)]
            command += ["-c", ",".join(sites), "-t", str(len(sites))]
            log = workspace.with_name("simulator.log")
            try:
                code = run_watched(command, log, lambda: None if line is None else line.show())
            finally:
                if line is not None:
                    line.end()
        self.last_run_failed = code != 0
        if self.last_run_failed:
            raise RuntimeError(f"the simulation ended with exit code {code}; its log: {log}")
        return str(job.name)


class Check:
    """What was found in the tables of all sites before a training; true if nothing stops it.

    Attributes:
        problems, notes: site -> sentences, with counts and names of columns, never a value of a row that is not shared.
        united: what sites write differently and now read alike.
        features, categories: what a job would say. left_out: columns that some site can only read as no feature.
    """

    def __init__(self, tables: Mapping[str, SiteTable]) -> None:
        self.tables = tables
        self.problems = {site: table.problems for site, table in tables.items() if table.problems}
        told = {site: table.found.findings for site, table in tables.items()}
        self.notes = {
            site: [hinted(one) for one in some if not stops(one) and one.kind != _DONE] for site, some in told.items()
        }
        self.united: list[str] = []
        self.features: tuple[str, ...] = ()
        self.categories: Mapping[str, Sequence[str]] = {}
        self.left_out: tuple[str, ...] = ()

    @property
    def rows(self) -> dict[str, int]:
        """How many rows each site has."""
        return {site: table.found.n_rows for site, table in self.tables.items()}

    def add(self, site: str, problem: str) -> None:
        """Note a problem."""
        self.problems.setdefault(site, []).append(problem)

    def ask_for(self, name: str, what: str) -> None:
        """Note each site whose table lacks a column."""
        for site, table in self.tables.items():
            if table.names and name not in table.names:
                hint = near_name(name, list(table.names)) or "."
                self.add(site, f"there is no column {name!r}, {what}{hint} {_RENAME}")

    def __bool__(self) -> bool:
        return not self.problems

    def __repr__(self) -> str:
        lines = [f"{site}: {counted(n, 'row')}" for site, n in self.rows.items()]
        for title, group in (("problem", self.problems), ("note", self.notes)):
            lines += [f"{title} at {site}: {text}" for site, some in group.items() for text in some]
        lines += [f"read alike: {text}" for text in self.united]
        lines += [f"features: {', '.join(self.features)}"] if self.features else []
        lines += [f"left out (ids, dates, free text): {', '.join(self.left_out)}"] if self.left_out else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return page("check.html", check=self)

    def raise_problems(self) -> None:
        """Raise all problems of all sites at once. Raises: SitesRefused."""
        if self.problems:
            raise SitesRefused(self.problems, "nothing was trained")


class Federation:
    """Sites on this machine, each a process of its own with its own table, reader and policy.

    Nothing runs before a training.

    Privacy: all is the caller's own and stays in ``folder``, data frames for their owner alone. What a site would
    refuse in production it refuses here, with its reasons shown.

    Args:
        sites: name of a site -> a data frame, the path of a CSV or Parquet file, or ``read(path, ...)``.
        label: column that is predicted; of survival {"time": ..., "event": ...}, {"signed": ...} or {"lower": ...,
            "upper": ...} (jobs/OWN_DATA.md).
        query: column that says which rows are ranked together; the label is then their relevance, and trainings rank
            (``rank:ndcg``) where they name no other objective. A query's rows lie at one site.
        evaluation: the same for rows to evaluate on after each round.
        holdout: share of each site's rows to hold out for that, in the place of ``evaluation``; of its queries, where
            rows are ranked.
        consents: what all sites agree to beyond their defaults, such as "plain_profile" (jobs/REFERENCE.md).
        budget: epsilon and delta that each site's table may spend on all private trainings in ``folder`` together,
            those that failed included; None gives each private training what it asks for, once. A delta of 0 allows
            method pure alone.
        policy: further keys of all sites' policies, such as {"min_effective_rows": 50}.
        folder: for data, policies and runs; None takes a new one below ``runs``.

    Attributes:
        sites: their names.
        folder: data, what sites remember, and a workspace for each job.

    Raises:
        ConfigurationError: names that FLARE refuses, a site named twice, no such file, or no table.
    """

    def __init__(
        self,
        sites: Mapping[str, Source],
        label: Label,
        *,
        query: str | None = None,
        evaluation: Mapping[str, Source] | None = None,
        holdout: float = 0.0,
        consents: Sequence[str] = (),
        budget: tuple[float, float] | None = None,
        policy: Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        self.sites = checked_names(list(sites))
        if not label or not isinstance(label, (str, Mapping)):
            raise ConfigurationError("label must be the name of a column, or name those of times")
        label = checked_label(label)
        if not 0 <= holdout < 1 or (holdout and evaluation is not None):
            raise ConfigurationError("holdout must be a share from 0 to below 1, and stands in the place of evaluation")
        if evaluation is not None and set(evaluation) != set(sites):
            raise ConfigurationError("evaluation must have a table for each of the sites, and for no other")
        self.label, self.query, self.budget, self.consents = label, query, budget, tuple(consents)
        self._policy = dict(policy or {})
        place = Path("runs") / f"federation-{datetime.now():%Y%m%d-%H%M%S-%f}" if folder is None else Path(folder)
        self.folder = place.expanduser().absolute()
        check_place(self.folder)
        make_folder(self.folder)
        self._spent = _spent_in(self.folder / SPENT)
        data = self.folder / "data"
        self._readers = {ROWS: {site: reader_of(site, one, data, ROWS) for site, one in sites.items()}}
        if evaluation is not None:
            self._readers[HELD_OUT] = {s: reader_of(s, evaluation[s], data, HELD_OUT) for s in self.sites}
        if holdout:
            self._hold_out(holdout)

    def __repr__(self) -> str:
        return f"<Federation of {', '.join(self.sites)}; label {words_of_label(self.label)!r}; {self.folder}>"

    # -- before a training --------------------------------------------------------------------------------------------

    def check(self, method: Method | None = None) -> Check:
        """Look at all tables of all sites, as ``veilboost check`` does, and at what they have in common."""
        return self._terms(method or Horizontal())[0]

    def recipe(
        self, method: Method | None = None, *, rounds: int = 10, profile: str | None = None, name: str = "train"
    ) -> JobRecipe:
        """Return the job that ``train`` runs; ``execute`` and ``export`` take it to a POC or to production.

        Raises:
            SitesRefused: tables that no reader makes equal, or that cannot be read.
            ConfigurationError: what no site would accept.
        """
        method = method or Horizontal()
        check, fields = self._terms(method)
        check.raise_problems()
        rest = {"num_rounds": rounds} | ({} if profile is None else {"profile": profile})
        if isinstance(method, Private):
            if rounds != 10 or profile is not None:
                raise ConfigurationError("private trees have no rounds and profile: set components={'n_trees': ...}")
            rest = {}
        made: JobRecipe = _RECIPES[method.KIND](name, **{**fields, **rest}, **self._named(method))
        return made

    def plan(self, method: Method | None = None, *, rounds: int = 10, profile: str | None = None) -> str:
        """Return what a training takes, shows and spends before it runs, as ``veilboost plan`` does."""
        made = self.recipe(method, rounds=rounds, profile=profile)
        n_rows = [table.found.n_rows for table in self._tables(ROWS).values()]
        request = PlanRequest(rows=sum(n_rows), features=len(made.job.features), sites=len(self.sites))
        if isinstance(method, Vertical):
            own = {site: len(names) for site, names in made.job.features.items()}
            foreign = tuple(own[site] for site in sorted(own) if site != made.job.active)
            request = PlanRequest(
                rows=max(n_rows), features=own[made.job.active], foreign_features=foreign, sites=len(self.sites)
            )
        elif isinstance(method, Private):
            request = PlanRequest(sites=len(self.sites))  # their number of rows is nobody's business
        planner = kind_of_job(made.job).planner
        if isinstance(planner, str):
            raise ConfigurationError(f"there is no plan of such a job: {planner}")
        return planner.plan(request, made.job).text

    # -- trainings ----------------------------------------------------------------------------------------------------

    def train(
        self,
        method: Method | None = None,
        *,
        rounds: int = 10,
        profile: str | None = None,
        name: str = "train",
        progress: bool = True,
    ) -> Run:
        """Train in FLARE's simulator: all sites are checked first, then each is a process under its own policy.

        Of a vertical training the simulated sites consent to align rows again; in production each site has to.

        Args:
            method: ``Horizontal(...)``, the default, ``vertical(...)`` or ``private(...)``.
            rounds: boosting rounds.
            profile: masks, bfv, ckks or plain; of vertical trainings paillier, elgamal or plain.
            name: of the job.
            progress: show one line that says how far each site is.

        Raises:
            SitesRefused: with the reasons of all sites, before or in the training.
            ConfigurationError: what no site would accept.
            KeyboardInterrupt: interrupted; no process of the job is left.
        """
        method = method or Horizontal()
        made = self.recipe(method, rounds=rounds, profile=profile, name=name)
        again = ("recompute_with_changes",) if isinstance(method, Vertical) else ()  # rows are aligned in each training
        return self._run(made, method, *again, progress=progress)

    def tune(
        self,
        method: Horizontal | None = None,
        *,
        search: Mapping[str, Any] | None = None,
        trials: Sequence[Mapping[str, Any]] | None = None,
        n_trials: int | None = None,
        folds: int = 5,
        rounds: int = 50,
        early_stopping_rounds: int | None = None,
        profile: str = "masks",
        name: str = "tune",
        progress: bool = True,
    ) -> Run:
        """Try parameter sets by cross validation: ``run.table("tuning.csv")`` and ``run.best`` have the outcome.

        The simulated sites give the consent that this needs (``tuning``); in production each site's policy has to.

        Args:
            method: what all trials have in common.
            search: for each parameter a list of values, or a range such as {"low": 0.01, "high": 0.3, "log": True}.
            trials: the parameter sets by themselves, in the place of ``search``.
            n_trials: how many sets ``search`` draws.
        """
        check, fields = self._terms(method or Horizontal())
        check.raise_problems()
        made = recipes.TuningRecipe(
            name,
            **{key: value for key, value in fields.items() if key not in ("eval_data_set", "evaluate_training")},
            search=search,
            trials=trials,
            n_trials=n_trials,
            folds=folds,
            num_rounds=rounds,
            early_stopping_rounds=early_stopping_rounds,
            profile=profile,
            min_clients=len(self.sites),
        )
        return self._run(made, Horizontal(), f"tuning={made.job.size}", progress=progress)

    def select(
        self,
        method: Horizontal | None = None,
        *,
        rounds: int = 50,
        profile: str = "masks",
        name: str = "select",
        progress: bool = True,
        **settings: Any,
    ) -> Run:
        """Select columns: ``run.features`` are the chosen ones, for the next ``Horizontal(features=...)``.

        ``run.table("selection.csv")`` has information value, gain and shadows by column, ``run.table(
        "selection_steps.csv")`` the score of each set of columns; ``run.page("selection.html")`` shows both.

        The simulated sites give the consents that this needs (``tuning``, ``feature_profile``); in production each
        site's policy has to.

        Args:
            method: what all trainings have in common, and the columns to begin with.
            rounds: boosting rounds of each training.
            settings: further fields of kind ``selection`` (jobs/REFERENCE.md): folds, min_features, step, importance
                ("gain" or "permutation"), rule ("one_standard_error" or "best"), shadows, group, information_value,
                which is left out of itself where the label is a number.

        Raises:
            ConfigurationError: what no site would accept, such as more columns asked for than there are.
            SitesRefused: with the reasons of all sites.
        """
        check, fields = self._terms(method or Horizontal())
        check.raise_problems()
        group = settings.get("group")
        fields["features"] = [column for column in fields["features"] if column != group]
        objective = str(fields["params"].get("objective", ""))
        counts = settings.pop("information_value", objective.startswith(("binary", "multi")))
        made = recipes.SelectionRecipe(
            name,
            **{key: value for key, value in fields.items() if key not in ("eval_data_set", "evaluate_training")},
            **settings,
            information_value=counts,
            num_rounds=rounds,
            profile=profile,
            min_clients=len(self.sites),
        )
        size = made.job.n_trials(len(made.job.features)) * made.job.folds * rounds
        consents = (f"tuning={size}", *(["feature_profile"] if counts else []))
        return self._run(made, Horizontal(), *consents, progress=progress)

    def profile(
        self, *, profile: str = "masks", monotonic: bool = False, name: str = "profile", progress: bool = True
    ) -> Run:
        """Look at what single columns tell of the label: ``run.table("profile.json")``, ``run.report``.

        With ``monotonic`` bins of numbers are joined as scorecards want them.

        The simulated sites give the consent that this needs (``feature_profile``); in production each site has to.
        """
        check, fields = self._terms(Horizontal())
        check.raise_problems()
        known = ("data_set", "label", "features", "categories", "unknown_category_is_missing", "label_classes")
        chosen = {key: fields[key] for key in known if key in fields}
        made = recipes.ProfileRecipe(name, **chosen, profile=profile, monotonic=monotonic, min_clients=len(self.sites))
        return self._run(made, Horizontal(), "feature_profile", progress=progress)

    # -- scores -------------------------------------------------------------------------------------------------------

    def predict(
        self,
        run: Run,
        rows: Mapping[str, Source],
        *,
        rounds: str = "all",
        name: str = "predict",
        progress: bool = True,
    ) -> pd.DataFrame:
        """Score new rows with a vertical model, by all of its parties in FLARE's simulator; ids are aligned first.

        The simulated sites consent to align rows again that were aligned before; in production each site has to.
        There ``VerticalInferenceRecipe`` is the job, and the active party alone gets the scores.

        Args:
            run: what ``train(vertical(...))`` of this federation returned.
            rows: name of each site -> its table: ids and the model's columns, no label. A data frame or a path is read
                as that site's training table was, ``read(path, ...)`` as it says.
            rounds: "all", or "best" for those up to the best round of early stopping.
            name: of the job.
            progress: show one line that says how far each site is.

        Returns:
            Margin, prediction and class of each row that all sites have, as the active party gets them; of more than
            two classes margin and probability of each. Rows are in the order of its table, and indexed by the ids as
            they stand there, or by position where there are none.

        Raises:
            ConfigurationError: another kind of run, a site without a table, or a part of the model that is gone.
            SitesRefused: with the reasons of all sites: a column that is missing, too few rows.
        """
        files = part_files(run, self.folder, self.sites)
        if not isinstance(rows, Mapping) or set(rows) != set(self.sites):
            raise ConfigurationError(f"rows must have a table for each of {', '.join(self.sites)}, and for no other")
        data_set = f"new_rows_{len(list((self.folder / 'runs').glob('*'))):03}"
        parts = {site: kept_part(site, files[site], self.folder / "memory" / site / "inputs") for site in self.sites}
        place = self.folder / "data" / data_set
        with_rows = copy.copy(self)
        with_rows.budget = None
        with_rows._readers = {data_set: {s: reader_as_trained(s, rows[s], run, parts[s], place) for s in self.sites}}
        made = recipes.VerticalInferenceRecipe(
            name,
            model=SIMULATED,
            data_set=data_set,
            alignment=run.job.alignment,
            rounds=rounds,
            unknown_category_is_missing=run.job.unknown_category_is_missing,
            sites=self.sites,
        )
        uses = {
            site: Use(
                features=part.columns,
                categories=part.categories,
                unknown_is_missing=made.job.unknown_category_is_missing,
                is_settled=True,
            )
            for site, part in parts.items()
        }
        done = with_rows._run(made, Vertical(), "recompute_with_changes", progress=progress, uses=uses)
        scores = pd.read_parquet(done.sites[run.job.active].folder / "predictions.parquet")
        return by_id(scores, with_rows._spec(data_set, run.job.active, Vertical()))

    # -- how ----------------------------------------------------------------------------------------------------------

    def _named(self, method: Method) -> dict[str, Any]:
        return {"sites": self.sites} if isinstance(method, Vertical) else {"min_clients": len(self.sites)}

    def _spec(self, name: str, site: str, method: Method) -> DataSet:
        reader = self._readers[name][site]
        entry = self._entry(name, site, method) | {"path": reader.path}
        document = {"data_sets": {name: {**entry, "path": str(reader.path)}}}
        return SitePolicy.from_dict(document, workspace=self.folder, site=site).data_set(name)

    def _entry(self, name: str, site: str, method: Method) -> dict[str, Any]:
        """Return a data set as the site's policy states it."""
        reader = self._readers[name][site]
        entry = {"path": str(reader.path), **reader.options}
        if getattr(method, "id", None) is not None:
            entry["id"] = method.id  # type: ignore[attr-defined]
        asked = method.epsilon_and_delta if isinstance(method, Private) else None
        budget = self._left() or asked
        if budget is not None and name == ROWS:
            entry["privacy"] = {"epsilon": float(budget[0]), "delta": float(budget[1])}
            if asked is not None and asked[1] == 0:
                entry["privacy"]["pure_epsilon"] = min(asked[0], budget[0])
        return entry

    def _left(self) -> tuple[float, float] | None:
        """Return what is left of the budget, by adding up what trainings have asked for.

        A ledger of the simulator's is for one job alone, as FLARE calls all of them by one name.

        Raises:
            ConfigurationError: nothing is left.
        """
        if self.budget is None:
            return None
        epsilon = self.budget[0] - sum(spent[0] for spent in self._spent)
        delta = self.budget[1] - sum(spent[1] for spent in self._spent)
        if epsilon <= 0 or delta < 0 or delta == 0 < self.budget[1]:
            raise ConfigurationError(
                f"the budget {self.budget} of every site is spent. Remedy: a larger budget of simulate, or a new "
                "federation"
            )
        return epsilon, delta

    def _tables(self, name: str, method: Method | None = None) -> dict[str, SiteTable]:
        method = method or Horizontal()
        return {
            s: SiteTable.of(self._spec(name, s, method), self.label, self._readers[name][s].options) for s in self.sites
        }

    def _has_label(self, table: SiteTable) -> bool:
        return set(columns_of(self.label)) <= set(table.names)

    def _hold_out(self, share: float) -> None:
        """Deal every site's rows out to a training set and an evaluation set, as texts where its file has texts.

        Where sites have other rows, those that are alike stay together: a registry takes a set that has some of them
        for an earlier version of the other. Where they have other columns, all take the same places.
        """
        problems: dict[str, list[str]] = {}
        tables = self._tables(ROWS)
        for site, table in tables.items():
            problems[site] = [hinted(one) for one in table.raw.findings if one.is_problem]
        if any(problems.values()):
            raise SitesRefused({site: some for site, some in problems.items() if some}, "no rows were held out")
        self._readers[HELD_OUT] = {}
        frames = {site: _frame(table) for site, table in tables.items()}
        has_labels = all(self._has_label(one) for one in tables.values())
        by_query = next((one for one in frames.values() if self.query in one.columns), None)
        for site, rows in frames.items():
            dealing = rows if has_labels or by_query is None else by_query
            if len(dealing) != len(rows):
                raise ConfigurationError(
                    f"holdout takes the queries of the site that has {self.query!r}, and {site} has other rows: give "
                    "evaluation in its place"
                )
            held = self._dealt(dealing, share, list(rows.columns) if has_labels else [])
            options = {k: v for k, v in self._readers[ROWS][site].options.items() if k not in _FILE_KEYS}
            for name, part in ((HELD_OUT, held), (ROWS, ~held)):
                place = make_folder(self.folder / "data" / site) / f"{name}.parquet"
                write_private_table(place, rows[part])
                self._readers[name][site] = Reader(place, {**options, "format": "parquet"})

    def _dealt(self, rows: pd.DataFrame, share: float, columns: list[str]) -> NDArray[np.bool_]:
        """Return which rows are held out: those of a query together, and rows that are alike.

        Shapes: bool[n_rows]. Args: columns: rows with equal values in these are alike; none where no two are.
        """
        random = np.random.default_rng(0)
        if self.query in rows.columns:
            query = rows.groupby(self.query, dropna=False, sort=False).ngroup().to_numpy()
            n = int(query.max(initial=-1)) + 1
            return np.isin(query, random.permutation(n)[: round(share * n)])
        alike = np.arange(len(rows))
        if columns:
            alike = rows.groupby(columns, dropna=False, sort=False).ngroup().to_numpy()
        return np.isin(alike, alike[random.permutation(len(rows))[: round(share * len(rows))]])

    def _terms(self, method: Method) -> tuple[Check, dict[str, Any]]:
        """Return what was found, and the fields of the job that follow from the tables."""
        tables = self._tables(ROWS, method)
        if isinstance(method, Private):
            return self._private_terms(method, tables)
        check = Check(tables)
        settings = dict(method.settings)
        row_id = settings.pop("id", None)
        asked = (settings.get("weight"), row_id, self.query)
        special = [*columns_of(self.label), *(str(one) for one in asked if one)]
        wanted = None if isinstance(method, Vertical) else settings.get("features")
        if isinstance(method, Vertical):
            fields = self._vertical_terms(check, special, row_id)
        else:
            fields = self._horizontal_terms(check, special, wanted)
        if not check:
            return check, {}
        tables = self._tables(ROWS, method)  # as the sites' options read them now
        params, classes, metric = task({s: one for s, one in tables.items() if self._has_label(one)}, self.label)
        if self.query is not None:
            params, metric = {"objective": "rank:ndcg"}, "ndcg"
        objective = str(method.params.get("objective", params["objective"]))
        params = {**params, "eval_metric": metric} if objective == params["objective"] else {}
        fields |= {"data_set": ROWS, "label": self.label, "params": {**params, **method.params}}
        if classes is not None and objective.startswith(("binary", "multi")):
            fields["label_classes"] = classes
        fields |= {"query": self.query} if objective.startswith("rank:") else {}
        fields |= {"unknown_category_is_missing": True} if fields["categories"] else {}
        fields |= {"eval_data_set": HELD_OUT} if HELD_OUT in self._readers else {"evaluate_training": True}
        return check, {**fields, **settings}

    def _horizontal_terms(self, check: Check, special: Sequence[str], wanted: object) -> dict[str, Any]:
        """Unite what all sites' tables suggest; what no reader makes equal becomes a problem."""
        for name in columns_of(self.label):
            check.ask_for(name, "the label")
        if self.query is not None:
            check.ask_for(self.query, "the query")
        if not check:
            return {}
        drafts = drafts_of(check.tables, self.label, special, cast("Sequence[str] | None", wanted))
        found = self._united(check, drafts)
        names = dict.fromkeys(name for draft in drafts.values() for name in draft.columns if name not in special)
        for site, text in lacking(self._tables(ROWS), list(cast("Sequence[str]", wanted or names))):
            check.add(site, text)
        if check and not found.features:
            check.add("all sites", "no column is left to train on: ids, dates, constants and free text are no features")
        check.features, check.categories = tuple(found.features), found.categories
        check.left_out = tuple(name for name in names if name not in found.features)
        return {"features": found.features, "categories": found.categories}

    def _vertical_terms(self, check: Check, special: Sequence[str], row_id: object) -> dict[str, Any]:
        """Return each party's own columns, and whose the label is."""
        active = [site for site, table in check.tables.items() if self._has_label(table)]
        if len(active) != 1:
            raise ConfigurationError(
                f"the label {words_of_label(self.label)!r} must be at one site alone, whose label it is; it is at "
                f"{', '.join(active) or 'none'}"
            )
        for site, table in check.tables.items():
            if row_id is not None and row_id not in table.names:
                check.add(site, f"there is no column {row_id!r}, which names the rows. {_RENAME}")
        if check and row_id is not None and len(ids := id_drafts(check.tables, str(row_id))) > 1:
            self._united(check, ids)
        drafts = {site: table.found.draft for site, table in check.tables.items()}
        features = {s: [name for name in draft.features if name not in special] for s, draft in drafts.items()}
        lists = {s: {n: sorted(v) for n, v in one.categories.items() if n in features[s]} for s, one in drafts.items()}
        check.features = tuple(f"{site}.{name}" for site, names in features.items() for name in names)
        fields = {
            "active": active[0],
            "features": features,
            "categories": {s: some for s, some in lists.items() if some},
        }
        return fields | ({} if row_id is None else {"alignment": "first"})

    def _united(self, check: Check, drafts: dict[str, SiteDraft]) -> Agreement:
        """Have every site read what the sites write differently, as ``veilboost agree`` proposes."""
        found = agree(drafts)
        for one in found.differences:
            if one.is_settled:
                check.united.append(one.text)
            else:
                check.add("all sites", one.text)
        for site, options in found.options.items():
            before = self._readers[ROWS][site].options
            changed = {key: options[key] for key in _AGREED if key in options and options[key] != before.get(key)}
            in_file = before.get("rename", {})
            called = {in_file.get(old, old): new for old, new in changed.get("rename", {}).items()}
            for readers in self._readers.values():
                own = {
                    key: {called.get(name, name): one for name, one in value.items()} if key in _BY_COLUMN else value
                    for key, value in readers[site].options.items()
                }
                told = {key: {**own.get(key, {}), **value} for key, value in changed.items()}
                readers[site] = Reader(readers[site].path, {**own, **told})
        return found

    def _private_terms(self, method: Private, tables: Mapping[str, SiteTable]) -> tuple[Check, dict[str, Any]]:
        """Return what the caller says is public; of the tables only whether they can be read so."""
        check = Check(tables)
        told = {site: [one for one in table.found.findings if one.kind in _UNUSABLE] for site, table in tables.items()}
        check.problems = {site: list(map(hinted, some)) for site, some in told.items() if some}
        settings = {key: value for key, value in method.settings.items() if key not in ("budget", "bounds")}
        names = [*method.bounds, *method.categories]
        for name, what in {
            **dict.fromkeys(columns_of(self.label), "the label"),
            **dict.fromkeys(names, "which the job names"),
        }.items():
            check.ask_for(name, what)
        label = self.label
        if isinstance(label, str) and method.label_classes is None and method.label_bounds is None:
            for site, table in tables.items():
                if label in table.names and not set(table.values(label)) <= {0, 1}:
                    check.add(site, f"label {label!r} holds more than 0 and 1: such rows would be left out. {_LABEL}")
        of_label = {label: method.label_bounds} if isinstance(label, str) and method.label_bounds else {}
        _check_bounds(check, tables, {**method.bounds, **of_label})
        fields: dict[str, Any] = {
            **settings,
            "data_set": ROWS,
            "label": self.label,
            "epsilon": method.epsilon_and_delta[0],
            "delta": method.epsilon_and_delta[1] or None,
            "feature_bounds": dict(method.bounds),
            "features": names or None,
        }
        check.features = tuple(names)
        return check, fields

    def _run(
        self,
        made: JobRecipe,
        method: Method,
        *consents: str,
        progress: bool,
        uses: Mapping[str, Use] | None = None,
    ) -> Run:
        if self._spent and not isinstance(method, Private):
            raise ConfigurationError(
                "private trees were trained on these tables, whose budget a job without privacy would not be charged "
                "to. Remedy: vb.private(...), or a new federation for other rows"
            )
        made_name = str(made.name)
        number = len(list((self.folder / "runs").glob("*"))) + 1
        root = make_folder(self.folder / "runs" / f"{number:03}-{made_name}", is_new=True)
        self._write_policies(root / made_name, method, consents)
        self._check_job(made.job, root / made_name, uses)
        if isinstance(method, Private):
            self._charge(method.epsilon_and_delta)
        return made.run(Simulator(self.sites, root, progress=progress))

    def _charge(self, budget: tuple[float, float]) -> None:
        """Note what a training may spend, durably and before it runs: one that fails may have released noised sums.

        Raises:
            ConfigurationError: it is more than is left; then nothing is noted.
        """
        left = self._left()
        if left is not None and (budget[0] > left[0] or budget[1] > left[1]):
            raise ConfigurationError(
                f"the training asks for the budget {budget}, and {left} is left of every site's. Remedy: ask for less"
            )
        self._spent.append((float(budget[0]), float(budget[1])))
        write_private(self.folder / SPENT, json.dumps(self._spent).encode())

    def _write_policies(self, workspace: Path, method: Method, consents: Sequence[str]) -> None:
        """Write every site's policy, for its process alone."""
        memory = self.folder / "memory" / "{site}"
        kept = {"registry": str(memory / "registry"), "inputs": str(memory / "inputs")}
        set_up(workspace, SetupOptions(consents=(*self.consents, *consents), policy={**kept, **self._policy}))
        common = json.loads((workspace / POLICY_FILE).read_text(encoding="utf-8"))
        for site in self.sites:
            sets = {name: self._entry(name, site, method) for name in self._readers}
            document = {**common, "data_sets": {**common.get("data_sets", {}), **sets}}
            SitePolicy.from_dict(document, workspace=workspace / site, site=site)
            write_atomically(policy_of_simulated(workspace, site), json.dumps(document, indent=2).encode(), 0o600)

    def _check_job(self, job: Any, workspace: Path, uses: Mapping[str, Use] | None = None) -> None:
        """Ask every site's policy, and look at its rows as the job will read them.

        Args:
            uses: what the job asks of each site's rows, where the job itself does not say it.

        Raises:
            SitesRefused: all reasons of all sites.
        """
        if is_private(str(getattr(job, "profile", ""))):
            return  # such a job refuses no row, and nothing may be told of one
        reasons: dict[str, list[str]] = {}
        n_rows = 0
        for site in self.sites:
            policy = SitePolicy.load(workspace, site)
            told = reasons[site] = _refused(job, policy, self.sites) if isinstance(job, HorizontalJob) else []
            for name in self._readers:
                found = survey(policy.data_set(name), use_of(job, None, site, name) if uses is None else uses[site])
                n_rows += found.n_rows if name == ROWS else 0
                told += [hinted(one) for one in (*found.findings, *floors(found, job, policy)) if one.is_problem]
            if isinstance(job, HorizontalJob) and site == self.sites[-1] and n_rows < policy.min_effective_rows:
                told.append(
                    f"all sites together have {n_rows} rows, and its policy asks for {policy.min_effective_rows}. "
                    "Policy key: min_effective_rows. Remedy: more rows, or simulate(policy={'min_effective_rows': ...})"
                )
        if any(reasons.values()):
            what = "nothing was trained" if uses is None else "nothing was scored"
            raise SitesRefused({site: some for site, some in reasons.items() if some}, what)


def _refused(job: HorizontalJob, policy: SitePolicy, sites: Sequence[str]) -> list[str]:
    """Return why a site's policy does not take a job, with where ``simulate`` says what all sites allow."""
    site = policy.site
    try:
        allow(job, SiteContext(site, tuple(sorted(sites)), SIMULATED, bytes(16), policy.runs, policy, Identity(site)))
    except PolicyRefusal as error:
        return [f"{error} In Python: simulate(..., consents=[...], policy={{...}})"]
    except ConfigurationError as error:
        return [str(error)]
    return []


_RECIPES: dict[str, Any] = {
    "horizontal": recipes.HorizontalXGBRecipe,
    "vertical": recipes.VerticalXGBRecipe,
    "private_trees": recipes.PrivateTreesRecipe,
}


def _check_bounds(check: Check, tables: Mapping[str, SiteTable], bounds: Mapping[str, tuple[float, float]]) -> None:
    """Note columns none of whose values lies within its bounds: a slip of units, most likely."""
    for name, (low, high) in bounds.items():
        for site, table in tables.items():
            values = table.values(name) if name in table.names else []
            if values and not any(isinstance(one, int | float) and low <= one <= high for one in values):
                check.add(site, f"no value of {name!r} lies within its bounds, {low:g} to {high:g}. {_BOUNDS}")


def _spent_in(path: Path) -> list[tuple[float, float]]:
    """Return what private trainings in a folder have asked for. Raises: ConfigurationError: it cannot be read."""
    try:
        return [(float(epsilon), float(delta)) for epsilon, delta in json.loads(path.read_bytes())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, RecursionError):
        raise ConfigurationError(f"{path} cannot be read, which says what was spent: take a new folder") from None


def _frame(table: SiteTable) -> pd.DataFrame:
    columns = [table.raw.columns[place] for place in range(len(table.names))]
    return pa.Table.from_arrays(columns, names=list(table.names)).to_pandas(types_mapper=pd.ArrowDtype)


simulate = Federation
