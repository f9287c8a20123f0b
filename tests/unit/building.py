"""A release engineer's desk for tests: a directory with sources and a definition, and ``stratum`` run in it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import ssl
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Callable, Optional, Union

from stratum.commands import bundle
from stratum.output import Output
from stratum.scripts.context import Context
from stratum.system import Host

ROOT = Path(__file__).resolve().parents[2]
PROXY_VARIABLES = [
    name for base in ("http_proxy", "https_proxy", "all_proxy", "no_proxy") for name in (base, base.upper())
]

HEAD = "name: demo\nversion: 1.0-1\nserial: 7\nplatforms: [linux/amd64]\ncomponents:\n"


@dataclass
class Ended:
    """A command that has ended, in this process or in another one."""

    status: int
    out: str
    err: str

    def document(self) -> Any:
        return json.loads(self.out)


@dataclass
class Desk:
    """``path`` holds the definition and its sources; ``cache`` is a directory of its own."""

    path: Path
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    def write(self, name: str, content: Union[bytes, str], mode: int = 0o644) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(mode)
        return path

    def define(self, components: str, name: str = "x.yaml", head: str = HEAD) -> Path:
        return self.write(name, head + components)

    def run(self, *words: object, stdin: Optional[io.BytesIO] = None) -> Ended:
        """Run ``stratum bundle`` in this process, through its own argument parser, from the desk."""
        import argparse

        from stratum.errors import StratumError

        parser = argparse.ArgumentParser(allow_abbrev=False)
        bundle.add_arguments(parser)
        arguments = parser.parse_args([str(word) for word in words])
        out, err = io.StringIO(), io.StringIO()
        output = Output(as_json=arguments.output == "json", stdout=out, stderr=err)
        context = Context(Host("/", dict(self.environ)), output, None, stdin)
        with inside(self.path):
            try:
                status = bundle.run(context, arguments)
            except StratumError as error:
                output.error(error)
                status = int(error.exit_code)
        return Ended(status, out.getvalue(), err.getvalue())

    def build(self, *words: object, definition: str = "x.yaml") -> Ended:
        return self.run("build", definition, "--cache", self.cache, *words)

    def built(self, *words: object, definition: str = "x.yaml") -> bytes:
        """Build to a tar file and return it."""
        ended = self.build("--to", "out.tar", "--force", *words, definition=definition)
        assert ended.status == 0, ended.err
        return (self.path / "out.tar").read_bytes()

    def spawn(self, *words: object, **options: Any) -> subprocess.Popen[bytes]:
        """Start ``stratum bundle`` as a process of its own."""
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **options.pop("environ", {})}
        argv = [sys.executable, "-m", "stratum", "bundle", *(str(word) for word in words)]
        return subprocess.Popen(
            argv, cwd=self.path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
        )

    def names(self, directory: str = ".") -> list[str]:
        return sorted(os.listdir(self.path / directory))


@contextlib.contextmanager
def inside(path: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def tar_of(*members: tuple[str, Any], mode: str = "w") -> bytes:
    """A tar; a member's content is bytes (a program), or a TarInfo with everything set but the name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in members:
            if isinstance(content, tarfile.TarInfo):
                content.name = name
                archive.addfile(content)
                continue
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def special(kind: bytes, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo("?")
    info.type, info.linkname, info.mode = kind, link, mode
    return info


def files_of(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {item.name: tar.extractfile(item).read() for item in tar if item.isfile()}  # type: ignore[union-attr]


def index_of(archive: bytes) -> dict[str, Any]:
    return dict(json.loads(files_of(archive)["index.json"]))


def blob(archive: bytes, descriptor: Mapping[str, Any]) -> bytes:
    return files_of(archive)["blobs/sha256/" + descriptor["digest"][7:]]


def description_of(archive: bytes, architecture: str = "amd64") -> dict[str, Any]:
    for item in index_of(archive)["manifests"]:
        if "artifactType" in item and item["platform"]["architecture"] == architecture:
            manifest = json.loads(blob(archive, item))
            return dict(json.loads(blob(archive, manifest["config"])))
    raise AssertionError(f"no bundle for {architecture}")


def layer_of(archive: bytes, component: str, architecture: str = "amd64") -> bytes:
    """The plain tar of a component, through the zstd library and no code of ours."""
    import zstandard

    for item in index_of(archive)["manifests"]:
        if "artifactType" in item and item["platform"]["architecture"] == architecture:
            for layer in json.loads(blob(archive, item))["layers"]:
                if layer["annotations"]["dev.stratum.component"] == component:
                    return zstandard.ZstdDecompressor().decompress(blob(archive, layer))
    raise AssertionError(f"no component {component}")


def placed(archive: bytes, component: str = "c") -> dict[str, bytes]:
    return files_of(layer_of(archive, component))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def certificate_for(path: Path) -> Path:
    """A certificate for 127.0.0.1 that no authority vouches for, with its key."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "private authority")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()) + made.public_bytes(encoding))
    return path


# -- a web server -----------------------------------------------------------------------------------------

Answer = Callable[[BaseHTTPRequestHandler], None]


def send(data: bytes, status: int = 200, **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in {"Content-Length": str(len(data)), **named}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(data)

    return answer


def cut_short(data: bytes, announced: int) -> Answer:
    return send(data, Content_Length=str(announced))


@dataclass
class Server:
    """Answers each path with its list of answers, the last one again and again."""

    url: str
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def put(self, path: str, *answers: Answer) -> str:
        self.answers[path] = list(answers)
        return f"{self.url}{path}"


@contextlib.contextmanager
def serving(certificate: Optional[Path] = None) -> Iterator[Server]:
    """A web server on this machine, with TLS when there is a ``certificate`` (with its key, PEM)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.asked.append(self.path)
            answers = server.answers.get(self.path)
            if not answers:
                send(b"no such page", 404)(self)
                return
            (answers.pop(0) if len(answers) > 1 else answers[0])(self)

        def log_message(self, *words: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    server = Server(f"http{'s' if certificate else ''}://127.0.0.1:{listener.server_address[1]}")
    if certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate)
        listener.socket = tls.wrap_socket(listener.socket, server_side=True)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()
