"""The plan of a vertical tuning: that of its deepest trial, of which there are as many as trials and folds."""

from __future__ import annotations

from nvflare_plugins.attempt.plan import Plan, PlanRequest
from nvflare_plugins.kinds.tuning.job import Trial
from nvflare_plugins.kinds.vertical.planner import plan as plan_training
from nvflare_plugins.kinds.vertical_tuning.job import VerticalTuningJob


def plan(request: PlanRequest, job: VerticalTuningJob) -> Plan:
    """Return the plan of the deepest trial's training, of which there are as many as trials and folds."""

    def depth(trial: Trial) -> int:  # without a limit as deep as it gets
        return int({**job.params, **trial}.get("max_depth", 6)) or 30

    training = plan_training(request, job.training_of(max(job.all_trials(), key=depth)))
    n_trainings = job.n_of_trials * job.folds
    text = (
        f"{job.n_of_trials} trials x {job.folds} folds x {job.num_rounds} rounds = {job.size:,}: every policy must "
        f"consent to as many (tuning), a passive party's to exact_bins.\n"
        f"{n_trainings} trainings, each at most:\n\n{training.text}"
    )
    return Plan({"trainings": n_trainings, "tuning": job.size, "training": training.figures}, text)
