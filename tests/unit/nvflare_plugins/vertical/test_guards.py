"""The guards by themselves: floors, differences, caps, and what is remembered from job to job."""

from __future__ import annotations

import numpy as np
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.data.declaration import VerticalRules
from nvflare_plugins.kinds.vertical.guards import Guard, SplitBits, merge_rare_bins
from nvflare_plugins.kinds.vertical.party_data import find_cut_points
from nvflare_plugins.site.memory.released import ReleasedSums, differences, fingerprint_of
from nvflare_plugins.site.memory.store import Memory

FLOOR = 20
N_ROWS = 2000
EVERYONE = np.arange(N_ROWS, dtype=np.int32)
IDS = [f"person {i}" for i in range(N_ROWS)]


def open_guard(folder, ids=IDS, max_sums=10**6, max_share=1e6, max_bits=10**6, **options) -> Guard:
    rules = VerticalRules(
        min_rows_per_node=FLOOR, max_bins=32, max_sums_per_row=max_sums, max_split_bits_per_row=max_bits
    )
    return Guard(rules, ReleasedSums(Memory(folder, "site"), "patients"), ids, max_share=max_share, **options)


def divided(left: np.ndarray, rows: np.ndarray = EVERYONE) -> tuple[np.ndarray, np.ndarray]:
    right = np.setdiff1d(rows, left).astype(np.int32)
    left = left.astype(np.int32)
    return (left, right) if left.size <= right.size else (right, left)


def told(rows: np.ndarray) -> SplitBits:
    return SplitBits(b"a split", rows, rows % 2 == 0)


def admit(guard: Guard, left: np.ndarray, rows: np.ndarray = EVERYONE) -> bool:
    return guard.admit([divided(left, rows)])[0]


@pytest.mark.parametrize(
    ("n_left", "row_fraction", "expected"),
    [
        (20, 1.0, True),
        (19, 1.0, False),
        (0, 1.0, False),
        (1981, 1.0, False),
        (39, 0.5, False),
        (40, 0.5, True),
    ],
)
def test_both_children_need_as_many_rows_as_the_floor(tmp_path, n_left, row_fraction, expected):
    guard = open_guard(tmp_path, row_fraction=row_fraction)
    assert guard.admit_root()
    assert admit(guard, EVERYONE[:n_left]) is expected


def test_a_table_below_the_floor_gives_nothing(tmp_path):
    assert not open_guard(tmp_path, IDS[:19]).admit_root()
    assert open_guard(tmp_path / "other", IDS[:20]).admit_root()


def after_a_tree_with(folder, left: np.ndarray, **options) -> Guard:
    """A guard in its second tree, after a first one divided the root so."""
    guard = open_guard(folder, **options)
    assert guard.admit_root() and admit(guard, left) and guard.admit_root()
    return guard


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (EVERYONE[:500], True),  # the same set again
        (EVERYONE[500:], True),
        (EVERYONE[:495], False),
        (EVERYONE[:501], False),
        (EVERYONE[5:500], False),
        (EVERYONE[9:509], False),  # as many rows, 18 of them others
        (EVERYONE[490:], False),  # nearly the complement
        (EVERYONE[:700], True),
        (EVERYONE[100:600], True),
        (EVERYONE[1000:1500], True),
    ],
    ids=[
        "same",
        "complement",
        "5_less",
        "1_more",
        "5_others",
        "18_others",
        "near_complement",
        "far",
        "200_others",
        "disjoint",
    ],
)
def test_a_set_that_hardly_differs_from_one_of_another_tree_is_withheld(tmp_path, other, expected):
    assert admit(after_a_tree_with(tmp_path, EVERYONE[:500]), other) is expected


def test_nested_nodes_of_one_tree_only_need_the_floor(tmp_path):
    guard = open_guard(tmp_path)
    assert guard.admit_root()
    rows = EVERYONE
    for n_left in (1980, 1960, 1940, 40):  # each time the rest is just above the floor, or the node is halved
        assert admit(guard, rows[:n_left], rows)
        rows = rows[:n_left]
    assert admit(guard, rows[:20], rows)


def test_a_small_difference_is_found_whatever_the_sets(tmp_path):
    """Naive twin: no admitted set is nearer than the floor to any that was admitted in an earlier tree."""
    rng = np.random.default_rng(3)
    guard = open_guard(tmp_path)
    earlier: list[set[int]] = []
    answers = []
    for _ in range(60):
        assert guard.admit_root()
        base = rng.choice(N_ROWS, size=int(rng.integers(30, N_ROWS - 30)), replace=False)
        if earlier and rng.random() < 0.7:
            base = np.array(sorted(earlier[int(rng.integers(len(earlier)))]))
        toggled = rng.choice(N_ROWS, size=int(rng.integers(0, 60)), replace=False)
        mine = set(base.tolist()) ^ set(toggled.tolist())
        sets = [mine, set(range(N_ROWS)) - mine]
        near = any(0 < len(one ^ other) < FLOOR for one in sets for other in earlier)
        is_admitted = admit(guard, np.array(sorted(mine)))
        assert not (near and is_admitted)
        answers.append((near, is_admitted))
        if is_admitted:
            earlier += sets
    # The estimate errs to the safe side, and not for all.
    assert sum(near for near, _ in answers) > 5 and sum(admitted for _, admitted in answers) > 20


def test_estimated_differences_are_right_on_average_and_zero_for_equal_sets(tmp_path):
    keys = ReleasedSums(Memory(tmp_path, "site"), "x").row_keys(IDS)
    rng = np.random.default_rng(0)
    for size in (1, 10, 300):
        estimates = []
        for _ in range(100):
            one = rng.random(N_ROWS) < 0.5
            other = one.copy()
            other[rng.choice(N_ROWS, size=size, replace=False)] ^= True
            estimates.append(differences(fingerprint_of(keys[one]), fingerprint_of(keys[other])[None])[0])
        # The relative error of one estimate is sqrt(2 / 64), of the mean of 100 of them a tenth of that: 5 of these.
        assert np.mean(estimates) == pytest.approx(size, rel=5 * np.sqrt(2 / 64) / 10)
    assert differences(fingerprint_of(keys), fingerprint_of(keys[::-1])[None])[0] == 0


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (IDS[:-3], False),
        ([*IDS, "new"], False),
        (IDS[::-1], True),
        (IDS[:1500], True),
        (IDS[:-19] + IDS[:0], False),
    ],
    ids=["3_left", "1_joined", "other_order", "500_left", "19_left"],
)
def test_another_job_on_nearly_the_same_rows_gets_nothing(tmp_path, ids, expected):
    assert open_guard(tmp_path).admit_root()
    assert open_guard(tmp_path, ids).admit_root() is expected


def test_sets_are_recognised_in_another_job_with_other_row_numbers(tmp_path):
    guard = open_guard(tmp_path)
    assert guard.admit_root() and admit(guard, EVERYONE[:500])
    again = open_guard(tmp_path, IDS[::-1])
    assert again.admit_root()
    assert not admit(again, N_ROWS - 1 - EVERYONE[:505])
    assert admit(again, N_ROWS - 1 - EVERYONE[:500])


def test_the_cap_on_sums_of_a_row_counts_over_jobs_whatever_they_promised(tmp_path):
    exact = open_guard(tmp_path, enforce=False)
    assert exact.admit_root() and admit(exact, EVERYONE[:5])  # preset exact: no floor, but counted
    assert exact.exposure().per_row_max == 4 and exact.exposure().per_row_cap is None
    guarded = open_guard(tmp_path, max_sums=6)
    assert guarded.admit_root()
    assert not guarded.admit_root()  # five rows are in six sums by now
    exposure = guarded.exposure()
    assert (exposure.per_row_max, exposure.per_row_cap, exposure.n_sums) == (6, 6, 2)
    assert exposure.per_row_mean == pytest.approx((4 * N_ROWS + 2 * 5) / N_ROWS)
    assert (exposure.nodes_released, exposure.nodes_withheld) == (1, 1)


def test_a_row_at_the_cap_closes_only_nodes_that_hold_it(tmp_path):
    guard = open_guard(tmp_path, max_sums=4)
    assert guard.admit_root()
    assert guard.admit([divided(EVERYONE[:50])]) == [True]  # these 50 are in four sums now
    rows, others = EVERYONE[:50], EVERYONE[50:]
    assert guard.admit([divided(rows[:25], rows), divided(others[:900], others)]) == [False, True]


def test_the_cap_on_split_bits_counts_over_jobs_whatever_they_promised(tmp_path):
    exact = open_guard(tmp_path, enforce=False, max_bits=1)
    assert exact.admit_root()
    for _ in range(3):  # not capped, but counted
        exact.charge_bits([told(EVERYONE[:700])])
    assert (exact.exposure().split_bits_max, exact.exposure().split_bits_cap) == (3, None)
    guarded = open_guard(tmp_path, IDS[::-1], max_bits=4)  # the same rows in another order
    assert guarded.admit_root()
    guarded.charge_bits([told(EVERYONE)])
    exposure = guarded.exposure()
    assert (exposure.split_bits_max, exposure.split_bits_cap) == (4, 4)
    assert exposure.split_bits_mean == pytest.approx((3 * 700 + N_ROWS) / N_ROWS)
    assert not guarded.admit_root()
    assert not admit(guarded, EVERYONE[:1000])  # the last 700 are the first of before, and have no bit left
    rest = EVERYONE[:1300]
    assert admit(guarded, rest[:600], rest)


def test_bits_beyond_the_cap_do_not_leave_where_two_jobs_run_at_once(tmp_path):
    one, other = open_guard(tmp_path, max_bits=1), open_guard(tmp_path, max_bits=1)
    assert one.admit_root() and other.admit_root()
    one.charge_bits([told(EVERYONE)])
    with pytest.raises(PolicyRefusal, match=r"vertical.max_split_bits_per_row"):
        other.charge_bits([told(EVERYONE)])
    assert one.exposure().split_bits_max == 1


def test_shares_add_up_to_the_number_of_independent_sums(tmp_path):
    guard = open_guard(tmp_path)
    rng = np.random.default_rng(1)
    equations = []
    for _ in range(3):
        g, h = rng.normal(size=(2, N_ROWS))
        assert guard.admit_root()
        cuts = np.sort(rng.choice(np.arange(50, N_ROWS - 50, 50), size=2, replace=False))
        order = rng.permutation(N_ROWS)
        first = np.sort(order[: cuts[1]])
        second = np.sort(order[: cuts[0]])
        assert admit(guard, first) and admit(guard, second, first)
        for rows in (EVERYONE, first, second):
            equations += [np.where(np.isin(EVERYONE, rows), values, 0) for values in (g, h)]
    rank = np.linalg.matrix_rank(np.array(equations))
    exposure = guard.exposure()
    assert exposure.n_sums == rank == 18
    assert exposure.share_mean * N_ROWS == pytest.approx(rank, rel=1e-5)


def test_the_cap_on_sums_per_row_looks_at_each_node_by_itself(tmp_path):
    guard = open_guard(tmp_path, max_share=0.05)
    few, many = EVERYONE[:100], EVERYONE[100:]
    answers = []
    for _ in range(4):
        assert guard.admit_root()
        answers.append(admit(guard, few))
    # A node of 100 rows adds 2 sums for them each time, the root 2 for all 2,000: 0.02 per row and tree.
    assert answers == [True, True, False, False]
    assert admit(guard, many[:950]) and guard.exposure().share_max == pytest.approx(0.04 + 0.002, abs=0.002)
    roots = 0
    while guard.admit_root():
        roots += 1
    assert 30 < roots < 50  # at 0.001 each, from about 0.006 to 0.05


def test_charges_are_durable_before_the_answer_and_hold_no_id(tmp_path):
    guard = open_guard(tmp_path)
    assert guard.admit_root()
    memory = Memory(tmp_path, "site")
    assert (ReleasedSums(memory, "patients").read().sums == 2).all()
    assert b"person" not in memory.path.read_bytes()
    # As if the process had lost the memory: it must not go on as if nothing had been released.
    with pytest.raises(ConfigurationError, match="replaced"):
        other = Memory(tmp_path / "other", "site")
        ReleasedSums(other, "patients")
        other.path.replace(memory.path)
        guard.admit_root()
    memory.path.unlink()
    with pytest.raises(ConfigurationError, match="no longer there"):
        guard.admit_root()
    assert not memory.path.exists()


def test_two_jobs_at_once_share_one_ledger(tmp_path):
    one, other = open_guard(tmp_path, max_sums=6), open_guard(tmp_path, IDS[:1200], max_sums=6)
    assert one.admit_root() and other.admit_root() and one.admit_root()
    assert not other.admit_root()


def test_ids_must_be_distinct(tmp_path):
    with pytest.raises(ValueError, match="distinct"):
        open_guard(tmp_path, ["a", "a"])


def test_more_bins_than_allowed_are_refused(tmp_path):
    guard = open_guard(tmp_path)
    guard.check_bins(32)
    with pytest.raises(PolicyRefusal, match=r"vertical.max_bins"):
        guard.check_bins(33)
    open_guard(tmp_path, enforce=False).check_bins(256)


def test_rare_bins_are_merged_and_rare_missing_values_join_the_last_bin(tmp_path):
    rng = np.random.default_rng(0)
    skewed = np.where(rng.random(N_ROWS) < 0.01, rng.integers(1, 9, N_ROWS), 0)
    features = np.stack([rng.normal(size=N_ROWS), skewed, rng.normal(size=N_ROWS)]).astype(np.float32)
    features[0, ::400], features[2, ::20] = np.nan, np.nan  # 5 and 100 missing
    guard = open_guard(tmp_path)
    cuts = guard.merge_rare_bins(find_cut_points(features, 32), features)
    codes = guard.codes(cuts, features)
    for line, n_bins in zip(codes, cuts.layout.n_bins, strict=True):
        counts = np.bincount(line, minlength=n_bins + 1)
        assert (counts[:n_bins] >= FLOOR).all() and (counts[n_bins] == 0 or counts[n_bins] >= FLOOR)
    assert cuts.layout.n_bins[0] > 25 and cuts.layout.n_bins[1] < 4
    assert (codes[0][::400] == cuts.layout.n_bins[0] - 1).all() and (codes[2][::20] == cuts.layout.n_bins[2]).all()
    exact = open_guard(tmp_path / "exact", enforce=False)
    assert exact.merge_rare_bins(cuts, features) is cuts and (exact.codes(cuts, features) == cuts.codes(features)).all()


def test_a_feature_without_enough_values_keeps_one_bin():
    features = np.array([[1, 2, 3, np.nan]], dtype=np.float32)
    cuts = find_cut_points(features, 32)
    merged = merge_rare_bins(cuts, cuts.codes(features), FLOOR)
    assert merged.layout.n_bins == (1,) and merged.upper[0][0] == cuts.upper[0][-1]
