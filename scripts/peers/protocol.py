"""Requests and answers, one line of JSON each, over standard input and output."""

import json
import subprocess
import sys
from pathlib import Path


class Process:
    """A worker process that is asked one thing at a time."""

    def __init__(self, name: str, command: list[str], log: Path, env: dict[str, str]):
        self.name, self.log = name, log
        with log.open("w") as errors:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            self.process = subprocess.Popen(command, text=True, env=env, **pipes)

    def ask(self, op: str, **request) -> dict:
        """Sends a request and waits for its answer."""
        self.process.stdin.write(json.dumps({"op": op, **request}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended during `{op}`; its last words: {self.log.read_text()[-2000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise SystemExit(f"{self.name} cannot do `{op}`: {answer['error']}")
        return answer

    def close(self) -> None:
        """Lets the worker end."""
        self.process.stdin.close()
        self.process.wait()


def serve(worker) -> None:
    """Answers requests with the worker's methods of their names until input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request["op"])(request)
        except Exception as error:  # the driver decides what a failure means
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
