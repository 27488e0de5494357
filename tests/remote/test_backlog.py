"""When a full reward server is asked for room again, and what is sent then."""

from __future__ import annotations

import asyncio
import random

from qreward_plugins.client.backlog import Backlog
from qreward_plugins.server.admission import Admission
from qreward_plugins.server.replies import Refused
from qreward_plugins.simulation import run


def test_it_is_asked_after_the_named_time_and_then_every_half_second():
    asked = []

    async def main():
        loop = asyncio.get_running_loop()
        backlog = Backlog(ask=lambda waiting: asked.append((round(loop.time() - began_at, 2), list(waiting))))
        began_at = loop.time()
        backlog.put_off([3, 1, 2], 0.2)
        for _ in range(4):
            await asyncio.sleep(1)
            assert backlog.take(0, order=int) == []
        assert backlog.take(2, order=int) == [1, 2]
        assert 3 in backlog
        assert 1 not in backlog
        await asyncio.sleep(1.1)
        backlog.put_off([4], 60)
        backlog.forget(3)
        await asyncio.sleep(1)
        backlog.forget(4)
        assert backlog.take(5, order=int) == []
        await asyncio.sleep(60)
        backlog.close()

    run(main())
    first = [(when, [3, 1, 2]) for when in (0.2, 1.4, 2.5, 3.5)]
    assert asked == [*first, (4.5, [3]), (5.6, [4])]


class Server:
    """A reward server that gives `rate` outcomes a second, each in its turn."""

    def __init__(self, rate):
        self.admission, self.rate, self.queue = Admission(64), rate, asyncio.Queue()

    async def work(self):
        while True:
            client, sample = await self.queue.get()
            await asyncio.sleep(1 / self.rate)
            self.admission.ended(1)
            if sample in client.due_at:
                client.scored += 1
                client.forget(sample)


class Client:
    """Sends and asks as `RemoteScoring` does, without a connection."""

    def __init__(self, server, deadline_s):
        self.server, self.deadline_s, self.scored, self.due_at = server, deadline_s, 0, {}
        self.backlog = Backlog(ask=self.ask)

    def submit(self, sample):
        loop = asyncio.get_running_loop()
        self.due_at[sample] = loop.time() + self.deadline_s
        loop.call_later(self.deadline_s, self.forget, sample)
        if len(self.backlog):
            self.backlog.add([sample])
        else:
            self.send([sample])

    def send(self, samples):
        loop = asyncio.get_running_loop()
        for sample in samples:
            try:
                self.server.admission.admit_some(1, 0.95 * (self.due_at[sample] - loop.time()))
            except Refused:
                loop.call_later(0.001, self.backlog.put_off, [sample], 1.0)
            else:
                self.server.queue.put_nowait((self, sample))

    def ask(self, waiting):
        loop = asyncio.get_running_loop()
        count = self.server.admission.room(len(waiting), max(map(self.due_at.get, waiting)) - loop.time())
        loop.call_later(0.001, lambda: self.send(self.backlog.take(count, order=int)))

    def forget(self, sample):
        self.due_at.pop(sample, None)
        self.backlog.forget(sample)


def test_a_client_without_outcomes_gets_room_beside_clients_with_many():
    async def main():
        server = Server(rate=20)
        working = asyncio.ensure_future(server.work())
        clients = [Client(server, deadline_s=10) for _ in range(20)]

        async def stream(number, client):
            rng = random.Random(number)
            for sample in range(300):
                await asyncio.sleep(rng.expovariate(1.3))
                client.submit(sample)

        await asyncio.gather(*(stream(number, client) for number, client in enumerate(clients)))
        await asyncio.sleep(20)
        working.cancel()
        return [client.scored for client in clients]

    scored = run(main())
    assert sum(scored) > 4500, "the server gives 4,800 outcomes meanwhile, of 6,000 samples"
    assert min(scored) > 120, "it was 29 of 300 where each outcome asked for room"
