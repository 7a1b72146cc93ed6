"""Records the control stream of every replica into files that `pagewire replay` runs again.

The event loop only puts bytes into a queue; a thread writes them. What the disk cannot take in time
is left out, serving never waits for it.

Owns: the queue and its bound, the thread, which replicas are kept. Does not know: what messages
mean, and hardly what files look like.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from typing import TYPE_CHECKING

from control_plane.recording_files import RecordingCounts, ReplicaFiles, remove_recording
from control_plane.replica import PROTOCOL_VERSION
from protos.pagewire.v1 import recording_pb2, worker_pb2
from protos.recording_file import DIRECTORY_PREFIX
from protos.software_version import software_version

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from control_plane.errors import ServingError
    from control_plane.recording_config import RecordingConfig
    from control_plane.replica import WorkerFacts

logger = logging.getLogger(__name__)

# A worker without a name of its own is a new replica with every start; the oldest ones go.
MAX_REPLICAS = 32
# The thread writes what has gathered, not every message by itself.
_GATHER_S = 0.02
_END_TIMEOUT_S = 5.0
# Of a message in the queue, beside its bytes.
_ITEM_BYTES = 200

_Item = tuple["ReplicaRecording", "Callable[[ReplicaFiles], None]", int]


class ReplicaRecording:
    """One replica's observer. Lives on the event loop; `files` and `is_stopped` are the thread's.

    Attributes:
        is_attached: A stream is open.
        is_stopped: Nothing can be written any more.
        num_missing: Messages left out since the recording has a gap; 0: it has none.
    """

    def __init__(self, recorder: Recorder, replica_id: str, model: str) -> None:
        """Nothing is written before a worker attaches."""
        self.replica_id = replica_id
        self.model = model
        self.is_attached = False
        self.is_stopped = False
        self.num_missing = 0
        self.files: ReplicaFiles | None = None
        self._recorder = recorder
        self._hello: bytes | None = None
        self._welcome: bytes | None = None

    def attached(self, facts: WorkerFacts) -> None:
        """A stream began."""
        self.is_attached = True
        self._welcome = None
        message = worker_pb2.WorkerMessage(hello=hello_of(facts))
        self._hello = None  # a gap that ends here is followed by it
        data = message.SerializeToString()
        self._put_received(data, ends_gap=True)
        self._hello = data

    def sent(self, message: worker_pb2.ControlMessage) -> None:
        """A message was queued for the worker."""
        data = message.SerializeToString()
        offset_us = self._recorder.offset_us()

        def write(files: ReplicaFiles) -> None:
            record = recording_pb2.Record(offset_us=offset_us)
            record.sent.ParseFromString(data)
            files.append(record)

        self._put(write, len(data), offset_us, ends_gap=message.HasField("reset"))
        if message.HasField("welcome"):
            self._welcome = data

    def received(self, message: worker_pb2.WorkerMessage) -> None:
        """A message came in."""
        self._put_received(message.SerializeToString())

    def ended(self, error: ServingError | None) -> None:
        """The stream ended."""
        self.is_attached = False
        offset_us = self._recorder.offset_us()
        event = recording_pb2.StreamEnded(reason="" if error is None else error.reason)
        record = recording_pb2.Record(offset_us=offset_us, stream_ended=event)
        self._put(lambda files: files.append(record), 0, offset_us)
        self._hello = self._welcome = None

    def _put_received(self, data: bytes, *, ends_gap: bool = False) -> None:
        offset_us = self._recorder.offset_us()

        def write(files: ReplicaFiles) -> None:
            record = recording_pb2.Record(offset_us=offset_us)
            record.received.ParseFromString(data)
            files.append(record)

        self._put(write, len(data), offset_us, ends_gap=ends_gap)

    def _put(
        self,
        write: Callable[[ReplicaFiles], None],
        size: int,
        offset_us: int,
        *,
        ends_gap: bool = False,
    ) -> None:
        if self.is_stopped:
            return
        recorder = self._recorder
        if self.num_missing and ends_gap and recorder.has_room(size):
            num_missing, hello, welcome = self.num_missing, self._hello, self._welcome
            logger.info(
                "recording goes on: replica=%s missing=%d", self.replica_id, self.num_missing
            )
            self.num_missing = 0
            recorder.put(self, lambda f: f.lose(num_missing, offset_us, hello, welcome), 0)
        if not self.num_missing and recorder.has_room(size):
            recorder.put(self, write, size)
            return
        if not self.num_missing:
            logger.warning(
                "recording has a gap: replica=%s cause=the disk does not keep up", self.replica_id
            )
            recorder.num_gaps += 1
        self.num_missing += 1
        recorder.num_missing += 1


class Recorder:
    """All recordings of this process.

    Attributes:
        counts: What the thread did.
        num_gaps: Times that messages began to be left out.
        num_missing: Messages left out.
    """

    def __init__(self, config: RecordingConfig, *, deployment: str) -> None:
        """Nothing runs before `start`."""
        self.counts = RecordingCounts()
        self.num_gaps = 0
        self.num_missing = 0
        self._config = config
        self._deployment = deployment
        self._version = software_version()
        self._started_s = time.monotonic()
        self._started_at_ms = int(time.time() * 1000)
        self._replicas: dict[str, ReplicaRecording] = {}
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        # Each is written by one side only, so no lock is needed.
        self._num_bytes_put = 0
        self._num_bytes_taken = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        logger.info(
            "recording control streams, prompts included: directory=%s", self._config.directory
        )
        self._thread.start()

    def close(self) -> None:
        """Write what is queued and end. Blocks; gives up on a disk that hangs."""
        self._closing.set()
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(_END_TIMEOUT_S)
            if self._thread.is_alive():
                logger.warning("recording cut off: the disk does not answer")

    def observe(self, replica_id: str, model: str) -> ReplicaRecording:
        """The observer of a replica, the same one if it was there before."""
        recording = self._replicas.get(replica_id)
        if recording is None or recording.model != model:
            if len(self._replicas) >= 2 * MAX_REPLICAS:
                self._replicas = {i: r for i, r in self._replicas.items() if r.is_attached}
            recording = self._replicas[replica_id] = ReplicaRecording(self, replica_id, model)
        return recording

    @property
    def num_active(self) -> int:
        """Replicas that are attached and recorded without a gap."""
        return sum(
            r.is_attached and not r.is_stopped and not r.num_missing
            for r in self._replicas.values()
        )

    def offset_us(self) -> int:
        """Microseconds since the recordings began."""
        return int((time.monotonic() - self._started_s) * 1e6)

    def has_room(self, size: int) -> bool:
        """Whether so many bytes may wait for the thread."""
        backlog = self._num_bytes_put - self._num_bytes_taken
        return backlog + size + _ITEM_BYTES <= self._config.max_backlog_bytes

    def put(
        self, recording: ReplicaRecording, write: Callable[[ReplicaFiles], None], size: int
    ) -> None:
        """Queue what the thread shall do; never blocks."""
        self._num_bytes_put += size + _ITEM_BYTES
        self._queue.put((recording, write, size + _ITEM_BYTES))

    # The thread.

    def _run(self) -> None:
        written: set[ReplicaRecording] = set()
        everybody: set[ReplicaRecording] = set()
        while True:
            item = self._queue.get()
            while item is not None:
                recording, write, size = item
                self._num_bytes_taken += size
                self._guard(recording, lambda r=recording, w=write: w(self._files_of(r, everybody)))
                written.add(recording)
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            for recording in written:
                self._guard(recording, lambda r=recording: r.files and r.files.flush())
            written.clear()
            if self._closing.is_set() and self._queue.empty():
                break
            self._closing.wait(_GATHER_S)
        for recording in everybody:
            self._guard(recording, lambda r=recording: r.files and r.files.end(self.offset_us()))

    def _guard(self, recording: ReplicaRecording, action: Callable[[], object]) -> None:
        """Whatever fails here costs a recording and nothing else."""
        if recording.is_stopped:
            return
        try:
            action()
        except OSError as error:
            logger.warning(
                "recording stopped: replica=%s error=%s", recording.replica_id, error.strerror
            )
        except Exception:
            logger.exception("recording stopped: replica=%s", recording.replica_id)
        else:
            return
        self.counts.num_failures += 1
        recording.is_stopped = True
        if recording.files is not None:
            recording.files.abandon()

    def _files_of(
        self, recording: ReplicaRecording, everybody: set[ReplicaRecording]
    ) -> ReplicaFiles:
        if recording.files is None:
            header = recording_pb2.SegmentHeader(
                pagewire_version=self._version,
                deployment=self._deployment,
                model=recording.model,
                replica_id=recording.replica_id,
                recording_id=os.urandom(16),
                started_at_ms=self._started_at_ms,
            )
            files = ReplicaFiles(
                self._config.directory,
                header,
                max_bytes=self._config.max_bytes,
                counts=self.counts,
            )
            self._make_room(files.directory, everybody)
            files.open()
            recording.files = files
            everybody.add(recording)
        return recording.files

    def _make_room(self, directory: Path, everybody: set[ReplicaRecording]) -> None:
        """Remove the recordings that ended longest ago if there are too many replicas."""
        others = [
            path
            for path in self._config.directory.iterdir()
            if path.name.startswith(DIRECTORY_PREFIX) and path != directory and path.is_dir()
        ]
        open_files = {r.files.directory: r for r in everybody if r.files is not None}
        idle = [p for p in others if p not in open_files or not open_files[p].is_attached]
        idle.sort(key=lambda path: path.stat().st_mtime)
        for path in idle[: max(0, len(others) + 1 - MAX_REPLICAS)]:
            recording = open_files.get(path)
            if recording is not None:
                everybody.discard(recording)
                if recording.files is not None:
                    recording.files.abandon()
                recording.files = None
            remove_recording(path)


def hello_of(facts: WorkerFacts) -> worker_pb2.Hello:
    """The Hello that the facts were read from."""
    geometry = facts.geometry
    return worker_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        worker_id=facts.worker_id,
        replica_id=facts.replica_id,
        rank=facts.rank,
        tp_size=facts.tp_size,
        epoch=facts.epoch,
        applied_version=facts.applied_version,
        highest_term=facts.highest_term,
        model_fingerprint=facts.model_fingerprint,
        kv_geometry=worker_pb2.KvGeometry(
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_size=geometry.head_size,
            dtype=geometry.dtype,
            block_size=geometry.block_size,
        ),
        num_blocks=facts.num_blocks,
        max_num_seqs=facts.max_num_seqs,
        max_model_len=facts.max_model_len,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        backend=facts.backend,
        device=facts.device,
        software_version=facts.software_version,
    )
