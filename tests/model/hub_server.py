"""A small Hugging Face hub over HTTP: the routes that a snapshot needs."""

import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40  # of all repositories here, as of duplicates


def blob(data: bytes) -> str:
    """What the hub calls the content's hash; any 40 hexadecimal digits that tell contents apart."""
    return f"{zlib.crc32(data):040x}"


class HubHandler(BaseHTTPRequestHandler):
    repos: dict[str, dict[str, bytes]]
    gated: set[str]
    fetched: list[str]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo = "/".join(parts[2:4])
            files = self.repos.get(repo)
            if files is None:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif parts[4:5] == ["revision"] and parts[5] not in ("main", COMMIT):
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            elif parts[4:5] == ["tree"]:
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": blob(data)} for name, data in files.items()
                ]
                self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
            else:
                siblings = [{"rfilename": name} for name in files]
                info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
                self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
            return
        repo, name = "/".join(parts[:2]), "/".join(parts[4:])
        data = self.repos.get(repo, {}).get(name)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        if repo in self.gated:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            return
        if self.command == "GET":
            self.fetched.append(name)
        etag = f'"{blob(data)}"'
        self._send(200, data, {"X-Repo-Commit": COMMIT, "ETag": etag, "Accept-Ranges": "bytes"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def hub_server(repos: dict[str, dict[str, bytes]], gated: set[str]) -> Iterator[tuple[str, list[str]]]:
    """Serve these repositories; yields the address and the list of files fetched so far."""
    fetched: list[str] = []
    handler = type("Handler", (HubHandler,), {"repos": repos, "gated": gated, "fetched": fetched})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
