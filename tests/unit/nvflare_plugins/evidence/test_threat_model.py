"""The threat model: one entry per profile that a job can name, complete, and strict about what is a leak."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nvflare_plugins.evidence.format import Protection
from nvflare_plugins.evidence.threat_model import CODEC_PROTECTION, notes_for, protection_text
from nvflare_plugins.pooled.processors import BUILT_IN
from nvflare_plugins.site.profiles import (
    DEFAULT_PROFILES,
    PROFILES,
    REMOVED_PROFILES,
    THREAT_MODELS,
    Family,
    Statement,
    profiles_of,
)
from nvflare_plugins.wire.envelope import Codec
from nvflare_plugins.wire.profiles import Profile
from tests.generated_tables import threats

PAGES = (Path(__file__).parents[4] / "docs" / "security").glob("*.md")
SECURITY = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def test_every_profile_has_an_entry_and_allows_its_own_protection():
    chosen = [name for family in ("HORIZONTAL", "VERTICAL", "PRIVATE") for name in profiles_of(Family[family])]
    assert list(PROFILES) == chosen and set(DEFAULT_PROFILES) < set(PROFILES)
    assert set(profiles_of(Family.HORIZONTAL)) == set(BUILT_IN) >= {profile.value for profile in Profile}
    assert REMOVED_PROFILES == {"okamoto_uchiyama": "elgamal"} and "okamoto_uchiyama" in THREAT_MODELS
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
    of_others = [name for name, one in THREAT_MODELS.items() if one.family is not Family.VERTICAL and name != "plain"]
    assert len(of_others) > 8 and all(needed[profile] is None for profile in of_others)


@pytest.mark.parametrize("profile", sorted(set(PROFILES) - {"plain"}))
def test_no_protecting_profile_lets_private_messages_pass_in_clear(profile):
    assert not {"PLAIN", "PLAIN_32", "PUBLIC"} & THREAT_MODELS[profile].codecs


def test_every_codec_is_explained():
    assert set(CODEC_PROTECTION) == {codec.name for codec in Codec}


@pytest.mark.parametrize("profile", profiles_of(Family.PRIVATE))
def test_noise_is_named_beside_the_masks_and_a_trusted_server_as_one_that_reads(profile: str) -> None:
    """The table said of private jobs what it says of masks alone, and of a trusted server that it sees no sum."""
    text = protection_text(profile, "NODE_STATS", "MASKED", private=True)
    assert "noise" in text and "pairwise masks" in text
    assert ("exact sum" in text) == (profile == "dp_trusted") != ("neither contribution nor sum" in text)
    assert protection_text(profile, "SCALE", "MASKED", private=True) == CODEC_PROTECTION["MASKED"]
    assert protection_text(profile, "AGREEMENT", "SEALED", private=True) == CODEC_PROTECTION["SEALED"]
    assert protection_text("masks", "HISTOGRAM", "MASKED", private=True) == CODEC_PROTECTION["MASKED"]
    assert protection_text(profile, "HANDSHAKE", "PUBLIC", private=False) == "public, nothing to protect"
    assert protection_text(profile, "?", "OTHER", private=True) == "UNKNOWN"


FAMILIES = [profiles_of(family) for family in Family]


@pytest.mark.parametrize("profiles", [*FAMILIES, profiles_of(Family.ALIGNMENT) + profiles_of(Family.INFERENCE)])
def test_markdown_holds_every_cell_once(profiles):
    """A cell, or its start, that an earlier column says is named by that column."""
    lines = [line.strip("| ").split(" | ") for line in threats(profiles).splitlines()]
    assert [len(line) for line in lines[2:]] == [len(profiles) + 1] * len(Statement.rows(THREAT_MODELS["masks"]))
    for number, (who, *cells) in enumerate(lines[2:]):
        said = {f"As under `{profile}`.": cell for profile, cell in zip(profiles, cells, strict=True)}
        for profile, cell in zip(profiles, cells, strict=True):
            who_really, what = THREAT_MODELS[profile].rows()[number]
            start = next((reference for reference in said if cell.startswith(reference)), "")
            assert who == who_really and what in (cell, said.get(start, "") + cell[len(start) :])
        own = [cell for cell in cells if not cell.startswith("As under")]
        assert len(set(own)) == len(own)


@pytest.mark.parametrize("profiles", FAMILIES)
def test_pages_on_security_hold_the_same_tables(profiles):
    assert threats(profiles) in SECURITY


def test_a_page_names_the_profiles_whose_sums_a_server_can_change_unnoticed():
    text = SECURITY.partition("\n* **No tags** under ")[2].partition("\n* ")[0]
    unnoticed = {profile for profile, model in THREAT_MODELS.items() if "unnoticed" in model.changed.lower()}
    assert set(re.findall(r"`(\w+)`", text)) == unnoticed == {"plain", "dp_trusted"}
