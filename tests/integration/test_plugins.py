"""Profiles of others: what is imported follows from the site's policy alone, and evidence says who claims what."""

from __future__ import annotations

import importlib.util
import json
import marshal
import shutil
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.cli.verify import render, to_json
from nvflare_plugins.evidence.format import SERVER, export_name
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.evidence.verification import Verdict, verify
from nvflare_plugins.pooled import processors
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.processors import choose_profile
from nvflare_plugins.site.policy import PROCESSORS, SitePolicy, hash_of, load_adder, load_plugin
from nvflare_plugins.wire.aggregation import Aggregator
from nvflare_plugins.wire.envelope import Codec, Frame, FrameType, Kind, Operation, Phase, TrainingStep
from tests.support import federation, plugins
from tests.support.evidence_attempts import rewrite
from tests.support.federation import Federation, succeed

PARAMS = {"objective": "binary:logistic", "max_depth": 3, "max_bin": 16, "eval_metric": "logloss"}
SIDE = "acme_veil_aside"


@pytest.fixture(autouse=True)
def _nothing_stays_imported() -> Iterator[None]:
    plugins.forget()
    yield
    plugins.forget()


def job(profile: str = plugins.PROFILE, **fields: object) -> HorizontalJob:
    return HorizontalJob("train", "y", PARAMS, num_rounds=2, profile=profile, evaluate_training=True, **fields)


def sites(folder: Path, policy: dict) -> Federation:
    rng = np.random.default_rng(7)
    frame = pd.DataFrame({"a": rng.normal(size=240), "b": rng.normal(size=240)})
    frame["y"] = (frame.a + 0.5 * frame.b + rng.normal(scale=0.5, size=240) > 0).astype(float)
    return Federation.of(folder, policy=policy, train=frame)


def policy(folder: Path, **keys: object) -> SitePolicy:
    return SitePolicy.from_dict(keys, workspace=folder, site="site-1")


@pytest.mark.usefixtures("every_report")
def test_a_plugin_trains_the_model_of_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.install(tmp_path / "packages", monkeypatch)
    one = sites(tmp_path / "plugin", plugins.POLICY)
    succeed(one.run(job()))
    assert plugins.imported()
    other = sites(tmp_path / "masks", {})
    succeed(other.run(job("masks")))
    assert one.model() == other.model()
    report = (one.workspace("site-1") / "runs" / "job" / "report.html").read_text()
    assert "acme_masks acme-veil 1.2.0" in report and "has not checked it" in report
    assert "Pairwise masks from ChaCha20" in report and "Nobody has reviewed it." in report
    assert "a plugin&#39;s processor" in report


class ServerWithEvidence(Aggregator):
    """The server's log of the attempt, as ServerAttempt writes it."""

    folder: Path

    def __init__(self, names: tuple[str, ...], attempt: bytes, deadline_s: float) -> None:
        path = self.folder / export_name(SERVER)
        self.log = EvidenceLog(path, SERVER, "job", attempt.hex(), plugins.PROFILE, role="server")
        super().__init__(names, attempt, deadline_s, self.log.transfer, self.log.signed_head)


@pytest.fixture
def evidence(tmp_path: Path, evidence_once: Path) -> Path:
    """Evidence of a whole run, with the plugin gone from this Python; each test has a copy."""
    return Path(shutil.copytree(evidence_once, tmp_path / "evidence"))


@pytest.fixture(scope="module")
def evidence_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        return evidence_of(tmp_path_factory.mktemp("once"), patch)


def evidence_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    packages = plugins.install(tmp_path / "packages", monkeypatch)
    folder = tmp_path / "evidence"
    folder.mkdir()
    opened: list[ServerWithEvidence] = []

    def server(*arguments: object) -> ServerWithEvidence:
        opened.append(ServerWithEvidence(*arguments))
        return opened[0]

    monkeypatch.setattr(ServerWithEvidence, "folder", folder, raising=False)
    monkeypatch.setattr(federation, "Aggregator", server)
    federated = sites(tmp_path / "sites", plugins.POLICY)
    succeed(federated.run(job()))
    opened[0].log.end("completed")
    opened[0].log.close()
    for site in federated.sites:
        log = export_name(site)
        (folder / log).write_bytes((federated.workspace(site) / "runs" / "job" / "evidence" / log).read_bytes())
    packages.rename(tmp_path / "gone")
    plugins.forget()
    return folder


def test_evidence_is_verified_without_the_plugin_and_says_whose_claim_it_is(evidence: Path) -> None:
    result = verify([evidence])
    text = render(result)
    assert result.verdict is Verdict.UNSIGNED and not plugins.imported(), text
    assert "plugin acme_masks acme-veil 1.2.0 claims (nobody checked it)" in text
    assert "Sizes, order and timing of the messages. No contribution and no sum." in text
    assert "what protected its sums is the claim of plugin acme_masks acme-veil 1.2.0" in text.splitlines()[-1]
    (attempt,) = to_json(result)["attempts"]
    release = {"plugin": "acme_masks", "distribution": "acme-veil", "version": "1.2.0"}
    assert attempt["plugin"]["release"] == release
    assert {message["codec"] for message in attempt["messages"] if message["kind"] == "HISTOGRAM"} == {"PLUGIN"}


@pytest.mark.parametrize(
    ("fact", "value", "complaint"),
    [
        ("version", "1.2.1", "recorded different protection: version"),
        ("claims server_alone", "Everything.", "recorded different protection: claims server_alone"),
        ("version", "", "does not say which release"),
        ("plugin", "other", "does not say which release"),
    ],
)
def test_sites_that_ran_other_releases_do_not_verify(evidence: Path, fact: str, value: str, complaint: str) -> None:
    def change(records: list[dict]) -> None:
        (session,) = (record for record in records if record["type"] == "session")
        session["protection"][fact] = value

    rewrite(evidence / export_name("site-2"), change)
    text = render(verify([evidence]))
    assert complaint in text and "NOT VERIFIED" in text


@pytest.mark.parametrize(
    ("allowed", "key", "remedy"),
    [
        ({}, "plugins.acme_masks", "names no plugin"),
        ({"distribution": "acme-veil", "version": "1.2.1"}, "plugins.acme_masks.version", "acme-veil==1.2.1"),
        ({"distribution": "acme-veil", "version": "1.2"}, "plugins.acme_masks.version", "acme-veil==1.2"),
        ({"distribution": "veilboost", "version": None}, "plugins.acme_masks.distribution", "no|has 0 entry points"),
        ({"distribution": "not-there", "version": "1"}, "plugins.acme_masks", "install not-there 1"),
    ],
    ids=["not named", "newer", "prefix", "of another distribution", "not installed"],
)
def test_what_the_policy_does_not_name_is_refused_before_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: dict, key: str, remedy: str
) -> None:
    plugins.install(tmp_path / "packages", monkeypatch)
    if allowed and allowed["version"] is None:
        plugins.describe(tmp_path / "packages", "aside", "3.0", {}, PROCESSORS)
        allowed = {"distribution": "aside", "version": "3.0"}
    named = {"plugins": {"acme_masks": allowed}} if allowed else {}
    outcomes = sites(tmp_path / "sites", named).run(job())
    for outcome in outcomes.values():
        assert isinstance(outcome, (PolicyRefusal, ConfigurationError)), outcome
    reasons = [str(outcome) for outcome in outcomes.values()]
    assert any(f"Policy key: {key}" in reason for reason in reasons), reasons
    assert any(part in reason for part in remedy.split("|") for reason in reasons), reasons
    assert not plugins.imported()


def test_only_the_entry_point_that_the_policy_names_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not another of the same distribution, nor one of the same name of another, though a job names them."""
    folder = plugins.install(tmp_path / "packages", monkeypatch, other_masks=f"{SIDE}:PROFILE")
    trace = tmp_path / "imported"
    (folder / f"{SIDE}.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    plugins.describe(folder, "attacker", "1.2.0", {"acme_masks": f"{SIDE}:PROFILE"}, PROCESSORS)
    named = policy(tmp_path, **plugins.POLICY)
    assert choose_profile(named, "plugin.acme_masks").release == "acme-veil 1.2.0"
    for profile in ("plugin.other_masks", "plugin.os"):
        with pytest.raises(PolicyRefusal, match=r"Policy key: plugins\.\w+\. Remedy: choose another profile"):
            choose_profile(named, profile)
    outcomes = sites(tmp_path / "sites", plugins.POLICY).run(job("plugin.other_masks"))
    assert all(isinstance(outcome, PolicyRefusal) for outcome in outcomes.values())
    assert not trace.exists()


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("PROFILE = 1", "no SumProfile"),
        ("raise ValueError('a secret of the site')", r"cannot be imported at site-1 \(ValueError\)"),
        ("from acme_veil.masks import PROFILE", "another name than its entry point"),
        (
            "from dataclasses import replace\nfrom acme_veil.masks import PROFILE\n"
            "from nvflare_plugins.wire.envelope import Codec\n"
            "PROFILE = replace(PROFILE, name='other_masks', codec=Codec.MASKED)",
            "codec",
        ),
    ],
)
def test_what_is_no_usable_profile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, complaint: str
) -> None:
    folder = plugins.install(tmp_path / "packages", monkeypatch, other_masks=f"{SIDE}:PROFILE")
    (folder / f"{SIDE}.py").write_text(source + "\n")
    monkeypatch.delitem(sys.modules, SIDE, raising=False)
    with pytest.raises(ConfigurationError, match=complaint) as caught:
        choose_profile(policy(tmp_path, plugins={"other_masks": plugins.PIN}), "plugin.other_masks")
    monkeypatch.delitem(sys.modules, SIDE, raising=False)
    assert "Policy key: plugins.other_masks" in str(caught.value) and "secret" not in str(caught.value)


def test_a_plugin_that_ends_the_process_when_it_is_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SystemExit is no Exception: the site's process would end without a word to anybody."""
    folder = plugins.install(tmp_path / "packages", monkeypatch, other_masks=f"{SIDE}:PROFILE")
    (folder / f"{SIDE}.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.delitem(sys.modules, SIDE, raising=False)
    with pytest.raises(ConfigurationError, match=r"cannot be imported at site-1 \(SystemExit\)"):
        load_plugin(policy(tmp_path, plugins={"other_masks": plugins.PIN}), "other_masks")


@pytest.mark.parametrize("spelling", ["acme-veil", "Acme-Veil", "acme_veil", "acme.veil", "ACME-_.veil"])
def test_all_spellings_of_a_distribution_are_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    """Sites compare what they run by its text."""
    plugins.install(tmp_path / "packages", monkeypatch)
    named = policy(tmp_path, plugins={"acme_masks": {**plugins.PIN, "distribution": spelling}})
    assert choose_profile(named, "plugin.acme_masks").release == "acme-veil 1.2.0"
    assert named.fingerprint() == policy(tmp_path, **plugins.POLICY).fingerprint()


def test_the_example_package_asks_for_this_version() -> None:
    root = Path(__file__).parents[2]
    example, own = (tomllib.loads((at / "pyproject.toml").read_text())["project"] for at in (plugins.PACKAGE, root))
    assert example["dependencies"] == [f"veilboost=={own['version'].rpartition('.')[0]}.*"]


def test_sites_with_different_releases_do_not_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each site allows what it has installed; the agreement names the site that has another release."""
    folder = plugins.install(tmp_path / "packages", monkeypatch)
    plugins.install(tmp_path / "newer", monkeypatch, version="1.3.0")
    federated = sites(tmp_path / "sites", plugins.POLICY)
    federated.set_policy("site-3", plugins={"acme_masks": {**plugins.PIN, "version": "1.3.0"}})
    older = metadata.PathDistribution(folder / "acme_veil-1.2.0.dist-info")
    here, find = threading.local(), metadata.distribution

    def load_at(site_policy: SitePolicy, name: str) -> object:
        here.is_newer = site_policy.site == "site-3"
        return load_plugin(site_policy, name)

    def installed_at(name: str) -> metadata.Distribution:
        return older if name == "acme-veil" and not here.is_newer else find(name)

    monkeypatch.setattr(processors, "load_plugin", load_at)
    monkeypatch.setattr(metadata, "distribution", installed_at)
    outcomes = federated.run(job())
    assert all(isinstance(outcome, VeilBoostError) for outcome in outcomes.values())
    assert any("runs plugin acme-veil 1.3.0 where this site runs acme-veil 1.2.0" in str(o) for o in outcomes.values())
    assert not list((tmp_path / "sites").rglob("model.json"))


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"a-b": plugins.PIN},
        {"": plugins.PIN},
        {"x": {}},
        {"x": {"distribution": "acme-veil"}},
        {"x": {**plugins.PIN, "version": 1}},
        {"x": {**plugins.PIN, "version": ">=1.2"}},
        {"x": {**plugins.PIN, "distribution": "../acme"}},
        {"x": {**plugins.PIN, "extra": 1}},
    ],
    ids=repr,
)
def test_a_policy_names_plugins_exactly_or_not_at_all(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigurationError, match="plugins"):
        policy(tmp_path, plugins=value)


def test_the_policys_hash_covers_the_plugins(tmp_path: Path) -> None:
    assert policy(tmp_path).fingerprint() != policy(tmp_path, **plugins.POLICY).fingerprint()


@pytest.mark.parametrize("profile", ["plugin.", "plugin.a.b", "plugin.a b", "plugin.../x", "PLUGIN.x", "acme_masks"])
def test_a_job_names_plugins_in_one_form(profile: str) -> None:
    with pytest.raises(ConfigurationError, match=r"plugin\.NAME"):
        job(profile)


def test_the_server_reads_a_job_with_a_plugin_that_it_has_not(tmp_path: Path) -> None:
    document = json.loads(json.dumps(job().to_dict()))
    assert HorizontalJob.from_dict(document).profile == plugins.PROFILE and not plugins.imported()


# -- messages that only the plugin can add -----------------------------------------------------------------------------

PAILLIER = "plugin.acme_paillier"
OF_BYTES = ["acme_paillier", "acme_ckks"]


def pinned(**changes: str) -> dict[str, str]:
    return {**plugins.PIN, "sha256": hash_of("acme-veil"), **changes}


def with_adder(folder: Path, name: str = "acme_paillier") -> Callable[..., Aggregator]:
    """Return what makes servers that add as the policy in a server's kit says."""

    def make(*arguments: object) -> Aggregator:
        server = Aggregator(*arguments)
        loaded = load_adder(folder, name)
        server.add_by(None if loaded is None else processors.check_plugin(loaded, name).add)
        return server

    return make


def server_policy(folder: Path, pin: dict[str, str] | None, name: str = "acme_paillier") -> Path:
    (folder / "local").mkdir(parents=True, exist_ok=True)
    document = {"plugins": {} if pin is None else {name: pin}}
    (folder / "local" / "veilboost_server.json").write_text(json.dumps(document))
    return folder


@pytest.mark.usefixtures("every_report")
@pytest.mark.parametrize("name", OF_BYTES)
def test_ciphertexts_of_others_train_the_model_of_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "acme_ckks":
        pytest.importorskip("tenseal", reason="TenSEAL is not installed")
    plugins.install(tmp_path / "packages", monkeypatch)
    server, small = server_policy(tmp_path / "server", pinned(), name), {**PARAMS, "max_depth": 2, "max_bin": 8}
    one = sites(tmp_path / "plugin", {"plugins": {name: pinned()}})
    succeed(one.run(replace(job(f"plugin.{name}"), params=small), make_server=with_adder(server, name)))
    other = sites(tmp_path / "masks", {})
    succeed(other.run(replace(job("masks"), params=small)))
    assert one.model() == other.model()
    report = (one.workspace("site-1") / "runs" / "job" / "report.html").read_text()
    assert "Every contribution: the site has the key." in report


def test_a_server_without_the_pin_adds_nothing_and_loads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins.install(tmp_path / "packages", monkeypatch)
    for folder in (tmp_path / "no_policy", server_policy(tmp_path / "no_pin", None)):
        assert load_adder(folder, "acme_paillier") is None and not plugins.imported()
    one = sites(tmp_path / "plugin", {"plugins": {"acme_paillier": pinned()}})
    outcomes = one.run(job(PAILLIER), make_server=with_adder(tmp_path / "no_pin"))
    assert "veilboost_server.json, key plugins" in str(outcomes)


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ({"sha256": "0" * 64}, "are not those that the policy"),
        ({"version": "1.2.1"}, "but version 1.2.0 is installed"),
        ({"sha256": ""}, "needs sha256"),
        ({"sha256": "short"}, "64 hexadecimal digits"),
        ({"distribution": "acme-other"}, "no distribution acme-other"),
    ],
)
def test_a_server_refuses_other_files_before_any_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pin: dict[str, str], said: str
) -> None:
    plugins.install(tmp_path / "packages", monkeypatch)
    with pytest.raises(VeilBoostError, match=said):
        load_adder(server_policy(tmp_path, pinned(**pin)), "acme_paillier")
    assert not plugins.imported()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"plugin": {}}', '{"plugins": {"a b": {}}}', '{"plugins": {}, "plugins": {}}']
)
def test_a_servers_policy_is_read_strictly(tmp_path: Path, text: str) -> None:
    server_policy(tmp_path, None).joinpath("local", "veilboost_server.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"server|plugins\.a b"):
        load_adder(tmp_path, "acme_paillier")


def test_a_changed_file_is_noticed_at_a_site_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = plugins.install(tmp_path / "packages", monkeypatch)
    allowed = policy(tmp_path, plugins={"acme_masks": pinned()})
    assert load_plugin(allowed, "acme_masks") is not None
    plugins.forget()
    with (folder / "acme_veil" / "paillier.py").open("a") as file:
        file.write("# not what was reviewed\n")
    with pytest.raises(PolicyRefusal, match=r"plugins\.acme_masks\.sha256"):
        load_plugin(allowed, "acme_masks")
    assert not plugins.imported()


def test_what_the_plugin_raises_at_the_server_is_not_told() -> None:
    class Spiteful:
        def add(self, payload: object) -> None:
            raise RuntimeError("secret")

        def pack(self) -> bytes:
            return b""

    server = Aggregator(("a",), bytes(16), 5.0)
    server.add_by(lambda parameters, n_values: Spiteful())
    step, codec = TrainingStep(Phase.UPDATE, 0), Codec.PLUGIN_BYTES
    frame = Frame(FrameType.CONTRIBUTION, Operation.SUM, Kind.HISTOGRAM, step, codec, 0, 0, bytes(16), 1, b"x")
    server.submit("a", replace(frame, salt=b"s" * 16).pack(), lambda answer: None)
    assert server.reason is not None and "RuntimeError" in server.reason and "secret" not in server.reason


_OTHER = "import sys\nsys.modules['acme_veil_other'] = sys\n"


def in_place_of(module: Path, how: str) -> None:
    """Lay beside a package what Python runs in the place of its module, or with it: its own files stay as they are."""
    files = {"folder": "paillier/__init__.py", "extension": "paillier.abi3.so", "further module": "hmac.py"}
    if how == "bytecode":
        cached = Path(importlib.util.cache_from_source(str(module)))
        cached.parent.mkdir(exist_ok=True)
        unchecked = (1).to_bytes(4, "little") + bytes(8)
        cached.write_bytes(importlib.util.MAGIC_NUMBER + unchecked + marshal.dumps(compile(_OTHER, "m", "exec")))
    else:
        path = module.parent / files[how]
        path.parent.mkdir(exist_ok=True)
        path.write_text(_OTHER)


@pytest.mark.parametrize("how", ["folder", "extension", "further module", "bytecode", "elsewhere"])
def test_what_runs_is_what_was_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    folder = plugins.install(tmp_path / "packages", monkeypatch)
    allowed = policy(tmp_path, plugins={"acme_paillier": pinned()})
    if how == "elsewhere":
        shutil.copytree(folder / "acme_veil", tmp_path / "before" / "acme_veil")
        (tmp_path / "before" / "acme_veil" / "__init__.py").write_text(_OTHER)
        monkeypatch.syspath_prepend(tmp_path / "before")
    else:
        in_place_of(folder / "acme_veil" / "paillier.py", how)
    plugins.forget()
    if how == "bytecode":
        assert load_plugin(allowed, "acme_paillier") is not None
    else:
        with pytest.raises(ConfigurationError, match=r"among the (modules|files) of acme-veil"):
            load_plugin(allowed, "acme_paillier")
    assert "acme_veil_other" not in sys.modules
