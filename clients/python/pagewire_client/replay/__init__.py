"""`pagewire replay`: runs a recorded control stream on a worker and compares every result.

Owns: reading a recording, playing it, saying what differs first. Does not know: models, devices,
how a plan was decided. It starts a worker as a process; it imports none.
"""
