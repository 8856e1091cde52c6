"""Metrics of the final model on the evaluation rows of all sites, from counts by bins of the predicted probability.

XGBoost averages the sites' areas under curves, which is not the area on the pooled rows. Here the sites count the rows
of each class in bins that are the same for all, and add the counts as they add histograms. One site makes the bins,
that which can fill most: each holds at least k of its own rows of either class, and so do the pooled bins. k is the
largest min_rows_per_cut of the job and any site's policy; an edge is the shortest decimal between two scores.

Privacy: needs the consent ``score_histogram`` of every site. The server sees sealed messages and protected sums. The
sites learn how many such bins each could fill (64 at most), the edges, and the pooled counts. Rows count as one each.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.data.table import Table
from nvflare_plugins.pages.run_record import ReportSection
from nvflare_plugins.pooled.job import SCORE_BINS
from nvflare_plugins.scoring.columns import auc, average_precision, kolmogorov_smirnov
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.cuts import shortest_between
from nvflare_plugins.xgb.matrices import unlabelled_blocks

OBJECTIVES = ("binary:logistic", "binary:logitraw")
_MOST_LEAST = 1 << 53  # as of any number in a policy
_WORD = 8  # bytes
_TITLE = "Metrics on the evaluation rows of all sites"
_TOO_FEW = "No site has evaluation rows enough for two bins with {} rows of each class: nothing was counted."
_NOTE = (
    "From counts by bins of the predicted probability, rows counting as one each. Where rows of both classes share a "
    "bin their order is unknown, so that the metrics lie between two numbers."
)

Scores = NDArray[np.float32]


def pooled_section(attempt: SiteAttempt, sums: ProtectedSums, booster: xgb.Booster, table: Table) -> ReportSection:
    """Count with all sites, and return what the report says.

    Args:
        table: this site's evaluation rows.

    Raises:
        ProtocolError: a site's edges are none, or hold fewer rows than it has said.
    """
    scores, is_positive = _probabilities(booster, table), table.label == 1
    own = max(attempt.context.policy.min_rows_per_cut, attempt.job.min_rows_per_cut)
    least = max(_gathered_whole(attempt, "least rows of a bin of scores", own, _MOST_LEAST))
    edges = edges_of(scores, is_positive, least)
    n_bins = _gathered_whole(attempt, "bins of scores", edges.size + 1, SCORE_BINS)
    if max(n_bins) < 2:
        return ReportSection(_TITLE, (_TOO_FEW.format(least),))
    chosen = n_bins.index(max(n_bins))
    # Nothing of the same size from the others: the server does not learn whose edges they are.
    own_edges = edges.tobytes() if chosen == attempt.channel.rank else bytes(4 * (n_bins[chosen] - 1))
    found = attempt.gather_sealed("edges of scores", own_edges)[chosen]
    edges = _read_edges(found, n_bins[chosen])
    counts = np.concatenate([_counts(scores[~is_positive], edges), _counts(scores[is_positive], edges)])
    pooled = sums.sum_counts(Kind.SCORE_COUNTS, counts).reshape(2, -1)
    if pooled.min() < least:
        raise ProtocolError("a bin of scores holds fewer rows than the site that made the bins has said")
    classes = attempt.job.label_classes
    return _section(edges, pooled[0], pooled[1], "class 1" if classes is None else str(classes[1]))


def edges_of(scores: Scores, is_positive: NDArray[np.bool_], least: int) -> NDArray[np.float32]:
    """Return edges between bins that each hold at least ``least`` rows of both classes; none if there are too few.

    Shapes: scores: float32[n_rows]; is_positive: bool[n_rows]; result: float32[at most 63], ascending; a row is in the
        bin above an edge where its score is at least the edge.
    """
    n_positive = int(np.count_nonzero(is_positive))
    wanted = max(least, -(-min(n_positive, scores.size - n_positive) // SCORE_BINS))
    order = np.argsort(scores, kind="stable")
    ordered, positive = scores[order], np.cumsum(is_positive[order])
    negative = np.arange(1, scores.size + 1) - positive
    ends = np.flatnonzero(ordered[1:] > ordered[:-1])  # last rows before a greater score
    edges: list[np.float32] = []
    done_positive = done_negative = 0
    for end in ends:
        inside = min(positive[end] - done_positive, negative[end] - done_negative)
        above = min(n_positive - positive[end], negative[-1] - negative[end])
        if inside >= wanted and above >= least and len(edges) < SCORE_BINS - 1:
            above_end = np.nextafter(ordered[end], np.float32(np.inf))
            edges.append(shortest_between(above_end, ordered[end + 1]))
            done_positive, done_negative = positive[end], negative[end]
    return np.array(edges, dtype=np.float32)


def _probabilities(booster: xgb.Booster, table: Table) -> Scores:
    from scipy.special import expit

    if not table.n_rows:
        return np.empty(0, dtype=np.float32)
    margins = [booster.predict(block, output_margin=True) for block in unlabelled_blocks(table)]
    scores: Scores = expit(np.concatenate(margins).astype(np.float64)).astype(np.float32)
    return scores


def _gathered_whole(attempt: SiteAttempt, purpose: str, own: int, most: int) -> list[int]:
    """Return every site's number. Raises: ProtocolError, for what is none from 1 to ``most``."""
    contents = attempt.gather_sealed(purpose, min(own, most).to_bytes(_WORD, "little"))
    found = [int.from_bytes(content, "little") for content in contents if len(content) == _WORD]
    if len(found) != len(contents) or not all(1 <= number <= most for number in found):
        raise ProtocolError("a site's number for the bins of scores is none")
    return found


def _read_edges(content: bytes, n_bins: int) -> NDArray[np.float32]:
    if len(content) != 4 * (n_bins - 1):
        raise ProtocolError("a site's edges of scores are not as many as it has said")
    edges = np.frombuffer(content, dtype="<f4").astype(np.float32)
    if not np.isfinite(edges).all() or (np.diff(edges) <= 0).any() or edges[0] < 0 or edges[-1] > 1:
        raise ProtocolError("a site's edges of scores are not ascending probabilities")
    return edges


def _counts(scores: Scores, edges: NDArray[np.float32]) -> NDArray[np.int64]:
    places = np.searchsorted(edges, scores, side="right")
    return np.bincount(places, minlength=edges.size + 1).astype(np.int64)


def _section(
    edges: NDArray[np.float32], negative: NDArray[np.int64], positive: NDArray[np.int64], name: str
) -> ReportSection:
    """Return metrics, calibration and what a threshold at each edge would do."""
    n_negative, n_positive = int(negative.sum()), int(positive.sum())
    area = auc(negative, positive)
    figures = (
        f"AUC {area} ({(area.low + area.high) / 2:.4g} if rows of a bin tie); average precision (AUCPR) "
        f"{average_precision(negative, positive)}; Kolmogorov-Smirnov {kolmogorov_smirnov(negative, positive)}. "
        f"{n_negative + n_positive:,} rows, {n_positive:,} of them {name}."
    )
    bounds = ["0", *(f"{edge:.6g}" for edge in edges), "1"]
    rows = []
    for place, (low, high) in enumerate(pairwise(bounds)):
        above, false = int(positive[place:].sum()), int(negative[place:].sum())
        inside = int(positive[place] + negative[place])
        rows.append(
            (
                f"{low} to {high}",
                f"{inside:,}",
                f"{positive[place] / inside:.4g}",
                f"{above / n_positive:.4g}",
                f"{above / (above + false):.4g}",
                f"{(above + false) / (n_positive + n_negative):.4g}",
            )
        )
    columns = (
        "probability",
        "rows",
        f"share {name} (calibrated if within)",
        "recall of a threshold at its lower end",
        "its precision",
        "rows above it",
    )
    counts = zip([0.0, *map(float, edges)], map(int, negative), map(int, positive), strict=True)
    return ReportSection(_TITLE, (figures, _NOTE), columns, tuple(rows), scores=tuple(counts))
