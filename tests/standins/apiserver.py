"""A stand-in for a Kubernetes API server, as far as a kubelet needs one to join.

It stands in for kube-apiserver with the bootstrap token authenticator, the CSR approver and signer of
kube-controller-manager and the node authorizer, and is as strict as they are about who may ask for what:

* a token that it does not know, or that ran out: 401;
* certificatesigningrequests (certificates.k8s.io/v1): POST, GET, a watch; the request must be signed by its own key,
  be for ``O=system:nodes, CN=system:node:NAME`` and for the signer and usages of a kubelet's client certificate;
* nodes and leases: only by a client certificate that its CA signed, and only a node's own.

Nothing else is there (404). It needs python3-cryptography and no other package; on loopback it needs no root.

::

    apiserver.py --directory DIR [--address 127.0.0.1] [--port 0] [--names localhost,127.0.0.1] [--token TOKEN]

``DIR/ca.crt`` is its CA, ``DIR/port`` its port once it listens, ``DIR/log.jsonl`` a line for each request. What is
in ``DIR/mode`` at the moment of a request makes it misbehave: ``forbid`` (403), ``hang`` (no answer), ``expired-token``
(401), ``deny`` (the request is denied), ``pending`` (never signed), ``future`` (certificates valid from in a day on),
``old`` (certificates that ran out), ``wrong-name`` (for another node); anything else is ``ok``. ``DIR/other-ca.crt``
is a CA that it does not use.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import http.server
import ipaddress
import json
import re
import ssl
import threading
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CSRS = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
NODES = "/api/v1/nodes"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
SIGNER = "kubernetes.io/kube-apiserver-client-kubelet"
USAGES = ({"client auth", "digital signature", "key encipherment"}, {"client auth", "digital signature"})
DAY = datetime.timedelta(days=1)


def now():
    return datetime.datetime.now(datetime.timezone.utc)


class Authority:
    """A CA that signs client and server certificates."""

    def __init__(self, name):
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self.name, self.key.public_key(), now() - DAY, now() + 3650 * DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.certificate = builder.sign(self.key, hashes.SHA256())
        self.pem = self.certificate.public_bytes(Encoding.PEM)

    def _builder(self, subject, public, begin, end):
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
        )

    def client(self, subject, public, begin, end):
        builder = self._builder(subject, public, begin, end)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
        return builder.add_extension(usage, critical=False).sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def server(self, names):
        key = ec.generate_private_key(ec.SECP256R1())
        found = []
        for name in names:
            try:
                found.append(x509.IPAddress(ipaddress.ip_address(name)))
            except ValueError:
                found.append(x509.DNSName(name))
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kube-apiserver")])
        builder = self._builder(subject, key.public_key(), now() - DAY, now() + 365 * DAY)
        builder = builder.add_extension(x509.SubjectAlternativeName(found), critical=False)
        pem = builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM)
        return pem + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


class State:
    """What the server knows; every request holds the lock."""

    def __init__(self, directory, token):
        self.directory = directory
        self.token = token
        self.lock = threading.Lock()
        self.authority = Authority("kubernetes")
        self.csrs = {}
        self.nodes = {}
        self.leases = {}
        self.version = 1

    @property
    def mode(self):
        try:
            return (self.directory / "mode").read_text().strip() or "ok"
        except FileNotFoundError:
            return "ok"

    def log(self, **entry):
        with open(self.directory / "log.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")

    def sign(self, csr):
        """What the controllers do with a request that is as it should be, or is not."""
        request = x509.load_pem_x509_csr(base64.b64decode(csr["spec"]["request"]))
        subject, mode = request.subject, self.mode
        if mode == "pending":
            return
        names = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        if mode == "deny" or csr["spec"]["signerName"] != SIGNER:
            csr["status"] = {"conditions": [{"type": "Denied", "status": "True", "reason": "AutoDenied"}]}
            return
        begin, end = now() - datetime.timedelta(minutes=5), now() + 365 * DAY
        if mode == "future":
            begin = now() + DAY
        if mode == "old":
            begin, end = now() - 2 * DAY, now() - DAY
        if mode == "wrong-name":
            other = x509.NameAttribute(NameOID.COMMON_NAME, names[0].value + "-other")
            subject = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "system:nodes"), other])
        pem = self.authority.client(subject, request.public_key(), begin, end)
        csr["status"] = {
            "conditions": [{"type": "Approved", "status": "True", "reason": "AutoApproved"}],
            "certificate": base64.b64encode(pem).decode(),
        }


def why_no_csr(body):
    """Why a body is no request for a kubelet's client certificate; None when it is one."""
    try:
        spec = body["spec"]
        if body["apiVersion"] != "certificates.k8s.io/v1" or body["kind"] != "CertificateSigningRequest":
            return "not a CertificateSigningRequest of certificates.k8s.io/v1"
        if (
            not {"request", "signerName", "usages"}
            <= set(spec)
            <= {"request", "signerName", "usages", "expirationSeconds"}
        ):
            return f"fields of spec: {sorted(spec)}"
        request = x509.load_pem_x509_csr(base64.b64decode(spec["request"], validate=True))
        if not request.is_signature_valid:
            return "the request is not signed by its key"
        organizations = [item.value for item in request.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)]
        (name,) = [item.value for item in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        if organizations != ["system:nodes"] or not re.fullmatch(r"system:node:[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name):
            return f"subject {request.subject.rfc4514_string()}"
        if set(spec["usages"]) not in USAGES:
            return f"usages {spec['usages']}"
    except (KeyError, ValueError, TypeError) as error:
        return repr(error)
    return None


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, *_words):
        """The log is a file of its own."""

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except (ConnectionError, ssl.SSLError):
            self.close_connection = True

    def user(self):
        """Who asks: by certificate, by token, or nobody."""
        certificate = self.connection.getpeercert()
        if certificate:
            subject = {key: value for part in certificate["subject"] for key, value in part}
            return subject.get("commonName", "")
        given = self.headers.get("Authorization", "")
        if given == f"Bearer {self.state.token}" and self.state.mode != "expired-token":
            return "system:bootstrap"
        return "" if given else "system:anonymous"

    def answer(self, status, body):
        if status >= 400:
            reason = {400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "AlreadyExists"}
            body = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "message": body,
                "reason": reason.get(status, ""),
                "code": status,
            }
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if not isinstance(body, bytes) else "text/plain")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_any(self):
        length = int(self.headers.get("Content-Length") or 0)
        data = self.rfile.read(length)
        place, user = urlsplit(self.path), self.user()
        self.state.log(method=self.command, path=self.path, user=user, mode=self.state.mode)
        if self.state.mode == "hang":
            time.sleep(3600)
        if not user:
            return self.answer(401, "Unauthorized")
        if place.path in ("/healthz", "/livez", "/readyz", "/version"):
            return self.answer(200, b"ok" if place.path != "/version" else {"gitVersion": "v1.34.1"})
        if user == "system:anonymous" or self.state.mode == "forbid":
            return self.answer(403, f'{place.path} is forbidden: User "{user}" cannot do that')
        try:
            body = json.loads(data) if data else None
        except ValueError:
            return self.answer(400, "the body is not JSON")
        with self.state.lock:
            watch = self.route(place, user, body)
        if watch:
            self.watch(watch)
        return None

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

    def route(self, place, user, body):
        """Answer; or the name of the object that is to be watched."""
        base, _, name = place.path.rpartition("/")
        if place.path == CSRS or base == CSRS:
            return self.csr(parse_qs(place.query), name if base == CSRS else "", user, body)
        for root, objects, prefix in (
            (NODES, self.state.nodes, "system:node:"),
            (LEASES, self.state.leases, "system:node:"),
        ):
            if place.path == root or base == root:
                wanted = name if base == root else (body or {}).get("metadata", {}).get("name", "")
                if user != f"{prefix}{wanted}":
                    return self.answer(403, f'{place.path} is forbidden: User "{user}" is not node "{wanted}"')
                return self.store(objects, wanted, body)
        return self.answer(404, f"{place.path}: not found")

    def store(self, objects, name, body):
        if self.command == "GET":
            found = objects.get(name)
            return self.answer(200, found) if found else self.answer(404, f"{name} not found")
        if self.command == "POST" and name in objects:
            return self.answer(409, f"{name} already exists")
        if self.command in ("POST", "PUT", "PATCH") and body is not None:
            objects[name] = body
            return self.answer(201 if self.command == "POST" else 200, body)
        return self.answer(400, f"{self.command} of {name}")

    def csr(self, query, name, user, body):
        csrs = self.state.csrs
        if self.command == "POST" and not name:
            why = why_no_csr(body)
            if why:
                return self.answer(400, why)
            meta = body.setdefault("metadata", {})
            name = meta.get("name") or f"{meta.get('generateName', 'csr-')}{len(csrs):05x}"
            if name in csrs:
                return self.answer(409, f'certificatesigningrequests "{name}" already exists')
            self.state.version += 1
            meta.update(name=name, uid=f"uid-{self.state.version}", resourceVersion=str(self.state.version))
            body["spec"]["username"] = user
            csrs[name] = body
            self.state.sign(body)
            return self.answer(201, body)
        if self.command != "GET":
            return self.answer(403, f'User "{user}" cannot {self.command} certificatesigningrequests')
        selected = re.fullmatch(r"metadata\.name=(.+)", query.get("fieldSelector", [""])[0])
        if "true" in query.get("watch", []):
            return selected[1] if selected else self.answer(403, "a watch of all requests is forbidden")
        if name:
            return self.answer(200, csrs[name]) if name in csrs else self.answer(404, f"{name} not found")
        items = [item for key, item in csrs.items() if selected and key == selected[1]]
        kind = {"kind": "CertificateSigningRequestList", "apiVersion": "certificates.k8s.io/v1"}
        return self.answer(200, {**kind, "metadata": {"resourceVersion": str(self.state.version)}, "items": items})

    def watch(self, name):
        """A stream of the changes of one request, for a minute."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        last, end = None, time.monotonic() + 60
        while time.monotonic() < end:
            with self.state.lock:
                found = self.state.csrs.get(name)
                if found and "status" not in found:
                    self.state.sign(found)
                text = json.dumps(found) if found else None
            if text and text != last:
                kind = "ADDED" if last is None else "MODIFIED"
                line = f'{{"type": "{kind}", "object": {text}}}\n'.encode()
                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                self.wfile.flush()
                last = text
            time.sleep(0.1)
        self.wfile.write(b"0\r\n\r\n")


class Server(http.server.ThreadingHTTPServer):
    """TLS in each connection's own thread, so that one that does not shake hands holds up no other."""

    daemon_threads = True
    context: ssl.SSLContext

    def process_request_thread(self, request, client_address):
        try:
            request.settimeout(30)
            wrapped = self.context.wrap_socket(request, server_side=True)
            wrapped.settimeout(None)
        except (OSError, ssl.SSLError):
            self.shutdown_request(request)
            return
        super().process_request_thread(wrapped, client_address)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--names", default="localhost,127.0.0.1")
    parser.add_argument("--token", default="abcdef.0123456789abcdef")
    arguments = parser.parse_args()
    directory = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    state = State(directory, arguments.token)
    (directory / "other-ca.crt").write_bytes(Authority("another").pem)
    own = directory / "server.pem"
    own.touch(0o600)
    own.write_bytes(state.authority.server(arguments.names.split(",")))
    (directory / "ca.crt").write_bytes(state.authority.pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own)
    context.load_verify_locations(directory / "ca.crt")
    context.verify_mode = ssl.CERT_OPTIONAL
    Handler.state = state
    server = Server((arguments.address, arguments.port), Handler)
    server.context = context
    (directory / "port.new").write_text(str(server.server_address[1]))
    (directory / "port.new").rename(directory / "port")
    server.serve_forever()


if __name__ == "__main__":
    main()
