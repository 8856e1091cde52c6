"""FATE's hetero SecureBoost of two parties on one machine, for ``bench_peers``: run by a Python that has pyfate 2.2.

    VEILBOOST_FATE=FOLDER FATE_PYTHON tests/bench/fate_lane.py --parties guest:9999 host:10000 --data_dir FOLDER/data

``FOLDER`` holds ``guest.npy`` (label first, then columns), ``host.npy`` and ``job.json``: trees, depth, bins and bits
of the key. FATE's own launcher starts a process for each party, without FATE-Flow; its standalone engine stores tables
and messages in LMDB files, and computes in as many processes for each party as the job says. Each party writes
``ROLE.json``: seconds of the training without reading, and bytes of what it pushed.
"""

import json
import os
import time
from pathlib import Path

FOLDER = Path(os.environ.get("VEILBOOST_FATE", "."))


def _count_bytes(sent):
    """Add to a party's count what it hands to the other, as stored: values of tables with their keys, and objects."""
    from fate.arch.computing.backends.standalone import standalone_raw

    federation = standalone_raw.Federation
    push_bytes, push_table = federation.push_bytes, federation.push_table

    def counted_bytes(self, v, name, tag, parties):
        sent["bytes"] += len(v) * len(parties)
        return push_bytes(self, v=v, name=name, tag=tag, parties=parties)

    def counted_table(self, table, name, tag, parties):
        sent["bytes"] += len(parties) * sum(len(key) + len(value) for key, value in table.collect())
        return push_table(self, table=table, name=name, tag=tag, parties=parties)

    federation.push_bytes, federation.push_table = counted_bytes, counted_table


def train(ctx):
    """Train at one party. Raises what FATE raises."""
    import numpy as np
    import pandas as pd
    from fate.arch.dataframe import PandasReader
    from fate.ml.ensemble import HeteroSecureBoostGuest, HeteroSecureBoostHost

    job, sent = json.loads((FOLDER / "job.json").read_text()), {"bytes": 0}
    _count_bytes(sent)
    role = "guest" if ctx.is_on_guest else "host"
    values = np.load(FOLDER / f"{role}.npy")
    names = [f"x{column}" for column in range(values.shape[1])]
    if role == "guest":
        names[0] = "y"
    ids = [str(row) for row in range(len(values))]
    frame = pd.DataFrame(values.astype(np.float64), columns=names)
    frame.insert(0, "match_id", ids)
    frame.insert(0, "sample_id", ids)
    label = {"label_name": "y"} if role == "guest" else {}
    reader = PandasReader(
        sample_id_name="sample_id", match_id_name="match_id", dtype="float32", partition=job["partitions"], **label
    )
    data = reader.to_frame(ctx, frame)
    began = time.perf_counter()
    shape = {"num_trees": job["trees"], "max_depth": job["depth"], "max_bin": job["bins"]}
    if role == "guest":
        ctx.cipher.set_phe(ctx.device, {"kind": "paillier", "key_length": job["key_bits"]})
        booster = HeteroSecureBoostGuest(objective="binary:bce", learning_rate=0.3, l2=1.0, min_child_weight=1, **shape)
    else:
        booster = HeteroSecureBoostHost(**shape)
    booster.fit(ctx, data)
    found = {"training_s": time.perf_counter() - began, **sent}
    if role == "guest":
        found["losses"] = [float(loss) for loss in booster._loss_history]
        found["nodes"] = [len(tree.get_nodes()) for tree in booster.get_trees()]
    (FOLDER / f"{role}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    from fate.arch.launchers.multiprocess_launcher import launch

    launch(train)
