"""Tasks, threads, processes, directories and Ray actors: what the operating system and the event loop give.

It knows nothing of samples, sources and judges.
"""
