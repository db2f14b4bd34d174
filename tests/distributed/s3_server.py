"""A real S3 protocol server for tests, in front of which faults can be put."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class _Quiet(WSGIRequestHandler):
    def log_request(self, *args: Any, **options: Any) -> None:
        """One line for each request would bury a test's output."""


class S3Server:
    """moto's server on a loopback port.

    ``down`` makes it answer 503 to everything; a function in ``fail_next``, called with method and
    path, makes it do so once, where it returns True. ``requests``: method and path of each.
    """

    bucket = "bucket"
    secret = "test-secret-word"

    def __init__(self) -> None:
        self.down = threading.Event()
        self.requests: list[tuple[str, str]] = []
        self.fail_next: list[Callable[[str, str], bool]] = []
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._serve, threaded=True, request_handler=_Quiet
        )
        self.url = f"http://127.0.0.1:{self._server.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        refused = self.down.is_set()
        if self.fail_next and self.fail_next[0](method, path):
            self.fail_next.pop(0)
            refused = True
        if refused:
            body = b"<Error><Code>SlowDown</Code><Message>Reduce your rate</Message></Error>"
            start_response("503 Service Unavailable", [("Content-Type", "application/xml")])
            return [body]
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer

    def environment(self) -> dict[str, str]:
        """What a client needs."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIATESTKEY",
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            # The retries of one library less, or every outage in a test takes half a minute.
            "AWS_MAX_ATTEMPTS": "1",
        }

    def reset(self) -> None:
        """Forget all buckets and faults."""
        self.down.clear()
        self.fail_next.clear()
        with urllib.request.urlopen(f"{self.url}/moto-api/reset", data=b"") as answer:
            answer.read()
        self.requests.clear()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
