"""`stratum bundle keygen` and `stratum bundle sign`, and how a secret key and its password are read.

Neither a key nor a password is ever an argument, an environment variable or part of a message.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import stat
import sys
import time
from typing import TYPE_CHECKING, BinaryIO, Optional

from stratum.atomicfile import create_exclusively, remove_created
from stratum.errors import BundleNotFoundError, ExitCode, StratumError, UsageError
from stratum.scripts.context import Context
from stratum.system import Host, HostPath

if TYPE_CHECKING:
    from stratum.bundle.blobs import BundleSource
    from stratum.trust.minisign import SecretKey

__all__ = ["local_path", "make_signature", "open_named", "read_secret_key", "run_keygen", "run_sign"]

_PASSWORD_LIMIT = 4096


def local_path(text: str) -> HostPath:
    """The absolute path of what the user wrote, seen from the working directory."""
    return HostPath(posixpath.abspath(text))


def read_small(host: Host, text: str, limit: int, what: str) -> bytes:
    """The content of a small file that the user named. Raises UsageError."""
    try:
        with host.open(local_path(text)) as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise UsageError("file-unreadable", f"{text}: {what} cannot be read: {error.strerror}") from None
    if len(data) > limit:
        raise UsageError("file-unreadable", f"{text}: too long for {what}")
    return data


def open_named(path: str, stdin: Optional[BinaryIO] = None) -> BundleSource:
    """Open the bundle that the user named as an argument. Raises BundleNotFoundError, BundleError."""
    from stratum.bundle.source import open_bundle

    try:
        return open_bundle(path, stdin=stdin)
    except BundleNotFoundError as error:
        raise BundleNotFoundError(error.reference, error.message, hint="check the argument BUNDLE") from None


# -- passwords --------------------------------------------------------------------------------------


def _has_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _ask(prompt: str) -> bytes:
    import getpass

    try:
        return getpass.getpass(prompt).encode("utf-8", "surrogateescape")
    except EOFError:
        raise UsageError("no-password", "no password was given") from None


def _password_from_file(context: Context, text: str) -> bytes:
    data = read_small(context.host, text, _PASSWORD_LIMIT, "the password file")
    info = context.host.stat(local_path(text))
    if stat.S_ISREG(info.st_mode) and info.st_mode & 0o077:
        context.out.warn(f"{text}: others than its owner can read the password; run: chmod 600 {text}")
    password = data.split(b"\n", 1)[0].rstrip(b"\r")
    if not password:
        raise UsageError("no-password", f"{text}: its first line is empty")
    return password


def read_secret_key(context: Context, key: str, password_file: Optional[str]) -> SecretKey:
    """The secret key in the file ``key``, opened with its password. Raises StratumError.

    The password comes from ``password_file`` or, where there is a terminal, from a prompt.
    """
    from stratum.trust.minisign import KEY_FILE_LIMIT, SecretKey

    data = read_small(context.host, key, KEY_FILE_LIMIT, "the secret key")
    try:
        secret = SecretKey.parse(data)
    except StratumError as error:
        raise StratumError(error.reference, f"{key}: {error.message}", hint=error.hint) from None
    if context.host.stat(local_path(key)).st_mode & 0o077:
        context.out.warn(f"{key}: others than its owner can read the secret key; run: chmod 600 {key}")
    if not secret.encrypted:
        return secret
    if password_file:
        password = _password_from_file(context, password_file)
    elif _has_terminal():
        password = _ask(f"Password of {key}: ")
    else:
        raise UsageError(
            "no-password",
            f"{key}: has a password, and there is no terminal to ask for it",
            hint="give --password-file FILE",
        )
    context.out.note("opening the secret key (this takes a moment)")
    return secret.decrypt(password)


def _new_password(context: Context, arguments: argparse.Namespace) -> Optional[bytes]:
    if arguments.no_password:
        return None
    if arguments.password_file:
        return _password_from_file(context, arguments.password_file)
    if not _has_terminal():
        raise UsageError(
            "no-password",
            "there is no terminal to ask for a password",
            hint="give --password-file FILE, or --no-password for a key without one",
        )
    first = _ask("Password for the new key: ")
    if not first:
        raise UsageError("no-password", "the password is empty", hint="--no-password makes a key without one")
    if _ask("The same again: ") != first:
        raise UsageError("no-password", "the two passwords differ")
    return first


# -- keygen -----------------------------------------------------------------------------------------


def run_keygen(context: Context, arguments: argparse.Namespace) -> int:
    """Make NAME.key and NAME.pub."""
    from dataclasses import replace

    host = context.host
    name = arguments.to
    secret_path, public_path = local_path(f"{name}.key"), local_path(f"{name}.pub")
    for path in (secret_path, public_path):
        if host.lexists(path):
            raise UsageError(
                "output-exists", f"{path}: exists already", hint="a key is never replaced; give another name"
            )
    if arguments.dry_run:
        context.out.result(f"would make {secret_path} and {public_path}")
        context.out.document("Key", {"dryRun": True, "secretKey": str(secret_path), "publicKey": str(public_path)})
        return int(ExitCode.DONE)
    password = _new_password(context, arguments)

    from stratum.trust.minisign import PublicKey, generate

    secret, public = generate(password)
    public = replace(public, comment=arguments.comment or f"minisign public key {public.key_id}")
    written = public.to_bytes()
    PublicKey.parse(written)  # a comment that no reader takes must fail before anything is written
    created = create_exclusively(host, secret_path, secret.to_bytes(), 0o600)
    try:
        create_exclusively(host, public_path, written, 0o644)
    except BaseException:
        # Half a pair is of no use to anybody; what somebody put in its place meanwhile is.
        remove_created(host, secret_path, created)
        raise
    context.out.result(f"secret key: {secret_path}" + (" (no password)" if password is None else ""))
    context.out.result(f"public key: {public_path}")
    context.out.result(f"key id: {public.key_id}")
    context.out.document(
        "Key",
        {
            "dryRun": False,
            "secretKey": str(secret_path),
            "publicKey": str(public_path),
            "keyId": public.key_id,
            "encrypted": password is not None,
        },
    )
    return int(ExitCode.DONE)


# -- sign -------------------------------------------------------------------------------------------


def make_signature(secret: SecretKey, index: bytes, name: str, version: str, serial: int) -> bytes:
    """The signature file for ``index``; its trusted comment says what was signed, and when."""
    from stratum.trust.minisign import sign

    moment = os.environ.get("SOURCE_DATE_EPOCH", "")
    now = int(moment) if moment.isascii() and moment.isdecimal() else int(time.time())
    comment = f"timestamp:{now}\tfile:index.json\tbundle:{name}\tversion:{version}\tserial:{serial}\thashed"
    return sign(secret, index, trusted_comment=comment, comment=f"signature of a Stratum bundle by key {secret.key_id}")


def run_sign(context: Context, arguments: argparse.Namespace) -> int:
    """Add a signature to a bundle, after proving that the bundle is whole."""
    if arguments.bundle == "-":
        raise UsageError("no-pipe", "a pipe cannot be signed in place", hint="build with --key, or sign a file")
    from stratum.bundle.signing import add_signature, read_signatures, signature_name
    from stratum.bundle.verify import check_all_digests, open_verified

    # A link stays a link: what it leads to is signed.
    host, path = context.host, HostPath(os.path.realpath(arguments.bundle))
    secret = read_secret_key(context, arguments.key, arguments.password_file)
    with open_named(str(path)) as source:
        index_bytes = source.index_bytes
        bundle = open_verified(source, [], insecure=True)
        with context.out.progress("checking", 0) as meter:
            check_all_digests(bundle, meter.advance)
        description = bundle.description
    name = signature_name(read_signatures(host, path), secret.key_id)
    document = {
        "dryRun": arguments.dry_run,
        "bundle": str(path),
        "file": name,
        "keyId": secret.key_id,
        "index": bundle_digest(index_bytes),
    }
    if not arguments.dry_run:
        signature = make_signature(secret, index_bytes, description.name, description.version, description.serial)
        with context.out.progress("signing", 0) as meter:
            add_signature(host, path, name, signature, meter.advance)
    verb = "would sign" if arguments.dry_run else "signed"
    context.out.result(f"{verb} {description.name} {description.version} with key {secret.key_id}: {name}")
    context.out.document("Signature", document)
    return int(ExitCode.DONE)


def bundle_digest(index: bytes) -> str:
    """The digest by which a bundle is known: that of its index."""
    from stratum.bundle.document import digest_of

    return digest_of(index)
