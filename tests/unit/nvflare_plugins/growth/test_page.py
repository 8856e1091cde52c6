"""The page "How a tree is grown": one page, one picture of the same steps, and a table of refusals that is true."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.growth import arithmetic
from nvflare_plugins.growth.arithmetic import why_not_own
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.xgb.parameters import check_parameters
from nvflare_plugins.xgb.versions import RELEASES
from tests.test_documents import rows

PAGE = Path(arithmetic.__file__).parent / "README.md"
PICTURE = PAGE.with_name("growth.svg")
MOST_WORDS, MOST_WORDS_OF_A_SENTENCE = 900, 30
CLASSES = {"objective": "multi:softprob", "num_class": 3}
FEATURES = ("a", "b")


def text() -> str:
    """Return the page's words: no table, no target of a link."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if not line.startswith("!")]
    return re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))


def test_the_page_is_short() -> None:
    assert len(re.findall(r"\w[\w.:=/-]*", text())) <= MOST_WORDS
    prose = "\n".join(line for line in text().splitlines() if not line.startswith(("|", "#")))
    for sentence in re.split(r"(?<=[.:;])\s+|\n\n", prose):
        assert len(sentence.split()) <= MOST_WORDS_OF_A_SENTENCE, sentence


def test_the_picture_shows_the_steps_of_the_page_and_asks_for_nothing_from_elsewhere() -> None:
    source = PICTURE.read_text(encoding="utf-8")
    picture = ElementTree.fromstring(source)
    shown = {"".join(node.itertext()) for node in picture.iter("{http://www.w3.org/2000/svg}text")}
    steps = re.findall(r"(?m)^(\d)\. \*\*(.*?)\.\*\*", PAGE.read_text(encoding="utf-8"))
    assert len(steps) == 8 and {f"{number} {name}" for number, name in steps} <= shown
    assert picture.get("aria-label") in PAGE.read_text(encoding="utf-8")
    assert not re.search(r"href|<script|<image|url\((?!#)", source)


OBJECTIVES = {"survival:cox": ({"signed": "days"}, {}), "rank:ndcg": ("label", {"query": "query"})}
"""Those that have a row of their own: a label and further fields of a job."""


def is_job(objective: str = "binary:logistic", **fields: object) -> bool:
    label, more = OBJECTIVES.get(objective, ("label", {}))
    try:
        HorizontalJob("train", label, {"objective": objective}, **more, **fields)
    except ConfigurationError:
        return False
    return True


def own_and_xgboost(what: str) -> tuple[bool, bool]:
    """Return what the code says of a row of the table: whether each engine takes it."""
    if what.startswith("XGBoost "):
        releases = re.findall(r"\d\.\d", what)
        known = {release.version for release in RELEASES}
        return set(releases) <= set(arithmetic.ARITHMETICS), set(releases) <= known
    if what.startswith("arithmetic"):
        return tuple(is_job(engine=engine, arithmetic="3.2") for engine in ("own", "xgboost"))
    if what in OBJECTIVES:
        return tuple(is_job(what, engine=engine) for engine in ("own", "xgboost"))
    name, _, value = what.partition("=")
    objective = CLASSES if name == "multi_strategy" else {"objective": "binary:logistic"}
    try:
        checked = check_parameters({**objective, name: {"true": True}.get(value, value)}, FEATURES, [])
    except ConfigurationError:
        return False, False
    return why_not_own(checked) is None, True


REFUSALS = [cells for cells in rows(PAGE, "What each engine refuses") if cells[0] != "what"]


@pytest.mark.parametrize("cells", REFUSALS, ids=lambda cells: cells[0])
def test_the_table_of_refusals_is_true(cells: list[str]) -> None:
    what = cells[0].replace("`", "")
    assert cells[1:] == ["yes" if taken else "refused" for taken in own_and_xgboost(what)]


def test_the_table_has_what_either_engine_alone_refuses() -> None:
    assert {tuple(cells[1:]) for cells in REFUSALS} == {
        ("yes", "yes"),
        ("yes", "refused"),
        ("refused", "yes"),
        ("refused", "refused"),
    }


def test_the_page_names_every_arithmetic() -> None:
    listed = [cells[0] for cells in rows(PAGE, "Whose arithmetic")]
    assert listed[1:] == list(arithmetic.ARITHMETICS)
