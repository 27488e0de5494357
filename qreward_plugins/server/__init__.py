"""The reward server: one engine behind HTTP, and the calls of clients of language models over its sources.

- `server`: `RewardServer` with `POST /score`. `forms`: bodies and replies, ours and those of other programs.
- `facts`: what a server says of itself. `exposition`: its metrics.
- `model_calls`: passes clients' requests on. `proxy` puts it behind the server's port, `transport` into httpx clients.

    async with RewardEngine("judges.yaml") as engine, RewardServer(engine, port=8080) as server:
        ...
"""
