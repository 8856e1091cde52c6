"""Jobs that wait for a lost site: one attempt after the other in the same job, against the job that nobody left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.base.errors import JobAborted, PolicyRefusal
from nvflare_plugins.evidence.format import export_name
from nvflare_plugins.evidence.reader import before_attempt, read_log
from nvflare_plugins.flare.kinds import KINDS
from nvflare_plugins.kinds.alignment.job import FILE as ALIGNMENT_FILE
from nvflare_plugins.kinds.vertical.model import ACTIVE_FILE, PASSIVE_FILE, PassivePart, read_part
from nvflare_plugins.kinds.vertical.site import MASKED_MODEL
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.wire.envelope import Kind, unpack
from tests.support import vertical_jobs
from tests.support import vertical_jobs as vertical
from tests.support.examples import quick, slow
from tests.support.federation import Federation, Parties, SiteDied, dies_at, succeed
from tests.support.federation import succeed as all_sites_of
from tests.support.horizontal_jobs import dies_after, federate, job, lose, spaced, table
from tests.support.horizontal_jobs import table as rows
from tests.support.private_federation import PrivateFederation, job_of
from tests.support.private_federation import job_of as private_job

WAITING = {"on_lost_site": "wait"}
CAN_WAIT = {"dpboost", "horizontal", "private_trees", "vertical", "vertical_inference"}


def waiting(**fields) -> HorizontalJob:
    return spaced({"max_depth": 2}, 5, **{**WAITING, **fields})


def searching() -> HorizontalJob:
    return job({"max_depth": 2}, 2, **WAITING)


def federation_of(folder: Path) -> Federation:
    return Federation.of(folder, train=table(200))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The model of the job that nobody left."""
    return federate(tmp_path_factory.mktemp("whole"), table(200), waiting()).model()


@pytest.fixture(scope="module")
def undisturbed_search(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The model of a job whose sites search for cut points, and that nobody left."""
    return federate(tmp_path_factory.mktemp("searched"), table(200), searching()).model()


def logs(federation: Federation, folder: str) -> list[Path]:
    return [federation.workspace(s) / "runs" / "job" / folder / export_name(s) for s in federation.sites]


@pytest.mark.parametrize(("site", "n_rounds"), [("site-2", 3), ("site-1", 1), *slow(("site-3", 5))])
def test_the_next_attempt_goes_on_after_the_last_round_and_ends_with_the_undisturbed_model(
    tmp_path, undisturbed, site, n_rounds
):
    federation, training = federation_of(tmp_path), waiting()
    lose(federation, training, 1, on_progress=dies_after(site, n_rounds))
    results = succeed(federation.run(training, "job", number=2))
    assert federation.model() == undisturbed
    assert {result.summary["n_rounds"] for result in results.values()} == {5}
    record = federation.record("site-1")
    assert [row.round for row in record.rounds] == list(range(n_rounds, 5))  # every round was a checkpoint
    assert any("Attempt 2" in note for note in record.notes)
    assert not list(tmp_path.rglob("checkpoint-*"))


@pytest.mark.parametrize(
    "kind", [Kind.HANDSHAKE, Kind.CUT_PLAN, *slow(Kind.AGREEMENT, Kind.CUT_COUNTS, Kind.MODEL_CHECK)]
)
def test_a_site_may_be_lost_at_any_message(tmp_path, undisturbed_search, kind):
    federation, training = federation_of(tmp_path), searching()
    lose(federation, training, 1, tamper={"site-2": dies_at(kind)})
    lose(federation, training, 2, tamper={"site-3": dies_at(kind)})
    succeed(federation.run(training, "job", number=3))
    assert federation.model() == undisturbed_search


def test_a_job_that_resumes_another_is_waited_for_too(tmp_path, undisturbed):
    federation, training = federation_of(tmp_path), waiting()
    outcomes = federation.run(training, "first", on_progress=dies_after("site-1", 2))
    assert isinstance(outcomes["site-1"], SiteDied)
    resumed = HorizontalJob.from_dict({**training.to_dict(), "resume_from": "first"})
    lose(federation, resumed, 1, tamper={"site-2": dies_at(Kind.HISTOGRAM)})  # before a checkpoint of its own
    lose(federation, resumed, 2, on_progress=dies_after("site-2", 4))
    succeed(federation.run(resumed, "job", number=3))
    assert federation.model() == undisturbed
    assert [row.round for row in federation.record("site-2").rounds] == [4]


def test_keys_masks_and_nonces_are_fresh_in_every_attempt(tmp_path):
    """The same sums leave under other masks: what two attempts sent has no payload in common but what is public."""
    federation, training, sent = federation_of(tmp_path), waiting(), []
    for number in (1, 2):
        frames: list[tuple[str, bytes]] = []
        kind = {"tamper": {"site-2": dies_at(Kind.HISTOGRAM)}} if number == 1 else {}
        federation.run(training, "job", number=number, frames=frames, **kind)
        read = [(site, unpack(frame)) for site, frame in frames]
        sent.append({(site, bytes(frame.payload)) for site, frame in read if len(frame.payload) > 8})
        assert len({frame.attempt for _, frame in read}) == 1
    assert len(sent[0]) > 20 and not sent[0] & sent[1]


def test_evidence_of_the_ended_attempt_stays_and_holds(tmp_path):
    federation, training = federation_of(tmp_path), waiting()
    lose(federation, training, 1, on_progress=dies_after("site-2", 2))
    before = {path.name: path.read_bytes() for path in logs(federation, "evidence") if path.exists()}
    succeed(federation.run(training, "job", number=2))
    ended, last = logs(federation, before_attempt(2)), logs(federation, "evidence")
    assert {path.name: path.read_bytes() for path in ended} == before and len(before) == 3
    assert not {read_log(path).attempt for path in ended} & {read_log(path).attempt for path in last}
    assert {read_log(path).completed for path in last} == {True}


def test_two_attempts_of_one_number_are_refused(tmp_path):
    federation, training = federation_of(tmp_path), waiting()
    lose(federation, training, 1, on_progress=dies_after("site-2", 1))
    lose(federation, training, 2, on_progress=dies_after("site-2", 2))
    outcomes = federation.run(training, "job", number=2)
    assert all(isinstance(one, JobAborted) and "has answered attempt 2" in str(one) for one in outcomes.values())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (waiting(), replace(waiting(), num_rounds=9)),
        *slow((waiting(), replace(waiting(), params={**waiting().params, "eta": 0.05}))),
        (waiting(), waiting(lost_site_deadline_s=77.0)),
        (waiting(on_lost_site="stop"), waiting()),  # which a lost site ended, or an operator: it never goes on
    ],
)
def test_a_further_attempt_is_of_the_job_that_was_begun(tmp_path, first, second):
    """The server names job, number and id: it could lead another job on under the id of one that has ended."""
    federation = federation_of(tmp_path)
    lose(federation, first, 1, tamper={"site-2": dies_at(Kind.HISTOGRAM)})
    frames: list[tuple[str, bytes]] = []
    outcomes = federation.run(second, "job", number=2, frames=frames)
    assert all(isinstance(one, ConfigurationError) and "another job" in str(one) for one in outcomes.values())
    assert not frames


def test_a_result_is_replaced_by_no_further_attempt(tmp_path):
    """The server names job, number and id: it could train another model under the id of one that is in use."""
    federation = federation_of(tmp_path)
    succeed(federation.run(waiting(), "job"))
    model, evidence = federation.model(), [path.read_bytes() for path in logs(federation, "evidence")]
    outcomes = federation.run(replace(waiting(), num_rounds=9), "job", number=2)
    assert all(isinstance(one, ConfigurationError) and "has the result" in str(one) for one in outcomes.values())
    assert federation.model() == model and [path.read_bytes() for path in logs(federation, "evidence")] == evidence


def test_a_first_attempt_never_writes_over_evidence(tmp_path):
    federation, training = federation_of(tmp_path), waiting()
    lose(federation, training, 1, on_progress=dies_after("site-2", 2))
    outcomes = federation.run(training, "job", number=1)
    assert all(isinstance(one, JobAborted) and "has answered attempt 1" in str(one) for one in outcomes.values())


# -- private trees ----------------------------------------------------------------------------------------------------


def test_a_private_job_replays_what_was_released_and_is_charged_once(tmp_path):
    """The same noised integers under new masks: nothing is drawn, or paid for, a second time."""
    federation, training = PrivateFederation(tmp_path), job_of(**WAITING)
    run = federation.run_private(training, tamper={"site-2": dies_at(Kind.NODE_STATS, 4)})
    assert isinstance(run.error("site-2"), SiteDied)
    charged = {site: federation.ledger(site).job_spent("job").epsilon(training.delta) for site in federation.sites}
    again = federation.run_private(training, number=2).succeed()
    sums = [
        {bytes(f.payload) for f in (unpack(data) for _, data in frames) if f.kind is Kind.NODE_STATS}
        for frames in (run.frames, again.frames)
    ]
    assert sums[0] and not sums[0] & sums[1]
    for site in federation.sites:
        ledger = federation.ledger(site)
        assert 0 < charged[site] < 0.999 < ledger.job_spent("job").epsilon(training.delta) <= training.epsilon
        assert ledger.spent() == ledger.job_spent("job")
        text = (federation.workspace(site) / "runs" / "job" / "evidence" / export_name(site)).read_text()
        assert text.count("replayed") >= 3
    assert any("at no charge" in note for note in federation.record("site-1").notes)


@pytest.mark.parametrize("nth", [*slow(1), 2])
def test_a_private_job_may_lose_a_site_before_all_have_reserved(tmp_path, nth):
    """What a site had reserved by then is kept for the next attempt; nothing had been released."""
    federation, training = PrivateFederation(tmp_path), job_of(**WAITING)
    run = federation.run_private(training, tamper={"site-2": dies_at(Kind.AGREEMENT, nth)})
    assert isinstance(run.error("site-2"), SiteDied)
    federation.run_private(training, number=2).succeed()
    for site in federation.sites:
        assert 0.999 < federation.ledger(site).job_spent("job").epsilon(training.delta) <= training.epsilon


def test_a_site_whose_ledger_forgot_a_release_is_not_waited_for(tmp_path):
    """Drawn afresh at one site and replayed at the others, a sum would be released twice and paid for once."""
    federation, training = PrivateFederation(tmp_path), job_of(**WAITING)
    federation.run_private(training, tamper={"site-2": dies_at(Kind.NODE_STATS, 4)})
    for path in (federation.workspace("site-2") / "veilboost_ledgers").rglob("*"):
        if path.is_file():
            path.unlink()
    outcomes = federation.run_private(training, number=2).outcomes
    assert all(isinstance(one, (PolicyRefusal, JobAborted)) for one in outcomes.values()), outcomes


@pytest.mark.slow
def test_replayed_noise_goes_into_no_sum_of_other_sites(tmp_path):
    """Sums over several choices of sites would show each one's part under its own share of the noise alone."""
    federation, training = PrivateFederation(tmp_path, n_sites=4), job_of(**WAITING)
    first, others = federation.sites[:3], federation.sites[1:]
    federation.run_private(training, sites=first, tamper={"site-1": dies_at(Kind.CELL_COUNTS)})
    run = federation.run_private(training, sites=others, number=2)
    assert "CELL_COUNTS" not in run.kinds
    assert all(isinstance(one, VeilBoostError) for one in run.outcomes.values()), run.outcomes
    federation.run_private(training, sites=first, number=3).succeed()


# -- vertical ---------------------------------------------------------------------------------------------------------


def test_a_vertical_job_goes_on_after_the_last_round_of_all_parties(tmp_path):
    parties, training = vertical.federation(tmp_path), vertical.job(**WAITING, checkpoint_every=0, num_rounds=5)
    succeed(vertical.run(parties, training, "whole"))
    for number, site in ((1, "site-2"), (2, "site-1")):
        dies = {site: dies_at(Kind.CONVERSATION, 22)}
        outcomes = vertical.run(parties, training, "job", tamper=dies, notices_death=True, number=number)
        assert isinstance(outcomes[site], SiteDied)
    succeed(vertical.run(parties, training, "job", number=3))
    assert any("resuming job after" in line for line in parties.said["site-3"])
    models = {(parties.run_folder("site-1", name) / MASKED_MODEL).read_bytes() for name in ("whole", "job")}
    assert len(models) == 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Kind.AGREEMENT, 5),  # before it keeps the result
        *slow((Kind.CONVERSATION, 2), (Kind.CONVERSATION, 20)),
    ],
)
def test_a_vertical_job_that_aligns_first_is_waited_for(tmp_path, kind, message):
    parties = Parties(tmp_path, 3, {**vertical.POLICY, "vertical": {"min_intersection": 50}})
    frame = vertical.table(300).assign(id=[f"p{n}" for n in range(300)])
    vertical.give_columns(parties, "data", frame, (2, 3, 1))
    training = vertical.job(**WAITING, alignment="first", num_rounds=3)
    outcomes = vertical.run(parties, training, tamper={"site-2": dies_at(kind, message)}, notices_death=True)
    assert isinstance(outcomes["site-2"], SiteDied)
    if kind is Kind.AGREEMENT:
        (parties.run_folder("site-2") / ALIGNMENT_FILE).unlink()
    succeed(vertical.run(parties, training, number=2))


# -- what cannot wait -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(set(KINDS) - CAN_WAIT))
@pytest.mark.parametrize("field", ["on_lost_site", "lost_site_deadline_s"])
def test_kinds_that_keep_nothing_refuse_by_name(kind, field):
    with pytest.raises(ConfigurationError, match=f"{field} is refused"):
        KINDS[kind].job.from_dict({field: "wait"})


def test_a_trusted_aggregator_is_not_waited_for():
    with pytest.raises(ConfigurationError, match="on_lost_site='wait' is refused with a trusted aggregator"):
        job_of(**WAITING, trust="trusted_aggregator", method="dp_tr_newton")


# -- how jobs end ------------------------------------------------------------------------------------------------------


# Steps from the last round to the end: the site dies before it sends its part (at "tamper"), or before it reads the
# answer that the others have got (at "tamper_reply"). After the first CLOSING sites write, after the second they tidy.
STEPS = [
    (Kind.MODEL_CHECK, 1, "tamper"),
    (Kind.MODEL_CHECK, 1, "tamper_reply"),
    (Kind.CLOSING, 1, "tamper"),
    (Kind.CLOSING, 1, "tamper_reply"),
    (Kind.CLOSING, 2, "tamper"),
    (Kind.CLOSING, 2, "tamper_reply"),
]
PARTS = [
    (Kind.AGREEMENT, 3, "tamper"),
    (Kind.AGREEMENT, 3, "tamper_reply"),
]  # the commitments to the parts of a vertical model
LAST = STEPS[-1]


def checkpoints(folders: list[Path]) -> list[int]:
    return [len(list(folder.glob("checkpoint-*.json"))) for folder in folders]


# -- horizontal -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    federation = Federation.of(tmp_path_factory.mktemp("whole"), train=rows(120))
    all_sites_of(federation.run(horizontal()))
    return federation.model()


def horizontal(**fields: object) -> HorizontalJob:
    return spaced({"max_depth": 2, "max_bin": 16}, 2, checkpoint_every=1, **fields)


@pytest.mark.parametrize(("kind", "nth", "hook"), quick(STEPS, *STEPS[1:3], LAST))
def test_a_horizontal_job_leaves_all_models_or_something_to_resume_from(tmp_path, whole, kind, nth, hook):
    federation = Federation.of(tmp_path, train=rows(120))
    outcomes = federation.run(horizontal(), "lost", notices_death=True, **{hook: {"site-2": dies_at(kind, nth)}})
    assert isinstance(outcomes["site-2"], SiteDied)
    folders = [federation.workspace(site) / "runs" / "lost" for site in federation.sites]
    if (kind, nth, hook) == LAST:
        assert federation.model("lost") == whole
        return
    assert 0 not in checkpoints(folders)
    all_sites_of(federation.run(horizontal(resume_from="lost"), "resumed"))
    assert federation.model("resumed") == whole
    assert checkpoints([federation.workspace(site) / "runs" / "resumed" for site in federation.sites]) == [0, 0, 0]


# -- vertical ---------------------------------------------------------------------------------------------------------


def contents(parties: Parties, job_id: str) -> list[object]:
    """Return what the parts hold, without what names the job."""
    tables = [
        read_part(parties.run_folder(site, job_id) / PASSIVE_FILE, site, PassivePart).part.table
        for site in parties.sites[1:]
    ]
    return [
        (parties.run_folder("site-1", job_id) / MASKED_MODEL).read_bytes(),
        vertical_jobs.merged(parties, job_id),
        *tables,
    ]


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> list[object]:
    parties = vertical_jobs.federation(tmp_path_factory.mktemp("parts"), n_rows=120)
    succeed(vertical_jobs.run(parties, vertical_jobs.job(num_rounds=2)))
    return contents(parties, "job")


@pytest.mark.parametrize(("kind", "nth", "hook"), quick([*PARTS, *STEPS], PARTS[1], *STEPS[1:3], LAST))
def test_a_vertical_job_leaves_all_parts_or_something_to_resume_from(tmp_path, parts, kind, nth, hook):
    victim = "site-3" if hook == "tamper" else "site-1"  # the active party, and a passive one
    parties = vertical_jobs.federation(tmp_path, n_rows=120)
    job = vertical_jobs.job(num_rounds=2)
    outcomes = vertical_jobs.run(parties, job, "lost", notices_death=True, **{hook: {victim: dies_at(kind, nth)}})
    assert isinstance(outcomes[victim], SiteDied)
    folders = [parties.run_folder(site, "lost") for site in parties.sites]
    if (kind, nth, hook) == LAST:
        names = (ACTIVE_FILE, PASSIVE_FILE, PASSIVE_FILE)
        assert all((folder / name).is_file() for folder, name in zip(folders, names, strict=True))
        return
    assert 0 not in checkpoints(folders)
    succeed(vertical_jobs.run(parties, vertical_jobs.job(num_rounds=2, resume_from="lost"), "resumed"))
    assert contents(parties, "resumed") == parts
    assert checkpoints([parties.run_folder(site, "resumed") for site in parties.sites]) == [0, 0, 0]


# -- private ----------------------------------------------------------------------------------------------------------


def test_a_private_job_stays_open_in_the_ledger_until_all_sites_have_the_model(tmp_path):
    federation = PrivateFederation(tmp_path)
    job = private_job(components={"n_trees": 2})
    lost = federation.run_private(job, "lost", tamper={"site-2": dies_at(Kind.CLOSING, 2)})
    assert isinstance(lost.error("site-2"), SiteDied)
    spent = {site: federation.ledger(site).job_spent("lost") for site in federation.sites}
    model = (federation.workspace("site-1") / "runs" / "lost" / "model.json").read_bytes()
    resumed = private_job(components={"n_trees": 2}, resume_from="lost")
    federation.run_private(resumed, "resumed").succeed()
    assert federation.model("resumed") == model
    assert spent == {site: federation.ledger(site).job_spent("lost") for site in federation.sites}
