"""The reward server: `POST /score`, and the forms of programs that ask for rewards over HTTP already.

`model_calls` and `transport` pass on the requests of clients of language models.
"""
