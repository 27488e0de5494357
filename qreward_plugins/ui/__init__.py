"""The page of `qreward ui`: a run's rewards over its steps, a step's samples, and the whole story of a sample.

It reads journals, also while runs write them, and changes nothing. Pages are made on the server from what the journal
holds; they need no network, and work without JavaScript, which adds keys and the note of new samples.

- `totals` adds entries up by step, as they come.
- `samples` finds the samples of a step: filtered, sorted, by pages.
- `comparison` has two judges on the same samples.
- `figures` computes in other processes what takes seconds.
- `charts` draws in SVG.
- `pages` answers requests.
"""
