"""Drafts of several sites are united: what is alike but written otherwise becomes alike, the rest is shown."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nvflare_plugins.cli.main import main
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.identity import load_ids
from nvflare_plugins.data.table import load_table
from tests.support.surveyed import ROWS, lines

STEPS = range(ROWS)
COLUMNS = {
    "id": [str(row + 1) for row in STEPS],
    "age": [str(18 + row * 7 % 70) for row in STEPS],
    "town": [("Ulm", "Kiel")[row % 2] for row in STEPS],
    "smoker": [("yes", "no")[row % 2] for row in STEPS],
    "seen": [f"2020-0{row % 9 + 1}-11" for row in STEPS],
    "y": [("Yes", "No")[row % 2] for row in STEPS],
}


def drafted(folder: Path, site: str, *, label: str = "y", names: dict[str, str] | None = None, **columns) -> Path:
    table = {**COLUMNS, **columns}
    header = ",".join((names or {}).get(name, name) for name in table)
    (folder / f"{site}.csv").write_text(lines(*table.values(), header=header), encoding="utf-8")
    draft = folder / f"{site}.json"
    main(["check", str(folder / f"{site}.csv"), "--label", label, "--draft", str(draft)])
    return draft


def united(folder: Path, capsys: pytest.CaptureFixture[str], *drafts: Path) -> tuple[int, dict]:
    capsys.readouterr()
    code = main(["agree", *map(str, drafts), "--out", str(folder / "all.json"), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((folder / "all.json").read_text()), "what is written is what is printed"
    return code, printed


def as_policies_say(folder: Path, found: dict) -> dict[str, DataSet]:
    """Return the data sets as each site's policy then says them."""
    return {
        site: DataSet("data", folder / f"{site}.csv", "csv", id="id", **one["data_sets"]["data"])
        for site, one in found["policies"].items()
    }


def test_sites_that_write_otherwise_train_on_the_same_table(tmp_path: Path, capsys) -> None:
    a = drafted(tmp_path, "a")
    b = drafted(tmp_path, "b", y=[text.lower() for text in COLUMNS["y"]], town=[t.upper() for t in COLUMNS["town"]])
    c = drafted(
        tmp_path,
        "c",
        names={"age": "Age "},
        id=[f"PAT-{row + 1:05d}" for row in STEPS],
        smoker=[("ja", "nein")[row % 2] for row in STEPS],
        seen=[f"11.0{row % 9 + 1}.2020" for row in STEPS],
        y=[("1", "0")[row % 2] for row in STEPS],
    )
    d = drafted(tmp_path, "d", id=[f"pat-{row + 1:05d}" for row in STEPS])
    code, found = united(tmp_path, capsys, a, b, c, d)
    job = found["job"]
    assert code == 0 and found["agrees"] and found["dates"] == ["seen"]
    assert (job["label"], job["features"], job["label_classes"]) == ("y", ["age", "town", "smoker"], None)
    assert job["categories"] == {"town": ["Kiel", "Ulm"]} and found["feature_bounds"]["for_private_jobs"] is False
    sets = as_policies_say(tmp_path, found)
    wanted = {"label": "y", "features": [*job["features"], "seen"], "categories": job["categories"]}
    tables = [load_table(spec, **wanted) for spec in sets.values()]
    assert all(np.array_equal(one.features, tables[0].features) for one in tables) and tables[0].features.std(0).all()
    assert all(np.array_equal(one.label, tables[0].label) for one in tables) and set(tables[0].label) == {0, 1}
    assert len({tuple(load_ids(spec)) for spec in sets.values()}) == 1


def test_a_category_of_one_site_is_in_the_list_of_all(tmp_path: Path, capsys) -> None:
    a, b = drafted(tmp_path, "a"), drafted(tmp_path, "b", town=[("Bonn", "Kiel")[row % 2] for row in STEPS])
    code, found = united(tmp_path, capsys, a, b)
    assert code == 0 and found["job"]["categories"]["town"] == ["Bonn", "Kiel", "Ulm"]
    assert found["job"]["label_classes"] == ["No", "Yes"]
    assert [one["text"] for one in found["differences"]] == [
        "column 'town': 'Ulm' is in no list of b",
        "column 'town': 'Bonn' is in no list of a",
    ]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"age": [str(170 * (row % 20)) for row in STEPS]}, "other units"),
        (
            {"age": [("40", "-99999")[row % 2] for row in STEPS]},
            "to -99999 at b: other units, or a number that means missing",
        ),
        ({"age": [("old", "young")[row % 2] for row in STEPS]}, "holds numbers at a, texts at b"),
        ({"smoker": [str(row % 5) for row in STEPS]}, "holds texts at a, numbers at b"),
        ({"y": [str(row % 2) for row in STEPS], "town": [str(row % 9) for row in STEPS]}, "texts at a, numbers at b"),
    ],
)
def test_what_nobody_can_tell_is_left_to_decide(tmp_path: Path, capsys, columns, says) -> None:
    code, found = united(tmp_path, capsys, drafted(tmp_path, "a"), drafted(tmp_path, "b", **columns))
    open_ones = [one["text"] for one in found["differences"] if not one["is_settled"]]
    assert code == 1 and not found["agrees"] and len(open_ones) == 1 and says in open_ones[0]
    assert "convert" in open_ones[0] or "Policy key: columns" in open_ones[0]


def test_a_column_of_some_sites_is_left_out_and_named(tmp_path: Path, capsys) -> None:
    a, b = drafted(tmp_path, "a", more=COLUMNS["age"]), drafted(tmp_path, "b")
    code, found = united(tmp_path, capsys, a, b)
    assert code == 0 and "more" not in found["job"]["features"] and "'more'" in found["differences"][0]["text"]


def test_lines_for_each_site_say_what_the_file_says(tmp_path: Path, capsys) -> None:
    a, b = drafted(tmp_path, "a"), drafted(tmp_path, "b", town=[t.upper() for t in COLUMNS["town"]])
    capsys.readouterr()
    assert main(["agree", str(a), str(b)]) == 0
    shown = capsys.readouterr().out
    line = next(one for one in shown.splitlines() if one.startswith("At b: veilboost site-setup DIR"))
    assert """'data=town={"ULM": "Ulm", "KIEL": "Kiel"}'""" in line and "features=['age', 'town', 'smoker']" in shown


def test_what_is_no_draft_is_refused_by_name(tmp_path: Path, capsys) -> None:
    a = drafted(tmp_path, "a")
    other = drafted(tmp_path, "b", label="smoker")
    (tmp_path / "c.json").write_text('[{"features": 1}]')
    (tmp_path / "d.json").write_text("[" * 100_000)
    for files, says in (
        ([a], "two sites or more"),
        ([a, a], "the same name"),
        ([a, other], "different labels"),
        ([a, tmp_path / "c.json"], "c.json is no draft"),
        ([a, tmp_path / "d.json"], "d.json is no draft"),
        ([a, tmp_path / "gone.json"], "gone.json cannot be read"),
    ):
        capsys.readouterr()
        assert main(["agree", *map(str, files), "--out", str(tmp_path / "all.json")]) == 1
        assert says in capsys.readouterr().err and not (tmp_path / "all.json").exists()


@pytest.mark.parametrize(
    "said",
    [
        {"data_set": {"loader": "os:system"}},
        {"data_set": {"privacy": {"epsilon": 1000, "delta": 0.1}}},
        {"data_set": {"columns": ["age"]}},
        {"ids": {"id": {"prefix": "PAT-", "padded": {}}}},
    ],
)
def test_a_draft_of_another_party_says_how_a_file_is_read_and_nothing_else_of_a_policy(
    tmp_path: Path, capsys, said: dict
) -> None:
    a, b = drafted(tmp_path, "a"), drafted(tmp_path, "b")
    (draft,) = json.loads(b.read_text())
    b.write_text(json.dumps([{**draft, **said}]))
    capsys.readouterr()
    assert main(["agree", str(a), str(b), "--out", str(tmp_path / "all.json")]) == 1
    assert "b.json is no draft" in capsys.readouterr().err and not (tmp_path / "all.json").exists()


def test_names_of_other_parties_are_inert_on_a_terminal_and_in_the_file(tmp_path: Path, capsys) -> None:
    a, b = drafted(tmp_path, "a"), drafted(tmp_path, "b")
    for one in (a, b):
        (draft,) = json.loads(one.read_text())
        one.write_text(json.dumps([{**draft, "features": [*draft["features"], "\u202e\x9b31m"]}]))
    for more in ([], ["--json"], ["--out", str(tmp_path / "all.json")]):
        capsys.readouterr()
        assert main(["agree", str(a), str(b), *more]) == 0
        shown = capsys.readouterr().out
        assert "31m" in shown and "\x9b" not in shown and "\u202e" not in shown
    assert "\x9b" not in (tmp_path / "all.json").read_text(encoding="utf-8")


def test_a_draft_holds_no_row_and_no_count(tmp_path: Path) -> None:
    secret = [f"{7919 * row}" for row in STEPS]
    draft = drafted(tmp_path, "a", id=secret).read_text()
    assert not any(value in draft for value in secret if len(value) > 4)
    assert '"count"' not in draft and '"rows"' not in draft and str(tmp_path) not in draft
