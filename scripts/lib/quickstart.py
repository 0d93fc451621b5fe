"""Make the SmolLM2 checkpoint, package it, serve it with TorchServe, and ask it something.

Run by ``scripts/quickstart`` inside the project's virtual environment.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from server import Server, request
from steps import StepError, Steps

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = "smollm2"
QUESTION = "What is the capital of France?"
MAX_NEW_TOKENS = 128

_READY_TIMEOUT_S = 600.0
_ANSWER_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Settings:
    """What the environment variables choose."""

    state: Path
    launch: str
    stages: int

    @classmethod
    def from_environment(cls) -> Settings:
        """Read and check the variables.

        Raises:
            StepError: Naming the variable, what it holds, and what it may hold.
        """
        launch = os.environ.get("TS_PIPPY_LAUNCH") or "torchrun"
        if launch not in ("torchrun", "spawn"):
            raise StepError(f"TS_PIPPY_LAUNCH is {launch!r}; it may be torchrun or spawn.")
        stages = os.environ.get("TS_PIPPY_STAGES") or "2"
        if not (stages.isdecimal() and 1 <= int(stages) <= 30):
            raise StepError(f"TS_PIPPY_STAGES is {stages!r}; it may be 1 to 30, the number of the model's layers.")
        return cls(Path(os.environ["TS_PIPPY_STATE"]), launch, int(stages))

    @property
    def checkpoint(self) -> Path:
        """The folder of the model."""
        return self.state / "checkpoints" / "SmolLM2-135M-Instruct"

    def fingerprint(self) -> dict[str, object]:
        """Return what a running server must have been started with to be used again."""
        code = hashlib.sha256()
        for source in sorted((REPOSITORY / "ts_pippy_handler").glob("*.py")):
            code.update(source.read_bytes())
        return {
            "launch": self.launch,
            "stages": self.stages,
            "checkpoint": str(self.checkpoint),
            "python": sys.prefix,
            "code": code.hexdigest(),
        }


@contextmanager
def alone(state: Path) -> Iterator[None]:
    """Hold the state folder: two quickstarts at once would start two servers and lose one."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StepError(f"Another quickstart is at work in {state}; wait until it is done.") from None
        yield


def make_checkpoint(steps: Steps, settings: Settings) -> None:
    """Write the model that scripts/install brought as a Hugging Face checkpoint, unless it is there."""
    if (settings.checkpoint / "config.json").is_file():
        return
    script = REPOSITORY / "examples" / "large_models" / "smollm2_cpu" / "make_checkpoint.py"
    with steps.step("Checkpoint of SmolLM2-135M-Instruct"):
        steps.run([sys.executable, str(script), str(settings.checkpoint)], timeout_s=900)


def package(steps: Steps, settings: Settings) -> None:
    """Make the model archive."""
    command = ["ts-pippy", "package", str(settings.checkpoint), "--name", MODEL, "--stages", str(settings.stages)]
    command += ["--launch", settings.launch, "-o", str(settings.state / "store"), "--force"]
    with steps.step(f"Model archive, {settings.stages} stages, launched by {settings.launch}"):
        steps.run(command, timeout_s=300, env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})


def serve(settings: Settings) -> Server:
    """Return a server that is ready, starting it unless one with these settings runs."""
    server = Server(settings.state, MODEL)
    fingerprint = settings.fingerprint()
    if server.serves(fingerprint):
        print("==> TorchServe is already running with these settings")
        return server
    steps = Steps(settings.state / "quickstart.log")
    if server.record is not None:
        with steps.step("Stopping the previous server"):
            server.stop()
    make_checkpoint(steps, settings)
    package(steps, settings)
    try:
        with steps.step("TorchServe, until it answers"):
            server.start(f"{MODEL}.mar", fingerprint)
            server.wait_ready(steps, _READY_TIMEOUT_S)
    except BaseException:
        server.stop(grace_s=0)
        raise
    return server


def ask(server: Server, settings: Settings, question: str) -> None:
    """Send a chat prompt over HTTP, and print it with its answer and what to do next.

    Raises:
        StepError: When the answer is not one.
    """
    body = {"messages": [{"role": "user", "content": question}], "max_new_tokens": MAX_NEW_TOKENS}
    start = time.monotonic()
    try:
        status, reply = request(server.url, json.dumps(body).encode(), timeout_s=_ANSWER_TIMEOUT_S)
    except OSError as error:
        raise StepError(f"No answer from {server.url} ({error}). The log is {server.log}") from None
    if status != 200:
        raise StepError(f"Status {status} from {server.url}: {reply.decode(errors='replace')}")
    answer, seconds = json.loads(reply), time.monotonic() - start
    ask_more = shlex.quote(json.dumps({"messages": [{"role": "user", "content": "Name three fruits."}]}))
    print(f"""
Question: {question}
Answer:   {answer["text"].strip()}

({answer["usage"]["completion_tokens"]} tokens in {seconds:.1f} s, {settings.stages} stages)

Ask more:  bash scripts/quickstart "Name three fruits."
           curl {server.url} -H 'Content-Type: application/json' -d {ask_more}
Stop:      bash scripts/quickstart stop
Log:       {server.log}
It listens on this machine only, without asking for a token.""")


def stop(settings: Settings) -> None:
    """Stop the server and say so."""
    print("Stopped." if Server(settings.state, MODEL).stop() else "Nothing is running.")


def _terminated(_signal_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Ask the question given, or stop; the exit status says whether it worked."""
    signal.signal(signal.SIGTERM, _terminated)
    question = sys.argv[1] if len(sys.argv) > 1 else QUESTION
    try:
        settings = Settings.from_environment()
        with alone(settings.state):
            if question == "stop":
                stop(settings)
            else:
                ask(serve(settings), settings, question)
    except StepError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read the output has enough, as in `quickstart | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
