"""containerd of each release pulls through what Stratum writes for registries, from a real registry of Debian's."""

from __future__ import annotations

import base64
import datetime
import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from stratum.config import Containerd, Mirror, Registry
from stratum.node import containerd, registries
from stratum.system import Host
from tests.lab import packages
from tests.lab.cri import Cri
from tests.lab.image import Image
from tests.lab.machine import Result, wait_until
from tests.lab.nspawn import NspawnMachine
from tests.standins import tokenregistry
from tests.unit.hosting import perform, put

SUITES = ("bookworm", "trixie", "unstable")
PASSWORD = "pass: word"
# bcrypt, the only form that the registry takes: htpasswd -nbB -C 4 reader 'pass: word'.
HTPASSWD = "reader:$2b$04$PuRU7WFVp9beAJVN4zaMSupPl.YQCqzQqQwzBDp9dsX7jTRh4BFU2\n"
NAME = "registry.test:5000"
SOCKET = containerd.ADDRESS
REGISTRY = """version: 0.1
storage: {filesystem: {rootdirectory: /var/lib/registry}}
http:
  addr: 127.0.0.1:5000
  tls: {certificate: /etc/registry/server.pem, key: /etc/registry/server-key.pem}
auth: {htpasswd: {realm: test, path: /etc/registry/htpasswd}}
"""


def certificates(directory: Path) -> None:
    """ca.pem, and server.pem with its key that it signed."""
    now = datetime.datetime.now(datetime.timezone.utc)
    authority = ec.generate_private_key(ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())

    def make(name: str, public: ec.EllipticCurvePublicKey, extension: x509.ExtensionType) -> bytes:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "registry CA")])
        builder = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=2)).add_extension(extension, critical=True)
        return builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    ca = make("registry CA", authority.public_key(), x509.BasicConstraints(ca=True, path_length=0))
    names = x509.SubjectAlternativeName(
        [x509.DNSName("registry.test"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (directory / "ca.pem").write_bytes(ca)
    (directory / "server.pem").write_bytes(make("registry.test", key.public_key(), names))
    (directory / "server-key.pem").write_bytes(private)


@dataclass
class Lab:
    """A machine with a registry and one containerd."""

    machine: NspawnMachine
    image: Image
    ca: bytes
    tree: Path
    version: str

    def configure(self, *configured: Registry) -> list[str]:
        """Write what a node has of registries; what was done. Where the main configuration changes, it is restarted."""
        host = Host(str(self.tree))
        put(host, "/root/ca.pem", self.ca)
        put(host, "/root/password", f"{PASSWORD}\n")
        spec = Containerd(configured)
        done = perform(host, lambda work: registries.plan_registries(work, spec, self.version))
        self.machine.run(["rm", "-rf", containerd.REGISTRY_DIR])
        self.machine.copy_tree_in(self.tree / str(containerd.REGISTRY_DIR)[1:], str(containerd.REGISTRY_DIR))
        logins = registries.read_logins(host, spec, self.version)
        text = containerd.render_config(self.version, containerd.ContainerdOptions(logins=logins))
        if text.decode() != self.machine.read(str(containerd.CONFIG_PATH)):
            self.machine.write(str(containerd.CONFIG_PATH), text, 0o600)
            self.machine.run(["systemctl", "stop", "node-containerd"])
            self.start()
        return done

    def start(self) -> None:
        config = str(containerd.CONFIG_PATH)
        self.machine.run(["systemd-run", "--unit=node-containerd", "/opt/lab/containerd", "--config", config])
        wait_until("containerd answers", lambda: self.ctr("version", check=False).status == 0, 60)

    def ctr(self, *arguments: str, check: bool = True) -> Result:
        return self.machine.run(["/opt/lab/ctr", "-a", SOCKET, "-n", "k8s.io", *arguments], check=check, timeout=60)

    def pull(self, name: str, *, check: bool = True) -> Result:
        return self.ctr("images", "pull", "--hosts-dir", str(containerd.REGISTRY_DIR), name, check=check)

    def forget(self) -> None:
        for name in self.ctr("images", "list", "-q").lines:
            self.ctr("images", "rm", "--sync", name)

    def cri(self) -> Cri:
        return Cri(self.machine.path_in_machine(str(SOCKET)))

    def log(self) -> str:
        """What registry and containerd have said so far."""
        return self.machine.sh("journalctl -o cat -u registry -u node-containerd").stdout


def mirror(url: str = f"https://{NAME}") -> Mirror:
    return Mirror(url, ca_file="/root/ca.pem", username="reader", password_file="/root/password")


@pytest.fixture(params=SUITES)
def lab(request: pytest.FixtureRequest, machine: NspawnMachine, demo_image: Image, tmp_path: Path) -> Iterator[Lab]:
    certificates(tmp_path)
    program = packages.fetch("bookworm", ("docker-registry",))["docker-registry"].tree / "usr/bin/docker-registry"
    machine.copy_in(program, "/opt/lab/docker-registry", 0o755)
    for name in ("server.pem", "server-key.pem", "ca.pem"):
        machine.copy_in(tmp_path / name, f"/etc/registry/{name}")
    machine.write("/etc/registry/htpasswd", HTPASSWD)
    machine.write("/etc/registry/config.yml", REGISTRY)
    machine.sh("echo 127.0.0.1 registry.test >>/etc/hosts")
    found = packages.fetch(request.param)
    for name in ("containerd", "ctr", "containerd-shim-runc-v2"):
        machine.copy_in(found["containerd"].tree / "usr/bin" / name, f"/opt/lab/{name}", 0o755)
    version = found["containerd"].version
    machine.write(str(containerd.CONFIG_PATH), containerd.render_config(version))
    machine.run(["systemd-run", "--unit=registry", "/opt/lab/docker-registry", "serve", "/etc/registry/config.yml"])
    made = Lab(machine, demo_image, (tmp_path / "ca.pem").read_bytes(), tmp_path / "tree", version)
    made.tree.mkdir()
    made.start()
    archive = tmp_path / "image.tar"
    archive.write_bytes(demo_image.oci_archive())
    machine.copy_in(archive, "/root/image.tar")
    made.ctr("images", "import", "--platform", "linux/amd64", "/root/image.tar")
    there = f"{NAME}/library/busybox:stratum-demo"
    made.ctr("images", "tag", demo_image.reference, there)
    local = ["--local"] if version >= "2" else []
    made.ctr("images", "push", *local, "--user", f"reader:{PASSWORD}", "--tlscacert", "/etc/registry/ca.pem", there)
    made.forget()
    yield made


def test_ctr_and_cri_pull_through_what_is_written(lab: Lab) -> None:
    client = lab.cri()
    # In order of asking: nothing listens at the first mirror. Neither client is told of a CA or a password.
    lab.configure(Registry("docker.io", (Mirror("https://127.0.0.1:9"), mirror()), upstream=False))
    lab.pull(lab.image.reference)
    assert lab.image.reference in lab.ctr("images", "list", "-q").lines
    lab.forget()
    client.pull(lab.image.reference)
    assert lab.image.reference in client.images()
    assert "ns=docker.io" in lab.log()
    lab.forget()

    # Without an upstream nobody but the mirror is asked, and the error says who it was.
    with pytest.raises(grpc.RpcError) as missing:
        client.pull("docker.io/library/absent:1")
    assert "library/absent:1" in str(missing.value.details())
    assert "registry-1.docker.io" not in lab.pull("docker.io/library/absent:1", check=False).stderr
    assert "registry-1.docker.io" not in lab.log()

    # A registry by its own name with a port; a change needs no restart of containerd.
    lab.configure(Registry(NAME, (mirror(),), upstream=False))
    own = f"{NAME}/library/busybox:stratum-demo"
    client.pull(own)
    assert own in client.images()
    lab.forget()
    lab.pull(own)
    lab.forget()

    # Every registry that has no entry, and a mirror below a path of its own that has /v2 in it.
    lab.configure(Registry("_default", (replace(mirror(f"https://{NAME}/v2"), override_path=True),), upstream=False))
    other = "elsewhere.test/library/busybox:stratum-demo"
    client.pull(other)
    assert other in client.images()
    assert "ns=elsewhere.test" in lab.log()
    lab.forget()

    # No way past the CA, and none past the password.
    lab.configure(Registry(NAME, (replace(mirror(), ca_file=""),), upstream=False))
    assert "x509" in lab.pull(own, check=False).stderr
    lab.configure(Registry(NAME, (replace(mirror(), username="stranger"),), upstream=False))
    refused = lab.pull(own, check=False)
    assert refused.status != 0
    assert "401" in refused.stderr or "authorization failed" in refused.stderr
    lab.configure(Registry(NAME, (replace(mirror(), ca_file="", skip_verify=True),), upstream=False))
    lab.pull(own)

    client.close()
    secret = base64.b64encode(f"reader:{PASSWORD}".encode()).decode()
    said = lab.log()
    assert PASSWORD not in said
    assert secret not in said


def test_credentials_reach_the_token_service_of_a_registry_that_has_one(lab: Lab) -> None:
    machine, port = lab.machine, 5001
    machine.copy_in(Path(tokenregistry.__file__), "/opt/lab/tokenregistry.py")
    script = ["python3", "/opt/lab/tokenregistry.py", str(port), "/etc/registry/server.pem"]
    user = f"reader:{PASSWORD}"
    machine.run(["systemd-run", "--unit=tokens", *script, "/etc/registry/server-key.pem", user, "/root/image.tar"])
    wait_until("it listens", lambda: f":{port} " in machine.run(["ss", "-Hltn"]).stdout, 30)
    given = mirror(f"https://registry.test:{port}")
    lab.configure(Registry("docker.io", (given,), upstream=False))
    client = lab.cri()
    client.pull(lab.image.reference)
    assert lab.image.reference in client.images()
    lab.forget()
    # ctr of 1.6 and 1.7 sends a header of hosts.toml to the registry alone.
    told = [] if lab.version >= "2" else ["--user", user]
    lab.ctr("images", "pull", *told, "--hosts-dir", str(containerd.REGISTRY_DIR), lab.image.reference)
    lab.forget()
    lab.configure(Registry("docker.io", (replace(given, username="stranger"),), upstream=False))
    with pytest.raises(grpc.RpcError):
        client.pull(lab.image.reference)
    client.close()
    assert PASSWORD not in lab.log()
