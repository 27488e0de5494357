"""The reward server: one engine behind HTTP, and the calls of clients of language models over its sources.

- `server`: `RewardServer` with `POST /score`, and its facts. `forms`: bodies and replies, ours and those of others.
- `access`: who may ask. `exposition`: its metrics.
- `proxy`: passes the requests of other clients on. `transport` puts it into httpx clients. `formats`: their requests.

    async with RewardEngine("judges.yaml") as engine, RewardServer(engine, port=8080) as server:
        ...
"""
