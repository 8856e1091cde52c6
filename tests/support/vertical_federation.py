"""Whole vertical trainings in one process, beside centralized XGBoost on the joined table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import xgboost as xgb
from numpy.typing import NDArray

from dp_components.split_candidates.dp_quantiles import quantile_cuts
from he_processors.curve.registry import available_backends
from he_processors.elgamal.encryption import DigitFormat
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.growth.ranking import Queries
from nvflare_plugins.kinds.vertical import active_party, key_owner
from nvflare_plugins.kinds.vertical.guards import Guard, TreeLimits
from nvflare_plugins.kinds.vertical.histogram_maker import histogram_maker
from nvflare_plugins.kinds.vertical.job import check_vertical_parameters
from nvflare_plugins.kinds.vertical.messages import Party, from_bytes, place_parties, to_bytes
from nvflare_plugins.kinds.vertical.model import FederatedModel, PassivePart, merge
from nvflare_plugins.kinds.vertical.noised import NoisePlan, NoiseSource, as_cut_points
from nvflare_plugins.kinds.vertical.party_data import CutPoints
from nvflare_plugins.kinds.vertical.passive_party import PassiveParty
from nvflare_plugins.kinds.vertical.sealed import SealedPassive, SealedPlan
from nvflare_plugins.kinds.vertical_inference.inference import PathOwner
from tests.support.clear_maker import ClearHistogramMaker
from tests.support.he_toys import toy_paillier
from tests.support.in_process_link import InProcessLink
from tests.support.survival import as_fields, label_of


@dataclass
class Joined:
    """A joined table, and which columns each party has (the active party first, in the order of columns)."""

    features: NDArray[np.float32]
    label: NDArray[np.float32]
    widths: Sequence[int]
    valid: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None
    weight: NDArray[np.float32] | None = None
    categories: Mapping[int, Sequence[str]] = field(default_factory=dict)
    queries: NDArray[np.int64] | None = None  # of each training row, from 0, ascending

    @property
    def types(self) -> list[str]:
        return ["c" if i in self.categories else "float" for i in range(self.features.shape[1])]

    def lists(self, party: int) -> list[tuple[str, ...]]:
        """Return the public list of each column of a party; nothing for one of numbers."""
        start = sum(self.widths[:party])
        return [tuple(self.categories.get(start + i, ())) for i in range(self.widths[party])]

    def matrix(self, table: NDArray[np.float32], **options) -> xgb.DMatrix:
        return xgb.DMatrix(table, feature_types=self.types, enable_categorical=True, **options)

    def part(self, party: int, table: NDArray[np.float32]) -> NDArray[np.float32]:
        start = sum(self.widths[:party])
        return np.ascontiguousarray(table[:, start : start + self.widths[party]])

    @property
    def tables(self) -> list[NDArray[np.float32]]:
        return [self.features] if self.valid is None else [self.features, self.valid[0]]


@dataclass
class Outcome:
    """The parts of a vertical model."""

    result: active_party.VerticalResult
    passives: list[PassiveParty]
    parties: tuple[Party, ...]
    n_own: int

    def merged(self) -> bytes:
        tables = [(p.first_column, passive.table) for p, passive in zip(self.parties, self.passives, strict=True)]
        return merge(self.result.model, self.n_own, tables)

    def predict(self, joined: Joined, data_set: int, output_margin: bool = False, **options) -> NDArray[np.float32]:
        """Predict as a job of its own does: with owners that hold their tables and the rows."""
        rows = joined.tables[data_set]
        introductions = []
        for i, (party, passive) in enumerate(zip(self.parties, self.passives, strict=True), start=1):
            aliases = party.schema.aliases
            owner = PathOwner(PassivePart(passive.table, aliases, aliases), joined.part(i, rows), len(rows))
            introductions.append((party.name, party.schema, InProcessLink(owner)))
        model = FederatedModel(self.result.model, place_parties(self.n_own, introductions), self.n_own, deadline_s=60)
        margin = model.margin(joined.part(0, rows), 0, **options)
        return margin if output_margin else model.output(margin)


def make_clear(n_rows: int):
    """Return the stand-in: the owner, and a function that makes a passive party's half."""
    return key_owner.ClearGradientOwner(key_owner.pair_format(n_rows)), ClearHistogramMaker


def make_paillier(n_rows: int):
    """Return the same of Paillier, with a key that protects nothing."""
    owner = key_owner.gradient_owner(toy_paillier(), key_owner.pair_format(n_rows))
    return owner, lambda: histogram_maker(owner.setup, n_rows, allow_toy_keys=True)


def announced(owner_of: Callable[[int], key_owner.GradientOwner], *, allow_toy_keys: bool = True):
    """Return a scheme in which the passive parties know only what the active party announces.

    Args:
        owner_of: makes the owner for a number of rows.
    """

    def make(n_rows: int):
        owner = owner_of(n_rows)
        setup = from_bytes(to_bytes(owner.setup))
        return owner, lambda: histogram_maker(setup, n_rows, allow_toy_keys=allow_toy_keys)

    return make


def on_the_curve(n_rows: int, fraction_bits: int = 40) -> key_owner.GradientOwner:
    """Return an owner of ElGamal."""
    return key_owner.elgamal_owner(DigitFormat.of(fraction_bits, n_rows))


def make_elgamal(n_rows: int):
    """Return the same of ElGamal; skips the test where there is no compiled curve."""
    if available_backends()[0] == "reference":
        pytest.skip("the C extension was not built")
    return announced(on_the_curve)(n_rows)


def noised_cuts(plan: NoisePlan, features: NDArray[np.float32], randomness: RandomSource = OS_RANDOMNESS) -> CutPoints:
    """Find the cut points of a passive party in the preset noised."""
    multiplier = plan.of_party(features.shape[1]).cuts_multiplier
    return as_cut_points(quantile_cuts(np.ascontiguousarray(features.T), plan.n_bins, multiplier, randomness))


def make_noise(plan: NoisePlan | SealedPlan, n_features: int) -> NoiseSource | SealedPassive:
    """Return a source that nobody charges, or the passive half of a sealed training."""
    if isinstance(plan, SealedPlan):
        return SealedPassive(plan, 1)
    return NoiseSource(plan.of_party(n_features), lambda tree: None)


def federate(
    joined: Joined,
    params: dict,
    num_rounds: int,
    scheme=make_clear,
    initial: Outcome | None = None,
    guards: Sequence[Guard | None] | None = None,
    listen=lambda link: link,
    planned: NoisePlan | SealedPlan | None = None,
    noise_of: Callable[[Any, int], NoiseSource | SealedPassive] | None = None,
    cuts_of: Callable[[NoisePlan, NDArray[np.float32]], CutPoints] = noised_cuts,
    **settings,
) -> Outcome:
    owner, make_maker = scheme(joined.features.shape[0])
    max_bin = params.get("max_bin", 256)
    names = [f"f{i}" for i in range(joined.features.shape[1])]
    checked = check_vertical_parameters({"nthread": 1, **params}, names, label=label_of(params))
    passives = [
        PassiveParty(
            [joined.part(i, table).T for table in joined.tables],
            [f"x{j}" for j in range(width)],
            max_bin,
            make_maker(),
            None if initial is None else initial.passives[i - 1].table,
            None if guards is None else guards[i - 1],
            limits=TreeLimits.from_effective(checked.effective),
            categories=joined.lists(i),
            cuts=cuts_of(planned, joined.part(i, joined.features)) if isinstance(planned, NoisePlan) else None,
            noise=None if planned is None else (noise_of or make_noise)(planned, width),
        )
        for i, width in enumerate(joined.widths)
        if i
    ]
    links = [listen(InProcessLink(passive)) for passive in passives]
    introductions = [
        (f"site-{i + 2}", passive.schema(), link) for i, (passive, link) in enumerate(zip(passives, links, strict=True))
    ]
    parties = place_parties(joined.widths[0], introductions)
    ranked = None if joined.queries is None else Queries.of(joined.queries, joined.weight)
    sets = [active_party.LabelledSet("train", joined.part(0, joined.features), joined.label, joined.weight, ranked)]
    if joined.valid is not None:
        sets.append(active_party.LabelledSet("valid", joined.part(0, joined.valid[0]), joined.valid[1]))
    model = None if initial is None else initial.result.model
    settings = active_party.VerticalSettings(num_rounds, planned=planned, **{"deadline_s": 60, **settings})
    own_names = tuple(names[: joined.widths[0]])
    lists = {name: words for name, words in zip(own_names, joined.lists(0), strict=True) if words}
    result = active_party.VerticalTraining(
        checked, sets, parties, owner, active_party.OwnColumns(own_names, lists), settings, model
    ).run()
    return Outcome(result, passives, parties, joined.widths[0])


def central(joined: Joined, params: dict, num_rounds: int, initial: bytes | None = None, **options) -> xgb.Booster:
    """Train stock XGBoost on the joined table."""
    name = str(params.get("objective"))
    weight = joined.weight
    if weight is not None and joined.queries is not None:
        weight = weight[np.unique(joined.queries, return_index=True)[1]]
    matrix = joined.matrix(joined.features, **as_fields(joined.label, name), weight=weight, qid=joined.queries)
    valid = [] if joined.valid is None else [(joined.valid[0], as_fields(joined.valid[1], name))]
    evals = [(joined.matrix(features, **fields), "valid") for features, fields in valid]
    settings = {"tree_method": "hist", "nthread": 1, **params}
    model = None if initial is None else bytearray(initial)
    return xgb.train(settings, matrix, num_rounds, evals=evals, xgb_model=model, verbose_eval=False, **options)


def trees(model: bytes) -> list[dict]:
    """Return everything a model says about its trees."""
    return json.loads(model)["learner"]["gradient_booster"]["model"]["trees"]


_FIELDS = (
    "left_children",
    "right_children",
    "parents",
    "split_indices",
    "split_conditions",
    "default_left",
    "base_weights",
    "loss_changes",
    "sum_hessian",
    "split_type",
    "categories",
    "categories_nodes",
    "categories_segments",
    "categories_sizes",
)


def first_difference(ours: bytes, theirs: bytes) -> str:
    """Name the first thing in which two models differ in any bit; empty if they are equal."""
    mine, other = trees(ours), trees(theirs)
    if len(mine) != len(other):
        return f"{len(mine)} trees, {len(other)} expected"
    for number, (a, b) in enumerate(zip(mine, other, strict=True)):
        for name in _FIELDS:
            if not np.array_equal(np.array(a[name], np.float64), np.array(b[name], np.float64)):
                return f"tree {number}: {name}"
    return ""
