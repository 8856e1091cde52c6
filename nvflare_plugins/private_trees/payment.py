"""A site's ledger in one private training."""

from __future__ import annotations

from dp_components.neighbouring import NeighbouringRelation
from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.attempt_payment import AttemptPayment
from nvflare_plugins.attempt.job_context import SiteContext, waiting_s
from nvflare_plugins.attempt.payment import JobLedger, check_rows_per_person
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.private_trees.job import PrivateTreesJob
from nvflare_plugins.private_trees.job_plan import JobPlan


class Payment(AttemptPayment):
    """Pays for the releases of one job at one site.

    Under distributed noise a release's reply holds this site's share of the noise, and the same queries get it again,
    in a new attempt or in a job that resumes it. Among other sites, or where a site draws its share afresh because its
    ledger was put back to an earlier state, say, it would stand in a second sum, which nobody has paid for. Under a
    trusted aggregator nothing is replayed: the noise was the server's and is gone, and fresh noise on the same sums is
    a further release. There the job ends with its attempt.
    """

    def __init__(
        self,
        job: PrivateTreesJob,
        context: SiteContext,
        plan: JobPlan,
        rows: bytes,
        evidence: EvidenceLog | None = None,
    ):
        """Reserve the cost of the whole plan, if two accountants agree on it.

        Args:
            rows: hash of the rows; it stays in this site's own ledger.

        Raises:
            PolicyRefusal: the data set has no budget or not so much left, a person has more rows at this site than
                the job protects.
            ConfigurationError: there is no such job to resume; a ``DataRefusal``: rows or sites are not those of it.
        """
        job_id = job.resume_from or context.job_id
        relation = NeighbouringRelation.ADD_OR_REMOVE_ROW
        ledger = JobLedger(context.policy, job.data_set, job_id, relation, evidence, job.delta)
        check_rows_per_person(context.policy, job.data_set, job.rows_per_person)
        if job.resume_from is not None and not ledger.is_known:
            raise ConfigurationError(f"the ledger of {context.site} knows no job {job.resume_from} to resume")
        super().__init__(
            context,
            ledger,
            job.data_set,
            plan.releases.events,
            rows,
            may_replay=not plan.training.trust.is_trusted_aggregator,
            is_kept=waiting_s(job) is not None,
            job_id=job_id,
        )
