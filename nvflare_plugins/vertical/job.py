"""What a vertical job says. Where the data lie and what is allowed, each site's own policy says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.checks import at_least, check_fields, expect, is_text, job_id_or_none, one_of, seconds

ALIGN_FIRST = "first"
_REFUSED = {
    "categories": "categorical columns are not supported by XGBoost's column split: encode them as numbers",
    "cuts": "each party finds its own cut points, as centralized training does",
    "base_margin": "a margin per row is not supported; use base_score, or continue from a model",
}


class VerticalProfile(Enum):
    """How gradients and their sums are protected from the parties that compute on them."""

    PAILLIER = "paillier"
    OKAMOTO_UCHIYAMA = "okamoto_uchiyama"
    PLAIN = "plain"


class Preset(Enum):
    """Which sums per bin the passive parties hand out.

    ``exact`` gives the model of centralized training and does not hide bin membership. ``guarded`` withholds sums that
    the party's own rules (``vertical`` in its policy) name; the rules are heuristics.
    """

    GUARDED = "guarded"
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class VerticalJob:
    """One vertical training: the same rows at every party, other columns, the label at one.

    Attributes:
        active: site that has the label; all other sites of the job are passive parties.
        data_set: name of the training set in every site's policy.
        label: label column at the active party.
        params: XGBoost parameters (jobs/README.md lists the supported ones). Columns of passive parties have the names
            ``<site>.<alias>`` in constraints. With ``subsample`` below 1 the active party replaces ``seed`` by a secret
            one, which its ``run.json`` names: a public seed would tell which rows a tree sampled.
        num_rounds: boosting rounds.
        profile: ``paillier``, ``okamoto_uchiyama`` or ``plain``.
        key_bits: length of the key that the active party generates for this job alone.
        preset: ``guarded`` or ``exact``, see ``Preset``.
        own_rounds: first rounds that use the active party's columns alone (Completely SecureBoost).
        eval_data_set: name of an evaluation set in every site's policy; evaluated after each round. Passive parties
            charge its rows as one prediction.
        evaluate_training: evaluate the training set too.
        weight: column of sample weights at the active party.
        features: by site, the columns to train on in this order; a site that is not named takes all columns of its
            file but label, weight and id. An empty list at the active party: it has the label alone.
        label_classes: public list of label values; None means that labels are numbers (classes 0 .. k-1).
        alignment: ``first`` finds the common rows by private set intersection before training; the id of a finished
            job of the same sites takes those that it found; None means that the files of all sites hold the same rows
            in the same order.
        early_stopping_rounds: stop after so many rounds without improvement of the last metric on the last set.
        checkpoint_every: rounds between checkpoints at every site; 0 keeps none. One costs milliseconds, a lost round
            the time of its encryption and, in guarded jobs, what the passive parties' caps were charged for it.
        initial_model: id of a finished vertical job whose model training continues by num_rounds.
        resume_from: id of an interrupted job; its last common checkpoint is continued up to num_rounds in total. All
            other fields stay as they were in that job, initial_model included. A job that was lost after its last round
            is brought to its end. Without sampling of rows or columns the model is that of an uninterrupted job, byte
            for byte; random draws are not those it would have made.
        tracking: stream the metrics of each round to the server.
        deadline_s: longest silence of a site, and longest time for one answer; 0 means 10 minutes and one hour.
    """

    active: str
    data_set: str
    label: str
    params: dict[str, Any] = field(default_factory=dict)
    num_rounds: int = 10
    profile: str = VerticalProfile.PAILLIER.value
    key_bits: int = 3072
    preset: str = Preset.GUARDED.value
    own_rounds: int = 0
    eval_data_set: str | None = None
    evaluate_training: bool = False
    weight: str | None = None
    features: dict[str, list[str]] = field(default_factory=dict)
    label_classes: list[Any] | None = None
    alignment: str | None = None
    early_stopping_rounds: int | None = None
    checkpoint_every: int = 1
    initial_model: str | None = None
    resume_from: str | None = None
    tracking: bool = False
    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("active", "data_set", "label"):
            expect(f"{name} must be a non-empty text", is_text(getattr(self, name)))
        for name in ("eval_data_set", "weight"):
            value = getattr(self, name)
            expect(f"{name} must be a non-empty text, or be left out", value is None or is_text(value))
        job_id_or_none("alignment", self.alignment, ALIGN_FIRST)
        for name in ("initial_model", "resume_from"):
            job_id_or_none(name, getattr(self, name))
        one_of("profile", self.profile, [p.value for p in VerticalProfile])
        one_of("preset", self.preset, [p.value for p in Preset])
        is_mapping = isinstance(self.params, dict) and all(map(is_text, self.params))
        expect("params must be a dictionary of XGBoost parameters", is_mapping)
        for name, least in (("num_rounds", 1), ("own_rounds", 0), ("checkpoint_every", 0), ("key_bits", 2048)):
            at_least(name, getattr(self, name), least)
        for name in ("evaluate_training", "tracking"):
            expect(f"{name} must be true or false", isinstance(getattr(self, name), bool))
        seconds("deadline_s", self.deadline_s)
        if self.early_stopping_rounds is not None:
            at_least("early_stopping_rounds", self.early_stopping_rounds, 1)
            expect("early_stopping_rounds needs an eval_data_set to watch", self.eval_data_set is not None)
        self._check_columns()

    def _check_columns(self) -> None:
        is_mapping = isinstance(self.features, dict) and all(
            is_text(site) and isinstance(names, (list, tuple)) and all(map(is_text, names))
            for site, names in self.features.items()
        )
        expect("features must give sites a list of column names", is_mapping)
        classes = self.label_classes
        is_list = isinstance(classes, (list, tuple)) and len(classes) > 0
        expect(
            "label_classes must be a list of texts or whole numbers",
            classes is None or (is_list and all(type(entry) in (str, int) for entry in classes)),
        )

    @property
    def is_encrypted(self) -> bool:
        """Whether gradients are encrypted."""
        return self.profile != VerticalProfile.PLAIN.value

    def to_dict(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> VerticalJob:
        """Read a job strictly.

        Raises:
            ConfigurationError: unknown or missing fields, or a value that is not allowed.
        """
        for name, reason in _REFUSED.items():
            if isinstance(document, dict) and name in document:
                raise ConfigurationError(f"{name} is refused in vertical jobs: {reason}")
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**check_fields(document, known, ("active", "data_set", "label")))
