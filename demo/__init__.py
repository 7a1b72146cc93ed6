"""Runs the whole system as real processes: the demos, and the launcher that tests use too.

Owns: processes, their logs and ports, the files under `.pagewire/`. Does not know what happens
inside a process; it talks to them as any client would.
"""
