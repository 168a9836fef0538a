"""Servers that answer in JSON on a free local port, as one that serves a model does."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]  # status and JSON body; a body of None closes the connection without an answer


def not_found(path: str) -> Reply:
    return 404, {}


@contextmanager
def json_server(post: Callable[[str, dict[str, Any]], Reply], get: Callable[[str], Reply] = not_found) -> Iterator[str]:
    """Answers GET by path, and POST by path and JSON body; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(get(self.path))

        def do_POST(self) -> None:
            self.reply(post(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def reply(self, reply: Reply) -> None:
            status, body = reply
            if body is None:
                self.close_connection = True
                return
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
