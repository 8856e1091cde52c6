"""Invented files as systems export them, for the guides: what a hospital, or a bank with two partners, begins with.

    python jobs/example_files.py clinics --data DIR    patients at three hospitals: the same columns, other rows
    python jobs/example_files.py bank --data DIR       a bank, a shop and a telco: other columns of the same people

Each site's files lie in DIR/site-1, DIR/site-2 and DIR/site-3. Nobody in them is real.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nvflare_plugins.base.files import make_folder, write_atomically

SITES = ("site-1", "site-2", "site-3")
WARDS = ["Chirurgie", "Innere", "Kardiologie", "Übrige"]
KINDS, TARIFFS = ["Bücher", "Kleidung", "Möbel", "Technik"], ["M", "S", "XL"]
_STAYS = {"2026-08": 1500, "2026-09": 700, "2026-10": 300}
_CUSTOMERS, _APPLICANTS = 4000, 400


def stays(n_rows: int, random: np.random.Generator, first_case: int) -> pd.DataFrame:
    """Return stays of patients, with the outcome as words."""
    age = random.integers(18, 96, n_rows)
    ward = random.choice(WARDS, n_rows, p=[0.3, 0.4, 0.2, 0.1])
    creatinine = random.lognormal(0.0, 0.4, n_rows)
    days = random.poisson(5, n_rows) + 1
    admitted = pd.Timestamp("2026-01-01") + pd.to_timedelta(random.integers(0, 200, n_rows), unit="D")
    risk = 0.05 * (age - 60) + 1.5 * (creatinine - 1) + 0.15 * (days - 6) + 0.8 * (ward == "Kardiologie") - 0.6
    readmitted = risk + random.logistic(size=n_rows) > 0
    frame = pd.DataFrame({"Fallnummer": np.arange(first_case, first_case + n_rows), "Alter": age})
    frame["Aufnahme"] = admitted.strftime("%d.%m.%Y")
    frame["Station"] = ward
    frame["Kreatinin"] = [f"{value:.2f}".replace(".", ",") for value in creatinine]
    frame["Tage"] = days
    frame["Verlauf"] = np.where(readmitted, "readmitted", "discharged")
    frame.loc[random.random(n_rows) < 0.06, "Kreatinin"] = "?"
    frame.loc[random.random(n_rows) < 0.01, "Verlauf"] = ""
    return frame


def write_clinics(folder: Path) -> None:
    """Write three hospitals' stays, month by month: semicolons, decimal commas, dates, umlauts of Windows."""
    random = np.random.default_rng(2026)
    for number, site in enumerate(SITES):
        make_folder(folder / site)
        for place, (month, n_rows) in enumerate(_STAYS.items()):
            frame = stays(n_rows // (number + 1), random, 10_000 * (10 * number + place + 1))
            _write(folder / site / f"{month}.csv", frame, sep=";", encoding="windows-1252")


def write_bank(folder: Path) -> None:
    """Write what a bank, a shop and a telco know of people: most of each know the two others too, in other orders."""
    random = np.random.default_rng(7)
    n_rows = _CUSTOMERS + _APPLICANTS
    names = np.array([f"C{number:06d}" for number in random.permutation(10 * n_rows)[:n_rows]])
    income, debt = random.lognormal(10.5, 0.4, n_rows), random.lognormal(9.0, 0.8, n_rows)
    spent, returns = random.lognormal(6.0, 0.7, n_rows), random.poisson(2, n_rows)
    late, contract = random.poisson(0.7, n_rows), random.integers(1, 120, n_rows)
    risk = 1.2 * np.log(debt / income) + 0.9 * late + 0.25 * returns - 0.01 * contract + 0.6
    bought = random.choice(KINDS, n_rows, p=[0.2, 0.4, 0.1, 0.3])
    tariff = random.choice(TARIFFS, n_rows, p=[0.4, 0.5, 0.1])
    risk += 0.8 * (bought == "Technik") - 0.6 * (tariff == "XL")
    default = (risk + random.logistic(size=n_rows) > 0).astype(int)
    exposure = np.where(default == 1, 1.0, np.round(random.uniform(0.5, 1.5, n_rows), 2))  # how much each counts
    tables: tuple[dict[str, Any], ...] = (
        {"income": income.round(2), "debt": debt.round(2), "exposure": exposure, "default": default},
        {"spent": spent.round(2), "returns": returns, "bought": bought},
        {"late_bills": late, "contract_months": contract, "tariff": tariff},
    )
    for site, columns in zip(SITES, tables, strict=True):
        make_folder(folder / site)
        whole = pd.DataFrame({"customer": names, **columns})
        known, fresh = whole[:_CUSTOMERS], whole[_CUSTOMERS:].drop(columns=["default", "exposure"], errors="ignore")
        for file, frame in (("customers.csv", known), ("applicants.csv", fresh)):
            _write(folder / site / file, frame.sample(frac=0.95, random_state=random.integers(2**31)), sep=",")


def _write(path: Path, frame: pd.DataFrame, sep: str, encoding: str = "utf-8") -> None:
    write_atomically(path, frame.to_csv(index=False, sep=sep).encode(encoding), 0o600)


WRITERS = {"clinics": write_clinics, "bank": write_bank}

if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WRITERS)
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="write the sites' files below this folder"
    )
    args = parser.parse_args()
    WRITERS[args.what](args.data)
    print(f"wrote the files of {', '.join(SITES)} below {args.data}")
