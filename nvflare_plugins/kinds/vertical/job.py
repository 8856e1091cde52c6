"""What a vertical job says, and which parameters of XGBoost it allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import Enum
from typing import Annotated, ClassVar

from annotated_types import Ge, Le
from pydantic import AfterValidator, BeforeValidator, Field

from he_processors.additive_schemes import security_bits
from he_processors.curve.interface import AFFINE_BYTES
from he_processors.elgamal.encryption import (
    EXACT_FRACTION_BITS,
    FRACTION_BITS,
    NOISED_FRACTION_BITS,
    POINT_BYTES,
    SHORT_FRACTION_BITS,
    DigitFormat,
)
from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import JobDocument, MostAttempts, OnLostParty
from nvflare_plugins.base.checks import expect, not_misspelt, one_of
from nvflare_plugins.base.declared import (
    STRICT,
    Entries,
    EntriesOfSites,
    Flag,
    JobId,
    Name,
    OneOf,
    Parameters,
    Rounds,
    Seconds,
    Whole,
    Words,
    document,
)
from nvflare_plugins.data.declaration import Delta, Epsilon
from nvflare_plugins.data.labels import Label, LabelColumns, check_classes
from nvflare_plugins.site.profiles import REMOVED_PROFILES
from nvflare_plugins.wire.profiles import SCHEME
from nvflare_plugins.xgb.objectives import COX, check_query
from nvflare_plugins.xgb.parameters import ALIASES, TrainingParameters, check_parameters, without_columns

# What a vertical job says. Where the data lie and what is allowed, each site's own policy says.


ALIGN_FIRST = "first"
ELGAMAL_STRENGTH = 128
SUMS_PER_PAIR = 2
MAX_BINS = (1 << 16) - 1
_NOISED_FEATURES, _NOISED_BINS = 8, 16


class VerticalProfile(Enum):
    """How gradients and their sums are protected from the parties that compute on them."""

    PAILLIER = "paillier"
    ELGAMAL = "elgamal"
    PLAIN = "plain"


def _not_removed(value: object) -> object:
    if isinstance(value, str) and value in REMOVED_PROFILES:
        instead = REMOVED_PROFILES[value]
        raise ConfigurationError(f"profile {value} was removed. Remedy: profile={instead}, which is faster.")
    return value


def _known(value: str) -> str:
    if not SCHEME.fullmatch(value):
        one_of("profile", value, [*(one.value for one in VerticalProfile), "scheme.NAME"])
    return value


ProfileOfParties = Annotated[str, OneOf(VerticalProfile), BeforeValidator(_not_removed)]
_ProfileName = Annotated[
    str,
    STRICT,
    BeforeValidator(_not_removed),
    AfterValidator(_known),
    Field(json_schema_extra={"anyOf": [{"enum": [one.value for one in VerticalProfile]}, {"pattern": SCHEME.pattern}]}),
    Words(f"one of {', '.join(one.value for one in VerticalProfile)}, scheme.NAME"),
]


class Preset(Enum):
    """Which sums per bin the passive parties hand out.

    ``exact`` gives the model of centralized training and does not hide bin membership. ``guarded`` withholds sums that
    the party's own rules (``vertical`` in its policy) name; the rules are heuristics. ``noised`` adds discrete Gaussian
    noise to every sum, which the party's privacy budget pays for: a proof, of what dp_components/vertical_bins.py says.
    ``sealed`` opens no sum: two parties compare splits under a circuit, and hear who wins each node.
    """

    GUARDED = "guarded"
    EXACT = "exact"
    NOISED = "noised"
    SEALED = "sealed"


def _not_misspelt(value: str) -> str:
    not_misspelt("alignment", value, ALIGN_FIRST)
    return value


NamesOfSites = Annotated[dict[Name, list[Name]], Words("an object that gives sites a list of column names")]
AlignmentId = Annotated[
    JobId,
    AfterValidator(_not_misspelt),
    Words(f"{ALIGN_FIRST!r} or the id of a job (letters, digits, '.', '_' and '-')"),
]


@document
class VerticalJob(JobDocument):
    """One vertical training: the same rows at every party, other columns, the label at one."""

    KIND: ClassVar[str] = "vertical"
    REFUSED: ClassVar[dict[str, str]] = {
        "cuts": "each party finds its own cut points, as centralized training does",
        "base_margin": "a margin per row is not supported; use base_score, or continue from a model",
    }
    REFUSED_IN: ClassVar[str] = "vertical jobs"
    CANNOT_CONTINUE: ClassVar[str] = "no other party has the columns of one that is lost"

    active: Name
    """Site that has the label; all other sites of the job are passive parties."""
    data_set: Name
    """Name of the training set in every site's policy."""
    label: LabelColumns
    """Label column at the active party, or its columns of times, as in horizontal jobs."""
    params: Parameters = field(default_factory=dict)
    """XGBoost parameters (jobs/MODEL.md lists the supported ones). Columns of passive parties have the names
    ``<site>.<alias>`` in constraints. With ``subsample`` below 1 the active party replaces ``seed`` by a secret one,
    which its ``run.json`` names: a public seed would tell which rows a tree sampled.
    """
    num_rounds: Rounds = 10
    """Boosting rounds."""
    profile: _ProfileName = VerticalProfile.PAILLIER.value
    """``paillier``, ``elgamal``, or ``plain``, which parties refuse unless they consent; or ``scheme.NAME``, a plugin's
    scheme that every party's policy, and the server's, pins (``plugins``).
    """
    key_bits: Annotated[Whole, Ge(2048)] = 3072
    """Length of the key that the active party generates for this job alone; ``elgamal`` has 128-bit strength always."""
    fraction_bits: Annotated[int, OneOf(*FRACTION_BITS)] = EXACT_FRACTION_BITS
    """Bits of gradients under ``elgamal``: 40 for the centralized model, or 20, which is cheaper and another model;
    14 in preset ``noised``, and only there.
    """
    point_bytes: Annotated[int, OneOf(*POINT_BYTES)] = AFFINE_BYTES
    """Bytes of a point under ``elgamal``: 64, or 32, which halves the traffic and costs a square root for each point
    that is read. The model is the same. ``veilboost plan`` says for which lines it pays.
    """
    preset: Annotated[str, OneOf(Preset)] = Preset.GUARDED.value
    """``guarded``; ``exact``, which equals centralized training; ``noised``, whose sums are differentially private
    given the split bits; or ``sealed``, which opens no sum, for exactly two parties under ``paillier``. Parties refuse
    all but ``guarded`` unless they consent.
    """
    epsilon: Epsilon | None = None
    """Preset ``noised``: what each passive party's sums and cut points may cost, for a change of one row's features at
    that party. Split bits are outside of it.
    """
    delta: Delta | None = None
    """Preset ``noised``: the delta of ``epsilon``, never computed from the data."""
    noised_features: Annotated[Whole, Ge(1)] = _NOISED_FEATURES
    """Preset ``noised``: most features of a passive party in a tree, drawn anew for each where it has more."""
    noised_bins: Annotated[Whole, Ge(2), Le(64)] = _NOISED_BINS
    """Preset ``noised``: bins of a passive party's features; ``max_bin`` is then the active party's alone."""
    noised_repeats: Annotated[Whole, Ge(0)] = 0
    """Preset ``noised``: rounds that ``on_lost_site="wait"`` may train, and passive parties pay for, a second time. A
    loss takes one or two. ``epsilon`` covers them, so that noise is as if there were so many rounds more.
    """
    own_rounds: Annotated[Whole, Ge(0)] = 0
    """First rounds that use the active party's columns alone (Completely SecureBoost)."""
    eval_data_set: Name | None = None
    """Name of an evaluation set in every site's policy; evaluated after each round. Passive parties charge its rows as
    one prediction.
    """
    evaluate_training: Flag = False
    """Evaluate the training set too."""
    weight: Name | None = None
    """Column of sample weights at the active party. They stay there: the cut points of other parties' columns are those
    of unweighted rows. Noise of preset ``noised`` is meant for the heaviest row, whose gradients fill the format.
    """
    query: Name | None = None
    """Column at the active party that says which rows are ranked together, of objectives ``rank:*``; it is no feature
    and stays there. Weights are those of queries, the same in each row of one.
    """
    features: NamesOfSites = field(default_factory=dict)
    """By site, the columns to train on in this order; a site that is not named takes all columns of its file but label,
    weight, query and id. An empty list at the active party: it has the label alone.
    """
    categories: EntriesOfSites = field(default_factory=dict)
    """By site, the public category list of each of its categorical columns. All sites and the server read the lists,
    with the columns' names. A category has a bin of its own; guarded jobs put rare ones together.
    """
    unknown_category_is_missing: Flag = False
    """Treat other categories as missing instead of refusing the data."""
    label_classes: Entries | None = None
    """Public list of label values; None means that labels are numbers (classes 0 .. k-1)."""
    alignment: AlignmentId | None = None
    """``first`` finds the common rows by private set intersection before training; the id of a finished job of the same
    sites takes those that it found; None means that the files of all sites hold the same rows in the same order.
    """
    early_stopping_rounds: Rounds | None = None
    """Stop after so many rounds without improvement of the last metric on the last set."""
    checkpoint_every: Annotated[Whole, Ge(0)] = 1
    """Rounds between checkpoints at every site; 0 keeps none. One costs milliseconds, a lost round the time of its
    encryption and, in guarded jobs, what the passive parties' caps were charged for it.
    """
    initial_model: JobId | None = None
    """Id of a finished vertical job whose model training continues by num_rounds."""
    resume_from: JobId | None = None
    """Id of an interrupted job; its last common checkpoint is continued up to num_rounds in total. All other fields
    stay as they were in that job, initial_model included. A job that was lost after its last round is brought to its
    end. Without sampling of rows or columns the model is that of an uninterrupted job, byte for byte; random draws are
    not those it would have made. In preset ``noised`` passive parties pay for the rounds from the checkpoint on and
    for new cut points, beside what the interrupted job has spent.
    """
    tracking: Flag = False
    """Stream the metrics of each round to the server."""
    deadline_s: Seconds = 0.0
    """Longest silence of a site, and longest time for one answer; 0 means 10 minutes and one hour."""
    on_lost_site: Annotated[str, OneOf(OnLostParty)] = OnLostParty.STOP.value
    """When a site is lost: ``stop`` ends the job; ``wait`` pauses it up to ``lost_site_deadline_s`` and, when the site
    is back, goes on from the last round that all parties have finished, under fresh keys and without a new submission.
    Each round is then a checkpoint, whatever ``checkpoint_every`` says.
    """
    lost_site_deadline_s: Seconds = 600.0
    """How long ``on_lost_site="wait"`` waits for a lost site, each time."""
    most_attempts: MostAttempts = 20
    """Attempts of a job that waits; each try after a loss, or after what time mends, is one."""

    def __post_init__(self) -> None:
        check_classes(self.label, self.label_classes)
        self._check_cox()
        check_query(self.params, self.query)
        if self.early_stopping_rounds is not None:
            expect("early_stopping_rounds needs an eval_data_set to watch", self.eval_data_set is not None)
        if self.is_noised and self.profile == VerticalProfile.ELGAMAL.value:
            expect(
                "weight is refused in preset noised under elgamal, whose 14 fraction bits would not count light rows: "
                "choose profile paillier, or leave the column out",
                self.weight is None,
            )
        if self.fraction_bits != EXACT_FRACTION_BITS:
            expect("fraction_bits is an option of profile elgamal", self.profile == VerticalProfile.ELGAMAL.value)
            expect("weight needs fraction_bits 40: with fewer, light rows would not count", self.weight is None)
            expect(
                f"fraction_bits {NOISED_FRACTION_BITS} is for preset noised: write {SHORT_FRACTION_BITS}, whose "
                "messages have the same bytes",
                self.is_noised or self.fraction_bits != NOISED_FRACTION_BITS,
            )
        if self.point_bytes != AFFINE_BYTES:
            expect("point_bytes is an option of profile elgamal", self.profile == VerticalProfile.ELGAMAL.value)
        self._check_preset()
        for site, lists in self.categories.items():
            for column, words in lists.items():
                expect(
                    f"categories gives {column!r} of {site} {len(words)} entries; a column may have {MAX_BINS}: put "
                    "rare ones together under one name",
                    len(words) <= MAX_BINS,
                )

    def _check_preset(self) -> None:
        """Refuse what the preset cannot do, and options of others. Raises: ConfigurationError."""
        if self.is_sealed:
            self._check_sealed()
        if self.is_noised:
            self._check_noised()
        else:
            is_stated = self.epsilon is not None or self.delta is not None
            expect("epsilon and delta are options of preset noised", not is_stated)
            is_sized = (self.noised_features, self.noised_bins) != (_NOISED_FEATURES, _NOISED_BINS)
            expect("noised_features and noised_bins are options of preset noised", not is_sized)
            expect("noised_repeats is an option of preset noised", self.noised_repeats == 0)

    def _check_cox(self) -> None:
        """Refuse what survival:cox is not for. Raises: ConfigurationError."""
        is_cox = self.params.get("objective") == COX
        expect(
            f"preset noised is refused with {COX}: no bound of a row's gradient is proven, from which the noise would "
            "follow. Choose survival:aft, or preset guarded",
            not (is_cox and self.is_noised),
        )
        expect(f"initial_model is refused with {COX}: train anew", not is_cox or self.initial_model is None)

    def _check_noised(self) -> None:
        """Refuse what noised sums cannot do. Raises: ConfigurationError."""
        expect("preset noised needs profile paillier, elgamal or plain", not SCHEME.fullmatch(self.profile))
        stated = self.epsilon is not None and self.delta is not None
        expect("preset noised needs epsilon and delta: what each passive party's budget pays", stated)
        expect(
            "preset noised needs a round with passive parties: lower own_rounds, or raise num_rounds",
            self.own_rounds < self.num_rounds,
        )
        if self.profile == VerticalProfile.ELGAMAL.value:
            expect(
                f"preset noised under elgamal needs fraction_bits {NOISED_FRACTION_BITS}: each digit would need noise "
                "of its own",
                self.fraction_bits == NOISED_FRACTION_BITS,
            )
        expect(
            "initial_model is refused in preset noised: train anew, or choose preset guarded",
            self.initial_model is None,
        )
        is_waiting = self.on_lost_site == OnLostParty.WAIT.value
        expect(
            "on_lost_site=wait needs noised_repeats in preset noised: rounds that are paid for again when a site is "
            "lost, one or two for each loss",
            not is_waiting or self.noised_repeats > 0,
        )
        expect("noised_repeats is an option of on_lost_site=wait", is_waiting or self.noised_repeats == 0)
        lists = [site for site, columns in self.categories.items() if columns and site != self.active]
        expect(
            "categories of a passive party are refused in preset noised: give it numbers, such as one column for each "
            "category",
            not lists,
        )

    def _check_sealed(self) -> None:
        """Refuse what sums under seal cannot do. Raises: ConfigurationError."""
        expect(
            "preset sealed needs profile paillier: masked sums have no small logarithms, and plain hides nothing",
            self.profile == VerticalProfile.PAILLIER.value,
        )
        expect("weight is refused in preset sealed, whose 14 fraction bits would not count light rows", not self.weight)
        lists = [site for site, columns in self.categories.items() if columns and site != self.active]
        expect(
            "categories of a passive party are refused in preset sealed: give it numbers, such as one column for each "
            "category",
            not lists,
        )

    @property
    def is_sealed(self) -> bool:
        """Whether no sum of a passive party opens."""
        return self.preset == Preset.SEALED.value

    @property
    def is_noised(self) -> bool:
        """Whether passive parties add noise to their sums."""
        return self.preset == Preset.NOISED.value

    @property
    def may_withhold(self) -> bool:
        """Whether a passive party may keep the sums of nodes."""
        return self.preset != Preset.EXACT.value

    @property
    def is_encrypted(self) -> bool:
        """Whether gradients are encrypted."""
        return self.profile != VerticalProfile.PLAIN.value

    @property
    def key_length(self) -> int | None:
        """Bits of the modulus that gradients are encrypted under; None where there is none."""
        return None if self.profile in (VerticalProfile.ELGAMAL.value, VerticalProfile.PLAIN.value) else self.key_bits

    @property
    def sums_per_set(self) -> int:
        """Numbers that the active party sees for a bin of a node: sums of gradients, hessians, or digits of them."""
        if self.is_sealed:
            return 0
        has_digits = self.profile == VerticalProfile.ELGAMAL.value
        return DigitFormat.of(self.fraction_bits, 1).n_messages if has_digits else SUMS_PER_PAIR

    @property
    def is_exact(self) -> bool:
        """Whether gradients have all the bits that the centralized model needs."""
        return self.fraction_bits == EXACT_FRACTION_BITS

    @property
    def strength(self) -> int:
        """Comparable bits of symmetric security of what encrypts gradients; 0 without encryption."""
        if self.key_length is not None:
            return security_bits(self.key_length)
        return ELGAMAL_STRENGTH if self.is_encrypted else 0


# The check of XGBoost parameters for the vertical mode: the horizontal one, and what its trees do not do.


_REFUSED_VALUES: dict[str, tuple[tuple[object, ...], str]] = {
    "booster": (("dart", "gblinear"), "vertical trees are neither dropped nor weighed again; use gbtree"),
    "multi_strategy": (("multi_output_tree",), "vertical trees have no leaves that are vectors"),
    "tree_method": (("approx", "exact"), "only hist finds its cut points at each party alone"),
    "sampling_method": (("gradient_based",), "only uniform sampling of rows is replicated"),
    "device": (("cuda", "gpu"), "training runs on the CPU"),
    "process_type": (("update",), "leaves are not refreshed; continue from a model instead"),
    "seed_per_iteration": ((True, 1), "rows and columns are drawn in one sequence through the whole training"),
}
_REFUSED: dict[str, str] = {
    "debug_synchronize": "one party alone has the whole model",
    "base_margin": "a margin per row is not supported; use base_score, or continue from a model",
    "feature_weights": "weighted column sampling is not replicated; use colsample_* alone",
}


def check_vertical_parameters(
    params: Mapping[str, object],
    names: Sequence[str],
    metrics: Sequence[str] | None = None,
    *,
    label: Label | None = None,
) -> TrainingParameters:
    """Check the XGBoost parameters of a vertical job; nothing has been sent yet.

    Args:
        params: as for ``xgb.train``.
        names: the columns of all parties, the active party's first.
        metrics: the metrics, if the job holds them apart.
        label: the job's, where its kind takes survival objectives.

    Raises:
        ConfigurationError: a parameter that vertical training does not support, named with the reason; or one that
            no job supports (xgb/parameters.py).
    """
    for name, value in params.items():
        canonical = ALIASES.get(name, name)
        if canonical in _REFUSED and value not in (None, False, 0):
            raise ConfigurationError(f"parameter {name!r} is refused in vertical jobs: {_REFUSED[canonical]}.")
        refused, reason = _REFUSED_VALUES.get(canonical, ((), ""))
        if value in refused or (canonical == "device" and str(value).startswith(("cuda", "gpu"))):
            raise ConfigurationError(f"{name}={value!r} is refused in vertical jobs: {reason}.")
    allowed = {name: value for name, value in params.items() if name not in _REFUSED}
    return check_parameters(allowed, names, metrics, label=label)


def check_active_party(active: str, sites: Sequence[str] | None) -> None:
    """Refuse named sites without the one that has the label. Raises: ConfigurationError."""
    if sites is not None and active not in sites:
        raise ConfigurationError(f"the active party {active!r} is not among the sites")


def check_vertical_early(job: VerticalJob, sites: Sequence[str] | None, n_sites: int) -> None:
    """Refuse what no party would accept; constraints name columns of all, known only when they meet.

    Raises:
        ConfigurationError: parameters, or names of sites.
    """
    check_vertical_parameters(without_columns(job.params), ["any"], label=job.label)
    check_active_party(job.active, sites)
    for name in ("features", "categories"):
        for site in getattr(job, name):
            if sites is not None and site not in sites:
                raise ConfigurationError(f"{name} names {site!r}, which is not among the sites")
