"""The threat model: one entry per profile that a job can name, complete, and strict about what is a leak."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvflare_plugins.threat_model import CODEC_PROTECTION, THREAT_MODELS, markdown_table
from nvflare_plugins.wire.envelope import Codec
from nvflare_plugins.wire.profiles import Profile


def test_every_profile_has_an_entry_and_allows_its_own_protection():
    assert set(THREAT_MODELS) == {profile.value for profile in Profile}
    own = {"plain": "PLAIN", "masks": "MASKED", "bfv": "BFV", "ckks": "CKKS"}
    for profile, model in THREAT_MODELS.items():
        assert model.profile == profile
        assert model.codecs == {"MASKED", "SEALED", own[profile]}
        assert all(what.strip() for _, what in model.rows())


@pytest.mark.parametrize("profile", ["masks", "bfv", "ckks"])
def test_no_protecting_profile_lets_private_messages_pass_in_clear(profile):
    assert not {"PLAIN", "PUBLIC"} & THREAT_MODELS[profile].codecs


def test_every_codec_is_explained():
    assert set(CODEC_PROTECTION) == {codec.name for codec in Codec}


def test_markdown_holds_every_cell():
    table = markdown_table()
    assert all(what in table for model in THREAT_MODELS.values() for _, what in model.rows())
    assert len({line.count("|") for line in table.splitlines()}) == 1


def test_readme_holds_the_same_table():
    # Print it with: python -c "from nvflare_plugins.threat_model import markdown_table as t; print(t())"
    assert markdown_table() in (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
