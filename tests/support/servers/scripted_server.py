"""A server that answers as it is told, for clients whose other side is not ours."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[int], tuple[int, bytes]]  # number of the request, from 1 → (status, body)


def events(*parts: Any) -> bytes:
    """A stream of the parts as JSON, and its end."""
    return b"".join(b"data: %s\n\n" % json.dumps(part).encode() for part in parts) + b"data: [DONE]\n\n"


@contextmanager
def scripted_server(answer: Answer) -> Iterator[tuple[str, list[Any]]]:
    """(URL, bodies received). A GET is told that a model `other` is served; a POST gets the answer."""
    received: list[Any] = []
    counting = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, b'{"object": "list", "data": [{"id": "other", "object": "model"}]}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with counting:
                received.append(body)
                number = len(received)
            self._answer(*answer(number))

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream" if body.startswith(b"data:") else "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()
