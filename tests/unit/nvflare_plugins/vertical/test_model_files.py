"""Parts of a vertical model on disk: what is written is read, and nothing else is."""

from __future__ import annotations

import json
import stat

import numpy as np
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.kinds.vertical.model import (
    ACTIVE_FILE,
    PASSIVE_FILE,
    ActivePart,
    ModelIdentity,
    Part,
    PartyColumns,
    PassivePart,
    PrivateSplit,
    commit,
    find_part,
    read_part,
    write_part,
)
from nvflare_plugins.xgb.model_json import model_bytes

SITES = ("site-1", "site-2", "site-3")


def booster() -> bytes:
    tree = {
        "left_children": [1, 3, -1, -1, -1],
        "right_children": [2, 4, -1, -1, -1],
        "split_indices": [0, 2, 0, 0, 0],
        "split_conditions": [0.5, 0.0, 1e-7, -0.2, 0.3],
        "default_left": [0, 1, 0, 0, 0],
    }
    learner = {"gradient_booster": {"model": {"trees": [tree]}}, "feature_names": [], "feature_types": []}
    return model_bytes({"learner": learner, "version": [3, 2, 0]})


ACTIVE = ActivePart(
    booster(), ("age",), (PartyColumns("site-2", ("f0", "f1")), PartyColumns("site-3", ("f0",))), best_round=4
)
PASSIVE = PassivePart({(0, 1): PrivateSplit(1, np.float32(0.1), True)}, ("income", "debt"), ("f0", "f1"))
OTHER = PassivePart({}, ("height",), ("f0",))


@pytest.fixture
def folders(tmp_path):
    """Write the parts of one model as three sites would."""
    parts = dict(zip(SITES, (ACTIVE, PASSIVE, OTHER), strict=True))
    commitments = {site: commit(part) for site, part in parts.items()}
    identity = ModelIdentity("job", "site-1", SITES, tuple(c.digest for c in commitments.values()))
    for site, part in parts.items():
        (tmp_path / site / "job").mkdir(parents=True)
        write_part(tmp_path / site / "job", site, part, identity, commitments[site])
    return {site: tmp_path / site / "job" for site in SITES}


def test_parts_are_read_as_they_were_written_and_share_one_model_id(folders):
    active = read_part(folders["site-1"] / ACTIVE_FILE, "site-1", ActivePart)
    passive = read_part(folders["site-2"] / PASSIVE_FILE, "site-2", PassivePart)
    other = read_part(folders["site-3"] / PASSIVE_FILE, "site-3", PassivePart)
    assert (active.part, passive.part, other.part) == (ACTIVE, PASSIVE, OTHER)
    assert active.identity == passive.identity == other.identity
    assert len(active.identity.model_id) == 64


def test_files_are_for_their_owner_alone(folders):
    for path in (folders["site-1"] / ACTIVE_FILE, folders["site-2"] / PASSIVE_FILE):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_equal_parts_have_different_commitments():
    assert commit(PASSIVE).digest != commit(PASSIVE).digest


def changed(path, change):
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


CHANGES = {
    "threshold": lambda d: d["part"]["splits"][0].__setitem__(3, "0.2"),
    "direction": lambda d: d["part"]["splits"][0].__setitem__(4, 0),
    "alias": lambda d: d["part"]["aliases"].__setitem__(0, "f7"),
    "column": lambda d: d["part"]["columns"].__setitem__(0, "other"),
    "nonce": lambda d: d.update(nonce="00" * 32),
    "short_nonce": lambda d: d.update(nonce="zz"),
    "model_id": lambda d: d.update(model_id="00" * 32),
    "job": lambda d: d.update(job_id="another"),
    "active": lambda d: d.update(active="site-2"),
    "commitment": lambda d: d["commitments"].update({"site-3": "00" * 32}),
    "format": lambda d: d.update(format="veilboost-vertical-part-2"),
    "no_part": lambda d: d.pop("part"),
    "part_is_a_list": lambda d: d.update(part=[]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_file_is_refused(folders, name):
    path = folders["site-2"] / PASSIVE_FILE
    changed(path, CHANGES[name])
    with pytest.raises(ConfigurationError) as caught:
        read_part(path, "site-2", PassivePart)
    assert "0.1" not in str(caught.value) and "0.2" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b'"text"', b"null", b"[" * 100_000])
def test_other_files_are_refused(folders, content):
    path = folders["site-2"] / PASSIVE_FILE
    path.write_bytes(content)
    with pytest.raises(ConfigurationError):
        read_part(path, "site-2", PassivePart)


def test_a_changed_leaf_and_an_unmasked_threshold_are_refused(folders):
    path = folders["site-1"] / ACTIVE_FILE
    original = path.read_bytes()
    for node in (1, 3):

        def change(document, node=node):
            model = document["part"]["booster"]["learner"]["gradient_booster"]["model"]
            model["trees"][0]["split_conditions"][node] = 7.0

        path.write_bytes(original)
        changed(path, change)
        with pytest.raises(ConfigurationError):
            read_part(path, "site-1", ActivePart)


def test_a_number_that_no_tree_holds_is_refused(folders):
    path = folders["site-1"] / ACTIVE_FILE

    def change(document):
        model = document["part"]["booster"]["learner"]["gradient_booster"]["model"]
        model["trees"][0]["left_children"][0] = 1 << 70

    changed(path, change)
    with pytest.raises(ConfigurationError):
        read_part(path, "site-1", ActivePart)


def test_parts_of_other_sites_and_kinds_are_refused(folders):
    with pytest.raises(ConfigurationError):
        read_part(folders["site-2"] / PASSIVE_FILE, "site-3", PassivePart)
    with pytest.raises(ConfigurationError):
        read_part(folders["site-2"] / PASSIVE_FILE, "site-9", PassivePart)
    with pytest.raises(ConfigurationError):
        read_part(folders["site-2"] / PASSIVE_FILE, "site-2", ActivePart)
    with pytest.raises(ConfigurationError):
        read_part(folders["site-2"] / "absent", "site-2", PassivePart)


def test_a_part_of_the_other_role_is_refused(tmp_path):
    """A party that is not the active one must not pass for it, whatever it committed to."""
    commitments = [commit(ACTIVE), commit(ACTIVE)]
    identity = ModelIdentity("job", "site-1", SITES[:2], tuple(c.digest for c in commitments))
    path = write_part(tmp_path, "site-2", ACTIVE, identity, commitments[1])
    with pytest.raises(ConfigurationError):
        read_part(path, "site-2", ActivePart)


def test_only_what_was_committed_is_written(tmp_path):
    commitment = commit(PASSIVE)
    identity = ModelIdentity("job", "site-1", SITES[:2], (b"\0" * 32, commitment.digest))
    with pytest.raises(ValueError):
        write_part(tmp_path, "site-2", OTHER, identity, commitment)
    with pytest.raises(ValueError):
        write_part(tmp_path, "site-1", PASSIVE, identity, commitment)
    assert not list(tmp_path.iterdir())


def test_a_part_is_found_in_the_run_or_in_the_inputs(folders, tmp_path):
    runs, inputs = tmp_path / "site-2", tmp_path / "inputs"
    inputs.mkdir()
    assert find_part(runs, inputs, "job", "site-2", PassivePart).part == PASSIVE
    (folders["site-2"] / PASSIVE_FILE).rename(inputs / "job.site-2.json")
    assert find_part(runs, inputs, "job", "site-2", Part).part == PASSIVE
    for name in ("absent", "../site-2/job", "", "..", "a\\b"):
        with pytest.raises(ConfigurationError):
            find_part(runs, inputs, name, "site-2", PassivePart)
