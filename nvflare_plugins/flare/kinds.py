"""The table of job kinds. Controller, executor, recipes, plans and the conformance suite follow from its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import Job, JobResult, Progress, SiteContext
from nvflare_plugins.base.checks import shown
from nvflare_plugins.flare.attempt import ServerSum
from nvflare_plugins.kinds.alignment.align import align_site
from nvflare_plugins.kinds.alignment.job import AlignmentJob
from nvflare_plugins.kinds.bagging.job import BaggingJob, check_bagging_early
from nvflare_plugins.kinds.bagging.training import run_bagging_site
from nvflare_plugins.kinds.dpboost.job import DpBoostJob
from nvflare_plugins.kinds.dpboost.server import FILE as DPBOOST_KEPT
from nvflare_plugins.kinds.dpboost.server import DpBoostServer
from nvflare_plugins.kinds.dpboost.training import run_dpboost_site
from nvflare_plugins.kinds.federboost_vertical.job import BucketJob
from nvflare_plugins.kinds.federboost_vertical.training import check_bucket_parameters
from nvflare_plugins.kinds.federboost_vertical.training import run_site as run_bucket_site
from nvflare_plugins.kinds.horizontal.site import run_site as run_horizontal_site
from nvflare_plugins.kinds.private_trees.job import JobPlan, PrivateTreesJob
from nvflare_plugins.kinds.private_trees.noisy_sums import TrustedServer
from nvflare_plugins.kinds.private_trees.training import run_private_trees_site
from nvflare_plugins.kinds.profile.job import ProfileJob
from nvflare_plugins.kinds.profile.site import run_profile_site
from nvflare_plugins.kinds.tuning.job import TuningJob, check_tuning_early
from nvflare_plugins.kinds.tuning.site import run_tuning_site
from nvflare_plugins.kinds.vertical.job import VerticalJob, check_active_party, check_vertical_early
from nvflare_plugins.kinds.vertical.site import run_vertical_site
from nvflare_plugins.kinds.vertical_inference.job import InferenceJob
from nvflare_plugins.kinds.vertical_inference.site import run_inference
from nvflare_plugins.kinds.vertical_tuning.job import VerticalTuningJob, check_vertical_tuning_early
from nvflare_plugins.kinds.vertical_tuning.site import run_vertical_tuning_site
from nvflare_plugins.pooled.job import HorizontalJob, check_horizontal_early
from nvflare_plugins.wire.channel import Transport

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


_LABELLED = ("data_set", "label")
_ROWS = (
    JobKind("alignment", AlignmentJob, align_site, fewest=2),
    JobKind("bagging", BaggingJob, run_bagging_site, stated=(*_LABELLED, "num_rounds"), check=check_bagging_early),
    JobKind(
        "dpboost",
        DpBoostJob,
        run_dpboost_site,
        _choices_of_dpboost,
        kept=(DPBOOST_KEPT,),
        stated=(*_LABELLED, "epsilon", "feature_bounds", "variant", "n_trees", "depth", "profile"),
    ),
    JobKind(
        "federboost_vertical",
        BucketJob,
        run_bucket_site,
        stated=(*_LABELLED, "active", "epsilon", "unit", "edges_epsilon", "n_buckets", "num_rounds", "profile"),
        check=_check_buckets,
    ),
    JobKind(
        "horizontal",
        HorizontalJob,
        run_horizontal_site,
        stated=(*_LABELLED, "profile", "num_rounds"),
        check=check_horizontal_early,
    ),
    JobKind(
        "private_trees",
        PrivateTreesJob,
        run_private_trees_site,
        _noise_of_trees,
        stated=(*_LABELLED, "epsilon", "delta", "method", "trust"),
        check=_check_plan,
    ),
    JobKind("profile", ProfileJob, run_profile_site, stated=(*_LABELLED, "profile")),
    JobKind(
        "tuning",
        TuningJob,
        run_tuning_site,
        stated=(*_LABELLED, "profile", "num_rounds", "folds"),
        check=check_tuning_early,
    ),
    JobKind(
        "vertical",
        VerticalJob,
        run_vertical_site,
        metrics_site=_active_party,
        stated=("active", *_LABELLED, "profile", "preset", "num_rounds"),
        fewest=2,
        check=check_vertical_early,
    ),
    JobKind(
        "vertical_inference",
        InferenceJob,
        run_inference,
        stated=("model", "action"),
        fewest=2,
    ),
    JobKind(
        "vertical_tuning",
        VerticalTuningJob,
        run_vertical_tuning_site,
        stated=("active", *_LABELLED, "profile", "preset", "num_rounds", "folds"),
        fewest=2,
        check=check_vertical_tuning_early,
    ),
)
KINDS: dict[str, JobKind] = {kind.name: kind for kind in _ROWS}


def kind_of(name: object) -> JobKind:
    """Return a kind by the name that a job's configuration gives. Raises: ConfigurationError."""
    if not isinstance(name, str) or name not in KINDS:
        raise ConfigurationError(f"there is no kind of job {shown(name)}; there are {', '.join(sorted(KINDS))}")
    return KINDS[name]


def kind_of_job(job: object) -> JobKind:
    """Return the kind of a job. Raises: ConfigurationError: it is no job of ours."""
    for kind in KINDS.values():
        if type(job) is kind.job:
            return kind
    jobs = ", ".join(sorted(kind.job.__name__ for kind in KINDS.values()))
    raise ConfigurationError(f"a recipe takes a job, one of {jobs}; this is of type {type(job).__name__}")
