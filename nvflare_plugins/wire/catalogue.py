"""What messages and frames are about, and the moments of a training to which they belong."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

CURVE_METRICS = ("auc", "aucpr")  # XGBoost averages these over the sites


@dataclass(frozen=True, slots=True)
class KindFacts:
    """What is known of a kind of message.

    Attributes:
        code: its number; in our own frames it travels.
        private: whether the content is derived from rows, or secret for another reason.
        meaning: one phrase for people.
    """

    code: int
    private: bool
    meaning: str


class Kind(Enum):
    """What a message is about. ``private`` kinds carry something derived from rows."""

    # XGBoost's own messages
    FEATURE_COUNT = KindFacts(1, False, "number of features")
    EMPTY_SITES = KindFacts(2, False, "which sites have no rows")
    ROW_COUNT = KindFacts(3, True, "number of training rows")
    WEIGHT_TOTAL = KindFacts(4, True, "sum of weights behind the first estimate")
    LABEL_MEAN = KindFacts(5, True, "label mean, local median or class counts behind the first estimate")
    STUMP_SUM = KindFacts(6, True, "gradient sums behind the first estimate")
    MODEL_PARAMETERS = KindFacts(7, False, "model parameters with the base score")
    SAMPLER_SEED = KindFacts(8, False, "seed of the column sampler")
    HISTOGRAM = KindFacts(9, True, "gradient histograms")
    ROOT_SUM = KindFacts(10, True, "gradient sum of all rows")
    LEAF_COUNT = KindFacts(11, False, "number of leaves of the tree")
    LEAF_VALID = KindFacts(12, True, "number of sites with rows in each leaf")
    LEAF_QUANTILE = KindFacts(13, True, "sum of the sites' residual quantiles per leaf")
    METRIC_SIZE = KindFacts(14, False, "largest evaluation set")
    METRIC = KindFacts(15, True, "parts of an evaluation metric")
    NODE_STATS = KindFacts(16, True, "leaf sums of random trees")
    # Our own exchanges
    HANDSHAKE = KindFacts(32, False, "public keys and signatures of the session")
    GROUP_KEY = KindFacts(33, True, "sealed shares of the group key")
    AGREEMENT = KindFacts(34, True, "sealed schema, parameters and versions")
    HE_SECRET = KindFacts(35, True, "sealed homomorphic key of the sites")
    HE_PUBLIC = KindFacts(36, False, "public parameters of the homomorphic scheme, for the server")
    SCALE = KindFacts(37, True, "secure maximum of exponents")
    CUT_COUNTS = KindFacts(38, True, "counts below candidate cut points")
    CUT_PLAN = KindFacts(39, False, "keyed hash of cut points known from an earlier job")
    MODEL_CHECK = KindFacts(40, False, "keyed hash of the final model")
    CLOSING = KindFacts(41, False, "signed heads of the evidence chains; then that every site has its result")
    CELL_COUNTS = KindFacts(42, True, "rows per cell of a public grid, for private quantiles")
    LEFT_SUMS = KindFacts(44, True, "gradient sums to the left of drawn candidates of private trees")
    HESSIANS = KindFacts(45, True, "Hessian sums between candidates, to refine these")
    EFFECTIVE_ROWS = KindFacts(
        46, True, "rows and sites that carry weight, or were added, counted up to what is needed"
    )
    LEAF_ROWS = KindFacts(47, True, "number of training rows in each leaf")
    OWN_TREES = KindFacts(48, True, "sealed trees that each site grew on its own rows")
    SCORE_COUNTS = KindFacts(51, True, "rows of each class by bins of the predicted probability")
    CELL_FLAGS = KindFacts(
        52, True, "whether some site has so many rows of a class in runs of bins, and whether all have"
    )
    CLASS_COUNTS = KindFacts(53, True, "rows of each class in merged bins of each feature")
    RESIDUAL_SCALE = KindFacts(54, True, "sum behind the scale of a smooth absolute or quantile error")
    HISTOGRAM_METRIC = KindFacts(
        55, True, "gradient histogram of a root, and parts of the evaluation metrics of the round before"
    )
    CONVERSATION = KindFacts(43, True, "sealed requests and answers between single parties")

    @property
    def code(self) -> int:
        """Number of the kind."""
        return self._facts.code

    @property
    def private(self) -> bool:
        """Whether the content is derived from rows, or secret for another reason."""
        return self._facts.private

    @property
    def meaning(self) -> str:
        """One phrase for people."""
        return self._facts.meaning

    @property
    def _facts(self) -> KindFacts:
        facts: KindFacts = self.value
        return facts


KIND_BY_CODE = {kind.code: kind for kind in Kind}


class Phase(Enum):
    """Where the training loop stands; the loop announces it to the mediator."""

    SETUP = 1
    UPDATE = 2
    EVALUATE = 3
    FINISH = 4


PHASE_BY_CODE = {phase.value: phase for phase in Phase}


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A phase and the boosting round it belongs to."""

    phase: Phase
    round: int = 0

    def __str__(self) -> str:
        return f"{self.phase.name.lower()}:{self.round}"


class BaseScoreSource(Enum):
    """How XGBoost estimates the base score, hence which messages precede the first tree."""

    GIVEN = "given"  # base_score set
    CONTINUED = "continued"  # training continues from a model
    MEAN = "mean"  # logistic, squared error, poisson, gamma, tweedie
    MEDIAN = "median"  # absolute error
    CLASSES = "classes"  # softmax, softprob
    QUANTILE = "quantile"  # quantile error
    STUMP = "stump"  # every other objective
