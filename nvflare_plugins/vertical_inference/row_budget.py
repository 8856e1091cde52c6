"""What a passive party charges for the rows that it answers for: times, or with the consent ``scoring`` bits."""

from __future__ import annotations

from dataclasses import dataclass

from nvflare_plugins.site.memory.prediction_budget import PredictionBudget
from nvflare_plugins.site.memory.scoring_budget import ScoringBudget
from nvflare_plugins.site.policy.policy import SitePolicy
from nvflare_plugins.vertical.model.model_files import PassivePart
from nvflare_plugins.vertical_inference.job import Action, InferenceJob
from nvflare_plugins.vertical_inference.rows import Rows


@dataclass(frozen=True, slots=True)
class RowBudget:
    """The budget of one job's data set."""

    _budget: PredictionBudget | ScoringBudget

    @classmethod
    def of(cls, policy: SitePolicy, job: InferenceJob, model_id: str, part: PassivePart) -> RowBudget:
        """Return the budget that the site's policy asks for."""
        data_set = str(job.data_set)
        if not policy.consents.gives("scoring"):
            return cls(PredictionBudget(policy, data_set))
        explains = job.action == Action.EXPLAIN.value
        what = f"{model_id}, {'explained' if explains else 'predicted'}"
        return cls(ScoringBudget(policy, data_set, what, bits_of(part, explains)))

    def check(self, rows: Rows) -> None:
        """Refuse what ``charge`` would refuse. Raises: PolicyRefusal."""
        if isinstance(self._budget, ScoringBudget):
            self._budget.check(rows.names(), rows.features)
        else:
            self._budget.check(rows.names())

    def charge(self, rows: Rows) -> None:
        """Charge rows, durably; nothing is charged if one of them must not be answered for. Raises: PolicyRefusal."""
        if isinstance(self._budget, ScoringBudget):
            self._budget.charge(rows.names(), rows.features)
        else:
            self._budget.charge(rows.names())


def bits_of(part: PassivePart, explains: bool) -> int:
    """Return how many distinct bits a row can show: one for each distinct split, and where missing values would go.

    Args:
        explains: positions among all thresholds, and which values are missing, are told.
    """
    splits = {(s.feature, float(s.threshold), s.default_left, s.categories) for s in part.table.values()}
    return len(splits) + (len(part.columns) if explains else 0)
