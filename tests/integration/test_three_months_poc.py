"""Three months of an operator and of a bank: their guides in a POC, and the two months that follow in the same one."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tests.integration.test_guides import expected, run_guide

pytestmark = [pytest.mark.poc, pytest.mark.slow]

OPERATOR = "/tmp/operator/poc/example_project/prod_00"  # noqa: S108  # the guide's own, replaced by the test's folder
READ = (
    '--encoding {0}=windows-1252 --separator "{0}=;" --decimal {0}=, --date {0}=Aufnahme=DD.MM.YYYY '
    '--missing "{0}=?" --drop-unlabelled {0}'
)
SITE_OF_OPERATOR = f"--workspace {OPERATOR}/site-1 --site site-1"
OPERATORS_MONTHS = [
    # September: new rows are a data set more, and the model goes on from them.
    f"veilboost models add outcome $JOB {SITE_OF_OPERATOR}",
    f"veilboost drift outcome /tmp/operator/data/site-1/2026-09.csv {SITE_OF_OPERATOR} --ignore Fallnummer",
    'veilboost site-setup /tmp/operator/poc --data-set "patients_09=/tmp/operator/data/{site}/2026-09.csv" '
    + READ.format("patients_09"),
    """sed -e 's/"outcome"/"september"/' -e "s/data_set=.*/data_set='patients_09', continue_from='$JOB',/" """
    "/tmp/operator/outcome.py > /tmp/operator/september.py",
    "python /tmp/operator/september.py",
    "SEPTEMBER=$(nvflare job submit -j /tmp/operator/jobs/september | awk '/job_id/ {print $2}')",
    "nvflare job wait $SEPTEMBER",
    "nvflare job download $SEPTEMBER -o /tmp/operator/result_09",
    f"veilboost verify /tmp/operator/result_09 --root-ca {OPERATOR}/admin@nvidia.com/startup/rootCA.pem",
    f"veilboost models add outcome $SEPTEMBER {SITE_OF_OPERATOR}",
    # October: an update of VeilBoost, the set-up completed and looked at; then back to August's model.
    "nvflare poc stop",
    f"veilboost registry {OPERATOR}/site-1 --site site-1 --backup /tmp/operator/october.backup",
    "veilboost site-setup /tmp/operator/poc --upgrade",
    "nvflare poc start --no-wait",
    "for i in $(seq 60); do nvflare system status && break; sleep 2; done",
    f"veilboost models rollback outcome 1 {SITE_OF_OPERATOR}",
    "veilboost predict outcome /tmp/operator/data/site-1/2026-10.csv --out /tmp/operator/again.csv "
    f"--id Fallnummer --ignore Verlauf {SITE_OF_OPERATOR}",
]

BANK = "/tmp/bank/poc/example_project/prod_00"  # noqa: S108  # as above
SITE_OF_BANK = f"--workspace {BANK}/site-1 --site site-1"
SERVE = """from nvflare_plugins.recipes.recipe import VerticalInferenceRecipe
import sys
VerticalInferenceRecipe(
    "serve", model=sys.argv[1], action="serve", data_set="applicants", alignment=sys.argv[2], batch_rows=64
).export("/tmp/bank/jobs")
"""
OCTOBER = """from nvflare_plugins.recipes.recipe import VerticalXGBRecipe
import sys
VerticalXGBRecipe(
    "october",
    active="site-1",
    data_set="customers_10",
    label="default",
    weight="exposure",
    categories={
        "site-2": {"bought": ["Bücher", "Kleidung", "Möbel", "Technik"]},
        "site-3": {"tariff": ["M", "S", "XL"]},
    },
    alignment="first",
    params={"objective": "binary:logistic", "max_depth": 3, "eta": 0.3, "max_bin": 32},
    num_rounds=2,
    initial_model=sys.argv[1],
).export("/tmp/bank/jobs")
"""
BANKS_MONTHS = [
    # September: a score while the applicant waits, from a job that stays.
    f"veilboost site-setup {BANK}/site-2 --consent scoring",
    f"veilboost site-setup {BANK}/site-3 --consent scoring",
    "python /tmp/bank/serve.py $MODEL $JOB",
    "SERVE=$(nvflare job submit -j /tmp/bank/jobs/serve | awk '/job_id/ {print $2}')",
    f"for i in $(seq 60); do veilboost score $SERVE --status {SITE_OF_BANK} && break; sleep 2; done",
    f"veilboost score $SERVE 0 17 {SITE_OF_BANK} > /tmp/bank/scores.json",
    f"veilboost score $SERVE --stop {SITE_OF_BANK}",
    "nvflare job wait $SERVE",
    # October: new customers, from whom the model goes on. Their few coarse columns look like those of earlier ones.
    "veilboost site-setup /tmp/bank/poc --consent recompute_with_changes",
    "for i in 1 2 3; do (cd /tmp/bank/raw/site-$i; sed 's/^C/D/' customers.csv > customers_10.csv); done",
    'veilboost site-setup /tmp/bank/poc --data-set "customers_10=/tmp/bank/raw/{site}/customers_10.csv" '
    "--id customers_10=customer",
    "python /tmp/bank/october.py $MODEL",
    "OCTOBER=$(nvflare job submit -j /tmp/bank/jobs/october | awk '/job_id/ {print $2}')",
    "nvflare job wait $OCTOBER",
    "python /tmp/bank/serve.py $OCTOBER $JOB",
    "SECOND=$(nvflare job submit -j /tmp/bank/jobs/serve | awk '/job_id/ {print $2}')",
    f"for i in $(seq 60); do veilboost score $SECOND --status {SITE_OF_BANK} && break; sleep 2; done",
    f"veilboost score $SECOND 0 17 {SITE_OF_BANK} > /tmp/bank/second.json",
    f"veilboost score $SECOND --stop {SITE_OF_BANK}",
    "nvflare job wait $SECOND",
]


def test_three_months_of_an_operator(tmp_path: Path) -> None:
    codes = run_guide("OPERATOR", tmp_path, OPERATORS_MONTHS)
    assert {command: code for command, code in codes.items() if code != expected(command)} == {}
    first, again = (pd.read_csv(tmp_path / "operator" / name) for name in ("october.csv", "again.csv"))
    pd.testing.assert_frame_equal(first, again)


def test_three_months_of_a_bank(tmp_path: Path) -> None:
    (tmp_path / "bank").mkdir()
    for name, code in (("serve.py", SERVE), ("october.py", OCTOBER)):
        (tmp_path / "bank" / name).write_text(code.replace("/tmp", str(tmp_path)))  # noqa: S108
    codes = run_guide("BANK", tmp_path, BANKS_MONTHS)
    assert {command: code for command, code in codes.items() if code != expected(command)} == {}
    (path,) = (tmp_path / "bank").glob("kept/site-1/veilboost_runs/*/predictions.csv")
    nightly = pd.read_csv(path).set_index("row")["prediction"]
    first, second = (
        json.loads((tmp_path / "bank" / name).read_text())["scores"] for name in ("scores.json", "second.json")
    )
    assert [score["row"] for score in first] == [0, 17]
    for score in first:
        assert score["probability"]["1"] == pytest.approx(nightly[score["row"]], abs=1e-6)
    assert first != second, "October's model has more trees"
