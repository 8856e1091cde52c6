"""How a job goes on without a lost site: what a site keeps of its course, and what it never sends twice.

Let S be the sites of a job and T a part of them. The sum of anything over S, less that over T, is what the others of S
sent, and where one is lost that is its own part. So nothing of which the sites of S may have opened the sum at a state
of training is ever summed over T at that state. A state is the model that a sum was computed with.

**What does not depend on the model** (counts of rows, cut points, base score, scales, the floors' counts) is never
asked for again: an attempt that goes on takes it over from the set-up (``SetUp``) that every site kept and compares.
What would be summed anew and depends on rows alone is refused beforehand (``check_can_go_on``): hessians that are
constants, counts of leaves' rows, sums of evaluation weights; rounds are not evaluated after a loss.

**What depends on the model.** Before a site sends the first sum of a round it notes durably, with fsync, the state and
the sites of the attempt (``Course.enter``), and refuses a state that it has entered with other sites.

Claim: no two sums of a job over different sets S and T that share an honest site are both opened at one state, whatever
the server does, and whichever other sites pool with it. Proof sketch: a sum over S opens only if every site of S has
contributed to it in one attempt, for the masks of an attempt cancel over all of its sites and no fewer, its tags fit
no other sum, and each attempt's keys are fresh. So the honest site has contributed to both, hence has entered the
state with both sets, which ``enter`` refuses, after a restart as well, for the note came before the contribution. It
needs no word of anybody on what was opened: what a site has contributed to includes whatever was opened. A server
that calls a site lost that is not, that hides an answer or delivers it later, that lets two parts of the sites go on
apart, or one after the other without different sites, gains no more: at each state a site stands with one set.

Which state to go on from is agreed: the last checkpoint that all sites hold, or, where a site has entered it with
others, a state beside it (xgb/continuation.py), the same at all sites. Where there is none, the job waits.

**A state is new by its trees, and sums depend on predictions.** So no state is entered at which a site's gradients are
next to those at one that it has entered with others (``GradientMoves``). To compute these anew a site keeps the models:
one file for each attempt, whose rounds are its states (``Chain``). That depends on rows: a refusal tells one bit of
them. Where rounds are left that cannot be trained so, the job waits, or is tried from the next state beside.

**What this leaves.** States of neighbouring rounds are alike, and sums over S at one and over T at the next differ by
the lost site's part and by how little a round changes, which is about as much as the learning rate says. So the others
can estimate the lost site's root sums, in early rounds and shallow trees nearly exactly. A server can bring that about
at will. Hence each site's consent (``continue_without_site``), given before the first attempt. The claim needs the
run's folder: a site that is set back to an older copy of it forgets what it has entered.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.attempt.job_context import CannotGoOn, SiteContext, goes_on_without
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.base.declared import values_of
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.base.files import write_private
from nvflare_plugins.data.table import Table
from nvflare_plugins.growth.training import Draws
from nvflare_plugins.pooled.row_floors import counts_leaves, row_weights, rows_needed
from nvflare_plugins.site.memory.registry import Reservation, Verdict
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.policy_values import Consents, Floors
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.continuation import MOST_STEPS, state_of, with_last_round_weighed
from nvflare_plugins.xgb.matrices import every_nth
from nvflare_plugins.xgb.model_json import trees_model
from nvflare_plugins.xgb.objectives import gradients
from nvflare_plugins.xgb.parameters import TrainingParameters

# Whether a site's gradients have moved since states that it has entered with other sites.
#
# A state is new by its trees, and sums depend on predictions: where a round moves none, the sums of all sites before it
# less those of the sites left after it are what the lost site sent. So each site looks at its own rows before it sends
# anything at such a state. It keeps no gradient: it computes those of each state anew, from the model and its rows.
#
# What it asks for: its |changes| add up to 1 % of its |gradients|, over all its rows, and in each leaf of the rounds
# that lie between. Where one round lies between, that is in every leaf, for the bins of one that does not move come out
# exactly. Where more do, it is in leaves with a fifth of the gradients or more: of many small leaves, over many pairs
# of states, a few come back by chance, and nobody can tell which.


LEAST_CHANGE = 0.01
_LARGE_LEAF = 0.2
_MOST_ROWS = 5_000  # more are looked at one in so many: a leaf is that of its rows, whichever these are


@dataclass(frozen=True, slots=True)
class States:
    """States that a model has passed through. Attributes: rounds: how many it had at each, in ascending order."""

    model: bytes
    rounds: Sequence[int]


@dataclass(frozen=True, slots=True)
class GradientMoves:
    """The rows of one site. Attributes: draws: which take part in each round; None for all."""

    table: Table
    parameters: TrainingParameters
    draws: Draws | None

    def have_moved(self, model: bytes, round_number: int, earlier: Sequence[States]) -> bool:
        """Tell whether this site's gradients at a model differ enough from those at states before.

        Args:
            round_number: of the round that begins with the model, which decides what rows take part.
        """
        # XGBoost of this thread may be in the middle of a training, and would ask the other sites.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self._have_moved, model, round_number, earlier).result()

    def _have_moved(self, model: bytes, round_number: int, earlier: Sequence[States]) -> bool:
        every = max(1, -(-self.table.n_rows // _MOST_ROWS))
        label = self.table.label[::every].astype(np.float64)
        if not label.size:
            return True
        matrix = every_nth(self.table, every)
        params = self.parameters.effective
        weight = row_weights(self.table, float(params.get("scale_pos_weight", 1.0)))[::every]
        if self.draws is not None:
            weight = weight * self.draws(round_number)[::every]
        new = _Walk(model, matrix)
        *_, at_new = new.margins()
        gradient = gradients(params, at_new, label)
        for states in earlier:
            old = _Walk(states.model, matrix)
            n_alike = old.rounds_alike(new)
            for n_rounds, margins in enumerate(old.margins()):
                if n_rounds in states.rounds:
                    before = gradients(params, margins, label)
                    changed, mass = (np.abs(one) * weight[:, None] for one in (gradient - before, before))
                    first = min(n_alike, n_rounds)
                    is_next = max(new.n_rounds, n_rounds) - first <= 1
                    for walk, last in ((new, new.n_rounds), (old, n_rounds)):
                        if not walk.have_moved(first, last, changed, mass, 0.0 if is_next else _LARGE_LEAF):
                            return False
        return True


class _Walk:
    """A model's rounds over some rows."""

    def __init__(self, model: bytes, matrix: xgb.DMatrix) -> None:
        within = trees_model(json.loads(model)["learner"])
        self.trees, self._outputs, self._ends = within["trees"], within["tree_info"], within["iteration_indptr"]
        self.n_rounds = len(self._ends) - 1
        self._starts = np.cumsum([0, *(len(tree["left_children"]) for tree in self.trees)])
        self._booster = xgb.Booster({"nthread": 1}, model_file=bytearray(model))
        self._matrix = matrix

    @cached_property
    def _leaf(self) -> NDArray[np.int64]:
        found = self._booster.predict(self._matrix, pred_leaf=True)
        return found.reshape(self._matrix.num_row(), len(self.trees)).astype(np.int64)

    def margins(self) -> Iterator[NDArray[np.float64]]:
        """Yield the margins before the first round and after each. Shapes: float64[n_rows, n_outputs]."""
        n_rows = self._matrix.num_row()
        first = self._booster.predict(self._matrix, output_margin=True, iteration_range=(0, 1)).astype(np.float64)
        margins = first.reshape(n_rows, -1) - self._of_round(0, first.size // n_rows)
        yield margins.copy()
        for number in range(self.n_rounds):
            margins = margins + self._of_round(number, margins.shape[1])
            yield margins

    def have_moved(
        self, first: int, last: int, changed: NDArray[np.float64], mass: NDArray[np.float64], least_part: float
    ) -> bool:
        """Tell whether the rows have, together and in each leaf of some rounds that holds that part of their mass.

        Shapes: changed, mass: float64[n_rows, n_outputs], |changes| and |gradients|.
        """
        for output in range(mass.shape[1]):
            of_all = mass[:, output].sum()
            if changed[:, output].sum() < LEAST_CHANGE * of_all:
                return False
            of_rounds = range(self._ends[first], self._ends[last])
            trees = [tree for tree in of_rounds if self._outputs[tree] == output]
            places = (self._leaf[:, trees] + self._starts[trees]).reshape(-1)
            moved, of_leaf = (np.bincount(places, np.repeat(one[:, output], len(trees))) for one in (changed, mass))
            if np.any((moved < LEAST_CHANGE * of_leaf) & (of_leaf >= least_part * of_all)):
                return False
        return True

    def rounds_alike(self, other: _Walk) -> int:
        """Return how many rounds, from the first, are the same in both."""
        for number in range(min(self.n_rounds, other.n_rounds)):
            trees = slice(self._ends[number], self._ends[number + 1])
            if self.trees[trees] != other.trees[trees]:
                return number
        return min(self.n_rounds, other.n_rounds)

    def _of_round(self, number: int, n_outputs: int) -> NDArray[np.float64]:
        given = np.zeros((self._matrix.num_row(), n_outputs))
        for tree in range(self._ends[number], self._ends[number + 1]):
            values = np.array(self.trees[tree]["split_conditions"], dtype=np.float64)
            given[:, self._outputs[tree]] += values[self._leaf[:, tree]]
        return given


FILE = "course.json"
_CONSTANT_HESSIANS = ("reg:squarederror", "binary:hinge", "reg:absoluteerror", "reg:quantileerror", "survival:aft")


_KNOWN = (Verdict.IDENTICAL, Verdict.OTHER_PARAMETERS, Verdict.GROWN, Verdict.SHRUNK)
_EARLIER_JOBS = (
    "an earlier job trained on these rows with all sites, and sums of both would differ by the lost site's part. "
    "Policy key: consents.recompute_with_changes. Remedy: wait for the site, rows that no job has used, or this site's "
    "consent"
    # Under survival:aft that is so of events, where the noise is normal.
)
_log = logging.getLogger(__name__)


def check_left(policy: SitePolicy, sites: Sequence[str], lost: Sequence[str], course: Course) -> None:
    """Check that this site goes on with those that are left; at the start, that it could with one site less.

    Raises:
        CannotGoOn: it does not go on without the sites that are lost.
        ConfigurationError: it never could.
    """
    if lost and course.why_not:
        raise CannotGoOn(course.why_not)
    fewer = [policy.site, *(site for site in sites if site != policy.site)][: len(sites) - 1]
    try:
        policy.check_sites(sites if lost else fewer)
    except PolicyRefusal as error:
        if lost:
            raise CannotGoOn(str(error)) from None
        raise ConfigurationError(
            f"on_lost_site='continue' could never go on: with one site less {error} Or use on_lost_site='wait'"
        ) from None


def check_can_go_on(policy: SitePolicy, parameters: TrainingParameters, rows_per_node: int) -> None:
    """Refuse a job that could not go on without a site, or that this site does not let do so.

    Args:
        rows_per_node: the floor that this site, or later all of them, ask for.

    Raises:
        PolicyRefusal, ConfigurationError: it says what stands against it.
    """
    policy.check_consent(
        "continue_without_site",
        "does not let the others train on without a site that was lost: from the sums before and after they can "
        "estimate its own",
        "use on_lost_site='wait'",
    )
    agreed, objective = parameters.agreed, parameters.objective.name
    for is_so, what in (
        (objective in _CONSTANT_HESSIANS, f"objective {objective}, whose hessians count rows whatever the model is"),
        (agreed.get("booster") == "dart", "booster dart, which comes back to earlier states of the model"),
        (agreed.get("multi_strategy") == "multi_output_tree", "multi_strategy multi_output_tree"),
        (counts_leaves(parameters, rows_per_node), f"objective {objective}, whose leaves' rows are counted"),
    ):
        if is_so:
            raise ConfigurationError(
                f"on_lost_site='continue' is refused for {what}: sums with and without the lost site would differ by "
                "its own part. Use 'wait'"
            )


@dataclass(frozen=True, slots=True)
class SetUp:
    """What the first attempt has found before training; nothing of it is asked for again without a site.

    Attributes:
        sites: of the first attempt.
        root_feature: a feature that no site lacks values in, if there is one.
        largest: no weight exceeds it, for each set of rows.
        counted: sites and rows that carry weight, for each set of rows, each site's rows up to what is needed.
        floors: what the policies of all sites ask for.
        scales: the bound's exponent of each quantity.
    """

    sites: tuple[str, ...]
    root_feature: int | None
    largest: tuple[float, ...]
    counted: tuple[int, ...]
    floors: Floors
    scales: Mapping[str, int]

    def check_enough(self, n_left: int, floors: Floors, needed: Sequence[int]) -> None:
        """Refuse to go on where those left may be too few, whatever the lost sites had. Raises: CannotGoOn.

        Args:
            n_left: sites that are left.
            needed: rows that must carry weight in each set (``row_floors.rows_needed``).
        """
        n_lost = len(self.sites) - n_left
        pairs = zip(self.counted[::2], self.counted[1::2], needed, strict=True)
        if any(n - n_lost < floors.sites or rows - n_lost * enough < enough for n, rows, enough in pairs):
            raise CannotGoOn(
                "without the lost sites too few rows or sites might be left for what the policies ask for (min_sites, "
                "min_effective_rows)"
            )


@dataclass(frozen=True, slots=True)
class Part:
    """Rounds that the same sites have trained.

    Attributes:
        first: round, from 0, with which they began.
        step: how the round before was weighed then (``weighed_round``).
    """

    first: int
    step: int
    sites: tuple[str, ...]


@dataclass(slots=True)
class Chain:
    """States that one attempt has entered one after the other: rounds of one model, which lies in a file of its own.

    Attributes:
        first: rounds of the job at the first state.
        last: the same at the last.
        before: rounds that the model had before the job.
    """

    sites: tuple[str, ...]
    first: int
    last: int
    before: int


HasMoved = Callable[[bytes, int, Sequence[States]], bool]
"""Tells of a model and a number of rounds whether this site's gradients differ from those at states before."""


@dataclass
class Kept:
    """What one site has kept of one run; the file of it is JSON.

    Attributes:
        members: sites of the first attempt.
        parts: who trained which rounds.
        states: states that this site has entered, with the sites of the attempt; with none, one that it refuses.
        chains: where the models of these states are, but for those that it refuses.
        why_not: why this site does not go on without another, whichever is lost; "" where it does; None: not known yet.
    """

    members: tuple[str, ...]
    set_up: SetUp | None
    parts: list[Part]
    states: list[tuple[str, tuple[str, ...]]]
    chains: list[Chain]
    why_not: str | None


@cache
def _reader() -> TypeAdapter[Kept]:
    return TypeAdapter(Kept)


class Course(Kept):
    """The course of one run at one site. Attributes: has_moved: set before a state is entered after a loss."""

    def __init__(self, path: Path, kept: Kept | None = None, has_moved: HasMoved | None = None) -> None:
        """Take up what was kept; None where nothing was."""
        kept = kept or Kept((), None, [], [], [], None)
        super().__init__(*(getattr(kept, one.name) for one in fields(Kept)))
        self.path, self.has_moved = path, has_moved
        self._n_before: int | None = None  # chains of earlier attempts

    @classmethod
    def of(cls, folder: RunFolder) -> Course:
        """Read what a run has kept. Raises: ConfigurationError, if it is damaged."""
        path = folder.path / FILE
        if not path.is_file():
            return cls(path)
        try:
            return cls(path, _reader().validate_json(path.read_bytes()))
        except ValueError:
            raise ConfigurationError(f"{FILE} of job {folder.path.name} cannot be read: submit the job anew") from None

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that trained last."""
        return self.parts[-1].sites if self.parts else self.members

    def without(self, sites: Sequence[str]) -> tuple[str, ...]:
        """Return the sites of the first attempt that are not among these. Raises: ConfigurationError."""
        if not self.members:
            return ()
        if not set(sites) <= set(self.sites):
            raise ConfigurationError("an attempt has sites that the attempts before it had not: submit the job anew")
        return tuple(site for site in self.members if site not in sites)

    def join(self, sites: tuple[str, ...]) -> None:
        """Keep who takes part, before anything of rows is sent."""
        if not self.members:
            self.members = sites
            self._write()

    def note_earlier_jobs(self, entries: Iterable[Reservation], consents: Consents) -> None:
        """Keep whether the registry, which knows these rows from earlier jobs, would refuse other sites over them.

        Args:
            entries: of the first attempt that was reserved.
        """
        if self.why_not is None:
            known = any(entry.verdict in _KNOWN for entry in entries)
            self.why_not = _EARLIER_JOBS if known and not consents.recompute_with_changes else ""
            if self.why_not:
                _log.warning("on_lost_site='continue' only waits for a lost site: %s", self.why_not)
            self._write()

    def begin(self, set_up: SetUp, n_done: int) -> None:
        """Keep the set-up of an attempt that had all sites, before its first round."""
        if self.set_up is None:
            self.set_up, self.parts = set_up, [Part(n_done, 0, set_up.sites)]
            self._write()

    def go_on(self, sites: tuple[str, ...], n_done: int, step: int) -> None:
        """Note that these sites go on after so many rounds."""
        before = self.parts_before(n_done)
        is_same = before[-1].sites == sites and step == 0
        self.parts = before if is_same else [*before, Part(n_done, step, sites)]
        self._write()

    def parts_before(self, n_done: int) -> list[Part]:
        """Return who trained the rounds that are done; a later part is made anew by whoever goes on."""
        return [part for part in self.parts if part.first < n_done]

    def enter(self, model: bytes, sites: tuple[str, ...], n_done: int) -> None:
        """Note, durably, that this site is about to send sums at a state, with these sites.

        Args:
            n_done: rounds of the job that are done.

        Raises:
            CannotGoOn: it may have sent some there with others, or at one next to it.
        """
        state = state_of(model)
        if not self._may_enter(state, sites):
            raise CannotGoOn("this site has sent sums at this state of the model together with other sites")
        # None is ever forgotten: whoever makes sites go back, and sends other sums each time, makes any number of them.
        if (state, sites) in self.states:
            return
        earlier = [self._states_of(number) for number, chain in enumerate(self.chains) if chain.sites != sites]
        if earlier and (self.has_moved is None or not self.has_moved(model, n_done, earlier)):
            self.states.append((state, ()))
            self._write()
            raise CannotGoOn(
                "gradients at this state would be next to those at one of before: sums with and without the lost site "
                "would differ by its own part. Remedy: a larger eta, or smaller gamma, lambda and alpha"
            )
        self._keep(model, sites, n_done)
        self.states.append((state, sites))
        self._write()

    def _keep(self, model: bytes, sites: tuple[str, ...], n_done: int) -> None:
        """Keep the model of a state: that of the attempt's state before has one round less."""
        if self._n_before is None:
            self._n_before = len(self.chains)
        if len(self.chains) > self._n_before and self.chains[-1].last == n_done - 1:
            self.chains[-1].last = n_done
        else:  # at no rounds done the first sums are sent before there is a model
            n_rounds = len(trees_model(json.loads(model)["learner"])["iteration_indptr"]) - 1
            self.chains.append(Chain(sites, 0 if n_done == 1 else n_done, n_done, n_rounds - n_done))
        write_private(self._file(len(self.chains) - 1), model)

    def _states_of(self, number: int) -> States:
        chain, path = self.chains[number], self._file(number)
        try:
            return States(path.read_bytes(), range(chain.before + chain.first, chain.before + chain.last + 1))
        except OSError:
            raise CannotGoOn(f"{path.name} cannot be read, the model of states that were entered") from None

    def _file(self, number: int) -> Path:
        return self.path.with_name(f"entered-{number}.json")

    def next_step(self, model: bytes, sites: tuple[str, ...]) -> int:
        """Return the first state beside a checkpoint that this site may enter with these sites. Raises: CannotGoOn."""
        entered = dict(self.states)
        free: int | None = None
        for step in range(MOST_STEPS + 1):
            try:
                at = entered.get(state_of(with_last_round_weighed(model, step)))
            except ConfigurationError as error:
                if free is None:
                    raise CannotGoOn(str(error)) from None
                break
            if at == sites:
                return step
            if at is None and free is None:
                free = step
        if free is None:
            raise CannotGoOn("every state beside the last common checkpoint was used with other sites")
        return free

    def _may_enter(self, state: str, sites: tuple[str, ...]) -> bool:
        return dict(self.states).get(state, sites) == sites

    def _write(self) -> None:
        write_private(self.path, json.dumps(values_of(self), default=values_of).encode() + b"\n")


@dataclass(frozen=True, slots=True)
class GoingOn:
    """From where an attempt goes on without lost sites; the same at all sites.

    Attributes:
        model: at the state from which it goes on.
    """

    set_up: SetUp
    lost: tuple[str, ...]
    floors: Floors
    n_done: int
    step: int
    model: bytes


def course_of(job: Any, context: SiteContext) -> Course | None:
    """Return the course of a job that may go on without a site; None of one that may not."""
    return Course.of(RunFolder(context.runs, context.job_id)) if goes_on_without(job) else None


def agree_to_go_on(
    attempt: SiteAttempt,
    course: Course,
    n_done: int,
    checkpoint: Path | None,
    floors: Floors,
    parameters: TrainingParameters,
    n_sets: int,
) -> GoingOn | None:
    """Have the sites of an attempt find out together from where they go on; None where nobody was lost.

    All sites say under the group key what they have kept; what they would do follows from that alone, at all alike.

    Args:
        n_done: finished rounds of the last checkpoint that all hold.
        floors: of the sites of this attempt.
        n_sets: sets of rows.

    Raises:
        CannotGoOn: the job has to wait for the lost site.
        ProtocolError: a site says something that it cannot.
    """
    sites = attempt.context.sites
    lost = course.without(sites)
    step = course.next_step(checkpoint.read_bytes(), sites) if lost and checkpoint is not None else 0
    kept = None
    if course.set_up is not None:
        kept = [asdict(course.set_up), [asdict(part) for part in course.parts_before(n_done)]]
    mine = json.dumps({"members": course.members, "kept": kept, "step": step}, sort_keys=True).encode()
    said = [_read(data) for data in attempt.gather_sealed("the state to go on from", mine)]
    if all(one["members"] in ([], list(sites)) for one in said):
        return None  # as many as ever: what they have sent together they may send again
    if course.set_up is None or checkpoint is None or n_done <= course.parts[0].first:
        raise CannotGoOn("no round was finished before the loss: there is no state to go on from")
    own = json.loads(mine)["kept"]
    if any((one["members"], one["kept"]) != (list(course.members), own) for one in said):
        raise CannotGoOn("the sites have not all kept the same of the attempt before")
    step = max(one["step"] for one in said)
    floors = course.set_up.floors.largest(floors)
    course.set_up.check_enough(len(sites), floors, rows_needed(floors, parameters, n_sets))
    try:
        model = with_last_round_weighed(checkpoint.read_bytes(), step)
    except ConfigurationError as error:
        raise CannotGoOn(str(error)) from None
    if not course._may_enter(state_of(model), sites):
        raise CannotGoOn("the sites have no state in common that is new to all of them")
    return GoingOn(course.set_up, lost, floors, n_done, step, model)


def _read(data: bytes) -> dict[str, Any]:
    try:
        said = json.loads(data)
        if set(said) == {"members", "kept", "step"} and type(said["step"]) is int and 0 <= said["step"] <= MOST_STEPS:
            return dict(said)
    except (ValueError, TypeError, RecursionError):
        pass
    raise ProtocolError("a peer says what nobody can have kept of an attempt")


def told(parts: Iterable[Part], n_rounds: int) -> list[str]:
    """Return, for people, which sites have trained which rounds."""
    parts, lines = list(parts), []
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        last = n_rounds if after is None else after.first
        if last > part.first:
            lines.append(f"Rounds {part.first + 1} to {last} were trained by {', '.join(part.sites)}.")
        if part.step:
            lines.append(
                f"Leaves of round {part.first} were weighed anew when {', '.join(part.sites)} went on from there."
            )
    return lines
