"""The files with which a kubelet finds its cluster and proves who it is: kubeconfig v1 (client-go clientcmd/api/v1).

Written as JSON, which every YAML reader takes. What holds a credential has mode 0600.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from stratum.config import Cluster, ExecCredential, Secret
from stratum.errors import StratumError
from stratum.system import Host, HostPath
from stratum.trust import certificates

__all__ = ["Join", "kubeconfig", "make_join", "render_json"]

# YAML takes these only escaped, and json.dumps leaves them as they are: YAML 1.2, 5.1.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")
_SIZE_LIMIT = 1 << 20


@dataclass(frozen=True)
class Join:
    """How to join a cluster: its CA (PEM), and one credential, which is used and not recorded."""

    server: str
    ca: bytes
    token: Optional[Secret] = None
    client_certificate: bytes = b""
    client_key: Optional[Secret] = None
    exec: Optional[ExecCredential] = None


def render_json(value: Mapping[str, Any], comment: str) -> bytes:
    """``value`` as YAML that is JSON but for a first line of comment; the same each time."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)
    text = _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return f"# {comment}\n{text}\n".encode()


def make_join(host: Host, cluster: Cluster, token: Optional[Secret], ca: bytes) -> Optional[Join]:
    """How to join ``cluster`` with what was read of it: a ``token`` or none, and its ``ca``; None without a credential.

    Reads the client certificate and its key where the configuration names them. Raises :class:`StratumError` for a
    file that cannot be read, or does not hold what it should, the CA among them.
    """
    if token is None and not cluster.client_certificate_file and cluster.exec is None:
        return None
    certificates.check_ca(ca, cluster.ca_file or "spec.cluster.ca")
    ca = certificates.without_keys(ca)
    if not cluster.client_certificate_file:
        return Join(cluster.server, ca, token, exec=cluster.exec)
    certificate = _read(host, cluster.client_certificate_file, "spec.cluster.clientCertificateFile")
    key = Secret(_read(host, cluster.client_key_file, "spec.cluster.clientKeyFile").decode("utf-8", "replace"))
    if not certificates.matches_key(certificate, key.value.encode()):
        raise StratumError(
            "client-key-mismatch",
            f"{cluster.client_key_file}: not the private key of {cluster.client_certificate_file}",
            hint="give the certificate and the key that belong together, both as PEM",
        )
    # Often both are in one file, as the kubelet has its own.
    return Join(cluster.server, ca, client_certificate=certificates.without_keys(certificate), client_key=key)


def _read(host: Host, path: str, name: str) -> bytes:
    try:
        content = host.read_bytes(path)
    except OSError as error:
        raise StratumError(
            "cluster-file", f"{path}: {error.strerror or error}", hint=f"correct {name}, or put the file there"
        ) from None
    if not content.strip() or len(content) > _SIZE_LIMIT:
        why = "is empty" if not content.strip() else f"is larger than {_SIZE_LIMIT} bytes"
        raise StratumError("cluster-file", f"{path}: {why}", hint=f"correct {name}")
    return content


def kubeconfig(server: str, ca_file: HostPath, user: Mapping[str, Any]) -> bytes:
    """A kubeconfig with one cluster, one user and one context."""
    value = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "default", "cluster": {"server": server, "certificate-authority": str(ca_file)}}],
        "users": [{"name": "default", "user": dict(user)}],
        "contexts": [{"name": "default", "context": {"cluster": "default", "user": "default"}}],
        "current-context": "default",
    }
    return render_json(value, "Written by Stratum.")


def exec_user(credential: ExecCredential) -> dict[str, Any]:
    """A user that a program speaks for: client-go ExecConfig, never asking anybody."""
    return {
        "exec": {
            "apiVersion": credential.api_version,
            "command": credential.command,
            "args": list(credential.args),
            "env": [{"name": name, "value": value} for name, value in sorted(credential.env.items())],
            "interactiveMode": "Never",
            "provideClusterInfo": False,
        }
    }
