"""What a job leaves for whoever started it: model, history, report and evidence, as far as they reach that person.

Privacy: nothing here asks a site for anything. Of a job in FLARE's simulator, whose sites are all the caller's own, it
reads the sites' run folders. Of a POC's or a production job it reads what FLARE hands its submitter: the server's
summary and the evidence, in which reasons stand only where a site's policy has ``share_data_errors``.
"""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.recipe import Run as FlareRun
from nvflare.recipe import SimEnv
from nvflare.recipe.spec import ExecEnv

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.evidence.format import EXPORT_SUFFIX
from nvflare_plugins.evidence.verification import Verification, verify
from nvflare_plugins.flare.attempt import FAILED, SUMMARY_FILE
from nvflare_plugins.pages import profile_page, report
from nvflare_plugins.pages.report import run_part
from nvflare_plugins.pages.run_record import FILE_NAME, REPORT, RunRecord
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.policy_values import FOLDERS

if TYPE_CHECKING:
    import pandas as pd

    from nvflare_plugins.scoring import VeilBoostClassifier, VeilBoostRegressor

SIMULATED = "simulate_job"  # what FLARE's simulator calls every job


class SitesRefused(ConfigurationError, RuntimeError):
    """What sites refused, all of it at once.

    Attributes:
        reasons: site -> its reasons, each with its remedy.
    """

    def __init__(self, reasons: Mapping[str, str | list[str]], what: str = "the job has no result") -> None:
        self.reasons = {site: [one] if isinstance(one, str) else [*one] for site, one in sorted(reasons.items())}
        lines = [f"  {site}: {text}" for site, texts in self.reasons.items() for text in texts]
        super().__init__("\n".join([f"{what}; why, by site:", *lines]))


@dataclass(frozen=True, slots=True)
class Page:
    """A page that opens in a browser, without network. ``path`` is where it lies."""

    path: Path

    def open(self) -> None:
        """Show it in the browser."""
        webbrowser.open(self.path.absolute().as_uri())


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence of a job's sites and server. ``folder`` holds it."""

    folder: Path

    def verify(self) -> Verification:
        """Check it as ``veilboost verify`` does; without a root certificate the best verdict is UNSIGNED."""
        return verify([self.folder])


class SiteRun:
    """One site's part of a job. Args: folder: with the site's ``run.json``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = RunRecord.read(folder)

    def __repr__(self) -> str:
        return f"<SiteRun of {self.record.site}: {self.folder}>"

    @cached_property
    def history(self) -> pd.DataFrame:
        """Metrics and seconds of each boosting round, from 0. Shapes: one row a round."""
        import pandas as pd

        rows = [{**row.metrics, "seconds": row.seconds} for row in self.record.rounds]
        return pd.DataFrame(rows, index=pd.Index([row.round for row in self.record.rounds], name="round", dtype=int))

    @property
    def best_round(self) -> int | None:
        """The round, from 0, with the best last metric; that of early stopping if there was one; None without metrics.

        Equal scores count for the earliest round.
        """
        found = self.record.best()
        return None if found is None else found.round

    @cached_property
    def model(self) -> VeilBoostClassifier | VeilBoostRegressor:
        """The finished model in scikit-learn's form. Raises: ConfigurationError: the job leaves none here."""
        from nvflare_plugins.scoring import load_model

        if self.record.model is None:
            raise ConfigurationError(f"the job left no model at {self.record.site}")
        return load_model(self.folder / self.record.model, dates=self._dates() or None)

    def _dates(self) -> dict[str, str]:
        """Return the patterns of dates by which the site's policy reads the training set."""
        used = {one.name for one in self.record.data}
        with suppress(ConfigurationError):
            sets = SitePolicy.load(self.folder.parent.parent, self.record.site).data_sets
            return {column: text for name in sorted(used & set(sets)) for column, text in sets[name].dates.items()}
        return {}

    @property
    def report(self) -> Page:
        """The site's report, written anew if it is not there."""
        path = self.folder / REPORT
        return Page(path if path.is_file() else report.write_report(self.folder))

    def page(self, name: str) -> Page:
        """Return a page that the job left, such as ``selection.html``. Raises: ConfigurationError: it left none."""
        return Page(self.file(name))

    @property
    def features(self) -> list[str]:
        """The columns that a selection chose. Raises: ConfigurationError: this job selected none."""
        found: list[str] = json.loads(self.file("selection.json").read_text(encoding="utf-8"))["chosen"]
        return found

    def scorecard(self, profile: SiteRun | Run | None = None, **scaling: Any) -> pd.DataFrame:
        """Return the points of the job's model, whose trees have one split each (``max_depth`` 1), for two classes.

        Args:
            profile: a run of kind profile over the same columns: each bin has its weight of evidence then.
            scaling: pdo, score, odds, is_reversed, is_whole of ``scoring.scorecard.Scaling``.

        Returns:
            A row for each bin, as ``veilboost scorecard`` writes it.

        Raises:
            ConfigurationError: the model, or the profile, makes no scorecard.
        """
        import pandas as pd

        from nvflare_plugins.scoring.model import FinishedModel
        from nvflare_plugins.scoring.scorecard import Scaling, Scorecard

        model = FinishedModel.read(self.file(self.record.model or "model.json"))
        told = None if profile is None else profile.file("profile.json")
        return pd.DataFrame(Scorecard(model, Scaling(**scaling), told).document()["bins"])

    def file(self, name: str) -> Path:
        """Return the path of a file that the job left here. Raises: ConfigurationError: it left none."""
        path = self.folder / name
        if not path.is_file():
            raise ConfigurationError(f"the job left no {name} at {self.record.site}")
        return path

    def table(self, name: str) -> pd.DataFrame:
        """Return a table that the job left: ``tuning.csv``, or the features in ``profile.json``.

        Raises:
            ConfigurationError: this job left none of that name.
        """
        import pandas as pd

        path = self.file(name)
        if path.suffix == ".csv":
            return pd.read_csv(path)
        return pd.DataFrame(json.loads(path.read_text(encoding="utf-8"))["features"])

    def compare(self, data_set: str | None = None) -> pd.DataFrame:
        """Compare the job's model with one of this site's own rows, on other rows of the site; sends nothing.

        Returns:
            One row a metric: both models' values, their difference with its 95 % interval, and a verdict. The page
            ``local.html`` in the run's folder shows the same.

        Raises:
            ConfigurationError: no such rows, or no horizontal training.
        """
        import pandas as pd

        from nvflare_plugins.scoring.comparison import compare_run

        site = self.record.site
        policy = SitePolicy.load(self.folder.parent.parent, site)
        found = compare_run(self.folder, policy, data_set)
        write_atomically(self.folder / profile_page.FILE_NAME, profile_page.comparison_html(found).encode(), 0o600)
        return pd.DataFrame(
            [(m.best_alone, m.federated, m.federated - m.best_alone, m.low, m.high, m.verdict) for m in found.metrics],
            columns=["alone", "federated", "difference", "low", "high", "verdict"],
            index=pd.Index([m.name for m in found.metrics], name="metric"),
        )

    def _repr_html_(self) -> str:
        return self.shown(f"{self.record.job_id} at {self.record.site}")

    def shown(self, name: str) -> str:
        """Return the run as HTML for a notebook. Args: name: its heading."""
        return run_part(self.record, name)


class Run(FlareRun):
    """A job that was started from Python: FLARE's ``Run``, and what the job left.

    In the simulator ``sites`` has every site's part, and ``model``, ``history``, ``best_round`` and ``report`` are
    those of the first site that has a model. In a POC and in production a model stays at its sites, and ``sites`` is
    empty. ``evidence`` and ``reasons`` hold what the server hands its submitter once ``get_result`` has been called.

    Attributes:
        name: of the job.
        job: the job, as it was submitted.
    """

    def __init__(self, env: ExecEnv, job_id: str, name: str, job: Any) -> None:
        super().__init__(env, job_id)
        self.name, self.job = name, job
        if isinstance(env, SimEnv):
            self._cached_result = str(Path(env.workspace_root) / name)

    def __repr__(self) -> str:
        where = f", sites {', '.join(self.sites)}" if self.sites else ""
        return f"<Run {self.name!r} (job {self.job_id}){where}>"

    @property
    def folder(self) -> Path:
        """Where the job's files lie. Raises: ConfigurationError: they are not here yet: call ``get_result()``."""
        if self._cached_result is None:
            raise ConfigurationError(f"job {self.job_id} has handed over nothing yet: call get_result() first")
        return Path(self._cached_result)

    @cached_property
    def sites(self) -> dict[str, SiteRun]:
        """Each site's part of a simulated job, by name; empty where sites are others' machines."""
        if not isinstance(self.exec_env, SimEnv):
            return {}
        places = sorted(self.folder.glob(f"*/{FOLDERS['runs']}/{SIMULATED}/{FILE_NAME}"))
        return {path.parents[2].name: SiteRun(path.parent) for path in places}

    @property
    def reasons(self) -> dict[str, list[str]]:
        """Why sites ended the job, as the server heard it: site -> reasons; empty if all went well."""
        return reasons_of(self.folder)

    @property
    def evidence(self) -> Evidence:
        """The evidence of sites and server that the submitter has."""
        found = sorted(self.folder.rglob(f"server{EXPORT_SUFFIX}"))
        return Evidence(found[0].parent if found else self.folder)

    @property
    def history(self) -> pd.DataFrame:
        """As ``SiteRun.history``."""
        return self._shown.history

    @property
    def best_round(self) -> int | None:
        """As ``SiteRun.best_round``."""
        return self._shown.best_round

    @property
    def model(self) -> VeilBoostClassifier | VeilBoostRegressor:
        """As ``SiteRun.model``."""
        return self._shown.model

    @property
    def report(self) -> Page:
        """As ``SiteRun.report``."""
        return self._shown.report

    def page(self, name: str) -> Page:
        """As ``SiteRun.page``."""
        return self._shown.page(name)

    @property
    def features(self) -> list[str]:
        """As ``SiteRun.features``."""
        return self._shown.features

    def scorecard(self, profile: SiteRun | Run | None = None, **scaling: Any) -> pd.DataFrame:
        """As ``SiteRun.scorecard``."""
        return self._shown.scorecard(profile, **scaling)

    def file(self, name: str) -> Path:
        """As ``SiteRun.file``."""
        return self._shown.file(name)

    def table(self, name: str) -> pd.DataFrame:
        """As ``SiteRun.table``."""
        return self._shown.table(name)

    def compare(self, site: str, data_set: str | None = None) -> pd.DataFrame:
        """As ``SiteRun.compare``, at one of the sites."""
        if site not in self.sites:
            raise ConfigurationError(f"there is no site {site!r} here; there are {', '.join(self.sites) or 'none'}")
        return self.sites[site].compare(data_set)

    @property
    def _shown(self) -> SiteRun:
        sites = list(self.sites.values())
        if not sites:
            raise ConfigurationError(
                f"job {self.job_id} left nothing of its sites here: models and reports stay at the sites, in "
                f"{FOLDERS['runs']}/{self.job_id}"
            )
        with_model = (one for one in sites if one.record.model is not None)
        return next(with_model, sites[0])

    def _repr_html_(self) -> str:
        return self._shown.shown(self.name)


def reasons_of(folder: Path) -> dict[str, list[str]]:
    """Return what the server's summary of a failed job says, site by site; nothing where there is none."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob(f"veilboost/{SUMMARY_FILE}")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("status") != FAILED:
            continue
        found |= dict(_own_reasons(document))
        if not found:
            found["server"] = [str(document.get("reason"))]
    return found


def _own_reasons(document: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield the sites that ended a job, and not those which were merely told so."""
    shared = str(document.get("reason"))
    for site, report_of_site in document.get("sites", {}).items():
        error = report_of_site.get("error") or ""
        if error and (shared.startswith(f"{site}: ") or shared not in error):
            yield site, [error]
