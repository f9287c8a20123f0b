"""A stand-in for a registry that gives out tokens: OCI distribution-spec 1.1 for pulls, distribution's token protocol.

``tokenregistry.py PORT CERTIFICATE KEY USER:PASSWORD IMAGE.tar`` serves the one image of an OCI layout at 127.0.0.1,
under any repository and tag. As a real one does (distribution, docs/spec/auth/token.md) it takes nothing but its own
bearer token, answers 401 with a challenge to all else, and gives the token out only for the right user and password.
"""

from __future__ import annotations

import base64
import json
import re
import ssl
import sys
import tarfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

TOKEN = "a-token-that-nobody-guesses"
SERVICE = "stand-in"


def load(archive: str) -> tuple[dict[str, object], dict[str, bytes]]:
    """The manifest's descriptor, and all blobs by digest."""
    blobs: dict[str, bytes] = {}
    top: dict[str, object] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member)
            data = file.read() if file else b""
            if member.name == "index.json":
                (top,) = json.loads(data)["manifests"]
            elif member.name.startswith("blobs/sha256/"):
                blobs[f"sha256:{member.name.rpartition('/')[2]}"] = data
    return top, blobs


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    user, port = "", 0
    top: ClassVar[dict[str, object]] = {}
    blobs: ClassVar[dict[str, bytes]] = {}

    def answer(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        given = self.headers.get_all("Authorization") or []
        if path == "/token":
            right = base64.b64encode(self.user.encode()).decode()
            if given != [f"Basic {right}"] or f"service={SERVICE}" not in self.path:
                self.answer(401, b"{}", Content_Type="application/json")
            else:
                self.answer(200, json.dumps({"token": TOKEN}).encode(), Content_Type="application/json")
            return
        if given != [f"Bearer {TOKEN}"]:
            name = re.sub(r"^/v2/(.*)/(manifests|blobs)/.*$", r"\1", path)
            realm = (
                f'realm="https://registry.test:{self.port}/token",service="{SERVICE}",scope="repository:{name}:pull"'
            )
            self.answer(401, b"{}", WWW_Authenticate=f"Bearer {realm}")
            return
        found = re.fullmatch(r"/v2/[a-z0-9/]+/(manifests|blobs)/([\w.:-]+)", path)
        digest = found[2] if found else ""
        if found and found[1] == "manifests" and not digest.startswith("sha256:"):
            digest = str(self.top["digest"])
        data = self.blobs.get(digest)
        if found is None or data is None:
            self.answer(404, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}', Content_Type="application/json")
            return
        kind = str(self.top["mediaType"]) if found[1] == "manifests" else "application/octet-stream"
        self.answer(200, data, Content_Type=kind, Docker_Content_Digest=digest)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        # The newer protocol of tokens, which many registries do not have: clients go on with the older one.
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.answer(404, b"{}", Content_Type="application/json")


def main() -> None:
    port, certificate, key, Handler.user, archive = sys.argv[1:]
    Handler.port = int(port)
    Handler.top, Handler.blobs = load(archive)
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
