"""``veilboost predict`` and ``score``: score rows with a finished model at one site, or by a job that stays.

Nothing is written unless everything could be read. What is written is for the owner of the process alone (mode 0600),
and appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.base.errors import reason_of
from nvflare_plugins.base.files import write_atomically, write_result_blocks
from nvflare_plugins.base.formatting import counted, printable
from nvflare_plugins.cli.options import Options, as_data_set, check_output, own_policy
from nvflare_plugins.data.declaration import DataSet, is_in_parts
from nvflare_plugins.kinds.vertical_inference.score_socket import SOCKET, reachable
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.scoring.model import FinishedModel, ScoringError, Strengths, shap_columns
from nvflare_plugins.scoring.noise import NoiseOfScores
from nvflare_plugins.scoring.rows import RowReader, Rows
from nvflare_plugins.scoring.versions import ModelVersions
from nvflare_plugins.site.policy import SitePolicy

_LONGEST_PATH = 4000
_ABOUT_NOISE = (
    "note: in 95 of 100 trainings the score of the same trees without noise lies between noise_low and noise_high. "
    "That is the noise alone: sampling and the model's own error come on top. SHAP values are left out, as covers are "
    "noised"
)


def run(options: Options) -> int:
    """Score, write, and say what was written."""
    _take_name(options)
    _check_output(options)
    model = FinishedModel.read(options.model)
    _check_threshold(options.threshold, model)
    noise = NoiseOfScores.of_run(options.model.parent, model) if options.explain else None
    if options.explain and noise is None:
        model.check_explainable()
    asked, strengths = (_data_set(options), model.features, options.id, options.ignore), Strengths(model)
    blocks = RowReader(*asked, unknown_is_missing=options.unknown_is_missing).blocks()
    shown, image = printable(str(options.out), _LONGEST_PATH), options.out.with_suffix(".svg")
    try:
        n_rows, changed = write_result_blocks(
            options.out, (_results(options, model, rows, strengths, noise) for rows in blocks)
        )
        if strengths.n_rows:
            write_atomically(image, strengths.picture(), 0o600)
    except OSError as error:
        raise ScoringError(f"--out {shown} cannot be written: {reason_of(error)}") from None
    options.tell(scores=options.out, rows=n_rows, picture=image if strengths.n_rows else None)
    print(f"wrote {shown}: {n_rows} rows scored with {_described(model, options.rounds)}")
    if changed:
        print(f"note: {counted(changed, 'text')} that a spreadsheet would compute got an apostrophe before it")
    if noise is not None:
        print(_ABOUT_NOISE)
    if strengths.n_rows:
        print(f"wrote {printable(str(image), _LONGEST_PATH)}: the strongest features")
    return 0


def _take_name(options: Options) -> None:
    """Put the file and the data set of a named model in the place of its name, where there is no file of that name."""
    if options.model.exists() or not ModelVersions.is_reference(str(options.model)):
        return
    if options.workspace is None or options.site is None:
        shown = printable(str(options.model))
        raise ScoringError(f"{shown} is no file; if it is a model's name, give --workspace and --site, whose it is")
    policy = own_policy(options)
    options.model = ModelVersions(policy.runs).path(str(options.model))
    if options.data_set is None:
        options.data_set = training_set(policy, options.model.parent)
        if options.data_set is None:
            options.workspace = options.site = None


def training_set(policy: SitePolicy, run_folder: Path) -> str | None:
    """Return the name of a run's training set, as new rows are written; None if the policy no longer has it."""
    data = RunRecord.read(run_folder).data
    return data[0].name if data and data[0].name in policy.data_sets else None


def _check_output(options: Options) -> None:
    out, shown = options.out, printable(str(options.out))
    check_output("--out", out, ".csv", ".parquet")
    written = [out, out.with_suffix(".svg")] if options.explain else [out]
    if written[-1].is_dir():
        raise ScoringError(f"--out {shown}: the picture beside it would have the name of a folder; choose another name")
    for given in (options.model, options.data):
        if any(path.exists() and given.exists() and path.samefile(given) for path in written):
            raise ScoringError(f"--out {shown} would overwrite {printable(str(given))}: choose another name")


def _check_threshold(threshold: float | None, model: FinishedModel) -> None:
    if threshold is None:
        return
    if not 0 <= threshold < 1:
        raise ScoringError("--threshold must be at least 0 and below 1")
    if model.classes is None or len(model.classes) != 2 or not model.has_probabilities:
        raise ScoringError(f"--threshold: {model.name} gives no probability of the second of two classes; leave it out")


def _data_set(options: Options) -> DataSet:
    """Return the file as a data set: as a site's policy reads one, or as it is read without a policy.

    Raises:
        ScoringError: there is no such file, or the options do not belong together.
    """
    path, name = options.data, printable(str(options.data))
    in_parts = is_in_parts(path)
    if not path.is_file() and not in_parts:
        raise ScoringError(f"{name} is no file: name the file with the rows to score")
    if not in_parts and path.stat().st_size == 0:
        raise ScoringError(f"{name} is empty: it needs at least a header that names the model's columns")
    spec = as_data_set(options, path, _declared(options), name)
    if options.separator is not None and (len(options.separator) != 1 or options.separator in '"\r\n'):
        raise ScoringError("--separator must be one character")
    given = {"separator": options.separator, "encoding": options.encoding}
    changes = {key: value for key, value in given.items() if value is not None}
    return replace(spec, missing=(*spec.missing, *options.missing), **changes)


def _declared(options: Options) -> DataSet:
    place = (options.workspace, options.site, options.data_set)
    if place == (None, None, None):
        return DataSet("", options.data, "csv")
    if None in place:
        raise ScoringError(
            "--workspace, --site and --data-set belong together: give all of them, or none (a model's name needs the "
            "first two alone)"
        )
    return own_policy(options).data_set(options.data_set)


def _results(
    options: Options, model: FinishedModel, rows: Rows, strengths: Strengths, noise: NoiseOfScores | None
) -> pd.DataFrame:
    """Return what is written of some rows; with --explain their noise, or SHAP values, which strengths add up."""
    frame = _scores(options, model, rows)
    if not options.explain:
        return frame
    if noise is not None:
        return _beside(frame, pd.DataFrame(noise.columns(rows.values)))
    contributions = model.contributions(rows.values, options.rounds)
    strengths.add(contributions)
    return _beside(frame, pd.DataFrame(shap_columns(model, contributions)))


def _scores(options: Options, model: FinishedModel, rows: Rows) -> pd.DataFrame:
    """Return id, class and probabilities, or id and prediction, of each row."""
    columns: dict[str, object] = {}
    if model.classes is None:
        columns["prediction"] = model.predict(rows.values, options.rounds)
    else:
        names = np.array([str(one) for one in model.classes], dtype=object)
        columns["class"] = names[model.positions(rows.values, options.rounds, options.threshold)]
        if model.has_probabilities:
            probabilities = model.probabilities(rows.values, options.rounds)
            columns |= {f"probability.{name}": probabilities[:, place] for place, name in enumerate(names)}
    frame = pd.DataFrame(columns)
    return frame if rows.ids is None else _beside(pd.DataFrame({options.id: rows.ids}), frame)


def _beside(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    both = sorted(set(first) & set(second))
    if both:
        shown = printable(repr(both[0]))
        raise ScoringError(f"two columns of the result would be called {shown}: rename the id column")
    return pd.concat([first, second], axis=1)


def _described(model: FinishedModel, rounds: str) -> str:
    n_rounds, note = model.n_rounds, ""
    if model.best_round is not None and rounds == "best":
        n_rounds = model.best_round + 1
    elif model.best_round is not None and model.best_round + 1 < model.n_rounds:
        note = f"; early stopping found round {model.best_round + 1} best: --rounds best ends there"
    classes = "" if model.classes is None else f", classes {', '.join(map(str, model.classes))}"
    return printable(f"{model.objective}, {n_rounds} rounds, {len(model.features)} features{classes}{note}", 600)


_WAIT_S = 330.0  # longer than the job lets a caller wait, also for a refreshed alignment


def score_one(options: Options) -> int:
    """Send one request, or every line of standard input; print one line of JSON for each."""
    requests = _requests(options)
    path = _socket_of(options)
    code = 0
    with _connected(path) as connection, connection.makefile("rb") as answers:
        for request in requests:
            try:
                connection.sendall(request + b"\n")
                answer = answers.readline()
            except OSError:
                answer = b""
            is_error = _says_error(answer)
            sys.stdout.buffer.write(answer)  # UTF-8 whatever the terminal's encoding is: names of classes, ids
            sys.stdout.buffer.flush()
            code = 1 if is_error else code
    return code


_WHY = (
    "it has ended, or waits for a party that is gone; this site's log says which. Remedy: try again later, or submit "
    "it anew"
)


def _says_error(answer: bytes) -> bool:
    """Return whether an answer is an error. Raises: ConfigurationError: it is no whole answer."""
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(answer) if answer.endswith(b"\n") else None
        if isinstance(told, dict):
            return "error" in told
    raise ConfigurationError(f"the job no longer answers: {_WHY}")


def _requests(options: Options) -> Iterator[bytes]:
    given = [
        document
        for is_given, document in (
            (bool(options.rows), {"ids" if options.ids else "rows": options.rows}),
            (options.status, {"status": True}),
            (options.stop, {"stop": True}),
            (options.refresh is not None, {"refresh": options.refresh}),
        )
        if is_given
    ]
    if len(given) > 1:
        raise ConfigurationError("give rows, or one of --status, --refresh and --stop")
    if not given:
        return (line.rstrip(b"\n") for line in sys.stdin.buffer if line.strip())
    (document,) = given
    if "rows" in document:
        document = {"rows": [_position(text) for text in options.rows]}
    return iter([json.dumps(document).encode()])


def _position(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ConfigurationError("rows are positions in the alignment, from 0; with --ids they are ids")
    return int(text)


def _socket_of(options: Options) -> Path:
    if options.socket is not None:
        return Path(options.socket)
    if options.workspace is None or options.site is None:
        raise ConfigurationError("give --workspace and --site, or --socket")
    policy = own_policy(options)
    return RunFolder(policy.runs, options.job).path / SOCKET


def _connected(path: Path) -> socket.socket:
    connection: Any = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with reachable(path) as name:
            connection.settimeout(_WAIT_S)
            connection.connect(name)
    except PermissionError:
        connection.close()
        raise ConfigurationError(
            f"{path.name} is for the user that runs FLARE here: run this command as that user"
        ) from None
    except OSError:
        connection.close()
        raise ConfigurationError(
            f"no job takes requests at {path}: it is not at this party (the one with the label), has not begun to "
            f"serve, or {_WHY}"
        ) from None
    result: socket.socket = connection
    return result
