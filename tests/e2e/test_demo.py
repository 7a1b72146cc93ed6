"""`python -m demo` as people run it: real processes, a real Valkey, the real model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from demo.leftovers import start_time_of
from demo.processes import child_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.redis]

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 150


class Demo:
    """A demo in a process of its own, its output read line by line."""

    def __init__(self, base_dir: Path, model_dir: Path, cwd: Path, **variables: str) -> None:
        self.base_dir = base_dir
        self.lines: list[str] = []
        self._news = threading.Condition()
        environment = child_environment(ROOT, os.environ)
        del environment["no_grpc_proxy"]  # the demo's own business
        self._process = subprocess.Popen(
            [sys.executable, "-m", "demo"],
            cwd=cwd,
            env={
                **environment,
                "PAGEWIRE_DIR": str(base_dir),
                "MODEL": str(model_dir),
                "DEVICE": "cpu",
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return "".join(self.lines)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                with self._news:
                    self.lines.append(line)
                    self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for(self, text: str) -> None:
        with self._news:
            found = self._news.wait_for(
                lambda: text in self.text or not self._reader.is_alive(), timeout=PATIENCE_S
            )
        assert found, self.text
        assert text in self.text, self.text

    def children(self) -> dict[str, tuple[int, str]]:
        state = json.loads((self.base_dir / "run" / "processes.json").read_text())
        return {child["name"]: (child["pid"], child["start_time"]) for child in state}

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        code = self._process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self.wait()


@pytest.fixture
def demos(tmp_path: Path, model_dir: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path, model_dir)
    yield starter
    starter.close()


class Starter:
    """Starts demos that share one directory, from a working directory that is not the checkout."""

    def __init__(self, tmp_path: Path, model_dir: Path) -> None:
        self._tmp_path = tmp_path
        self._model_dir = model_dir
        self._demos: list[Demo] = []

    def __call__(self, **variables: str) -> Demo:
        demo = Demo(self._tmp_path / "pagewire", self._model_dir, cwd=self._tmp_path, **variables)
        self._demos.append(demo)
        return demo

    def close(self) -> None:
        for demo in self._demos:
            demo.close()


def assert_gone(children: dict[str, tuple[int, str]]) -> None:
    alive = {name: pid for name, (pid, start) in children.items() if start_time_of(pid) == start}
    assert alive == {}


def test_demo_answers_and_stops_everything(demos):
    # A proxy that nobody answers for: nothing on this machine may be called through it.
    demo = demos(WORKERS="2", http_proxy="http://127.0.0.1:9")
    demo.wait_for("started")
    children = demo.children()
    assert set(children) == {"valkey", "control-plane", "worker-0", "worker-1"}
    assert demo.wait() == 0, demo.text
    assert "Paris" in demo.text
    assert re.search(r"first token .* s after the question", demo.text)
    assert re.search(r"pagewire(_client\.cli)? chat --server", demo.text)
    for caller in ("grpcurl", "from pagewire_client", "node clients/node"):
        assert caller in demo.text
    assert_gone(children)
    assert not (demo.base_dir / "run" / "processes.json").exists()


def test_second_demo_in_one_directory_says_so_and_interrupt_ends_the_first(demos):
    first = demos(KEEP="1", STORE="memory")
    first.wait_for("Running until Ctrl-C")
    children = first.children()
    assert set(children) == {"control-plane", "worker-0"}
    second = demos()
    assert second.wait() == 1
    assert f"another demo is running in this checkout: make demo, pid {first.pid}" in second.text
    first.signal(signal.SIGINT)
    assert first.wait() == 128 + signal.SIGINT, first.text
    assert_gone(children)


@pytest.mark.parametrize("moment", ["model", "store", "started", "> What is"])
def test_interrupt_at_any_moment_leaves_nothing(demos, moment):
    demo = demos()
    demo.wait_for(moment)
    path = demo.base_dir / "run" / "processes.json"
    children = demo.children() if path.exists() else {}
    demo.signal(signal.SIGINT)
    assert demo.wait() == 128 + signal.SIGINT, demo.text
    assert_gone(children)
    assert not path.exists()


def test_what_a_killed_demo_left_behind_is_ended_by_the_next(demos):
    killed = demos(KEEP="1")
    killed.wait_for("Running until Ctrl-C")
    children = killed.children()
    killed.signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    # One of them hangs, and one pid now belongs to somebody else: to us.
    os.kill(children["worker-0"][0], signal.SIGSTOP)
    path = killed.base_dir / "run" / "processes.json"
    state = json.loads(path.read_text())
    state.append({"name": "stranger", "pid": os.getpid(), "start_time": "another boot:1"})
    path.write_text(json.dumps(state))
    demo = demos()
    assert demo.wait() == 0, demo.text
    assert demo.text.count("left behind by an earlier run") == len(children)
    assert "stranger" not in demo.text
    assert "Paris" in demo.text
    assert_gone(children)


def test_death_of_a_child_is_shown_and_fails_the_demo(demos):
    demo = demos(KEEP="1", STORE="memory")
    demo.wait_for("Running until Ctrl-C")
    children = demo.children()
    os.kill(children["control-plane"][0], signal.SIGKILL)
    assert demo.wait() == 1
    assert "control-plane ended by SIGKILL" in demo.text
    assert "worker attached" in demo.text  # the end of its log
    assert_gone(children)


def test_child_that_cannot_start_fails_the_demo(demos, tmp_path):
    broken = tmp_path / "broken-model"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    demo = demos(MODEL=str(broken), STORE="memory")
    assert demo.wait() == 1
    assert re.search(r"(control-plane|worker-0) ended with code [1-9]", demo.text), demo.text


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"WORKERS": "none"}, "WORKERS must be a number"),
        ({"DEVICE": "tpu"}, "DEVICE must be auto, cpu or cuda"),
        ({"STORE": "disk"}, "STORE must be valkey, memory or a redis:// URL"),
        ({"MODEL": "/nowhere"}, "MODEL=/nowhere is neither a directory"),
    ],
)
def test_wrong_variable_is_named(demos, variables, complaint):
    demo = demos(**variables)
    assert demo.wait() == 1
    assert complaint in demo.text
