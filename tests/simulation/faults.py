"""What may befall a job, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pyarrow import parquet

from nvflare_plugins.flare.timeouts import SILENCE_LIMIT_S
from nvflare_plugins.flare.transport import TOPIC_FRAME, TOPIC_REPLY
from tests.simulation import hostile
from tests.simulation.cases import CONTINUE
from tests.simulation.hostile import Claim, Lie, Naming, Swap, Tampering
from tests.simulation.world import SERVER, Delivery, Loss, Machines, World

SURVIVED_S = 45.0
"""A pause that every job survives: silence ends it after SILENCE_LIMIT_S, of which beats and questions take a part."""


@dataclass
class Plan:
    """The faults of one run.

    Attributes:
        words: what happens, for people.
        is_harmless: the job must end as if nothing had happened.
        is_tampered: bytes are changed on their way, which only a hostile server or relay does.
        killed: machines that die, if they live so long.
        aborted_s: when an operator aborts the job.
        hung: a machine whose work stands still, and since when.
        hangs_alone: that work's conversation with others, in threads of its own, goes on.
        is_full: a disk is full.
        is_clock_wrong: one shows another time than the others'.
        has_twin: the same job is submitted a second time while the first one runs.
        comes_back: machines that died are started again, and the job is submitted again.
        liar: a site that cheats, and how.
        losses: sites that are lost while the job goes on.
        filled: a machine whose disk is full for a while.
        naming: a server that names the sites of a job's attempts as it likes.
        claim: a site whose evidence says something else of who was lost.
        hidden: a site whose evidence the server keeps to itself at the end.
        swap: a server that answers with what belongs to another exchange.
        replaced: a site's files get other rows while the job goes on.
    """

    seed: int
    words: list[str] = field(default_factory=list)
    is_harmless: bool = True
    killed: str | None = None
    aborted_s: float | None = None
    hung: tuple[str, float] | None = None
    hangs_alone: bool = False
    is_full: bool = False
    is_clock_wrong: bool = False
    has_twin: float | None = None
    comes_back: bool = False
    lost: float = 0.0
    doubled: float = 0.0
    longest_s: float = 0.05
    outages: list[tuple[str, float, float]] = field(default_factory=list)
    machines: Machines = field(default_factory=Machines)
    lie: Lie | None = None
    tampering: Tampering | None = None
    other_terms: str | None = None
    liar: tuple[str, str] | None = None
    losses: tuple[Loss, ...] = ()
    filled: str | None = None
    naming: Naming | None = None
    claim: Claim | None = None
    hidden: str | None = None
    swap: Swap | None = None
    replaced: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(f"network {self.seed}")

    def __str__(self) -> str:
        return "; ".join(self.words) or "nothing happens"

    @property
    def is_tampered(self) -> bool:
        """Whether somebody cheats."""
        liars = (self.lie, self.tampering, self.other_terms, self.liar, self.claim, self.swap)
        return any(one is not None for one in liars)

    def calm(self) -> None:
        """Let nothing befall what comes from now on."""
        self.lost = self.doubled = 0.0
        self.longest_s, self.outages, self.tampering, self.swap = 0.05, [], None, None
        self.machines.disk = lambda owner, count: None
        self.machines.terms = self.machines.report = lambda site, document: document
        self.machines.losses = []

    def fate(self, sent: Delivery) -> list[tuple[float, bytes | None]]:
        """Decide what becomes of a message."""
        payload = sent.payload if self.tampering is None else self.tampering.payload(sent)
        payload = payload if self.swap is None else self.swap.payload(sent)
        for owner, start, end in self.outages:
            if owner in (sent.origin, sent.target) and start <= sent.seconds < end:
                return []
        copies = 1 + (self._random.random() < self.doubled) - (self._random.random() < self.lost)
        return [(self._random.uniform(0.0005, self.longest_s), payload) for _ in range(copies)]


def plan_of(seed: int, sites: Sequence[str]) -> Plan:
    """Draw what befalls a job of these sites."""
    dice = random.Random(f"plan {seed}")
    plan = Plan(seed)
    if dice.random() < 0.5:
        _bad_network(plan, dice)
    if dice.random() < 0.2:
        _bad_clocks(plan, dice, sites)
    if dice.random() < 0.15:
        _slow_disk(plan, dice, sites)
    menu = [
        (18, _pause),
        (18, _death),
        (7, _full_disk),
        (4, _hang),
        (2, _very_slow_disk),
        (7, _long_silence),
        (6, _operator),
        (14, _tampering),
        (15, _lie),
        (4, _terms),
        (4, _liar),
        (7, lambda *_: None),
    ]
    more = random.Random(f"more {seed}")  # apart, so that what the others draw stays what it was
    if more.random() < 0.15:
        more.choice((_swap, _swap, _full_disk_for_a_while, _replacement))(plan, more, sites)
    else:
        weights, choices = zip(*menu, strict=True)
        dice.choices(choices, weights)[0](plan, dice, sites)
    if dice.random() < 0.12:
        plan.has_twin = dice.choice([0.0, dice.uniform(0, 2), 20.0])
        plan.words.append(f"the job is submitted a second time at {plan.has_twin:.2f} s")
    may_come_back = not plan.is_tampered and not plan.is_harmless
    if may_come_back and plan.hung is None and dice.random() < 0.6:
        plan.comes_back = True
        plan.words.append("afterwards all machines are there again, and so is the job")
    return plan


def plan_of_losses(seed: int, sites: Sequence[str], on_loss: str, *, server_dies: bool = False) -> Plan:
    """Draw what befalls a job that survives lost sites: up to three die, most come back; others seem to be lost."""
    dice, plan = random.Random(f"losses {seed}"), Plan(seed, is_harmless=False)
    if dice.random() < 0.3:
        _bad_network(plan, dice)
    if dice.random() < 0.15:
        _slow_disk(plan, dice, sites)
    sent = dict.fromkeys(sites, 0)
    for _ in range(dice.choice([1, 1, 1, 2, 2, 3])):
        site = dice.choice(sites)
        sent[site] += dice.randrange(5, 75)
        is_gone = dice.random() < (0.4 if on_loss == CONTINUE else 0.1)
        back_after_s = None if is_gone else dice.choice([dice.uniform(0.5, 5.0), dice.uniform(10.0, 120.0)])
        plan.machines.losses.append(Loss(site, sent[site], back_after_s, dice.random() < 0.5))
        back = "for good" if is_gone else f"for {back_after_s:.1f} s"
        how = "loses power" if plan.machines.losses[-1].loses_power else "dies"
        plan.words.append(f"{site} {how} with message {sent[site]}, {back}")
    if server_dies:
        _server_dies(plan, random.Random(f"server {seed}"))
    plan.losses = tuple(plan.machines.losses)
    if dice.random() < 0.2:
        _long_silence(plan, dice, sites)
    if on_loss == CONTINUE and dice.random() < 0.35:
        plan.naming = Naming(random.Random(f"naming {seed}"))
        plan.words.append("the server names the sites of further attempts as it likes")
    if on_loss != CONTINUE:
        _filled(plan, random.Random(f"filled {seed}"), sites)  # apart, so that what the others draw stays what it was
    forgery = dice.random()
    if on_loss == CONTINUE and forgery < 0.2:
        liar = dice.choice(sites)
        plan.claim = Claim(liar, dice.choice([(), *((site,) for site in sites)]))
        plan.words.append(f"the evidence of {liar} says that {', '.join(plan.claim.named) or 'nobody'} was lost")
    elif forgery < 0.5:
        plan.hidden = dice.choice(sites)
        plan.words.append(f"the server hides the evidence of {plan.hidden}")
    return plan


def _server_dies(plan: Plan, dice: random.Random) -> None:
    """The server dies too, up to three times, and comes back: apart, so that what the others draw stays what it was."""
    n_sent = 0
    for _ in range(dice.choice([0, 0, 1, 1, 2, 3])):
        n_sent += dice.randrange(3, 200)
        back_after_s = dice.choice([dice.uniform(0.5, 5.0), dice.uniform(10.0, 120.0)])
        plan.machines.losses.append(Loss(SERVER, n_sent, back_after_s, dice.random() < 0.5, dice.random() < 0.15))
        how = "loses power" if plan.machines.losses[-1].loses_power else "dies"
        old = ", and is back as it was an attempt ago" if plan.machines.losses[-1].is_old else ""
        plan.words.append(f"the server {how} with message {n_sent}, for {back_after_s:.1f} s{old}")


def _bad_network(plan: Plan, dice: random.Random) -> None:
    plan.lost, plan.doubled = dice.choice([(0.0, 0.3), (0.05, 0.1), (0.15, 0.0), (0.25, 0.25)])
    plan.longest_s = dice.choice([0.05, 1.0, 6.0])
    plan.words.append(f"{plan.lost:.0%} lost, {plan.doubled:.0%} doubled, up to {plan.longest_s:g} s on the way")


def _bad_clocks(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    owner = dice.choice([*sites, SERVER])
    moment, seconds = dice.choice([0.0, dice.uniform(0, 3)]), dice.choice([-1, 1]) * dice.choice([3.0, 4e3, 1e6, 4e7])
    plan.machines.events.append((moment, lambda world: world.scheduler.clock_is_off_s.update({owner: seconds})))
    plan.is_clock_wrong = True
    plan.words.append(f"the clock of {owner} jumps by {seconds:+g} s at {moment:.2f} s")


def _slow_disk(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    _slow(plan, dice.choice([*sites, SERVER]), dice.choice([0.1, 2.0]))


def _very_slow_disk(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    """Work takes longer than silence is suffered; signs of life must go on."""
    _slow(plan, dice.choice(sites), 30.0)


def _slow(plan: Plan, owner: str, longest: float) -> None:
    slow = random.Random(f"disk {plan.seed}")
    plan.machines.disk = lambda who, count: slow.uniform(0, longest) if who == owner else None
    plan.words.append(f"each change of the disk of {owner} takes up to {longest:g} s")


def _pause(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    owner, start, seconds = dice.choice([*sites, SERVER]), dice.uniform(0, 3), dice.uniform(5, SURVIVED_S)
    if dice.random() < 0.5:
        plan.outages.append((owner, start, start + seconds))
        plan.words.append(f"{owner} is cut off from {start:.2f} s for {seconds:.0f} s")
    else:
        plan.machines.events.append((start, lambda world: world.scheduler.stall(owner, seconds)))
        plan.words.append(f"{owner} stands still from {start:.2f} s for {seconds:.0f} s")


def _death(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    plan.is_harmless = False
    owner = dice.choice([*sites, *sites, SERVER])
    plan.killed, plan.machines.loses_power = owner, dice.random() < 0.6
    how = "loses power" if plan.machines.loses_power else "dies"
    if dice.random() < 0.4:
        moment = dice.uniform(0, 1.5) * (1 + 20 * plan.lost)
        plan.machines.events.append((moment, lambda world: world.kill(owner)))
        plan.words.append(f"{owner} {how} at {moment:.3f} s")
    else:
        number, slow = dice.randrange(1, 120), plan.machines.disk
        plan.machines.disk = lambda who, count: "die" if (who, count) == (owner, number) else slow(who, count)
        plan.words.append(f"{owner} {how} at its disk's change {number}")


def _full_disk(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    plan.is_harmless, plan.is_full = False, True
    owner, number = dice.choice([*sites, *sites, SERVER]), dice.randrange(1, 120)
    plan.machines.disk = lambda who, count: "full" if who == owner and count >= number else None
    plan.words.append(f"the disk of {owner} is full from its change {number} on")


def _full_disk_for_a_while(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    """What was refused room may be written again, so that files of before and after lie side by side."""
    plan.is_harmless, plan.is_full = False, True
    owner, number, n_changes = dice.choice([*sites, *sites, SERVER]), dice.randrange(1, 120), dice.choice([1, 4, 30])

    def disk(who: str, count: int) -> str | None:
        return None if who != owner else "full" if number <= count < number + n_changes else "free"

    plan.machines.disk = disk
    plan.words.append(f"the disk of {owner} is full from its change {number} on, for {n_changes} changes")


def _filled(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    """A disk is full while a job goes on that waits; often nothing else befalls it."""
    if dice.random() < 0.5:
        return
    owner, start, seconds = dice.choice([*sites, *sites, SERVER]), dice.uniform(0, 1.5), dice.choice([2.0, 20.0, 100.0])
    if dice.random() < 0.7:
        plan.losses, plan.words = (), []
        plan.machines.losses.clear()
    plan.filled, plan.is_full = owner, True

    def fill(world: World, room: int | None) -> None:
        world.disks.of[owner].room = room

    plan.machines.events += [(start, lambda world: fill(world, 0)), (start + seconds, lambda world: fill(world, None))]
    plan.words.append(f"the disk of {owner} is full from {start:.3f} s on for {seconds:.0f} s")


def _replacement(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    """Somebody puts other files in the place of a site's rows: the same rows written anew, or in another order."""
    site, moment, is_other = dice.choice(sites), dice.uniform(0, 1.5) * (1 + 20 * plan.lost), dice.random() < 0.5
    plan.replaced, plan.is_harmless = is_other, not is_other

    def replace(world: World) -> None:  # by nobody's program, so that it is no change that something befalls
        world.scheduler.spawn(lambda: write_anew(world.parties.workspace(site), is_other), "files", "observer")

    plan.machines.events.append((moment, replace))
    what = "the same rows in another order" if is_other else "the same rows"
    plan.words.append(f"at {moment:.3f} s the files of {site} are replaced by {what}")


def write_anew(workspace: Path, is_other: bool) -> None:
    """Replace a site's tables, each at once."""
    for path in sorted(workspace.glob("*.parquet")):
        table = parquet.read_table(path)
        rows = range(table.num_rows - 1, -1, -1) if is_other else range(table.num_rows)
        fresh = path.with_name(f"{path.name}.new.parquet")
        parquet.write_table(table.take(list(rows)), fresh, compression="zstd")
        fresh.rename(path)


def _long_silence(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    plan.is_harmless = False
    owner, start, seconds = dice.choice([*sites, SERVER]), dice.uniform(0, 2), dice.uniform(2, 5) * SILENCE_LIMIT_S
    plan.outages.append((owner, start, start + seconds))
    plan.words.append(f"{owner} is cut off from {start:.2f} s for {seconds:.0f} s")


def _hang(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    """The work of a machine stands still, while it gives signs of life."""
    plan.is_harmless = False
    owner, moment = dice.choice([*sites, SERVER]), dice.uniform(0, 1.5) * (1 + 20 * plan.lost)
    plan.hung = (owner, moment)
    names = ("pool",) if owner == SERVER else ("veilboost_job", "veilboost_asking", "veilboost_answering")
    if random.Random(f"hang {plan.seed}").random() < 0.4:  # the work alone, and not its conversation with others
        names, plan.hangs_alone = names[:1], True
    for name in names:
        plan.machines.events.append((moment, lambda world, name=name: world.scheduler.hang(owner, name)))
    plan.words.append(f"the work of {owner} hangs from {moment:.3f} s on")


def _operator(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    plan.is_harmless = False
    moment = dice.uniform(0, 2) * (1 + 20 * plan.lost)
    plan.aborted_s = moment
    plan.machines.events.append((moment, lambda world: world.abort()))
    plan.words.append(f"an operator aborts at {moment:.3f} s")


def _tampering(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    plan.is_harmless = False
    site, how, which = dice.choice(sites), dice.choice([*hostile.CHANGES, *hostile.FORGERIES]), dice.randrange(1, 60)
    ends = dice.choice([(site, SERVER, TOPIC_FRAME), (SERVER, site, TOPIC_REPLY)])
    plan.tampering = Tampering(ends, which, how, random.Random(f"tampering {plan.seed}"))
    plan.words.append(f"{ends[2]} {which} from {ends[0]} to {ends[1]}: {how}")


def _lie(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    plan.is_harmless = False
    how = dice.choice([*hostile.SUMS, *hostile.PARTS])
    victim = dice.choice([None, *range(len(sites))])
    plan.lie = Lie(dice.randrange(1, 12), how, None if how in hostile.WHILE_ADDING else victim)
    to = "all" if plan.lie.victim is None else sites[plan.lie.victim]
    plan.words.append(f"the server cheats: {how}, at {plan.lie.which}, told to {to}")


def _swap(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    plan.is_harmless = False
    plan.swap = Swap(dice.randrange(3, 40), None if dice.random() < 0.6 else dice.choice(sites))
    to = plan.swap.victim or "all"
    plan.words.append(f"the server answers {to} with what belongs to another exchange, at {plan.swap.which}")


def _terms(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    plan.is_harmless = False
    victim, how = dice.choice(sites), dice.choice(hostile.TERMS)
    plan.other_terms = victim if how != "a field less" else None  # which may have been the default
    plan.machines.terms = hostile.other_terms(victim, how, random.Random(f"terms {plan.seed}"))
    plan.words.append(f"the server tells {victim} other terms: {how}")


def _liar(plan: Plan, dice: random.Random, sites: Sequence[str]) -> None:
    plan.is_harmless = False
    liar, how = dice.choice(sites), dice.choice(hostile.REPORTS)
    plan.liar = (liar, how)
    plan.machines.report = hostile.other_report(liar, how, random.Random(f"report {plan.seed}"))
    plan.words.append(f"{liar} reports {how}")
