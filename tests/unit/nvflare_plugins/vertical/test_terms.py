"""Terms of a vertical job: every difference between parties is named, and hostile bytes are refused."""

from __future__ import annotations

import dataclasses
import hmac
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.kinds.vertical.messages import RowsProof, VerticalTerms, agree, rows_content


class ToyKey:
    def hmac(self, purpose: str, data: bytes) -> bytes:
        return hmac.digest(b"group key", purpose.encode() + b"\0" + data, "sha256")


PROOF = RowsProof(ToyKey(), [rows_content([b"ann", b"bob"]), b""])
MINE = VerticalTerms(
    {"xgboost": "3.2.0", "veilboost": "1"},
    {"label": "y"},
    {"agreed": {}},
    [5, 3],
    PROOF.of(0),
    "m",
    {"2": "aa", "4": "bb"},
)
THEIRS = dataclasses.replace(MINE, rows=PROOF.of(1))
SITES = ("site-1", "site-2")


def meet(other: VerticalTerms) -> int:
    return agree(MINE, [MINE.to_bytes(), other.to_bytes()], SITES, 0, PROOF)[0]


def named(mine: str, theirs: str) -> tuple[int, str]:
    """Meet a party that has another XGBoost and names an arithmetic of its own."""
    ours, other = (
        dataclasses.replace(terms, versions={"xgboost": f"{name}.0", "veilboost": "1", "arithmetic": name})
        for terms, name in ((MINE, mine), (THEIRS, theirs))
    )
    return agree(ours, [ours.to_bytes(), other.to_bytes()], SITES, 0, PROOF)


@pytest.mark.parametrize(("mine", "theirs"), [("3.4", "3.2"), ("3.2", "3.4"), ("3.10", "3.2"), ("3.2", "3.2")])
def test_parties_of_unlike_wheels_agree_on_the_lowest_arithmetic(mine, theirs):
    assert named(mine, theirs) == (4, "3.2")


@pytest.mark.parametrize("theirs", ["", "3", "latest", "3.4; rm"])
def test_a_party_that_names_no_arithmetic_is_refused(theirs):
    with pytest.raises(ConfigurationError, match="no arithmetic that is known here"):
        named("3.2", theirs)


def test_a_proof_that_another_party_gave_does_not_count():
    assert meet(THEIRS) == 4
    with pytest.raises(ConfigurationError, match="another order"):
        meet(dataclasses.replace(THEIRS, rows=MINE.rows))


def test_a_proof_of_one_data_set_does_not_count_for_another():
    both = RowsProof(ToyKey(), [b"same"] * 2).of(1)
    assert both[0] != both[1]


def test_equal_terms_agree_on_the_last_common_checkpoint():
    assert meet(THEIRS) == 4
    assert meet(dataclasses.replace(THEIRS, checkpoints={"2": "aa", "4": "cc", "6": "dd"})) == 2
    assert meet(dataclasses.replace(THEIRS, checkpoints={})) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"versions": {"xgboost": "3.2.1", "veilboost": "1"}}, "xgboost 3.2.1"),
        ({"job": {"label": "z"}}, "'label'"),
        ({"parameters": {"agreed": {"eta": 1}}}, "'agreed'"),
        ({"n_rows": [5, 4]}, "another number of rows"),
        ({"n_rows": [5]}, "another number of rows"),
        ({"rows": PROOF.of(1)[:1]}, "another number of data sets"),
        ({"rows": ["ac", ""]}, "another order"),
        ({"rows": ["", ""]}, "all, or none"),
        ({"model": "n"}, "another model"),
    ],
    ids=str,
)
def test_a_difference_is_named(change, said):
    with pytest.raises(ConfigurationError, match=said):
        meet(dataclasses.replace(THEIRS, **change))


@pytest.mark.parametrize("proof", ["\u00e9b", "\ud800"])
def test_a_proof_that_is_no_hexadecimal_text_is_refused(proof):
    with pytest.raises(ProtocolError):
        meet(dataclasses.replace(THEIRS, rows=[proof, ""]))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=8)
            | st.dictionaries(
                st.sampled_from(["versions", "job", "parameters", "n_rows", "rows", "model", "checkpoints", "x"]),
                inner,
                max_size=8,
            )
        ),
    )
)
def test_hostile_documents_are_refused(document):
    with pytest.raises((ProtocolError, ConfigurationError)):
        agree(MINE, [MINE.to_bytes(), json.dumps(document).encode()], SITES, 0, PROOF)


@given(st.binary(max_size=60))
def test_hostile_bytes_are_refused(data):
    with pytest.raises(ProtocolError):
        VerticalTerms.from_bytes(data)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(VerticalTerms)])
@pytest.mark.parametrize("value", [None, 5, [None], {"a": []}, "text"], ids=str)
def test_fields_of_other_types_are_refused_or_differ(name, value):
    document = {**json.loads(THEIRS.to_bytes()), name: value}
    try:
        agree(MINE, [MINE.to_bytes(), json.dumps(document).encode()], SITES, 0, PROOF)
    except (ProtocolError, ConfigurationError):
        return
    assert name == "checkpoints"


def test_the_order_of_rows_shows_in_their_content():
    assert rows_content([b"a", b"bc"]) != rows_content([b"ab", b"c"]) != rows_content([b"c", b"ab"])
    assert rows_content(None) == b""
