"""Any order of work, faults and recoveries on the control stream leaves every request right."""

from __future__ import annotations

from control_stream_machine import ControlStreamMachine
from hypothesis import HealthCheck, settings

TestControlStream = ControlStreamMachine.TestCase
TestControlStream.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
