"""Unites the drafts that several sites have of their data sets: one job for all, and what each policy has to say.

Privacy: a draft holds names of columns, texts that ten rows share, rounded bounds and how ids are written
(``survey.Draft``). Nothing else is looked at, and no file of rows is read.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unicodedata import normalize

from pydantic import TypeAdapter

from he_processors.errors import ConfigurationError
from nvflare_plugins.data.declaration import YES_NO, DataSet, is_yes_or_no
from nvflare_plugins.data.labels import Label, columns_of, label_of_words, words_of_label
from nvflare_plugins.survey.columns import IdShape

_OPTIONS = {
    *("encoding", "format", "separator", "decimal", "thousands", "missing", "names", "rename", "memory"),
    *("dates", "columns", "id_form", "drop_unlabelled"),
}
"""What a draft may say of a policy: how a file is read. Drafts come from other parties."""
_SHAPE = TypeAdapter(IdShape)
_OTHER_UNIT = 8.0  # so many times larger values at one site than at another


@dataclass(slots=True)
class SiteDraft:
    """What one site's survey suggests, as ``veilboost check --draft`` writes it.

    Attributes:
        columns: all that something is known of.
        numbers: column -> rounded bounds, None where they are not known.
        texts: column -> its categories; label_classes: likewise.
        ids: column -> how its ids are written, as of ``columns.IdShape``.
        options: keys of the policy's data set.
    """

    label: Label | None
    columns: list[str]
    numbers: dict[str, tuple[float, float] | None]
    texts: dict[str, list[str]]
    dates: list[str]
    ids: dict[str, dict[str, Any]]
    label_classes: list[str] | None
    options: dict[str, Any]

    @classmethod
    def from_dict(cls, draft: Mapping[str, Any]) -> SiteDraft:
        """Read a draft, which may say of a policy how a file is read, and nothing else.

        Raises:
            LookupError, TypeError, ValueError, AttributeError, ConfigurationError: it is none.
        """
        options = copy.deepcopy(dict(draft["data_set"]))
        if foreign := set(options) - _OPTIONS:
            raise ValueError(f"no draft says {sorted(foreign)[0]!r} of a policy")
        DataSet(**{"name": "data", "path": Path("data.csv"), "format": "csv", **options})
        bounds = {
            str(name): (float(pair[0]), float(pair[1])) for name, pair in draft["feature_bounds"]["bounds"].items()
        }
        texts = {str(name): [str(text) for text in values] for name, values in draft["categories"].items()}
        classes = draft["label_classes"]
        label = None if draft["label"] is None else label_of_words(str(draft["label"]))
        return cls(
            label,
            list(dict.fromkeys(map(str, [*draft["features"], *draft["dates"], *draft["ids"], *columns_of(label)]))),
            {str(name): bounds.get(name) for name in draft["features"] if name not in texts},
            texts,
            [str(name) for name in draft["dates"]],
            {str(name): asdict(_SHAPE.validate_python(shape)) for name, shape in draft["ids"].items()},
            None if classes is None else [str(text) for text in classes],
            options,
        )

    def kind(self, name: str) -> str:
        """Return what a column holds, in words; "" if there is none."""
        kinds = (("numbers", self.numbers), ("texts", self.texts), ("dates", self.dates), ("ids", self.ids))
        return next((kind for kind, held in kinds if name in held), "")

    def answer(self, column: str, answer: str | Mapping[str, str]) -> None:
        """Have the policy answer a column. Args: answer: a word, or other spellings of some texts."""
        answers = self.options.setdefault("columns", {})
        before = answers.get(column)
        if isinstance(answer, str) or not isinstance(before, dict):
            answers[column] = answer if isinstance(answer, str) else dict(answer)
        else:
            answers[column] = {text: answer.get(said, said) for text, said in before.items()} | dict(answer)

    def rename(self, old: str, new: str) -> None:
        """Call a column otherwise, in the policy and here."""
        names = self.options.setdefault("rename", {})
        in_file = next((given for given, called in names.items() if called == old), old)
        names[in_file] = new
        for key in ("dates", "columns"):
            if old in self.options.get(key, {}):
                self.options[key][new] = self.options[key].pop(old)
        for held in (self.numbers, self.texts, self.ids):
            if old in held:
                held[new] = held.pop(old)  # type: ignore[assignment]
        self.dates = [new if name == old else name for name in self.dates]
        self.columns = [new if name == old else name for name in self.columns]
        if isinstance(self.label, Mapping):
            self.label = {part: new if name == old else name for part, name in self.label.items()}
        else:
            self.label = new if self.label == old else self.label


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that sites have otherwise. Attributes: is_settled: the united draft makes it alike."""

    text: str
    is_settled: bool


@dataclass(slots=True)
class Agreement:
    """One job for all sites, what it leaves out, and what each site's policy says then.

    Attributes:
        options: site -> keys of the policy's data set.
    """

    label: Label | None
    features: list[str] = field(default_factory=list)
    categories: dict[str, list[str]] = field(default_factory=dict)
    label_classes: list[str] | None = None
    dates: list[str] = field(default_factory=list)
    feature_bounds: dict[str, tuple[float, float]] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to decide."""
        return all(one.is_settled for one in self.differences)

    def note(self, text: str, *, is_settled: bool = True) -> None:
        """Remember a difference."""
        self.differences.append(Difference(text, is_settled))


def agree(drafts: Mapping[str, SiteDraft]) -> Agreement:
    """Unite the drafts of all sites, which are changed on the way.

    Raises:
        ConfigurationError: fewer than two, or of different labels.
    """
    if len(drafts) < 2:
        raise ConfigurationError("one draft agrees with itself: give those of two sites or more")
    found = Agreement(None)
    _name_alike(drafts, found)
    found.label = next(iter(drafts.values())).label
    if any(one.label != found.label for one in drafts.values()):
        shown = _grouped({site: repr(one.label and words_of_label(one.label)) for site, one in drafts.items()})
        raise ConfigurationError(f"the drafts are for different labels ({shown}): check all with the same --label")
    names = dict.fromkeys(name for one in drafts.values() for name in one.columns)
    for name in names:
        if name not in columns_of(found.label):
            _unite(name, drafts, found)
    if isinstance(found.label, str):
        _unite_label(found.label, drafts, found)
    found.options = {site: one.options for site, one in drafts.items()}
    return found


def _grouped(of_sites: Mapping[str, str]) -> str:
    """Return what sites have, each with those that have it."""
    sites = {what: [site for site in of_sites if of_sites[site] == what] for what in of_sites.values()}
    return ", ".join(f"{what} at {' and '.join(those)}" for what, those in sites.items())


def _fold(text: str) -> str:
    return " ".join(normalize("NFKC", normalize("NFKC", text).casefold()).split())


def _variants(of_sites: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return text -> the spelling that most sites have, where several sites spell alike what is not the same."""
    spelt: dict[str, Counter[str]] = {}
    for texts in of_sites.values():
        for text in texts:
            spelt.setdefault(_fold(text), Counter())[text] += 1
    return {text: count.most_common(1)[0][0] for count in spelt.values() for text in count}


def _name_alike(drafts: Mapping[str, SiteDraft], found: Agreement) -> None:
    common = _variants({site: one.columns for site, one in drafts.items()})
    for site, one in drafts.items():
        for name in one.columns:
            if common[name] != name and common[name] not in one.columns:
                one.rename(name, common[name])
                found.note(f"column {common[name]!r} is called {name!r} at {site}: renamed there")


def _unite(name: str, drafts: Mapping[str, SiteDraft], found: Agreement) -> None:
    kinds = {site: one.kind(name) for site, one in drafts.items()}
    absent = [site for site, kind in kinds.items() if not kind]
    if absent:
        found.note(f"column {name!r} is nothing to train on at {', '.join(absent)}, or not there: left out")
        return
    if set(kinds.values()) == {"numbers", "texts"}:
        _read_as_yes_or_no(name, drafts)
    kinds = {site: one.kind(name) for site, one in drafts.items()}
    if len(set(kinds.values())) > 1:
        found.note(
            f"column {name!r} holds {_grouped(kinds)}: answer at all sites what it is. Policy key: columns",
            is_settled=False,
        )
        return
    _UNITE[next(iter(kinds.values()))](name, drafts, found)


def _read_as_yes_or_no(name: str, drafts: Mapping[str, SiteDraft]) -> None:
    """Have texts that mean yes and no become 1 and 0, where other sites have these."""
    with_texts = [one for one in drafts.values() if name in one.texts]
    others = [one.numbers[name] for one in drafts.values() if name in one.numbers]
    if all(map(is_yes_or_no, (text for one in with_texts for text in one.texts[name]))) and set(others) <= {(0.0, 1.0)}:
        for one in with_texts:
            one.answer(name, YES_NO)
            one.numbers[name] = (0.0, 1.0)
            del one.texts[name]


def _unite_numbers(name: str, drafts: Mapping[str, SiteDraft], found: Agreement) -> None:
    found.features.append(name)
    bounds = {site: pair for site, one in drafts.items() if (pair := one.numbers[name]) is not None}
    if any(one.options.get("columns", {}).get(name) == YES_NO for one in drafts.values()):
        found.note(f"column {name!r} says yes and no in several ways: 1 and 0 everywhere")
    if not bounds:
        return
    ends = {site: max(pair, key=abs) for site, pair in bounds.items()}
    least, most = min(ends, key=lambda site: abs(ends[site])), max(ends, key=lambda site: abs(ends[site]))
    if abs(ends[most]) >= _OTHER_UNIT * abs(ends[least]) > 0:
        text = f"column {name!r} goes to {ends[least]:g} at {least} and to {ends[most]:g} at {most}: other units, or "
        remedy = "Nothing compares what a number means; convert at one of them, or say there what is missing"
        found.note(f"{text}a number that means missing? {remedy}", is_settled=False)
    found.feature_bounds[name] = (min(low for low, _ in bounds.values()), max(high for _, high in bounds.values()))


def _unite_texts(name: str, drafts: Mapping[str, SiteDraft], found: Agreement) -> None:
    of_sites = {site: one.texts[name] for site, one in drafts.items()}
    if (united := _one_list(name, "column", of_sites, drafts, found)) is None:
        found.feature_bounds[name] = (0.0, 1.0)
    else:
        found.categories[name] = united
    found.features.append(name)


def _one_list(
    name: str, what: str, of_sites: Mapping[str, Sequence[str]], drafts: Mapping[str, SiteDraft], found: Agreement
) -> list[str] | None:
    """Return one list of texts for all sites, spelt alike by their policies; None where they became 1 and 0."""
    held = {text for texts in of_sites.values() for text in texts}
    if len({frozenset(texts) for texts in of_sites.values()}) > 1 and held and all(map(is_yes_or_no, held)):
        for one in drafts.values():
            one.answer(name, YES_NO)
        found.note(f"{what} {name!r} says yes and no in several ways: 1 and 0 everywhere")
        return None
    common = _variants(of_sites)
    for site, texts in of_sites.items():
        other = {text: common[text] for text in texts if common[text] != text}
        if other:
            drafts[site].answer(name, other)
            shown = ", ".join(f"{text!r} is {spelt!r}" for text, spelt in other.items())
            found.note(f"{what} {name!r} is spelt otherwise at {site}: {shown}")
    united = list(dict.fromkeys(common[text] for texts in of_sites.values() for text in texts))
    for text in united:
        absent = [site for site, texts in of_sites.items() if text not in [common[one] for one in texts]]
        if absent:
            found.note(f"{what} {name!r}: {text!r} is in no list of {', '.join(absent)}")
    return sorted(united)


def _unite_dates(name: str, drafts: Mapping[str, SiteDraft], found: Agreement) -> None:
    found.dates.append(name)
    forms = {site: one.options.get("dates", {}).get(name, "as declared") for site, one in drafts.items()}
    if len(set(forms.values())) > 1:
        found.note(f"column {name!r} has dates as {_grouped(forms)}: each policy says its own, and days come of all")


def _unite_ids(name: str, drafts: Mapping[str, SiteDraft], found: Agreement) -> None:
    shapes = {site: one.ids[name] for site, one in drafts.items()}
    prefixes = {site: str(shape["prefix"]) for site, shape in shapes.items()}
    steps: dict[str, bool] = {}
    if len({bool(shape["padded"]) for shape in shapes.values()}) > 1:
        steps["ignore_padding"] = True
    if any(shape["wide"] for shape in shapes.values()):
        steps["nfkc"] = True
    if len({_fold(prefix) for prefix in prefixes.values()}) < len(set(prefixes.values())):
        steps["ignore_case"] = True
    differ = len({_fold(prefix) for prefix in prefixes.values()}) > 1
    for site, one in drafts.items():
        form = {**steps, **({"prefix": prefixes[site]} if differ and prefixes[site] else {})}
        if form:
            one.options["id_form"] = form
    if steps or differ:
        shown = {site: " or ".join(map(str, shape["shapes"])) for site, shape in shapes.items()}
        found.note(f"ids of {name!r} are written {_grouped(shown)}: each policy says what makes them equal")


_UNITE: dict[str, Callable[[str, Mapping[str, SiteDraft], Agreement], None]] = {
    "numbers": _unite_numbers,
    "texts": _unite_texts,
    "dates": _unite_dates,
    "ids": _unite_ids,
}


def _unite_label(name: str, drafts: Mapping[str, SiteDraft], found: Agreement) -> None:
    of_sites = {site: one.label_classes for site, one in drafts.items()}
    lists = {site: classes for site, classes in of_sites.items() if classes is not None}
    if not lists:
        return
    if len(lists) < len(of_sites):
        numbers = ", ".join(site for site in of_sites if site not in lists)
        if not all(is_yes_or_no(text) for classes in lists.values() for text in classes):
            text = f"label {name!r} needs a list at {', '.join(lists)} and none at {numbers}: mend it at one of them"
            found.note(text, is_settled=False)
            return
        for site in lists:
            drafts[site].answer(name, YES_NO)
        found.note(f"label {name!r} says yes and no at {', '.join(lists)}: 1 and 0, as at {numbers}")
        return
    found.label_classes = _one_list(name, "label", lists, drafts, found)


def lines(found: Agreement) -> Iterator[str]:
    """Yield what sites have otherwise, for people."""
    for title, is_settled in (("Left to decide", False), ("Made alike", True)):
        group = [one for one in found.differences if one.is_settled is is_settled]
        if group:
            yield f"{title}:"
            yield from (f"  - {one.text}" for one in group)
