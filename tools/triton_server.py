"""Run a real Triton Inference Server on loopback, without a GPU and without a container.

The wheel `nvidia-pytriton` contains the server with its Python backend. This arranges the wheel's parts as a server
installation in a temporary directory, starts it on three free ports of 127.0.0.1, waits until it serves, and stops it:

    python tools/triton_server.py REPOSITORY [-- more tritonserver options]

The interpreter that runs this file is the one whose packages the models see: it must have ddtree-trt, nvidia-pytriton
and NumPy 1.26 (this server's Python backend was built against it).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 120.0
_POLL_S = 0.1


class ServerFailed(RuntimeError):
    """The server did not start, died, or did not stop cleanly; the text ends as its log does."""


class TritonServer:
    """A server process. Use it as a context manager; leaving it fails if the server died meanwhile.

    Args:
        repository: a model repository. Models that cannot be loaded do not stop the others.
        options: more options of `tritonserver`, e.g. ["--strict-readiness=false"].
        python: the directory of the `python3` that models run in, of the same Python version as this one.
    """

    def __init__(self, repository: Path, options: Sequence[str] = (), *, python: Path | None = None) -> None:
        self.repository, self.options = repository.resolve(), list(options)
        self.python = python or Path(sys.executable).parent
        self.id = f"ddtree-{uuid.uuid4().hex[:12]}"
        self._home = Path(tempfile.mkdtemp(prefix="ddtree-triton-"))
        self.log_path = self._home / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        http, grpc, metrics = _free_ports(3)
        self.http, self.grpc, self.metrics_address = (f"127.0.0.1:{port}" for port in (http, grpc, metrics))

    def __enter__(self) -> TritonServer:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.stop()
        else:
            print(self.trouble(), file=sys.stderr)
            self.kill()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def start(self) -> None:
        """Start the server and wait until every model is ready or has failed to load."""
        command, environment = self._installation()
        with self.log_path.open("wb") as log:
            # A session of its own, so that Ctrl-C reaches this process only and the stop is an orderly one.
            self._process = subprocess.Popen(
                command,
                cwd=self._home,  # Python would look for packages in ours
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._settled():
            if not self.alive or time.monotonic() > deadline:
                code = self._process.returncode  # None: it is not ready in time
                raise ServerFailed(f"the server did not start (code {code})\n{self.trouble()}")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """SIGTERM, wait, clean up. Raises ServerFailed if it had died, does not stop, or ends with an error."""
        had_died = not self.alive
        try:
            if not had_died:
                self.signal(signal.SIGTERM)
            code = self.wait()
            problem = f"{'died' if had_died else 'stopped'} with code {code}"
        except subprocess.TimeoutExpired:
            code, problem = -1, f"did not stop within {STOP_TIMEOUT_S:.0f} s"
        trouble = self.trouble()
        self.kill()
        if had_died or code != 0:
            raise ServerFailed(f"the server {problem}\n{trouble}")

    def signal(self, number: int) -> None:
        """Send the server a signal."""
        assert self._process is not None, "the server has not been started"
        self._process.send_signal(number)

    def wait(self) -> int:
        """Wait until the server has ended; its exit code. Raises subprocess.TimeoutExpired."""
        assert self._process is not None, "the server has not been started"
        return self._process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """End whatever is left of the server, models' processes included, and remove its files."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for region in Path("/dev/shm").glob(f"{self.id}*"):
            region.unlink(missing_ok=True)
        shutil.rmtree(self._home, ignore_errors=True)

    def get(self, path: str, *, method: str = "GET", timeout: float = 60) -> Any:
        """JSON (or None for an empty body) of a path of the HTTP endpoint. Raises urllib's errors."""
        request = urllib.request.Request(f"http://{self.http}{path}", method=method)
        with urllib.request.urlopen(request, timeout=timeout) as response:
            body = response.read()
        return json.loads(body) if body else None

    def index(self) -> dict[str, dict[str, str]]:
        """The repository index: model → {name, version, state, reason}."""
        return {model["name"]: model for model in self.get("/v2/repository/index", method="POST")}

    def metrics(self) -> dict[str, float]:
        """Every sample of the metrics endpoint: `name{labels}` → value."""
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def trouble(self) -> str:
        """The end of the log."""
        return "\n".join(self.log.splitlines()[-40:])

    def _settled(self) -> bool:
        """Whether this server (not another one on a reused port) answers and no model is still loading."""
        try:
            if self.get("/v2")["name"] != self.id:
                return False
            states = {model.get("state", "") for model in self.index().values()}
            self.metrics()  # its port opens last
        except (urllib.error.URLError, OSError, ValueError):
            return False
        return not {"LOADING", "UNLOADING"}.intersection(states)

    def _installation(self) -> tuple[list[str], dict[str, str]]:
        """Arrange the wheel's parts as a server; returns (command, environment)."""
        spec = importlib.util.find_spec("pytriton")
        if spec is None or spec.origin is None:
            raise ServerFailed(f"nvidia-pytriton is not installed in {sys.prefix}; run: make test-triton")
        wheel = Path(spec.origin).parent / "tritonserver"
        stub = wheel / "python_backend_stubs" / f"{sys.version_info[0]}.{sys.version_info[1]}"
        if not stub.is_dir():
            raise ServerFailed(f"nvidia-pytriton has no stub for Python {sys.version.split()[0]}; use 3.11 or 3.12")
        library = Path(sysconfig.get_config_var("LIBDIR")) / str(sysconfig.get_config_var("INSTSONAME"))
        if not library.is_file() or ".so" not in library.name:
            raise ServerFailed(f"{sys.executable} has no shared libpython, which the server's Python backend loads")
        backend = self._home / "backends" / "python"
        backend.mkdir(parents=True)
        for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
            (backend / name).symlink_to(wheel / "backends" / "python" / name)
        for source, copy in (
            (stub / "triton_python_backend_stub", backend / "triton_python_backend_stub"),
            (wheel / "bin" / "tritonserver", self._home / "tritonserver"),
        ):
            shutil.copyfile(source, copy)  # the wheel drops the executable bit
            copy.chmod(0o755)
        (http, grpc, metrics) = (a.rpartition(":")[2] for a in (self.http, self.grpc, self.metrics_address))
        command = [
            str(self._home / "tritonserver"),
            f"--id={self.id}",
            f"--model-repository={self.repository}",
            f"--backend-directory={self._home / 'backends'}",
            f"--backend-config=python,shm-region-prefix-name={self.id}",
            *(f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")),
            *(f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"),
            *("--allow-gpu-metrics=false", "--disable-auto-complete-config", "--exit-on-error=false"),
            *self.options,
        ]
        # The first python3 on PATH decides which packages the models see; the libraries are the wheel's and libpython.
        environment = {**os.environ, "PATH": f"{self.python}:{os.environ.get('PATH', '')}"}
        libraries = [str(wheel.parents[1] / "nvidia_pytriton.libs"), str(library.parent)]
        environment["LD_LIBRARY_PATH"] = ":".join([*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
        return command, environment


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def main() -> None:
    with TritonServer(Path(sys.argv[1]), [o for o in sys.argv[2:] if o != "--"]) as server:
        for model in server.index().values():
            print(f"{model['name']}: {model.get('state')} {model.get('reason', '')}")
        print(f"http {server.http}  grpc {server.grpc}  metrics {server.metrics_address}  (Ctrl-C stops)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while server.alive:
                time.sleep(1)


if __name__ == "__main__":
    main()
