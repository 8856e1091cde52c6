"""The threat model: one entry per profile that a job can name, complete, and strict about what is a leak."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvflare_plugins.evidence.contents import Protection
from nvflare_plugins.evidence.threat_model import (
    ALIGNMENT,
    BAGGING,
    CODEC_PROTECTION,
    HORIZONTAL,
    INFERENCE,
    PRIVATE,
    THREAT_MODELS,
    VERTICAL,
    markdown_table,
    notes_for,
    protection_text,
)
from nvflare_plugins.site.policy.values import PROFILES
from nvflare_plugins.wire.envelope import Codec
from nvflare_plugins.wire.profiles import Profile


def test_every_profile_has_an_entry_and_allows_its_own_protection():
    assert set(PROFILES) == {*HORIZONTAL, *VERTICAL, *PRIVATE}
    assert set(THREAT_MODELS) == {*PROFILES, *ALIGNMENT, *INFERENCE, *BAGGING}
    assert set(HORIZONTAL) == {profile.value for profile in Profile}
    own = {"plain": {"PLAIN", "PLAIN_32"}, "masks": {"MASKED_32"}, "bfv": {"BFV"}, "ckks": {"CKKS"}}
    for profile, model in THREAT_MODELS.items():
        assert model.profile == profile
        assert model.codecs == {"MASKED", "SEALED"} | own.get(profile, set())
        assert all(what.strip() for _, what in model.rows())
        assert notes_for(profile)
    assert notes_for("unknown") == ()


def test_gradients_need_the_scheme_that_the_profile_names():
    needed = {profile: model.ciphertexts for profile, model in THREAT_MODELS.items()}
    assert needed["paillier"] == Protection.PAILLIER.name
    assert needed["okamoto_uchiyama"] == Protection.OKAMOTO_UCHIYAMA.name
    assert needed["elgamal"] == Protection.ELGAMAL.name
    assert needed["plain"] == Protection.CLEAR.name
    assert all(needed[profile] is None for profile in ("masks", "bfv", "ckks", *PRIVATE, *ALIGNMENT, *INFERENCE))


@pytest.mark.parametrize("profile", sorted(set(PROFILES) - {"plain"}))
def test_no_protecting_profile_lets_private_messages_pass_in_clear(profile):
    assert not {"PLAIN", "PLAIN_32", "PUBLIC"} & THREAT_MODELS[profile].codecs


def test_every_codec_is_explained():
    assert set(CODEC_PROTECTION) == {codec.name for codec in Codec}


@pytest.mark.parametrize("profile", PRIVATE)
def test_noise_is_named_beside_the_masks_and_a_trusted_server_as_one_that_reads(profile: str) -> None:
    """The table said of private jobs what it says of masks alone, and of a trusted server that it sees no sum."""
    text = protection_text(profile, "NODE_STATS", "MASKED", True)
    assert "noise" in text and "pairwise masks" in text
    assert ("exact sum" in text) == (profile == "dp_trusted") != ("neither contribution nor sum" in text)
    assert protection_text(profile, "SCALE", "MASKED", True) == CODEC_PROTECTION["MASKED"]
    assert protection_text(profile, "AGREEMENT", "SEALED", True) == CODEC_PROTECTION["SEALED"]
    assert protection_text("masks", "HISTOGRAM", "MASKED", True) == CODEC_PROTECTION["MASKED"]
    assert protection_text(profile, "HANDSHAKE", "PUBLIC", False) == "public, nothing to protect"
    assert protection_text(profile, "?", "OTHER", True) == "UNKNOWN"


@pytest.mark.parametrize("profiles", [HORIZONTAL, VERTICAL, PRIVATE])
def test_markdown_holds_every_cell(profiles):
    table = markdown_table(profiles)
    assert all(what in table for profile in profiles for _, what in THREAT_MODELS[profile].rows())
    assert len({line.count("|") for line in table.splitlines()}) == 1


@pytest.mark.parametrize("profiles", [HORIZONTAL, VERTICAL, PRIVATE, ALIGNMENT + INFERENCE, BAGGING])
def test_security_md_holds_the_same_tables(profiles):
    # Print one with: python -c "from nvflare_plugins.evidence.threat_model import *; print(markdown_table(HORIZONTAL))"
    assert markdown_table(profiles) in (Path(__file__).parents[4] / "SECURITY.md").read_text(encoding="utf-8")
