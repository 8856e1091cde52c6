"""New rows for a finished vertical model: each party's part, its table read as it was trained on, the scores by id."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
from nvflare.recipe import SimEnv

from he_processors.errors import ConfigurationError
from nvflare_plugins.api.sources import Reader, Source, reader_of
from nvflare_plugins.base.files import make_folder, write_private
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.identity import load_ids
from nvflare_plugins.kinds.vertical.job import VerticalJob
from nvflare_plugins.kinds.vertical.model import ACTIVE_FILE, PASSIVE_FILE, Part, read_part
from nvflare_plugins.recipes.run import SIMULATED, Run
from nvflare_plugins.site.policy import policy_of_simulated
from nvflare_plugins.site.policy_values import FOLDERS
from nvflare_plugins.survey.raw_file import read_raw

_OF_THE_FILE = ("separator", "encoding", "rename", "names")
_BY_COLUMN = ("rename", "dates", "columns")
_NOT_OF_READING = ("path", "privacy", "drop_unlabelled")


def part_files(run: Run, folder: Path, sites: Sequence[str]) -> dict[str, Path]:
    """Return where each party's part of a run's model lies.

    Args:
        folder: of the federation, whose run it has to be.

    Raises:
        ConfigurationError: it is another's, no vertical training in the simulator, or a site's part is gone.
    """
    if not isinstance(run.job, VerticalJob):
        raise ConfigurationError(
            f"predict is for vertical trainings, and {run.name!r} is none. Remedy: run.model.predict_proba(rows)"
        )
    if not isinstance(run.exec_env, SimEnv):
        raise ConfigurationError(
            f"the sites of job {run.job_id} keep their parts of its model. Remedy: run the job "
            f"VerticalInferenceRecipe(name, model={run.job_id!r}, data_set=...) over them"
        )
    if not run.folder.absolute().is_relative_to(folder):
        raise ConfigurationError(f"{run.name!r} was not trained by this federation: call predict of the one that did")
    found = {}
    for site in sites:
        place = run.folder / site / FOLDERS["runs"] / SIMULATED
        name = ACTIVE_FILE if site == run.job.active else PASSIVE_FILE
        if not (place / name).is_file():
            raise ConfigurationError(f"{site}: its part of the model is gone from {place}. Remedy: train again")
        found[site] = place / name
    return found


def kept_part(site: str, file: Path, inputs: Path) -> Part:
    """Check a site's part, and place it where the site of another job looks for it. Raises: ConfigurationError."""
    part: Part = read_part(file, site, Part).part  # type: ignore[arg-type]  # either
    write_private(make_folder(inputs) / f"{SIMULATED}.{site}.json", file.read_bytes())
    return part


def reader_as_trained(site: str, source: Source, run: Run, part: Part, folder: Path) -> Reader:
    """Return how a site's new rows are read: as the training's were, but for what ``read`` says of them.

    Args:
        folder: takes a data frame.

    Raises:
        ConfigurationError: no such file, or no table.
    """
    stated = json.loads(policy_of_simulated(run.folder, site).read_text(encoding="utf-8"))
    trained = {k: v for k, v in stated["data_sets"][run.job.data_set].items() if k not in _NOT_OF_READING}
    reader = reader_of(site, source, folder, "new_rows")
    if isinstance(source, Reader):
        trained = {key: trained[key] for key in ("id", "id_form") if key in trained}
    elif reader.options["format"] != trained["format"]:
        trained = {key: value for key, value in trained.items() if key not in _OF_THE_FILE}
    used = {*part.columns, trained.get("id")}
    for key in set(_BY_COLUMN) & set(trained):
        trained[key] = {a: b for a, b in trained[key].items() if (b if key == "rename" else a) in used}
    return Reader(reader.path, {**trained, **reader.options})


def by_id(scores: pd.DataFrame, spec: DataSet) -> pd.DataFrame:
    """Return scores in the order of the active party's table, indexed by its ids as they stand there, or by position.

    Args:
        scores: what the job wrote: canonical ids, if there are any.
        spec: the active party's table.
    """
    scores = scores.drop(columns="row")
    if spec.id is None:
        return scores
    rows = {one.decode(): row for row, one in enumerate(load_ids(spec))}
    scores.index = pd.Index(scores.pop("id").map(rows))
    scores = scores.sort_index()
    raw = read_raw(spec)
    ids = raw.columns[raw.names.index(spec.id)].take(pa.array(scores.index))
    scores.index = pd.Index(ids.to_pandas(), name=spec.id)
    return scores
