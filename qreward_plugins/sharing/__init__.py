"""Shares the limits of sources between the processes of a Ray job or of a machine. In order:

`membership`      the worker's loop: reports what waits, and applies the keeper's answers; which keeper it asks
`member`          the worker's rules, without a clock and a network
`messages`        what they tell each other
`keeper`          the keeper: which reports it answers, when, and with what
`division`        divides one limit between the workers by max-min fairness; the sum never exceeds it
`learning`        learns a limit that nobody declared, from what all workers hear
`ray_keeper`      the keeper as an actor of the Ray job
`machine_keeper`  the keeper as a process of this machine
`machine_channel` the connection to it, and the directory in which the processes of a machine find it

This page imports nothing, because the process of a machine's keeper starts here and must stay small.
"""
