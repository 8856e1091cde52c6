"""Recipes in the style of FLARE 2.9: one for a job of any kind, and one by name for each kind."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from inspect import Parameter, signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from nvflare.job_config.api import FedJob
from nvflare.private.fed.app.utils import kill_child_processes
from nvflare.recipe import PocEnv, SimEnv
from nvflare.recipe.spec import ExecEnv, Recipe

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import Job, goes_on_without, waiting_s
from nvflare_plugins.base.checks import checked_sites, shown
from nvflare_plugins.data.declaration import VerticalRules
from nvflare_plugins.flare.components import ignore_settings_here
from nvflare_plugins.flare.controller import TRAIN_TASK, JobController
from nvflare_plugins.flare.executor import LONGEST_NAME, JobExecutor, is_job_name
from nvflare_plugins.flare.kinds import kind_of, kind_of_job
from nvflare_plugins.kinds.vertical.job import Preset
from nvflare_plugins.recipes.poc_env import VeilPocEnv
from nvflare_plugins.recipes.run import Run, SitesRefused, reasons_of
from nvflare_plugins.site.flare_boundary import check_references, check_set_up
from nvflare_plugins.site.policy_values import POLICY_FILE
from nvflare_plugins.site.setup import check_place

SIMULATOR = "nvflare_plugins.flare.simulator"
OUR_PACKAGES = ["nvflare_plugins", "he_processors", "dp_components"]


class _SimulatedFast(FedJob):
    """FLARE's job, whose simulator forks its sites (flare/simulator.py)."""

    def simulator_run(
        self,
        workspace: str,
        n_clients: int | None = None,
        clients: list[str] | None = None,
        threads: int | None = None,
        gpu: str | None = None,
        log_config: str | None = None,
    ) -> int:
        """Run it over sites of some names, or so many, and return the simulator's exit code."""
        names = clients or [f"site-{number}" for number in range(1, (n_clients or 0) + 1)]
        with TemporaryDirectory(prefix="veilboost-") as folder:
            self.export_job(folder)
            command = [sys.executable, "-m", SIMULATOR, str(Path(folder) / self.name), "-w", workspace]
            command += ["-c", ",".join(names), "-t", str(threads or len(names))]
            command += [*(("-gpu", gpu) if gpu else ()), *(("-l", log_config) if log_config else ())]
            process = subprocess.Popen(command, start_new_session=True)
            try:
                return process.wait()
            except KeyboardInterrupt:
                kill_child_processes(process.pid)
                process.kill()
                return -9  # as FLARE's


class JobRecipe(Recipe):
    """A FLARE job made of one of our jobs.

        recipe = JobRecipe("credit", HorizontalJob(data_set="credit", label="default", num_rounds=20))
        recipe.execute(SimEnv(num_clients=3, workspace_root=...))      # or ProdEnv(...)
        recipe.export("jobs")                                          # or write the job folder

    A job names data sets; where they lie, and what a job may do there, each site's own policy says
    (``veilboost site-setup``). Nothing about paths, code or keys is in the job.

    Args:
        name: name of the FLARE job.
        job: a job of any kind; a field at its default stays out of the job folder.
        sites: the sites that take part; None means all that FLARE assigns to the job.
        min_clients: fewest sites; default what the kind needs, or the number of ``sites``.

    Raises:
        ConfigurationError: a setting that no site would accept.
    """

    def __init__(self, name: str, job: Job, sites: Sequence[str] | None = None, min_clients: int | None = None) -> None:
        _check_name(name)
        kind = kind_of_job(job)
        self.job: Any = job
        self.sites = checked_sites(sites)
        self.min_clients = min_clients if min_clients is not None else len(self.sites or ()) or kind.fewest
        if self.sites is not None and self.min_clients > len(self.sites):
            raise ConfigurationError(f"min_clients is {self.min_clients}, but only {len(self.sites)} sites are named")
        if goes_on_without(self.job) and self.sites is not None and self.min_clients == len(self.sites):
            raise ConfigurationError(
                "on_lost_site='continue' with min_clients equal to the number of sites: no site could be missing. Give "
                "min_clients, the fewest sites that may be left"
            )
        kind.check(self.job, None if self.sites is None else tuple(self.sites), self.min_clients)
        # fail_fast: without a site the job cannot go on, so FLARE need not wait whether it comes back; or the job does.
        ends = waiting_s(self.job) is None
        flare_job = _SimulatedFast(
            name=name, min_clients=self.min_clients, mandatory_clients=self.sites, fail_fast=ends
        )
        flare_job.set_app_packages(OUR_PACKAGES)  # sites have the package installed; no code travels with the job
        fields = self.job.stated(kind.stated)
        check_references(fields, "the job")
        controller = JobController(fields, self.sites, self.min_clients, kind=kind.name)
        flare_job.to_server(controller, id="veilboost_controller")
        if self.job.tracking:
            from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver

            flare_job.to_server(TBAnalyticsReceiver(tb_folder="tb_events"), id="tb_receiver")
        if self.sites is None:
            flare_job.to_clients(JobExecutor(kind.name), tasks=[TRAIN_TASK])
        else:
            for site in self.sites:
                flare_job.to(JobExecutor(kind.name), site, tasks=[TRAIN_TASK])
        super().__init__(flare_job)

    def run(self, env: ExecEnv, *args: Any, **kwargs: Any) -> Run:
        """Run the job as FLARE does; where sites would not be set up, it is refused before anything starts.

        Raises:
            SitesRefused: the simulator's sites did not train; it has the reasons of all that said one.
            ConfigurationError: ``veilboost site-setup`` has not been run on the simulator's folder; or the environment
                is FLARE's PocEnv, which provisions and starts without a set-up in between.
        """
        if isinstance(env, PocEnv) and not isinstance(env, VeilPocEnv):
            raise ConfigurationError(
                "PocEnv provisions its sites anew and starts them without a set-up, so that every job is refused. "
                "Remedy: nvflare_plugins.recipes.VeilPocEnv, which sets them up in between."
            )
        if isinstance(env, SimEnv):
            folder = Path(env.workspace_root) / self.name
            check_place(folder)
            if not (folder / POLICY_FILE).is_file():
                raise ConfigurationError(
                    f"the simulator's sites have no policy: run `veilboost site-setup {folder} --data-set NAME=PATH` "
                    "first"
                )
            check_set_up(folder, str(folder))
            env = self._with_names(env)
        ignore_settings_here()
        try:
            job_id = super().run(env, *args, **kwargs).job_id
        except RuntimeError as error:
            reasons = reasons_of(Path(env.workspace_root) / self.name) if isinstance(env, SimEnv) else {}
            if reasons:
                raise SitesRefused(reasons) from error
            raise
        return Run(env, job_id, self.name, self.job)

    def _with_names(self, env: SimEnv) -> SimEnv:
        """Return an environment whose sites have the job's names: FLARE would call them site-1, site-2, ..."""
        if self.sites is None or env.clients:
            return env
        if env.num_clients != len(self.sites):
            raise ConfigurationError(
                f"the job names {len(self.sites)} sites and SimEnv has num_clients={env.num_clients}: give it as many"
            )
        env = copy.copy(env)
        env.clients = list(self.sites)
        return env


def _check_name(name: object) -> None:
    """Refuse a name that FLARE would refuse when the job is submitted, or that cannot be a folder's."""
    if not isinstance(name, str) or not is_job_name(name):
        raise ConfigurationError(
            f"name={shown(name)} is no name that FLARE takes for a job. Remedy: a name of at most {LONGEST_NAME} "
            "letters, digits and . _ - of ASCII, with a letter or digit at first."
        )


class _NamedRecipe(JobRecipe):
    """A recipe of one kind, whose arguments are the fields of its job."""

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        of_job = signature(kind_of(cls.kind).job).parameters.values()
        own = list(signature(JobRecipe.__init__).parameters.values())
        by_name = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in (*of_job, *own[3:])]
        cls.__signature__ = signature(JobRecipe).replace(parameters=[own[1], *by_name])

    def __init__(
        self, name: str, *, sites: Sequence[str] | None = None, min_clients: int | None = None, **fields: Any
    ) -> None:
        job: Any = kind_of(self.kind).job
        made = {each.name for each in dataclasses.fields(job) if each.default_factory is not dataclasses.MISSING}
        given = {name: value for name, value in fields.items() if value is not None or name not in made}
        super().__init__(name, job.from_dict(self._completed(given)), sites, min_clients)

    @staticmethod
    def _completed(fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the job with what the recipe adds."""
        return fields


class AlignmentRecipe(_NamedRecipe):
    """Find the rows that all sites have, by private set intersection over their ids.

    Each site ends with the positions of its own common rows, in an order that all sites share, in the job's run folder
    (``alignment.npz``); vertical jobs name this job to use them. Which column holds the ids, each site's policy says
    (``veilboost site-setup --id NAME=COLUMN``).

        recipe = AlignmentRecipe("align_loans", data_sets=["loans", "loans_test"], sites=["bank", "shop", "telco"])
        recipe.export("jobs")

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``alignment`` (jobs/REFERENCE.md).
    """

    kind = "alignment"


class BaggingXGBRecipe(_NamedRecipe):
    """Train XGBoost by bagging: each round every site grows a tree on its own rows, and all sites take all of them.

    A round costs one sealed message of a few kilobytes, whatever the number of rows. In return the other sites get each
    site's own trees, which tell of its rows alone; sites refuse that unless their policy consents
    (``share_own_trees``). ``HorizontalXGBRecipe`` shows pooled sums only, and gives the model of centralized training.

        recipe = BaggingXGBRecipe(
            name="credit", data_set="credit", label="default", params={"objective": "binary:logistic"}, num_rounds=20
        )

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``bagging`` (jobs/REFERENCE.md).
    """

    kind = "bagging"


class DpBoostRecipe(_NamedRecipe):
    """Train DPBoost (Li et al., AAAI 2020) over sites that hold the same columns for other rows: pure epsilon.

    The server is trusted with exact sums over all sites: it chooses the splits and adds the noise. Sites must allow the
    profile dp_trusted. Where nobody is to be trusted so far, ``PrivateTreesRecipe`` is the better choice.

        recipe = DpBoostRecipe(
            name="abalone", data_set="abalone", label="rings", epsilon=4.0, label_bounds=(1, 29),
            feature_bounds={"length": (0, 1), "height": (0, 0.5)}, categories={"sex": ["F", "I", "M"]},
        )
        recipe.execute(SimEnv(num_clients=3, workspace_root=...))      # or ProdEnv(...)

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``dpboost`` (jobs/REFERENCE.md).
    """

    kind = "dpboost"


class FederBoostVerticalRecipe(_NamedRecipe):
    """Train over parties that hold other columns of the same rows, under local differential privacy of each value.

    The passive parties send the bucket of every value once, randomised; the active party, which has the label, trains
    stock XGBoost on them. What is public about a passive party's features stands in a file at that party.

        recipe = FederBoostVerticalRecipe(
            name="credit", data_set="credit", active="bank", label="default", epsilon=4.0, num_rounds=20
        )
        recipe.execute(SimEnv(num_clients=3, workspace_root=...))      # or ProdEnv(...)

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``federboost_vertical``
    (jobs/REFERENCE.md).
    """

    kind = "federboost_vertical"


class HorizontalXGBRecipe(_NamedRecipe):
    """Train XGBoost over sites that hold the same columns for other rows, every private message protected.

    The job names a data set; where it lies, and what a job may do there, each site's own policy says
    (``veilboost site-setup``). Nothing about paths, code or keys is in the job.

        recipe = HorizontalXGBRecipe(
            name="credit", data_set="credit", label="default", params={"objective": "binary:logistic"}, num_rounds=20
        )
        recipe.execute(SimEnv(num_clients=3, workspace_root=...))      # or ProdEnv(...)
        recipe.export("jobs")                                          # or write the job folder

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``horizontal`` (jobs/REFERENCE.md).
    """

    kind = "horizontal"


class PrivateTreesRecipe(_NamedRecipe):
    """Train trees under differential privacy over sites that hold the same columns for other rows.

    Each site's policy must give the data set a privacy budget, from which its ledger pays for the job. Everything here
    is public and must come from public knowledge: bounds, category lists, delta.

        recipe = PrivateTreesRecipe(
            name="credit", data_set="credit2", label="label", epsilon=0.5, delta=1e-6,
            feature_bounds={"AGE": (18, 100), "LIMIT_BAL": (0, 1_000_000)}, features=["AGE", "LIMIT_BAL"],
        )
        recipe.execute(SimEnv(num_clients=3, workspace_root=...))      # or ProdEnv(...)

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``private_trees`` (jobs/REFERENCE.md).
    """

    kind = "private_trees"


class ProfileRecipe(_NamedRecipe):
    """Look at the data of all sites before a horizontal training: missing values, rates, information value.

    Each site gets ``profile.json``, whose ``ranking`` lists columns for ``features`` of a training, ``profile.html``
    and, about its own rows, ``local.html``. Cut points are searched once: a later ``HorizontalXGBRecipe`` over the same
    data, sites, ``max_bin`` and ``min_rows_per_cut`` uses them again. Sites refuse it unless their policy consents
    (``feature_profile``).

        recipe = ProfileRecipe(name="look", data_set="credit", label="default")

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``profile`` (jobs/REFERENCE.md).
    """

    kind = "profile"


class SelectionRecipe(_NamedRecipe):
    """Select columns over all sites: backward elimination by cross validation, and information values by fold.

    Each site gets ``selection.csv``, ``selection_steps.csv``, ``selection.json``, ``selection.html`` and
    ``train_chosen.py``, which writes the job that trains on the chosen columns. Sites take part if their policy allows
    as many sets of columns times folds times rounds (``tuning``), and counts by columns and label
    (``feature_profile``).

        recipe = SelectionRecipe(
            name="select", data_set="credit", label="default", params={"objective": "binary:logistic"}, num_rounds=30
        )

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``selection`` (jobs/REFERENCE.md).
    """

    kind = "selection"


class TuningRecipe(_NamedRecipe):
    """Try parameter sets by cross validation over sites that hold the same columns for other rows.

    Each site gets ``tuning.csv``, ``tuning.json``, ``tuning.html`` and ``train_best.py``, which writes the job that
    trains the best parameters on all rows. Sites refuse it unless their policy allows as many trials times folds times
    rounds (``tuning``).

        recipe = TuningRecipe(
            name="tune", data_set="credit", label="default", params={"objective": "binary:logistic"},
            search={"eta": {"low": 0.02, "high": 0.3, "log": True}, "max_depth": [3, 4, 6]}, n_trials=8,
        )

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``tuning`` (jobs/REFERENCE.md).
    """

    kind = "tuning"


class VerticalXGBRecipe(_NamedRecipe):
    """Train XGBoost over parties that hold other columns of the same rows; one of them has the label.

    The job names a data set; where it lies, and what a job may do there, each party's own policy says
    (``veilboost site-setup``). Nothing about paths, code or keys is in the job. In the preset ``guarded`` max_bin is 32
    unless given: what parties allow by default.

        recipe = VerticalXGBRecipe(
            "credit", active="bank", data_set="loans", label="default", alignment="first",
            params={"objective": "binary:logistic", "max_bin": 32}, num_rounds=20, sites=["bank", "shop", "telco"],
        )
        recipe.execute(SimEnv(num_clients=3, workspace_root=...))      # or ProdEnv(...)
        recipe.export("jobs")                                          # or write the job folder

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``vertical`` (jobs/REFERENCE.md).
    """

    kind = "vertical"

    @staticmethod
    def _completed(fields: dict[str, Any]) -> dict[str, Any]:
        params = fields.get("params", {})
        is_guarded = fields.get("preset", Preset.GUARDED) == Preset.GUARDED
        if is_guarded and isinstance(params, Mapping) and not {"max_bin", "max_bins"} & set(params):
            return {**fields, "params": {**params, "max_bin": VerticalRules().max_bins}}
        return fields


class VerticalInferenceRecipe(_NamedRecipe):
    """Predict, explain, merge, or score rows as they are asked for, with a vertical model, by all of its parties.

    Every site holds its part of the model since the training (``veilboost_runs/<job id>/``). The result is written at
    the active party, in the run folder of this job: ``predictions.parquet``, ``contributions.parquet`` or
    ``merged_model.json``, and ``importance.csv``.

        recipe = VerticalInferenceRecipe(
            "score_loans", model="5d0c...", data_set="loans_2026", alignment="first", sites=["bank", "shop", "telco"]
        )
        recipe.export("jobs")

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``vertical_inference``
    (jobs/REFERENCE.md).
    """

    kind = "vertical_inference"


class VerticalTuningRecipe(_NamedRecipe):
    """Try parameter sets by cross validation over parties that hold other columns of the same rows.

    The active party gets ``tuning.csv``, ``tuning.json``, ``tuning.html`` and ``train_best.py``, which writes the job
    that trains the best parameters on all rows; the others get nothing but their reports. Parties refuse it unless
    their policy allows as many trials times folds times rounds (``tuning``) and, passive ones, ``exact_bins``.

        recipe = VerticalTuningRecipe(
            "tune", active="bank", data_set="loans", label="default", alignment="first", profile="elgamal",
            params={"objective": "binary:logistic"}, trials=[{"eta": 0.1}, {"eta": 0.3}], sites=["bank", "shop"],
        )

    Its arguments beside ``sites`` and ``min_clients`` are the fields of kind ``vertical_tuning`` (jobs/REFERENCE.md).
    """

    kind = "vertical_tuning"


def write_folder(job: JobRecipe, folder: Path) -> Path:
    """Write a job's folder below a folder, replacing what was there under its name; return where it is."""
    path = folder / str(job.name)
    shutil.rmtree(path, ignore_errors=True)
    job.export(str(folder))
    return path
