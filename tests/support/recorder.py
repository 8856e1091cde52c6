"""Records what stock XGBoost says to its tracker, knowing nothing of our catalogue.

The servicer below adds up or passes on whatever comes, as XGBoost's own tracker does, and writes down each call of
rank 0. ``python -m tests.support.recorder`` writes the golden traces again.
"""

from __future__ import annotations

import json
import threading
from concurrent import futures
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import xgboost as xgb

from nvflare_plugins.pooled.mediated.communicator import CALLS, SERVICE, reply_class, request_class
from nvflare_plugins.xgb.versions import RELEASES, known_release
from tests.support.threads import in_threads

GOLDEN = Path(__file__).parent.parent / "golden"
WORLD = 3
N_ROWS, N_FEATURES, MAX_BIN, ROUNDS = 300, 5, 16, 2
_DTYPES = {1: "<f4", 2: "<f8", 6: "<i4", 7: "<i8", 8: "<u1", 10: "<u4", 11: "<u8"}
_REDUCE = {
    0: np.maximum.reduce,
    1: np.minimum.reduce,
    2: np.add.reduce,
    3: np.bitwise_and.reduce,
    4: np.bitwise_or.reduce,
}


def traces() -> dict[str, dict]:
    """Return the traces of all releases by name; the names of later ones end with the release."""
    found = json.loads((GOLDEN / "horizontal_traces.json").read_text())
    for release in RELEASES[1:]:
        later = json.loads((GOLDEN / f"horizontal_traces_{release.version}.json").read_text())
        found |= {f"{name} {release.version}": trace for name, trace in later.items()}
    return found


def write_traces(traced: dict[str, dict]) -> None:
    """Write the traces of the release that is installed."""
    release = known_release(xgb.__version__)
    suffix = "" if release is RELEASES[0] else f"_{release.version}"
    (GOLDEN / f"horizontal_traces{suffix}.json").write_text(json.dumps(traced, indent=None) + "\n")


def installed_name(name: str) -> str:
    """Return the name under which ``traces`` has a case of the release that is installed."""
    release = known_release(xgb.__version__)
    return name if release is RELEASES[0] else f"{name} {release.version}"


CASES: dict[str, dict] = {
    "logistic": {"objective": "binary:logistic", "eval_metric": ["auc", "logloss"]},
    "base_score": {"objective": "binary:logistic", "base_score": 0.5},
    "weighted": {"objective": "binary:logistic", "weighted": True},
    "hinge": {"objective": "binary:hinge"},
    "softprob": {"objective": "multi:softprob", "num_class": 3, "eval_metric": ["mlogloss", "auc"]},
    "vector_leaf": {"objective": "multi:softprob", "num_class": 3, "multi_strategy": "multi_output_tree"},
    "squared_error": {"objective": "reg:squarederror", "eval_metric": ["rmse", "mae"]},
    "pseudo_huber": {"objective": "reg:pseudohubererror"},
    "absolute_error": {"objective": "reg:absoluteerror"},
    "absolute_error_forest": {"objective": "reg:absoluteerror", "num_parallel_tree": 2},
    "quantile_error": {"objective": "reg:quantileerror", "quantile_alpha": 0.3},
    "poisson": {"objective": "count:poisson"},
    "gamma": {"objective": "reg:gamma"},
    "tweedie": {"objective": "reg:tweedie"},
    "lossguide": {"objective": "binary:logistic", "grow_policy": "lossguide", "max_leaves": 6, "max_depth": 0},
    "forest": {"objective": "binary:logistic", "num_parallel_tree": 2},
    "dart": {"objective": "binary:logistic", "booster": "dart", "rate_drop": 0.5},
    "sampled": {"objective": "binary:logistic", "subsample": 0.5, "colsample_bylevel": 0.5},
    "deep": {"objective": "binary:logistic", "max_depth": 7, "min_child_weight": 0},
    "stump": {"objective": "binary:logistic", "max_depth": 1},
    "continued": {"objective": "binary:logistic", "continued": True},
}


class _Tracker:
    """Rendezvous of WORLD ranks per sequence number; rank 0's calls are written down."""

    def __init__(self) -> None:
        self.calls: list[list] = []
        self._met: dict[int, dict[int, object]] = {}
        self._changed = threading.Condition()

    def start(self) -> str:
        self._server = grpc.server(futures.ThreadPoolExecutor(WORLD + 1))
        handlers = {
            call: grpc.unary_unary_rpc_method_handler(
                lambda request, context, call=call: self._serve(call, request),
                request_deserializer=request_class(call).FromString,
                response_serializer=reply_class(call).SerializeToString,
            )
            for call in CALLS
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return f"127.0.0.1:{port}"

    def stop(self) -> None:
        self._server.stop(None)

    def _serve(self, call: str, request):
        with self._changed:
            here = self._met.setdefault(request.sequence_number, {})
            here[request.rank] = request
            if request.rank == 0:
                dtype, op = getattr(request, "data_type", 0), getattr(request, "reduce_operation", 0)
                self.calls.append([call, dtype, op, len(request.send_buffer)])
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(here) == WORLD, timeout=60):
                raise TimeoutError
        buffers = [here[rank].send_buffer for rank in range(WORLD)]
        if call == "Broadcast":
            reply = buffers[request.root]
        elif call == "Allreduce":
            arrays = np.array([np.frombuffer(b, _DTYPES[request.data_type]) for b in buffers])
            reply = _REDUCE[request.reduce_operation](arrays).astype(_DTYPES[request.data_type]).tobytes()
        else:
            reply = b"".join(buffers)
        return reply_class(call)(receive_buffer=reply)


def data(n_classes: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features, labels (positive whole numbers for regression) and weights."""
    rng = np.random.default_rng(7)
    features = rng.normal(size=(N_ROWS, N_FEATURES)).astype(np.float32)
    score = features[:, 0] + features[:, 1] * features[:, 2] + rng.normal(size=N_ROWS)
    labels = np.digitize(score, np.quantile(score, np.arange(1, n_classes) / n_classes)).astype(np.float32)
    return features, labels, rng.random(N_ROWS).astype(np.float32) + 0.5


def record(case: dict) -> dict:
    """Run one case and return its trace: facts, and the calls of each phase in order."""
    params = {"max_bin": MAX_BIN, "max_depth": 3, "nthread": 1, **case}
    weighted, continued = params.pop("weighted", False), params.pop("continued", False)
    regression = not params["objective"].startswith(("binary", "multi"))
    features, labels, weights = data(5 if regression else params.get("num_class", 2))
    labels = labels + 1 if regression else labels
    initial = None
    if continued:
        initial = xgb.train(params, xgb.QuantileDMatrix(features, label=labels, max_bin=MAX_BIN), 1).save_raw("json")
    tracker, phases = _Tracker(), []
    address = tracker.start()
    facts: dict[str, object] = {}

    def site(rank: int) -> None:
        rows = slice(rank * N_ROWS // WORLD, (rank + 1) * N_ROWS // WORLD)
        reference = xgb.QuantileDMatrix(np.sort(features, axis=0)[::20], max_bin=MAX_BIN)
        matrix = xgb.QuantileDMatrix(
            features[rows],
            label=labels[rows],
            weight=weights[rows] if weighted else None,
            ref=reference,
            max_bin=MAX_BIN,
        )
        with xgb.collective.CommunicatorContext(
            dmlc_communicator="federated",
            federated_server_address=address,
            federated_world_size=WORLD,
            federated_rank=rank,
        ):
            booster = xgb.Booster(params, [matrix], model_file=initial)
            for number in range(ROUNDS):
                for phase, step in (
                    ("update", partial(booster.update, matrix, number)),
                    ("evaluate", partial(booster.eval_set, [(matrix, "train")], number)),
                ):
                    if rank == 0:
                        start = len(tracker.calls)
                    step()
                    if rank == 0:
                        phases.append([phase, number, tracker.calls[start:]])
        if rank == 0:
            facts["n_bins"] = int(matrix.get_quantile_cut()[0][-1]) - N_FEATURES

    in_threads(site, range(WORLD))
    tracker.stop()
    return {"xgboost": xgb.__version__, "case": case, **facts, "phases": phases}


if __name__ == "__main__":
    write_traces({name: record(case) for name, case in CASES.items()})
