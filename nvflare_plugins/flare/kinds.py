"""The table of job kinds. Controller, executor, recipes, plans and the conformance suite follow from its rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import Job, JobResult, Progress, SiteContext
from nvflare_plugins.attempt.plan import Planner
from nvflare_plugins.base.checks import shown
from nvflare_plugins.flare.attempt import ServerSum
from nvflare_plugins.kinds.alignment.align import align_site
from nvflare_plugins.kinds.alignment.job import AlignmentJob
from nvflare_plugins.kinds.bagging import planner as bagging
from nvflare_plugins.kinds.bagging.job import BaggingJob, check_bagging_early
from nvflare_plugins.kinds.bagging.training import run_bagging_site
from nvflare_plugins.kinds.dpboost import planner as dpboost
from nvflare_plugins.kinds.dpboost.job import DpBoostJob
from nvflare_plugins.kinds.dpboost.server import FILE as DPBOOST_KEPT
from nvflare_plugins.kinds.dpboost.server import DpBoostServer
from nvflare_plugins.kinds.dpboost.training import run_dpboost_site
from nvflare_plugins.kinds.federboost_vertical import planner as federboost_vertical
from nvflare_plugins.kinds.federboost_vertical.job import BucketJob
from nvflare_plugins.kinds.federboost_vertical.training import check_bucket_parameters
from nvflare_plugins.kinds.federboost_vertical.training import run_site as run_bucket_site
from nvflare_plugins.kinds.horizontal import planner as horizontal
from nvflare_plugins.kinds.horizontal.site import run_site as run_horizontal_site
from nvflare_plugins.kinds.private_trees import planner as private_trees
from nvflare_plugins.kinds.private_trees.job import JobPlan, PrivateTreesJob
from nvflare_plugins.kinds.private_trees.noisy_sums import TrustedServer
from nvflare_plugins.kinds.private_trees.training import run_private_trees_site
from nvflare_plugins.kinds.profile import planner as profile
from nvflare_plugins.kinds.profile.job import ProfileJob
from nvflare_plugins.kinds.profile.site import run_profile_site
from nvflare_plugins.kinds.tuning import planner as tuning
from nvflare_plugins.kinds.tuning.job import TuningJob, check_tuning_early
from nvflare_plugins.kinds.tuning.site import run_tuning_site
from nvflare_plugins.kinds.vertical import planner as vertical
from nvflare_plugins.kinds.vertical.job import VerticalJob, check_active_party, check_vertical_early
from nvflare_plugins.kinds.vertical.site import run_vertical_site
from nvflare_plugins.kinds.vertical_inference.job import InferenceJob
from nvflare_plugins.kinds.vertical_inference.site import run_inference
from nvflare_plugins.kinds.vertical_tuning import planner as vertical_tuning
from nvflare_plugins.kinds.vertical_tuning.job import VerticalTuningJob, check_vertical_tuning_early
from nvflare_plugins.kinds.vertical_tuning.site import run_vertical_tuning_site
from nvflare_plugins.pooled.job import HorizontalJob, check_horizontal_early
from nvflare_plugins.site.flare_boundary import CONTROLLER, refuse_removed
from nvflare_plugins.wire.channel import Transport

SERVER_CONFIGURATION = "config_fed_server.json"
RunSite = Callable[[Any, SiteContext, Transport, float, Progress], JobResult]
"""Takes part in one attempt at one site: (job, context, transport, longest wait for an exchange in seconds, progress).

Raises: VeilBoostError: what ended the attempt at this site.
"""

AnswerSum = Callable[[Any, int], ServerSum | None]
"""(job, number of sites) -> what turns added words into the answer at a server that is trusted with sums; None else."""

Sites = tuple[str, ...] | None
Check = Callable[[Any, Sites, int], None]
"""(job, its sites if they are named, fewest sites): refuses before anything is submitted what no site would accept.

Raises: ConfigurationError.
"""


def _sees_no_sum(job: Job, n_sites: int) -> ServerSum | None:
    return None


def _accept(job: Any, sites: Sites, n_sites: int) -> None:
    """Refuse nothing beyond what the job refuses by itself."""


def _first_site(job: Job, sites: tuple[str, ...]) -> str:
    return sites[0]


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
    answer_sum: AnswerSum = _sees_no_sum
    metrics_site: Callable[[Any, tuple[str, ...]], str] = _first_site
    kept: tuple[str, ...] = ()
    stated: tuple[str, ...] = ()
    fewest: int = 3
    check: Check = _accept
    planner: Planner | str = "none has been written"


def _noise_of_trees(job: PrivateTreesJob, n_sites: int) -> ServerSum | None:
    plan = JobPlan.of(job, n_sites)
    return TrustedServer(plan).answer if plan.training.trust.is_trusted_aggregator else None


def _choices_of_dpboost(job: DpBoostJob, n_sites: int) -> ServerSum | None:
    return DpBoostServer(job).answer


def _active_party(job: VerticalJob, sites: tuple[str, ...]) -> str:
    return job.active  # it alone knows the metrics


def _check_buckets(job: BucketJob, sites: Sites, n_sites: int) -> None:
    check_bucket_parameters(job.params, job.n_buckets)
    check_active_party(job.active, sites)


def _check_plan(job: PrivateTreesJob, sites: Sites, n_sites: int) -> None:
    JobPlan.of(job, n_sites)  # refuses what no site could train


NO_ALIGNMENT_PLAN = "it takes about 14 CPU seconds of each party for 100,000 ids, and releases who is common"
NO_INFERENCE_PLAN = "it takes seconds; what it may ask is in the passive parties' policies (predictions_per_row)"
_LABELLED = ("data_set", "label")
_ROWS = (
    JobKind("alignment", AlignmentJob, align_site, fewest=2, planner=NO_ALIGNMENT_PLAN),
    JobKind(
        "bagging",
        BaggingJob,
        run_bagging_site,
        stated=(*_LABELLED, "num_rounds"),
        check=check_bagging_early,
        planner=Planner(bagging.plan),
    ),
    JobKind(
        "dpboost",
        DpBoostJob,
        run_dpboost_site,
        _choices_of_dpboost,
        kept=(DPBOOST_KEPT,),
        stated=(*_LABELLED, "epsilon", "feature_bounds", "variant", "n_trees", "depth", "profile"),
        planner=Planner(dpboost.plan),
    ),
    JobKind(
        "federboost_vertical",
        BucketJob,
        run_bucket_site,
        stated=(*_LABELLED, "active", "epsilon", "unit", "edges_epsilon", "n_buckets", "num_rounds", "profile"),
        check=_check_buckets,
        planner=Planner(federboost_vertical.plan),
    ),
    JobKind(
        "horizontal",
        HorizontalJob,
        run_horizontal_site,
        stated=(*_LABELLED, "profile", "num_rounds"),
        check=check_horizontal_early,
        planner=Planner(horizontal.plan),
    ),
    JobKind(
        "private_trees",
        PrivateTreesJob,
        run_private_trees_site,
        _noise_of_trees,
        stated=(*_LABELLED, "epsilon", "delta", "method", "trust"),
        check=_check_plan,
        planner=Planner(private_trees.plan, uses=("base_rate",)),
    ),
    JobKind("profile", ProfileJob, run_profile_site, stated=(*_LABELLED, "profile"), planner=Planner(profile.plan)),
    JobKind(
        "tuning",
        TuningJob,
        run_tuning_site,
        stated=(*_LABELLED, "profile", "num_rounds", "folds"),
        check=check_tuning_early,
        planner=Planner(tuning.plan),
    ),
    JobKind(
        "vertical",
        VerticalJob,
        run_vertical_site,
        metrics_site=_active_party,
        stated=("active", *_LABELLED, "profile", "preset", "num_rounds"),
        fewest=2,
        check=check_vertical_early,
        planner=Planner(vertical.plan, uses=("workers",)),
    ),
    JobKind(
        "vertical_inference",
        InferenceJob,
        run_inference,
        stated=("model", "action"),
        fewest=2,
        planner=NO_INFERENCE_PLAN,
    ),
    JobKind(
        "vertical_tuning",
        VerticalTuningJob,
        run_vertical_tuning_site,
        stated=("active", *_LABELLED, "profile", "preset", "num_rounds", "folds"),
        fewest=2,
        check=check_vertical_tuning_early,
        planner=Planner(vertical_tuning.plan, uses=("workers",)),
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
