"""`stratum bundle verify`, `inspect` and `extract`: everything that reads a bundle and trusts nobody's word."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Optional

from stratum.bundle.document import digest_of
from stratum.bundle.oci import ARTIFACT_TYPE, Component, Description, Descriptor, Platform
from stratum.bundle.source import BundleSource, Wanted
from stratum.bundle.tarstream import shown
from stratum.bundle.unpack import unpack_layer
from stratum.bundle.verify import VerifiedBundle, check_all_digests, open_verified
from stratum.bundle.write import staging_directory
from stratum.commands.bundle_keys import local_path, open_named, read_small
from stratum.errors import ExitCode, NotTrustedError, UsageError
from stratum.scripts.context import Context
from stratum.steps import remove_tree
from stratum.system import Host, HostPath
from stratum.trust.keyring import load_keyring
from stratum.trust.minisign import KEY_FILE_LIMIT, PublicKey
from stratum.trust.policy import Verdict

__all__ = ["run_extract", "run_inspect", "run_verify"]


def _keys(context: Context, trust: Sequence[str]) -> list[PublicKey]:
    """The keys given on the command line, or else those that this host trusts."""
    if not trust:
        return load_keyring(context.host)
    found = []
    for text in trust:
        try:
            found.append(PublicKey.parse(read_small(context.host, text, KEY_FILE_LIMIT, "the public key")))
        except NotTrustedError as error:
            raise NotTrustedError(error.reference, f"{text}: {error.message}", hint=error.hint) from None
    return found


def _platform(text: str) -> Platform:
    system, slash, architecture = text.partition("/")
    if not system or not slash or not architecture or "/" in architecture:
        raise UsageError("bad-platform", f"--platform {text}: must be OS/ARCH, such as linux/amd64")
    return Platform(system, architecture)


def _open(context: Context, arguments: argparse.Namespace) -> BundleSource:
    return open_named(arguments.bundle, context.stdin)


def _signers(verdict: Optional[Verdict]) -> list[dict[str, object]]:
    return [
        {"keyId": item.key_id, "comment": item.comment, "trustedComment": item.trusted_comment}
        for item in (verdict.signers if verdict else ())
    ]


def _say_signers(context: Context, verdict: Verdict) -> None:
    for item in verdict.signers:
        said = ", ".join(shown(part) for part in item.trusted_comment.split("\t"))
        context.out.result(f"signature: good, by key {item.key_id} ({said})")


# -- verify -----------------------------------------------------------------------------------------


def run_verify(context: Context, arguments: argparse.Namespace) -> int:
    """Verify the signature, then read every blob of every platform and prove its digest."""
    keys = _keys(context, arguments.trust)
    with _open(context, arguments) as source:
        bundle = open_verified(source, keys)
        assert bundle.verdict is not None
        with context.out.progress("verifying", 0) as meter:
            count = check_all_digests(bundle, meter.advance)
        platforms = [str(item.platform) for item in bundle.index.bundles()]
        description, digest = bundle.description, digest_of(source.index_bytes)
    context.out.result(f"bundle: {description.name} {description.version} (serial {description.serial})")
    context.out.result(f"platforms: {', '.join(platforms)}")
    context.out.result(f"index: {digest}")
    _say_signers(context, bundle.verdict)
    context.out.result(f"digests: {count} blobs are what their digests say")
    context.out.document(
        "BundleVerification",
        {
            "name": description.name,
            "version": description.version,
            "serial": description.serial,
            "platforms": platforms,
            "index": digest,
            "verified": True,
            "signers": _signers(bundle.verdict),
            "blobs": count,
        },
    )
    return int(ExitCode.DONE)


# -- inspect ----------------------------------------------------------------------------------------


def run_inspect(context: Context, arguments: argparse.Namespace) -> int:
    """Show what a bundle says of itself, and whether a trusted key says so too."""
    keys = _keys(context, arguments.trust)
    with _open(context, arguments) as source:
        bundle, why_not = _trusted_or_not(source, keys)
        chosen = bundle.index.bundles() if source.random_access else bundle.index.bundles()[:1]
        contents = [bundle.content_for(item.platform) for item in chosen if item.platform]
        descriptions = [item.description for item in contents]
        digest, count = digest_of(source.index_bytes), len(source.signatures)
        random_access = source.random_access
    first = bundle.description
    context.out.result(f"bundle: {first.name} {first.version} (serial {first.serial})")
    context.out.result(f"platforms: {', '.join(str(item.platform) for item in bundle.index.bundles())}")
    context.out.result(f"index: {digest}")
    if bundle.verdict:
        _say_signers(context, bundle.verdict)
    else:
        context.out.result(f"signature: NOT verified ({count} there): {why_not}")
    for content in contents:
        _say_components(context, content.description, content.layers, arguments.files)
    if not random_access:
        context.out.note("a pipe shows its first platform only; give a file for all of them")
    for image in _images(bundle):
        name = shown(image.name or image.digest)
        context.out.result(f"image: {name} ({image.platform or 'every platform'}) {image.digest}")
    layers = {layer.digest: layer.size for content in contents for layer in content.manifest.layers}
    context.out.document(
        "Bundle",
        {
            "name": first.name,
            "version": first.version,
            "serial": first.serial,
            "index": digest,
            "signatures": count,
            "verified": bundle.verdict is not None,
            "notVerifiedBecause": why_not,
            "signers": _signers(bundle.verdict),
            "platforms": [
                {"platform": str(item.platform), "components": _components(item, layers, arguments.files)}
                for item in descriptions
            ],
            "images": [
                {
                    "name": item.name,
                    "digest": item.digest,
                    "platform": str(item.platform) if item.platform else None,
                    "mediaType": item.media_type,
                }
                for item in _images(bundle)
            ],
        },
    )
    return int(ExitCode.DONE)


def _trusted_or_not(source: BundleSource, keys: Sequence[PublicKey]) -> tuple[VerifiedBundle, Optional[str]]:
    try:
        return open_verified(source, keys), None
    except NotTrustedError as error:
        # Nothing was read beyond the index, so a pipe still stands where it stood.
        return open_verified(source, keys, insecure=True), error.message


def _images(bundle: VerifiedBundle) -> list[Descriptor]:
    return [item for item in bundle.index.manifests if item.artifact_type != ARTIFACT_TYPE]


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _say_components(context: Context, description: Description, layers: Mapping[str, Descriptor], files: bool) -> None:
    context.out.result(f"{description.platform}:")
    for item in description.components:
        count = sum(entry.type != "directory" for entry in item.files)
        packed = _mebibytes(layers[item.name].size)
        context.out.result(
            f"  {item.name} {shown(item.version)}: {count} files, {_mebibytes(item.size)}, packed {packed}"
        )
        if files:
            for entry in item.files:
                mode = f"{entry.mode:04o}" if entry.type != "symlink" else "link"
                arrow = f" -> {shown(entry.target)}" if entry.type == "symlink" else ""
                slash = "/" if entry.type == "directory" else ""
                context.out.result(f"    {mode} {entry.size:>10} {shown(entry.path)}{slash}{arrow}")


def _components(description: Description, layers: dict[str, int], files: bool) -> list[dict[str, object]]:
    found = []
    for item in description.components:
        value = item.to_json()
        value["packedSize"] = layers[item.layer]
        if not files:
            del value["files"]
        found.append(value)
    return found


# -- extract ----------------------------------------------------------------------------------------


def run_extract(context: Context, arguments: argparse.Namespace) -> int:
    """Unpack components into a new directory, which appears when it is whole."""
    host, target = context.host, local_path(arguments.to)
    if host.lexists(target):
        raise UsageError("output-exists", f"{target}: exists already", hint="give the name of a new directory")
    if not host.is_dir(target.parent):
        raise UsageError("output-parent-missing", f"{target.parent}: no such directory")
    platform = _platform(arguments.platform) if arguments.platform else Platform.of_machine(host.machine())
    insecure = arguments.insecure_skip_verify
    if insecure:
        context.out.warn("the signature is NOT verified: anyone may have made this bundle")
    keys = [] if insecure else _keys(context, arguments.trust)
    with _open(context, arguments) as source:
        bundle = open_verified(source, keys, platform=platform, insecure=insecure)
        chosen = _chosen(bundle.description, arguments.component)
        if not arguments.dry_run:
            with staging_directory(host, target.parent, target.name) as staged:
                _unpack(context, bundle, chosen, staged)
                source.finish()
                host.syncfs(staged)
                host.rename(staged / "tree", target)
                host.fsync_dir(target.parent)
    verb = "would unpack" if arguments.dry_run else "unpacked"
    for item in chosen:
        context.out.result(f"{verb} {item.name} {shown(item.version)} to {target}")
    context.out.document(
        "BundleExtraction",
        {
            "dryRun": arguments.dry_run,
            "platform": str(platform),
            "directory": str(target),
            "components": [item.name for item in chosen],
            "verified": bundle.verdict is not None,
            "signers": _signers(bundle.verdict),
        },
    )
    return int(ExitCode.DONE)


def _chosen(description: Description, names: Optional[Sequence[str]]) -> list[Component]:
    if not names:
        return list(description.components)
    known = {item.name: item for item in description.components}
    for name in names:
        if name not in known:
            raise UsageError("unknown-component", f"--component {name}: the bundle has {', '.join(known)}")
    return [item for item in description.components if item.name in names]


def _unpack(context: Context, bundle: VerifiedBundle, chosen: Sequence[Component], staged: HostPath) -> None:
    host = context.host
    host.mkdir(staged / "tree", 0o755)
    by_layer = {item.layer: item for item in chosen}
    layers = [bundle.layer_of(item) for item in chosen]
    with context.out.progress("unpacking", sum(item.size for item in layers)) as meter:
        for descriptor, blob in bundle.source.stream_blobs(Wanted(layers)):
            component = by_layer[descriptor.digest]
            part = staged / "part"
            host.mkdir(part, 0o755)
            unpack_layer(host, blob, descriptor.media_type, component, part, progress=meter.advance)
            _merge(host, component, part, staged / "tree")
            remove_tree(host, part)


def _merge(host: Host, component: Component, part: HostPath, tree: HostPath) -> None:
    """Move what was unpacked into the tree; components share nothing but directories."""
    directories = []
    for entry in component.files:
        # Names are UTF-8 whatever the locale says.
        name = os.fsdecode(entry.path.encode("utf-8"))
        if entry.type == "directory":
            directories.append((name, entry.mode))
            continue
        host.makedirs((tree / name).parent, 0o755)
        host.rename(part / name, tree / name)
    # Last, and from below: a directory that nobody may write to takes no files either.
    for name, mode in sorted(directories, reverse=True):
        host.makedirs(tree / name, 0o755)
        host.chmod(tree / name, mode)
