"""Three hospitals keep the same kind of table in three ways; their policies make one training of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nvflare_plugins.base.errors import REGISTRY_TEXT
from nvflare_plugins.cli.main import main
from nvflare_plugins.pooled.job import HorizontalJob
from tests.support.federation import Federation, central_model, leaf_difference, succeed

ROWS = 120
NAMES = {"Größe": "height", "Aufnahme": "admitted", "Betrag": "cost", "Ende": "outcome"}
CLASSES = ["gesund", "krank"]


def table() -> pd.DataFrame:
    rng = np.random.default_rng(8)
    frame = pd.DataFrame(
        {
            "height": rng.normal(175, 10, ROWS).round(1),
            "admitted": rng.integers(15_000, 20_000, ROWS),
            "cost": rng.integers(100_000, 9_999_999, ROWS) / 100,
        }
    )
    frame.loc[::9, "cost"] = np.nan
    return frame.assign(outcome=(frame.height + rng.normal(0, 8, ROWS) > 175).astype(int))


def written_as(frame: pd.DataFrame, date: str, decimal_sign: str, thousands: str, missing: str) -> pd.DataFrame:
    def number(value: float, digits: int) -> str:
        if np.isnan(value):
            return missing
        return f"{value:,.{digits}f}".translate(str.maketrans({",": thousands, ".": decimal_sign}))

    return pd.DataFrame(
        {
            "Größe": [number(value, 1) for value in frame.height],
            "Aufnahme": pd.to_datetime(frame.admitted, unit="D").dt.strftime(date),
            "Betrag": [number(value, 2) for value in frame.cost],
            "Ende": [CLASSES[code] for code in frame.outcome],
        }
    )


def setup(site: Path, file: Path, options: list[str]) -> None:
    (site / "local").mkdir(parents=True, exist_ok=True)
    assert main(["site-setup", str(site), "--data-set", f"patients={file}", *options]) == 0


@pytest.mark.parametrize("profile", ["plain", "masks"])
def test_tables_of_three_formats_train_the_pooled_model(tmp_path: Path, profile: str) -> None:
    frame = table()
    first, second, third = (frame.iloc[rows] for rows in np.array_split(np.arange(ROWS), 3))
    german = written_as(first, "%d.%m.%Y", ",", ".", "k.A.")
    german.to_csv(tmp_path / "a.csv", sep=";", index=False, encoding="latin-1", lineterminator="\r\n")
    swiss = written_as(second, "%Y-%m-%d", ".", "'", "-")
    swiss.to_csv(tmp_path / "b.csv", sep="\t", index=False, encoding="utf-16")
    parquet = third.assign(
        admitted=pd.to_datetime(third.admitted, unit="D"), outcome=[CLASSES[c] for c in third.outcome]
    )
    parquet.to_parquet(tmp_path / "c.parquet", index=False)
    names = [word for old, new in NAMES.items() for word in ("--rename", f"patients={old}={new}")]
    federation = Federation(tmp_path)
    common = ["--min-sites", "3", "--profile", profile, *(["--consent", "plain_profile"] if profile == "plain" else [])]
    of_a = ["encoding", "latin-1", "separator", ";", "decimal", ",", "thousands", ".", "missing", "k.A."]
    of_b = ["encoding", "utf-16", "separator", "\t", "thousands", "'", "missing", "-"]
    for site, file, reader, pattern in (
        ("site-1", "a.csv", of_a, "DD.MM.YYYY"),
        ("site-2", "b.csv", of_b, "YYYY-MM-DD"),
        ("site-3", "c.parquet", [], "YYYY-MM-DD"),
    ):
        options = [w for k, v in zip(reader[::2], reader[1::2], strict=True) for w in (f"--{k}", f"patients={v}")]
        more = [*options, "--date", f"patients=admitted={pattern}", *(names if site != "site-3" else [])]
        setup(federation.workspace(site), tmp_path / file, [*more, *common])
        workspace = ["check", str(tmp_path), "--site", site, "--data-set", "patients"]
        assert main([*workspace, "--label", "outcome"]) == 0
    job = HorizontalJob.from_dict(
        {
            "data_set": "patients",
            "label": "outcome",
            "label_classes": CLASSES,
            "features": ["height", "admitted", "cost"],
            "params": {"objective": "binary:logistic", "max_depth": 3},
            "num_rounds": 3,
            "profile": profile,
        }
    )
    succeed(federation.run(job))
    central = central_model(frame, "outcome", job.params, federation.cuts(), 3)
    assert leaf_difference(federation.model(), central) <= 2e-7


def test_another_option_of_the_reader_is_another_version_of_the_rows(tmp_path: Path) -> None:
    """The registry sees values as they are read: an option can neither hide a change nor make one of nothing."""
    federation = Federation(tmp_path, policy={"consents": {}, "share_data_errors": False})
    rng = np.random.default_rng(2)
    frame = pd.DataFrame({"x": (rng.integers(100, 999, 60) * 10 + 1) / 1000, "z": rng.integers(0, 9, 60)})
    frame = frame.assign(y=(frame.x > 5).astype(int))
    federation.give_data("train", frame)
    file = tmp_path / "site-1" / "train.csv"
    frame.iloc[:20].to_csv(file, index=False, sep=";")

    def outcome(job_id: str, **options: object) -> object:
        entry = {"path": "train.csv", "separator": ";", **options}
        federation.set_policy("site-1", data_sets={"train": entry})
        fields = {
            "data_set": "train",
            "label": "y",
            "features": ["x", "z"],
            "num_rounds": 1,
            "params": {"objective": "binary:logistic"},
            "cuts": "uniform",
            "cut_bounds": {"x": [0, 10], "z": [0, 9]},
        }
        return federation.run(HorizontalJob.from_dict(fields), job_id)["site-1"]

    assert not isinstance(outcome("first"), Exception)
    for number, option in enumerate(
        ({"decimal": ",", "thousands": "."}, {"missing": ["4"]}, {"rename": {"x": "z", "z": "x"}}, {"missing": ["3"]})
    ):
        assert str(outcome(f"changed-{number}", **option)) == REGISTRY_TEXT, option
    file.write_text(file.read_text(), encoding="utf-16")
    for number, option in enumerate(({}, {"thousands": ","}, {"missing": ["?"]}, {"drop_unlabelled": True})):
        assert not isinstance(outcome(f"same-{number}", encoding="utf-16", **option), Exception), option
