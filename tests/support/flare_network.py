"""Cells as FLARE has them, without FLARE: messages may be lost, doubled, reordered or forged."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from nvflare.apis.fl_constant import CellMessageAuthHeaderKey
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message

from nvflare_plugins.flare.transport import CHANNEL


class Network:
    """Delivers messages in threads of their own, as FLARE's frame pool does, each after ``longest_s`` at the most."""

    def __init__(self, longest_s: float = 0.003) -> None:
        self._longest_s = longest_s
        self.cells: dict[str, FakeCell] = {}
        self.rule: Callable[[str, str, Message], int] = lambda origin, topic, message: 1  # how many copies arrive
        self.log: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        self._under_way: list[threading.Timer] = []

    def deliver(self, origin: str, target: str, topic: str, message: Message) -> None:
        with self.lock:
            self.log.append((origin, topic))
            copies = self.rule(origin, topic, message)
        payload = bytes(message.payload) if message.payload is not None else None
        callback = self.cells[target].callbacks.get((CHANNEL, topic)) if target in self.cells else None
        for _ in range(copies if callback is not None else 0):  # whoever is not there yet hears nothing
            copy = Message(dict(message.headers), payload)
            delivery = threading.Timer(random.uniform(0, self._longest_s), callback, [copy])
            with self.lock:
                self._under_way.append(delivery)
            delivery.start()

    def settle(self) -> None:
        """Wait until every message sent so far has been delivered, and those that deliveries sent."""
        while True:
            with self.lock:
                started, self._under_way = [one for one in self._under_way if one.ident is not None], []
            if not started:
                return
            for delivery in started:
                delivery.join()

    def count(self, origin: str, topic: str) -> int:
        with self.lock:
            return self.log.count((origin, topic))


class FakeCell:
    def __init__(self, network: Network, name: str, client_name: str = "") -> None:
        self.network, self.name, self.client_name = network, name, client_name
        self.callbacks: dict[tuple[str, str], Callable[[Message], None]] = {}
        self.is_closed = False
        network.cells[name] = self

    def get_fqcn(self) -> str:
        return self.name

    def register_request_cb(self, channel: str, topic: str, cb: Callable[[Message], None]) -> None:
        self.callbacks[channel, topic] = cb

    def fire_and_forget(
        self, channel: str, topic: str, targets: str, message: Message, *, optional: bool = False
    ) -> dict[str, str]:
        if self.is_closed:
            raise RuntimeError("Messenger is not running")
        message.set_header(MessageHeaderKey.ORIGIN, self.name)
        if self.client_name:
            message.set_header(CellMessageAuthHeaderKey.CLIENT_NAME, self.client_name)
        self.network.deliver(self.name, targets, topic, message)
        return {targets: ""}
