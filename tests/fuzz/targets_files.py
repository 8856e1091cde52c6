"""Targets for files and documents of a site, jobs, models, tables, and the native modules' byte entries."""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from he_processors.errors import ConfigurationError, VeilBoostError
from tests.fuzz.targets import Target

GOLDEN = Path(__file__).parents[1] / "golden"
_NOT_JSON = (ValueError, RecursionError)


def _folder() -> Path:
    """Return a new folder, in memory where that is possible."""
    memory = Path("/dev/shm")  # noqa: S108  # a folder of its own is made in it
    return Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))


def _documents(take: Callable[[Any], object], corpus: list[Any]) -> Target:
    """Return the target that reads a JSON document; what is no JSON is refused before."""

    def parse(data: bytes) -> object:
        try:
            document = json.loads(data)
        except _NOT_JSON:
            return None
        return take(document)

    from dp_components.errors import PrivacyError

    refusals = (VeilBoostError, PrivacyError)
    return Target(parse, [json.dumps(one).encode() for one in corpus], refusals, most=1 << 14)


def _policy() -> Target:
    from nvflare_plugins.site.policy import SitePolicy

    folder = _folder()
    (folder / "local").mkdir()
    path = folder / "local" / "veilboost.json"

    def parse(data: bytes) -> object:
        path.write_bytes(data)
        return SitePolicy.load(folder, "site-2")

    files = [GOLDEN / "site_3" / "local" / "veilboost.json", *GOLDEN.glob("set_up/**/veilboost.json")]
    return Target(parse, [file.read_bytes() for file in files if file.exists()], (ConfigurationError,), most=1 << 14)


def _jobs() -> Target:
    from nvflare_plugins.flare.kinds import KINDS
    from tests.conformance.kind_cases import CASES

    kinds = {name: KINDS[name].job for name in CASES}

    def take(document: Any) -> object:
        kind = document.pop("kind", None) if isinstance(document, dict) else None
        return kinds[kind].from_dict(document).to_dict() if isinstance(kind, str) and kind in kinds else None

    corpus = [{"kind": name, **case.least} for name, case in CASES.items()]
    return _documents(take, corpus)


def _parameters() -> Target:
    from nvflare_plugins.xgb.parameters import check_parameters

    def take(document: Any) -> object:
        return check_parameters(document, ["a", "b", "c", "d"]) if isinstance(document, dict) else None

    corpus: list[Any] = [
        {"objective": "binary:logistic", "max_depth": 3, "eta": 0.3, "monotone_constraints": "(1,0,-1,0)"},
        {"objective": "multi:softprob", "num_class": 3, "interaction_constraints": [[0, 1], [2]], "max_bin": 64},
        {"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.5], "eval_metric": ["rmse", "mae"]},
    ]
    return _documents(take, corpus)


def _model() -> Target:
    from nvflare_plugins.scoring.model import FinishedModel, ScoringError

    def parse(data: bytes) -> object:
        return FinishedModel(data, "model.json").features

    files = sorted(GOLDEN.glob("models/*/**/model.json"))
    return Target(parse, [file.read_bytes() for file in files][:12], (ScoringError,), most=1 << 16)


def _part() -> Target:
    from nvflare_plugins.kinds.vertical.model import ActivePart, PassivePart, read_part

    path = _folder() / "part.json"

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        for kind in (ActivePart, PassivePart):
            try:
                read_part(path, "site-1", kind)
            except ConfigurationError:
                continue

    files = [file for file in sorted(GOLDEN.glob("models/vertical*/**/*.json")) if b'"nonce"' in file.read_bytes()]
    return Target(parse, [file.read_bytes() for file in files][:8], (ConfigurationError,), most=1 << 16)


def _file(read: Callable[[Path], object], corpus: list[Any], *refusals: type[Exception]) -> Target:
    """Return the target that reads a file of JSON."""
    path = _folder() / "document.json"

    def parse(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return Target(parse, [json.dumps(one).encode() for one in corpus], refusals or (VeilBoostError,), most=1 << 13)


def _description() -> Target:
    from nvflare_plugins.kinds.federboost_vertical.job import Description

    features = {"a": {"low": 0, "high": 1.5}, "b": {"values": [1, 2]}, "c": {"edges": [0.5, 1e9]}}
    return _file(Description.read, [features])


def _cuts() -> Target:
    from nvflare_plugins.attempt.run_folder import RunFolder

    folder = _folder()
    run = RunFolder(folder, "job")
    run.path.mkdir(parents=True, exist_ok=True)

    def parse(data: bytes) -> object:
        (run.path / "cuts.json").write_bytes(data)
        return run.read_cuts()

    return Target(parse, [json.dumps([[0.5, 1.0], [], [-1e30, 7]]).encode()], (VeilBoostError,))


def _checkpoint() -> Target:
    from nvflare_plugins.kinds.vertical.context import _digest, _read

    content = "content"
    whole = {"format": "veilboost-vertical-checkpoint-1", "n_rounds": 2, "tag": "ab", "content": content}
    return _file(_read, [{**whole, "digest": _digest(content)}])


def _private_table() -> Target:
    from nvflare_plugins.kinds.vertical.model import table_from_json

    table = {"aliases": ["a", "b"], "splits": [[0, 1, 0, "0.5", True, None], [0, 3, 1, "inf", False, [1, "left"]]]}
    return Target(lambda data: table_from_json(data.decode("latin-1")), [json.dumps(table).encode()], (VeilBoostError,))


def _offer() -> Target:
    from nvflare_plugins.kinds.alignment.align import _Offer

    return Target(_Offer.from_bytes, [json.dumps([{"rows": 100, "x": 3}, 10, 7]).encode()], (VeilBoostError,))


def _aliases() -> Target:
    from nvflare_plugins.kinds.federboost_vertical.training import _read_aliases

    return Target(_read_aliases, [json.dumps(["a", "größe", "c"]).encode()], (VeilBoostError,))


def _arrays() -> Target:
    from nvflare_plugins.site.memory.store import read_arrays

    path = _folder() / "x.npz"

    def parse(data: bytes) -> object:
        path.write_bytes(data)
        return read_arrays(path)

    corpus = []
    for save in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        save(file, a=np.arange(5, dtype=np.uint64), b=np.zeros((2, 3), np.int32))
        corpus.append(file.getvalue())
    return Target(parse, corpus, (ValueError,))


def _table(suffix: str, contents: Callable[[], list[bytes]]) -> Callable[[], Target]:
    def build() -> Target:
        from nvflare_plugins.data.declaration import DataSet
        from nvflare_plugins.data.table import load_table

        path = _folder() / f"rows.{suffix}"
        spec = DataSet(name="rows", path=path, format=suffix)

        def parse(data: bytes) -> None:
            path.write_bytes(data)
            load_table(spec, label="y", categories={"c": ["a", "b"]}, unknown_is_missing=True)
            load_table(spec, label="y", categories={"c": ["a"]}, repair=True)

        return Target(parse, contents(), (ConfigurationError,))

    return build


def _csv_contents() -> list[bytes]:
    rows = b"a,c,y\n1,a,0\n2.5,b,1\n,,1\n-3e4,a,0\n"
    return [
        rows,
        rows.replace(b",", b";").replace(b".", b","),
        b'a,c,y\n"1,5","a",0\n',
        "größe,c,y\n1,a,1\n".encode("latin-1"),
    ]


def _parquet_contents() -> list[bytes]:
    import pandas as pd

    frame = pd.DataFrame({"a": [1.0, 2.5, None], "c": ["a", "b", None], "y": [0, 1, 1]})
    contents = []
    for compression in ("snappy", "gzip", None):
        file = io.BytesIO()
        frame.to_parquet(file, index=False, compression=compression)
        contents.append(file.getvalue())
    return contents


def _registry() -> Target:
    from nvflare_plugins.site.memory.registry import Registry
    from nvflare_plugins.site.memory.store import Memory
    from nvflare_plugins.site.policy_values import Consents

    source, folder = _folder(), _folder()
    Memory(source, "site-2")
    name = next(path.name for path in source.iterdir() if path.read_bytes().startswith(b"SQLite format 3"))
    with sqlite3.connect(source / name) as db:
        tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    assert tables

    def parse(data: bytes) -> object:
        shutil.rmtree(folder)
        shutil.copytree(source, folder)
        (folder / name).write_bytes(data)
        return Registry(Memory(folder, "site-2"), Consents()).describe()

    return Target(parse, [(source / name).read_bytes()], (ConfigurationError, OSError), most=1 << 18)


_COUNTS = {
    "_bignum": {
        "modulus": 6,
        "first_not_below": 3,
        "enter": 4,
        "leave": 3,
        "mul": 4,
        "add": 4,
        "products": 5,
        "ladder": 4,
        "table": 4,
        "powers": 6,
        "pow_const": 5,
        "horner": 5,
    },
    "_curve": {
        "from_affine": 3,
        "from_compressed": 3,
        "from_ristretto": 3,
        "from_uniform": 3,
        "to_affine": 3,
        "to_ristretto": 3,
        "narrow": 3,
        "widen": 3,
        "y_words": 4,
        "add": 4,
        "negate": 3,
        "twice": 4,
        "equal": 4,
        "sums": 6,
        "ladder": 4,
        "table": 4,
        "fixed_mul": 5,
        "mul": 4,
        "mul_each": 5,
        "all_below": 3,
    },
    "_field": {"combine": 6, "powers": 2},
}
_SIZES = (0, 1, 2, 3, 5, 8, 10, 16, 32, 40, 64, 80, 96, 128, 160, 256, 320, 512, 640, 1024)


def _native(module: str) -> Callable[[], Target]:
    """Any arguments to the C functions: arrays of any size and kind, numbers, handles. They refuse or compute."""

    def build() -> Target:
        import importlib

        native = importlib.import_module(f"he_processors._native.{module}")
        functions = [(getattr(native, name), count) for name, count in _COUNTS[module].items() if hasattr(native, name)]
        handles: list[Any] = [one[0] if isinstance(one, tuple) else one for one in native.instruction_sets()]
        if module == "_bignum":
            from he_processors.bignum.native import load

            handles += [load(name[0])(2**127 - 1)._handle for name in native.instruction_sets()]  # type: ignore[attr-defined]

        def argument(kind: int, size: int) -> Any:
            n = _SIZES[size % len(_SIZES)]
            if kind < 3:
                return handles[size % len(handles)]
            if kind < 6:
                return (0, 1, 2, 3, 4, 8, 16, 32, 63, 64, -1, 1 << 20, 1 << 31, 1 << 62, (1 << 63) - 1)[size % 15]
            array = np.arange(n, dtype=(np.uint8, np.int32, np.int64, np.uint64, np.uint64)[kind % 5])
            if kind > 12:
                array = array.reshape(-1, 2) if n % 2 == 0 else array[::-1]
            return array if kind % 2 else (array * 0x9E3779B97F4A7C15 if array.dtype == np.uint64 else array % 3)

        def parse(data: bytes) -> object:
            padded = data.ljust(16, b"\0")
            function, count = functions[padded[0] % len(functions)]
            count += (padded[1] == 255) - (padded[1] == 254)
            return function(*[argument(padded[2 + 2 * i] % 16, padded[3 + 2 * i]) for i in range(count)])

        rng = np.random.default_rng(7)
        refusals = (ValueError, TypeError, OverflowError, BufferError)
        return Target(parse, [rng.bytes(16) for _ in range(64)], refusals, most=24)

    return build


TARGETS: dict[str, Callable[[], Target]] = {
    "policy": _policy,
    "jobs": _jobs,
    "parameters": _parameters,
    "model": _model,
    "part of a model": _part,
    "private table": _private_table,
    "checkpoint": _checkpoint,
    "cuts": _cuts,
    "description": _description,
    "offer": _offer,
    "aliases": _aliases,
    "arrays": _arrays,
    "csv": _table("csv", _csv_contents),
    "parquet": _table("parquet", _parquet_contents),
    "registry": _registry,
    "native numbers": _native("_bignum"),
    "native curve": _native("_curve"),
    "native field": _native("_field"),
}
