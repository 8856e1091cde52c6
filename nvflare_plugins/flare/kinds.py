"""The table of job kinds. Controller, executor, recipes, plans and the conformance suite follow from its rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import Job, JobResult, Progress, SiteContext
from nvflare_plugins.attempt.plan import Planner
from nvflare_plugins.base.checks import shown
from nvflare_plugins.flare.attempt import ServerSum
from nvflare_plugins.kinds.alignment.job import AlignmentJob
from nvflare_plugins.kinds.bagging.job import BaggingJob, check_bagging_early
from nvflare_plugins.kinds.dpboost.job import KEPT_FILE, DpBoostJob
from nvflare_plugins.kinds.federboost_vertical.job import BucketJob
from nvflare_plugins.kinds.private_trees.job import JobPlan, PrivateTreesJob
from nvflare_plugins.kinds.profile.job import ProfileJob
from nvflare_plugins.kinds.selection.job import SelectionJob, check_selection_early
from nvflare_plugins.kinds.tuning.job import TuningJob, check_tuning_early
from nvflare_plugins.kinds.vertical.job import VerticalJob, check_active_party, check_vertical_early
from nvflare_plugins.kinds.vertical_inference.job import InferenceJob
from nvflare_plugins.kinds.vertical_tuning.job import VerticalTuningJob, check_vertical_tuning_early
from nvflare_plugins.pooled.job import HorizontalJob, check_horizontal_early
from nvflare_plugins.site.flare_boundary import CONTROLLER, refuse_removed
from nvflare_plugins.wire.channel import Transport

SERVER_CONFIGURATION = "config_fed_server.json"
RunSite = Callable[[Any, SiteContext, Transport, float, Progress], JobResult]
"""Takes part in one attempt at one site: (job, context, transport, longest wait for an exchange in seconds, progress).

Raises: VeilBoostError: what ended the attempt at this site.
"""

AnswerSum = Callable[[Any, int, Path], ServerSum | None]
"""(job, number of sites, server's workspace) -> what turns added words into the answer at a server that is trusted with
sums; None else.
"""

Sites = tuple[str, ...] | None
Check = Callable[[Any, Sites, int], None]
"""(job, its sites if they are named, fewest sites): refuses before anything is submitted what no site would accept.

Raises: ConfigurationError.
"""


def _accept(job: Any, sites: Sites, n_sites: int) -> None:
    """Refuse nothing beyond what the job refuses by itself."""


@dataclass(frozen=True, slots=True)
class JobKind:
    """One kind of job.

    Attributes:
        name: what a job's configuration calls it.
        job: reads the job and says what it may not say.
        run: a site's part.
        answer_sum: the server's part beyond adding, if it has one.
        metrics_site: the one site that streams metrics to the server, where the job asks for it; (job, sites) -> site.
        kept: files in a site's run folder that are for further attempts only, and go when the site's part is over.
        stated: fields that a job folder states even where they are at their defaults.
        fewest: fewest sites, where a recipe names none.
        check: what a recipe refuses.
        planner: what plans a job before it runs, or why nothing does.
    """

    name: str
    job: type[Job]
    run: RunSite
    answer_sum: AnswerSum = lambda job, n_sites, workspace: None
    metrics_site: Callable[[Any, tuple[str, ...]], str] = lambda job, sites: sites[0]
    kept: tuple[str, ...] = ()
    stated: tuple[str, ...] = ()
    fewest: int = 3
    check: Check = _accept
    planner: Planner | str = "none has been written"


def _named(name: str) -> Callable[..., Any]:
    """Return a function below ``nvflare_plugins.kinds`` imported when called: a process needs one kind."""
    module, _, function = name.rpartition(".")

    def call(*arguments: Any) -> Any:
        return getattr(import_module(f"nvflare_plugins.kinds.{module}"), function)(*arguments)

    return call


def _noise_of_trees(job: PrivateTreesJob, n_sites: int, workspace: Path) -> ServerSum | None:
    from nvflare_plugins.kinds.private_trees.noisy_sums import server_of

    server = server_of(job, n_sites, workspace)
    return None if server is None else server.answer


def _choices_of_dpboost(job: DpBoostJob, n_sites: int, workspace: Path) -> ServerSum | None:
    from nvflare_plugins.kinds.dpboost.server import DpBoostServer

    return DpBoostServer(job).answer


def _check_buckets(job: BucketJob, sites: Sites, n_sites: int) -> None:
    from nvflare_plugins.kinds.federboost_vertical.training import check_bucket_parameters

    check_bucket_parameters(job.params, job.n_buckets)
    check_active_party(job.active, sites)


def _check_plan(job: PrivateTreesJob, sites: Sites, n_sites: int) -> None:
    ours = replace(job, noise="")  # a plugin's price is known where its files are
    JobPlan.of(ours, n_sites)  # refuses what no site could train


NO_ALIGNMENT_PLAN = "it takes about 14 CPU seconds of each party for 100,000 ids, and releases who is common"
NO_INFERENCE_PLAN = "it takes seconds; what it may ask is in the passive parties' policies (predictions_per_row)"
_LABELLED = ("data_set", "label")
_ROWS = (
    JobKind("alignment", AlignmentJob, _named("alignment.align.align_site"), fewest=2, planner=NO_ALIGNMENT_PLAN),
    JobKind(
        "bagging",
        BaggingJob,
        _named("bagging.training.run_bagging_site"),
        stated=(*_LABELLED, "num_rounds"),
        check=check_bagging_early,
        planner=Planner(_named("bagging.model.plan")),
    ),
    JobKind(
        "dpboost",
        DpBoostJob,
        _named("dpboost.training.run_dpboost_site"),
        _choices_of_dpboost,
        kept=(KEPT_FILE,),
        stated=(*_LABELLED, "epsilon", "feature_bounds", "variant", "n_trees", "depth", "profile"),
        planner=Planner(_named("dpboost.server.plan")),
    ),
    JobKind(
        "federboost_vertical",
        BucketJob,
        _named("federboost_vertical.training.run_site"),
        stated=(*_LABELLED, "active", "epsilon", "unit", "edges_epsilon", "n_buckets", "num_rounds", "profile"),
        check=_check_buckets,
        planner=Planner(_named("federboost_vertical.payment.plan")),
    ),
    JobKind(
        "horizontal",
        HorizontalJob,
        _named("horizontal.site.run_site"),
        stated=(*_LABELLED, "profile", "num_rounds"),
        check=check_horizontal_early,
        planner=Planner(_named("horizontal.planner.plan")),
    ),
    JobKind(
        "private_trees",
        PrivateTreesJob,
        _named("private_trees.training.run_private_trees_site"),
        _noise_of_trees,
        stated=(*_LABELLED, "epsilon", "delta", "method", "trust"),
        check=_check_plan,
        planner=Planner(_named("private_trees.planner.plan"), uses=("base_rate",)),
    ),
    JobKind(
        "profile",
        ProfileJob,
        _named("profile.site.run_profile_site"),
        stated=(*_LABELLED, "profile"),
        planner=Planner(_named("profile.job.plan")),
    ),
    JobKind(
        "selection",
        SelectionJob,
        _named("selection.site.run_selection_site"),
        stated=(*_LABELLED, "profile", "num_rounds", "folds"),
        check=check_selection_early,
        planner=Planner(_named("selection.job.plan")),
    ),
    JobKind(
        "tuning",
        TuningJob,
        _named("tuning.site.run_tuning_site"),
        stated=(*_LABELLED, "profile", "num_rounds", "folds"),
        check=check_tuning_early,
        planner=Planner(_named("tuning.job.plan")),
    ),
    JobKind(
        "vertical",
        VerticalJob,
        _named("vertical.site.run_vertical_site"),
        metrics_site=lambda job, sites: job.active,  # it alone knows the metrics
        stated=("active", *_LABELLED, "profile", "preset", "num_rounds"),
        fewest=2,
        check=check_vertical_early,
        planner=Planner(_named("vertical.planner.plan"), uses=("workers",)),
    ),
    JobKind(
        "vertical_inference",
        InferenceJob,
        _named("vertical_inference.site.run_inference"),
        stated=("model", "action"),
        fewest=2,
        planner=NO_INFERENCE_PLAN,
    ),
    JobKind(
        "vertical_tuning",
        VerticalTuningJob,
        _named("vertical_tuning.site.run_vertical_tuning_site"),
        stated=("active", *_LABELLED, "profile", "preset", "num_rounds", "folds"),
        fewest=2,
        check=check_vertical_tuning_early,
        planner=Planner(_named("vertical_tuning.job.plan"), uses=("workers",)),
    ),
)
KINDS: dict[str, JobKind] = {kind.name: kind for kind in _ROWS}


def kind_of(name: object) -> JobKind:
    """Return a kind by the name that a job's configuration gives. Raises: ConfigurationError."""
    if not isinstance(name, str) or name not in KINDS:
        raise ConfigurationError(f"there is no kind of job {shown(name)}; there are {', '.join(sorted(KINDS))}")
    return KINDS[name]


def kind_of_controller(path: object, arguments: Mapping[str, Any]) -> JobKind | None:
    """Return the kind of a job from its controller in a job folder; None if it is no controller of ours.

    Raises:
        ConfigurationError: it names a kind or a class that is there no more.
    """
    refuse_removed(path)
    return kind_of(arguments.get("kind")) if path == CONTROLLER else None


def read_job(folder: Path) -> Any:
    """Return the job in a FLARE job folder. Raises: as ``find_job``."""
    return find_job(folder)[1]


def find_job(folder: Path) -> tuple[JobKind, Any]:
    """Read the job in a FLARE job folder, and of which kind it is.

    Raises:
        ConfigurationError: no server configuration with a job of ours in it, or one that no site would accept.
    """
    for path in sorted(folder.glob(f"*/config/{SERVER_CONFIGURATION}")):
        try:
            found = _find_job(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, RecursionError):
            raise ConfigurationError(f"{path} is not valid JSON") from None
        if found is not None:
            return found
    raise ConfigurationError(f"{folder} is not the folder of a VeilBoost job: no {SERVER_CONFIGURATION} holds one")


def _find_job(value: Any) -> tuple[JobKind, Any] | None:
    if isinstance(value, dict):
        arguments = value.get("args")
        if isinstance(arguments, dict) and isinstance(arguments.get("job"), dict):
            kind = kind_of_controller(value.get("path"), arguments)
            if kind is not None:
                return kind, kind.job.from_dict(arguments["job"])
        value = list(value.values())
    if isinstance(value, list):
        return next((found for item in value if (found := _find_job(item)) is not None), None)
    return None


def kind_of_job(job: object) -> JobKind:
    """Return the kind of a job. Raises: ConfigurationError: it is no job of ours."""
    for kind in KINDS.values():
        if type(job) is kind.job:
            return kind
    jobs = ", ".join(sorted(kind.job.__name__ for kind in KINDS.values()))
    raise ConfigurationError(f"a recipe takes a job, one of {jobs}; this is of type {type(job).__name__}")
