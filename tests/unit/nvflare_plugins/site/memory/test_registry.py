"""The registry against differencing: planted changes are found, harmless repeats are not."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.cli.main import main
from nvflare_plugins.data import identity as data_identity
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.table import Table
from nvflare_plugins.site.memory import store
from nvflare_plugins.site.memory.registry import Registry, Reservation, ResumePoint, Verdict, Wanted, describe_draw
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.site.policy import SitePolicy, template
from nvflare_plugins.site.policy_values import Consents
from tests.support.memories import changed
from tests.support.refusals import refused, refused_for

SITES = ("site-1", "site-2", "site-3")
JOB = {"job_id": "job-1", "sites": SITES, "parameters": b"p"}


def spec(name: str = "credit", path: str = "credit.csv") -> DataSet:
    return DataSet(name, Path("/data") / path, "csv")


def table(n: int = 300, seed: int = 5, names: tuple[str, ...] = ("a", "b"), rows: object = slice(None)) -> Table:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, 4)).astype(np.float32)[:, ["abcd".index(name) for name in names]]
    label = rng.integers(0, 2, n).astype(np.float32)
    return Table(np.ascontiguousarray(features[rows]), names, ("float",) * len(names), label[rows], "y")


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(Memory(tmp_path / "r", "site-1"), Consents())


def reserve(registry: Registry, rows: Table, data: DataSet | None = None, **changes: object) -> Reservation:
    of_job = {
        name: changes.pop(name) for name in ("job_id", "sites", "parameters", "resume", "beside") if name in changes
    }
    wanted = Wanted(rows, data or spec(), **changes)  # type: ignore[arg-type]
    return registry.reserve(wanted, **{**JOB, **of_job})  # type: ignore[arg-type]


def test_the_same_run_again_is_the_same_release(registry: Registry) -> None:
    assert reserve(registry, table()).verdict is Verdict.NEW
    again = reserve(registry, table(), job_id="job-2", sites=SITES[::-1])
    assert again.verdict is Verdict.IDENTICAL and "job-1" in again.message
    shuffled = table(rows=np.random.default_rng(0).permutation(300))
    assert reserve(registry, shuffled, job_id="job-3").verdict is Verdict.IDENTICAL
    assert reserve(registry, table(), job_id="job-4", parameters=b"q").verdict is Verdict.OTHER_PARAMETERS
    assert reserve(registry, table(names=("b", "c")), job_id="job-5").verdict is Verdict.OTHER_PARAMETERS


DRAWS = [
    describe_draw(),
    describe_draw(0.98),
    describe_draw(0.5),
    describe_draw(1.0, "w"),
    describe_draw(0.98, "w"),
    describe_draw(1.0, "subsample 0.98"),
]


@pytest.mark.parametrize("second", DRAWS)
@pytest.mark.parametrize("first", DRAWS)
def test_another_sample_or_other_weights_are_changed_rows(tmp_path: Path, first: str, second: str) -> None:
    registry = Registry(Memory(tmp_path / "r", "site-1"), Consents())
    reserve(registry, table(), draw=first)
    if first == second:
        assert reserve(registry, table(), draw=second, parameters=b"q").verdict is Verdict.OTHER_PARAMETERS
        return
    with refused_for("recompute_with_changes") as caught:
        reserve(registry, table(), draw=second, parameters=b"q")
    assert "other weights or another sample" in caught.value.reason
    consenting = Registry(Memory(tmp_path / "r", "site-1"), Consents(recompute_with_changes=True))
    assert reserve(consenting, table(), draw=second, parameters=b"q").verdict is Verdict.CONSENTED


def test_other_columns_draw_other_rows(registry: Registry) -> None:
    draw = describe_draw(0.5)
    reserve(registry, table(), draw=draw)
    with refused_for("recompute_with_changes"):
        reserve(registry, table(names=("b", "c")), draw=draw, parameters=b"q")


def test_a_secret_is_the_sites_own_and_the_same_for_the_same_facts(tmp_path: Path) -> None:
    registries = [Registry(Memory(tmp_path / name, "site-1"), Consents()) for name in ("a", "b")]
    again = Registry(Memory(tmp_path / "a", "site-1"), Consents())
    assert registries[0].secret("rows", "0.5") == again.secret("rows", "0.5")
    others = [registries[1].secret("rows", "0.5"), again.secret("rows", "0.6"), again.secret("other", "0.5")]
    assert len({again.secret("rows", "0.5"), *others}) == 4


def one_value_changed() -> Table:
    changed = table()
    changed.features[7, 1] += 1
    return changed


def labels_swapped() -> Table:
    """Every column holds the same values as before; only which row holds them differs."""
    changed = table()
    other = int(np.flatnonzero(changed.label != changed.label[0])[0])
    changed.label[[0, other]] = changed.label[[other, 0]]
    return changed


DIFFERENCES = {
    "a site less": (table(), spec(), {"sites": SITES[:2]}),
    "another site": (table(), spec(), {"sites": ("site-1", "site-2", "site-4")}),
    "a site less, other parameters": (table(), spec(), {"sites": SITES[:2], "parameters": b"other"}),
    "a site less, other columns": (table(names=("b", "c")), spec(), {"sites": SITES[:2]}),
    "a site less, renamed copy": (table(), spec("copy", "copy.csv"), {"sites": SITES[:2]}),
    "a site less, renamed copy with other columns": (
        table(names=("b", "d")),
        spec("copy", "copy.csv"),
        {"sites": SITES[:2]},
    ),
    "a row less": (table(rows=slice(1, None)), spec(), {}),
    "a row less in a renamed copy": (table(rows=slice(1, None)), spec("copy", "copy.csv"), {}),
    "a row less, other columns, same file under another name": (
        table(names=("b", "c"), rows=slice(1, None)),
        spec("copy"),
        {},
    ),
    "a value changed": (one_value_changed(), spec(), {}),
    "two rows swapped their labels": (labels_swapped(), spec(), {}),
    "rows added": (table(n=301, rows=slice(None)), spec(), {}),
    "other rows under the same name": (table(seed=6), spec(), {}),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_a_difference_is_refused_and_consent_allows_it(tmp_path: Path, case: str) -> None:
    rows, data, changes = DIFFERENCES[case]
    registry = Registry(Memory(tmp_path, "site-1"), Consents())
    reserve(registry, table())
    before = registry.describe()
    with refused_for(r"job-1.*consents\.recompute_with_changes"):
        reserve(registry, rows, data, job_id="job-2", **changes)
    assert registry.describe() == before
    consenting = Registry(Memory(tmp_path, "site-1"), Consents(recompute_with_changes=True))
    assert reserve(consenting, rows, data, job_id="job-2", **changes).verdict is Verdict.CONSENTED


def test_other_peoples_rows_are_unrelated(registry: Registry) -> None:
    reserve(registry, table())
    assert reserve(registry, table(seed=6), spec("other", "other.csv"), sites=SITES[:2]).verdict is Verdict.NEW


def test_one_common_row_is_found_in_other_data(registry: Registry) -> None:
    reserve(registry, table())
    mixed = table(seed=6)
    mixed.features[0], mixed.label[0] = table().features[11], table().label[11]
    with refused_for("earlier version"):
        reserve(registry, mixed, spec("other", "other.csv"))


def test_negative_zero_and_nan_payloads_do_not_make_another_row() -> None:
    one, two = table(), table()
    one.features[0] = [0.0, np.nan]
    two.features[0] = np.array([0x80000000, 0x7FC00123], np.uint32).view(np.float32)
    records = [data_identity.identify(rows, spec(), b"k" * 32)[0] for rows in (one, two)]
    assert records[0] == records[1]
    assert data_identity.identify(one, spec(), b"l" * 32)[0].fingerprint != records[0].fingerprint


def test_cancel_only_before_anything_was_released(registry: Registry) -> None:
    run = reserve(registry, table())
    registry.cancel(run)
    run = reserve(registry, table(), sites=SITES[:2])
    registry.plan_cuts(run, ["a"], b"bins=16")
    with pytest.raises(ValueError, match="cannot be cancelled"):
        registry.cancel(run)
    with refused_for("Policy key"):
        reserve(registry, table())


def test_resume_only_with_the_same_sites_rows_and_parameters(registry: Registry) -> None:
    registry.trees_complete(reserve(registry, table()), 20)
    point = ResumePoint("job-1", 20)
    for changes, said in (
        ({"sites": SITES[:2]}, "site set"),
        ({"parameters": b"q"}, "parameters"),
        ({"resume": ResumePoint("job-1", 21)}, "left 20 complete trees"),
        ({"resume": ResumePoint("job-9", 20)}, "no record"),
    ):
        with refused(said):
            reserve(registry, table(), **{"job_id": "job-2", "resume": point, **changes})
    with refused_for("rows"):
        reserve(registry, table(rows=slice(1, None)), job_id="job-2", resume=point)
    resumed = reserve(registry, table(), job_id="job-2", resume=ResumePoint("job-1", 10))
    assert resumed.verdict is Verdict.RESUMED
    registry.cancel(resumed)  # another site refused: nothing new was released, and the old release stays on record
    registry.complete(resumed, 30)
    with pytest.raises(ConfigurationError, match="job job-2 is complete"):
        reserve(registry, table(), job_id="job-3", resume=ResumePoint("job-2", 30))


def test_one_quantile_search_per_column_and_site_set(tmp_path: Path, registry: Registry) -> None:
    first = reserve(registry, table())
    plan = registry.plan_cuts(first, ["a", "b"], b"bins=16,k=10")
    assert plan.to_search == ("a", "b") and not plan.known
    assert registry.plan_cuts(first, ["a", "b"], b"bins=16,k=10").to_search == ("a", "b")  # interrupted: the same again
    cuts = {"a": np.array([1.5, 2.5], np.float32), "b": np.array([3.0], np.float32)}
    registry.save_cuts(first, cuts)
    second = reserve(registry, table(names=("b", "c")), job_id="job-2")
    plan = registry.plan_cuts(second, ["b", "c"], b"bins=16,k=10")
    assert plan.to_search == ("c",)
    np.testing.assert_array_equal(plan.known["b"], cuts["b"])
    with refused_for(r"column 'b'.*consents\.second_quantile_search"):
        registry.plan_cuts(second, ["b"], b"bins=32,k=10")
    consenting = Registry(Memory(tmp_path / "r", "site-1"), Consents(second_quantile_search=True))
    assert consenting.plan_cuts(second, ["b"], b"bins=32,k=10").to_search == ("b",)
    with pytest.raises(ValueError, match="exactly"):
        registry.save_cuts(second, cuts)


def test_cuts_of_another_site_set_are_not_reused(tmp_path: Path) -> None:
    registry = Registry(Memory(tmp_path, "site-1"), Consents(recompute_with_changes=True))
    run = reserve(registry, table())
    registry.plan_cuts(run, ["a"], b"s")
    registry.save_cuts(run, {"a": np.zeros(1, np.float32)})
    other = reserve(registry, table(), job_id="job-2", sites=SITES[:2])
    assert registry.plan_cuts(other, ["a"], b"s").to_search == ("a",)


def test_no_row_is_stored(tmp_path: Path) -> None:
    memory, rows = Memory(tmp_path, "site-1"), table()
    registry = Registry(memory, Consents())
    reserve(registry, rows)
    assert not any(row.tobytes() in memory.path.read_bytes() for row in rows.features)
    described = registry.describe()
    assert "credit" in described and "job-1" in described and "site-1, site-2, site-3" in described


def test_a_data_set_is_recognised_under_all_its_names(registry: Registry) -> None:
    """The second name took the place of the first: changed rows under that one were then new."""
    reserve(registry, table())
    reserve(registry, table(), spec("copy", "copy.csv"), job_id="job-2")
    for name in ("credit", "copy"):
        with refused_for("earlier version"):
            reserve(registry, table(seed=6, names=("c", "d")), spec(name, f"{name}.csv"), job_id="job-3")


def test_the_command_makes_no_registry_for_a_site_that_has_none(tmp_path: Path, capsys) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "veilboost.json").write_text(template({"credit": "credit.csv"}))
    assert main(["registry", str(tmp_path), "--site", "site-9"]) == 1
    error = capsys.readouterr().err
    assert "site-9 remembers nothing: there is no registry in" in error
    assert "or its workspace or name is another" in error
    assert {path.name for path in tmp_path.iterdir()} == {"local"}


def test_the_command_finds_a_simulated_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "site-1"):
        (folder / "local").mkdir(parents=True)
        (folder / "local" / "veilboost.json").write_text(template({"credit": "credit.csv"}))
    reserve(Registry.open(SitePolicy.load(tmp_path / "site-1", "site-1")), table())
    for folder in (tmp_path, tmp_path / "site-1"):
        assert main(["registry", str(folder), "--site", "site-1"]) == 0
        shown = capsys.readouterr().out
        assert "job-1" in shown and "\n1 run, 0 quantile searches, 1 version of data sets.\n" in shown


@pytest.mark.parametrize(
    "change",
    [
        "array_parts SET content = x'00'",
        "array_parts SET content = substr(content, 9)",
        "array_parts SET part = 7",
        "array_parts SET digest = x'00'",
        "data_versions SET n_rows = n_rows + 1",
    ],
)
def test_damaged_rows_are_refused_not_forgotten(tmp_path: Path, change: str) -> None:
    memory = Memory(tmp_path, "site-1")
    reserve(Registry(memory, Consents()), table())
    changed(memory, f"UPDATE {change}")
    with pytest.raises(ConfigurationError, match="Restore it from a backup"):
        reserve(Registry(memory, Consents()), table(rows=slice(1, None)), spec("x", "x.csv"))


def test_one_run_more_reads_no_more_among_ten_thousand(tmp_path: Path) -> None:
    """Steps of SQLite's machine, not seconds: opening, a reservation and a checkpoint know no number of runs."""
    memory = Memory(tmp_path, "site-1")
    registry = Registry(memory, Consents())
    registry.complete(reserve(registry, table(), job_id="first"), 1)
    few = steps(lambda: one_more(tmp_path, "second"))
    with memory.transaction() as db:
        rows = [(f"job-{number}",) for number in range(10_000)]
        db.executemany("INSERT INTO runs (job_id, terms, started, state, trees) VALUES (?, 1, '', 'complete', 9)", rows)
    assert steps(lambda: one_more(tmp_path, "third")) < few + 200
    assert steps(lambda: registry.describe()) > 10_000, "what counts steps would see them"


def one_more(folder: Path, job_id: str) -> None:
    registry = Registry(Memory(folder, "site-1"), Consents())
    registry.trees_complete(reserve(registry, table(), job_id=job_id), 3)


def test_one_other_parameter_stands_for_all_and_the_same_are_found(registry: Registry) -> None:
    for number, parameters in enumerate((b"q", b"p", b"r", b"a")):
        verdict = reserve(registry, table(), job_id=f"job-{number}", parameters=parameters).verdict
        assert verdict is (Verdict.OTHER_PARAMETERS if number else Verdict.NEW)
    for number, parameters in enumerate((b"q", b"p", b"r", b"a")):
        again = reserve(registry, table(), job_id="again", parameters=parameters)
        assert again.verdict is Verdict.IDENTICAL and f"job-{number} " in again.message


def steps(action: Callable[[], object]) -> int:
    """Return the steps that SQLite takes in an action."""
    taken, connect = [0], store._connect

    def counting(path: Path) -> sqlite3.Connection:
        db = connect(path)
        db.set_progress_handler(lambda: taken.__setitem__(0, taken[0] + 1), 1)
        return db

    with mock.patch.object(store, "_connect", counting):
        action()
    return taken[0]


def test_data_sets_of_one_job_are_not_compared_with_each_other(registry: Registry) -> None:
    """A held-out set of few columns has rows that look like training rows; another job's would be refused."""
    training = reserve(registry, table())
    held = table(rows=slice(0, 50))
    assert reserve(registry, held, spec("held", "held.csv"), beside=(training,)).verdict is Verdict.NEW
    with refused_for("Policy key"):
        reserve(registry, table(rows=slice(50, 90)), spec("later", "later.csv"), job_id="job-2")


def test_rows_with_other_ids_are_other_rows(registry: Registry) -> None:
    def ids(first: int) -> list[bytes]:
        return [str(first + row).encode() for row in range(300)]

    assert reserve(registry, table(), ids=ids(0)).verdict is Verdict.NEW
    assert reserve(registry, table(), job_id="job-2", ids=ids(0)).verdict is Verdict.IDENTICAL
    with refused_for("Policy key"):
        reserve(registry, table(), job_id="job-3", ids=ids(1))
    few = table(names=("a",))
    few.features[:], few.label[:] = 1, 0
    assert reserve(registry, few, spec("one", "one.csv"), job_id="job-4", ids=ids(0)).verdict is Verdict.NEW
    assert reserve(registry, few, spec("two", "two.csv"), job_id="job-5", ids=ids(1000)).verdict is Verdict.NEW
    with refused_for("Policy key"):
        reserve(registry, few, spec("three", "three.csv"), job_id="job-6", ids=ids(1299))
