"""Every byte between the parties of an encrypted training is searched for what must stay at its owner."""

from __future__ import annotations

import numpy as np
import pytest

from nvflare_plugins.growth.objectives import Objective
from nvflare_plugins.kinds.vertical import key_owner
from nvflare_plugins.kinds.vertical.messages import Message, to_bytes
from tests.support import in_process_link
from tests.support.searching import found_every_time
from tests.support.vertical_federation import Joined, federate, make_clear, make_elgamal, make_paillier, trees


def data() -> Joined:
    rng = np.random.default_rng(5)
    features = rng.normal(size=(120, 6)).astype(np.float32)
    label = (features[:, 1] + features[:, 4] + rng.normal(size=120) * 0.3 > 0).astype(np.float32)
    return Joined(features, label, (2, 2, 2), (features[:30], label[:30]))


def recorded(monkeypatch, scheme) -> tuple[bytes, list[bytes], object]:
    """Train; return all bytes that travelled, the secrets of the active party, and the outcome."""
    wire, secrets = [], []

    def note(message: Message) -> bytes:
        wire.append(to_bytes(message))
        return wire[-1]

    def listen(cls):
        honest = cls.encrypt

        def encrypt(self, g, h):
            for pair in np.stack([g, h], axis=1)[:40]:
                secrets.append(pair.astype("<i8").tobytes())
            return honest(self, g, h)

        monkeypatch.setattr(cls, "encrypt", encrypt)

    honest = Objective.gradients

    def take(*args):
        found = honest(*args)
        secrets.extend(pair.tobytes() for pair in found[0, :40])
        return found

    monkeypatch.setattr(in_process_link, "to_bytes", note)
    monkeypatch.setattr(Objective, "gradients", take)
    listen(key_owner.EncryptedGradientOwner)
    listen(key_owner.ElGamalGradientOwner)
    listen(key_owner.ClearGradientOwner)
    params = {"objective": "binary:logistic", "max_depth": 3, "max_bin": 8, "base_score": 0.37}
    outcome = federate(data(), params, 2, scheme=scheme)
    return b"".join(wire), secrets, outcome


@pytest.mark.parametrize("scheme", [make_paillier, make_elgamal])
def test_no_gradient_leaf_or_threshold_is_on_the_wire(monkeypatch, scheme):
    def search(run: int) -> list[bytes]:
        wire, secrets, outcome = recorded(monkeypatch, scheme)
        assert len(secrets) > 100 and len(wire) > 100_000
        assert not [secret for secret in secrets if secret in wire]
        numbers = [
            x for tree in trees(outcome.result.model) for x in [*tree["split_conditions"], *tree["base_weights"]]
        ]
        thresholds = [split.threshold for passive in outcome.passives for split in passive.table.values()]
        assert len(numbers) > 20 and thresholds
        patterns = [np.float32(x).tobytes() for x in numbers if abs(x) > 1e-6] + [x.tobytes() for x in thresholds]
        return [pattern for pattern in patterns if pattern in wire]

    assert not found_every_time(search)


def test_the_search_finds_what_the_stand_in_shows(monkeypatch):
    wire, secrets, _ = recorded(monkeypatch, make_clear)
    assert [secret for secret in secrets if secret in wire]


@pytest.mark.parametrize("make", ["passive", "owner", "split"])
def test_nothing_secret_is_printed(make):
    outcome = federate(data(), {"objective": "binary:logistic", "max_depth": 2}, 1)
    split = next(iter(outcome.passives[0].table.values() or outcome.passives[1].table.values()))
    shown = {"passive": outcome.passives, "owner": make_paillier(120)[0], "split": split}[make]
    assert str(split.threshold) not in repr(shown) and "array" not in repr(shown)
