"""``veilboost agree``: the drafts of several sites become one job, and what each policy has to say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.failures import reason_of
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.cli.check import recipe_lines, site_setup
from nvflare_plugins.cli.options import DAMAGED, Options, check_output
from nvflare_plugins.survey.agreement import Agreement, SiteDraft, agree, lines


def run(options: Options) -> int:
    """Unite, show what differs, write."""
    if options.out is not None:
        check_output("--out", options.out, ".json")
    sites = [path.stem for path in options.drafts]
    if len(set(sites)) < len(sites):
        raise ConfigurationError("two drafts have the same name, which is their site's: name the files after the sites")
    found = agree({path.stem: _draft_in(path) for path in options.drafts})
    document = _document(found, options.data_set)
    is_inert = json.dumps(document, ensure_ascii=False).isprintable()  # else marks of others steer a terminal
    written = json.dumps(document, indent=1, ensure_ascii=not is_inert)
    if options.out is not None:
        write_atomically(options.out, written.encode(), 0o600)
    if options.json:
        print(written)
        return int(not found.is_whole)
    _show(found, options.data_set)
    if options.out is not None:
        print(f"\nwrote {options.out}")
    return int(not found.is_whole)


def _show(found: Agreement, data_set: str) -> None:
    for text in lines(found) if found.differences else ["The drafts agree."]:
        print(printable(text, 1000))
    for site, of_policy in found.options.items():
        if of_policy:
            line = site_setup(data_set, of_policy, None)
            said = "see --out: no line of a shell says it" if line is None else f"veilboost site-setup DIR {line}"
            print(f"\nAt {printable(site)}: {said}")
    print("\n".join(recipe_lines(found.features, found.categories, found.label_classes, found.feature_bounds)))


def _draft_in(path: Path) -> SiteDraft:
    """Read a draft, or what ``veilboost check --json`` printed. Raises: ConfigurationError."""
    try:
        (document,) = json.loads(path.read_bytes())
        return SiteDraft.from_dict(document.get("draft", document))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {reason_of(error)}") from None
    except (*DAMAGED, ConfigurationError, RecursionError):
        raise ConfigurationError(
            f"{path} is no draft of one data set: write it with `veilboost check FILE --label COLUMN --draft SITE.json`"
        ) from None


def _document(found: Agreement, data_set: str) -> dict[str, Any]:
    return {
        "agrees": found.is_whole,
        "job": {
            "data_set": data_set,
            "label": found.label,
            "features": found.features,
            "categories": found.categories,
            "label_classes": found.label_classes,
        },
        "dates": found.dates,
        "feature_bounds": {"taken_from_data": True, "for_private_jobs": False, "bounds": found.feature_bounds},
        "differences": [dataclasses.asdict(one) for one in found.differences],
        "policies": {site: {"data_sets": {data_set: of}} for site, of in found.options.items()},
    }
