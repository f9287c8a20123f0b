"""A small real container image made of Debian's busybox-static.

The same busybox gives the same bytes: no times, no user names, no compression.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DEMO_IMAGE = "docker.io/library/busybox:stratum-demo"

#: In place of Kubernetes' own, which Debian has not: it holds a pod's namespaces and does nothing.
PAUSE_IMAGE = "registry.k8s.io/pause:3.10"

#: A bridge network for containers on a machine of the lab.
LAB_NETWORK = """{"cniVersion": "0.4.0", "name": "lab", "plugins": [{"type": "bridge", "bridge": "lab0",
 "isGateway": true, "ipMasq": true, "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}]],
 "routes": [{"dst": "0.0.0.0/0"}]}}, {"type": "portmap", "capabilities": {"portMappings": true}}]}
"""

_APPLETS = (
    "cat", "chmod", "cp", "date", "df", "dmesg", "echo", "env", "false", "free", "grep", "head", "hostname",
    "httpd", "id", "ifconfig", "ip", "kill", "ln", "ls", "mkdir", "mount", "mv", "nc", "nslookup", "ping",
    "printf", "ps", "pwd", "readlink", "rm", "route", "sed", "sh", "sleep", "sort", "stat", "sync", "tail",
    "tee", "test", "top", "touch", "tr", "true", "umount", "uname", "vi", "wc", "wget", "which", "whoami",
)

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"


@dataclass(frozen=True)
class Image:
    """The three blobs of an image with one layer."""

    reference: str
    layer: bytes
    config: bytes
    manifest: bytes

    def blobs(self) -> Mapping[str, bytes]:
        """Return the blobs by the hexadecimal digits of their digest."""
        return {_hex(blob): blob for blob in (self.manifest, self.config, self.layer)}

    def oci_archive(self) -> bytes:
        """Return the image as a tar of an OCI image layout."""
        files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": self._index()}
        files.update({f"blobs/sha256/{digits}": blob for digits, blob in self.blobs().items()})
        return _tar(files)

    def docker_archive(self) -> bytes:
        """Return the image as ``docker save`` writes it."""
        config, layer = f"{_hex(self.config)}.json", f"{_hex(self.layer)}/layer.tar"
        manifest = [{"Config": config, "RepoTags": [self.reference], "Layers": [layer]}]
        return _tar({"manifest.json": _json(manifest), config: self.config, layer: self.layer})

    def _index(self) -> bytes:
        annotations = {
            "io.containerd.image.name": self.reference,
            "org.opencontainers.image.ref.name": self.reference.rpartition(":")[2],
        }
        descriptor = {**_descriptor(_MANIFEST, self.manifest), "annotations": annotations}
        return _json({"schemaVersion": 2, "manifests": [descriptor]})


def busybox_image(
    busybox: Path,
    reference: str = DEMO_IMAGE,
    *,
    architecture: str = "amd64",
    note: str = "",
    command: Sequence[str] = ("/bin/sh",),
) -> Image:
    """Make an image of a static busybox.

    :param busybox: the program, ``bin/busybox`` of Debian's busybox-static.
    :param note: what ``/etc/note`` says in it; another note is another image.
    :param command: what a container of it runs.
    """
    layer = _layer(busybox.read_bytes(), note)
    config = {
        "architecture": architecture, "os": "linux",
        "config": {"Env": ["PATH=/bin"], "Cmd": list(command), "WorkingDir": "/"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{_hex(layer)}"]},
    }
    packed = _json(config)
    manifest = {
        "schemaVersion": 2, "mediaType": _MANIFEST,
        "config": _descriptor(_CONFIG, packed), "layers": [_descriptor(_LAYER, layer)],
    }
    return Image(reference, layer, packed, _json(manifest))


def pause_image(busybox: Path) -> Image:
    """Make a stand-in for the pause image: a busybox that waits for its end."""
    return busybox_image(busybox, PAUSE_IMAGE, command=("/bin/tail", "-f", "/dev/null"))


def _layer(busybox: bytes, note: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, mode in (("bin", 0o755), ("dev", 0o755), ("etc", 0o755), ("proc", 0o755),
                           ("root", 0o700), ("sys", 0o755), ("tmp", 0o1777)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        files = (("bin/busybox", busybox, 0o755), ("etc/note", note.encode(), 0o644),
                 ("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n", 0o644))
        for name, content, mode in files:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
        for applet in _APPLETS:
            entry = tarfile.TarInfo(f"bin/{applet}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
    return buffer.getvalue()


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _descriptor(media_type: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": f"sha256:{_hex(blob)}", "size": len(blob)}


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _hex(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()
