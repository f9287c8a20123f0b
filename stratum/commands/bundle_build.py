"""`stratum bundle build`: from a definition to a bundle, with its lock."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, Optional

from stratum.atomicfile import write_file
from stratum.bundle.build import Builder, BuiltBundle, Options, Work
from stratum.bundle.definition import Definition, Source, parse_definition
from stratum.bundle.document import digest_of
from stratum.bundle.fetch import Fetcher, default_cache
from stratum.bundle.layer import LEVELS
from stratum.bundle.lock import Lock, parse_lock
from stratum.bundle.oci import Platform
from stratum.bundle.signing import signature_name
from stratum.bundle.sources import SourceFinder
from stratum.bundle.write import (
    BlobStore,
    Contents,
    check_replaceable,
    output_form,
    publish_directory,
    publish_file,
    staging_directory,
    write_tar,
)
from stratum.commands.bundle_keys import local_path, make_signature, read_secret_key, read_small
from stratum.errors import ExitCode, StratumError, UsageError
from stratum.scripts.context import Context
from stratum.system import HostPath

__all__ = ["run_build"]

DEFAULT_LEVEL = 12
_DEFINITION_LIMIT = 1 << 20
_LOCK_LIMIT = 16 << 20


@dataclass(frozen=True)
class _Plan:
    """What was asked for, checked."""

    definition: Definition
    base: HostPath
    lock_path: HostPath
    known_lock: Optional[Lock]  # what is there
    lock: Optional[Lock]  # what must be met
    options: Options
    cache: HostPath
    form: str
    target: HostPath


def run_build(context: Context, arguments: argparse.Namespace) -> int:
    """Build, compare with the lock, sign, publish."""
    plan = _plan(context, arguments)
    if arguments.dry_run:
        return _report_plan(context, plan, arguments)
    secret = read_secret_key(context, arguments.key, arguments.password_file) if arguments.key else None
    host = context.host
    parent = plan.target.parent
    if plan.form == "pipe":
        parent = plan.cache
        host.makedirs(parent, 0o700)
    with staging_directory(host, parent, plan.target.name) as staged, context.out.progress("building", 0) as meter:
        work = Work(meter.advance)
        store = BlobStore(host, staged / "layout")
        builder = _builder(context, plan, arguments, store, staged, work)
        located = builder.find_sources()
        built = builder.build(located)
        if plan.lock:
            plan.lock.check(built.lock)
        signatures = []
        if secret:
            definition = plan.definition
            data = make_signature(secret, built.index, definition.name, definition.version, definition.serial)
            signatures = [(signature_name({}, secret.key_id), data)]
        contents = Contents(built.index, signatures, built.blobs)
        locked = _write_lock(context, plan, built)
        _publish(context, plan, store, contents, work)
    _report(context, plan, built, locked, secret.key_id if secret else None)
    return int(ExitCode.DONE)


# -- before -----------------------------------------------------------------------------------------


def _plan(context: Context, arguments: argparse.Namespace) -> _Plan:
    host = context.host
    definition = parse_definition(
        read_small(host, arguments.definition, _DEFINITION_LIMIT, "the definition"), arguments.definition
    )
    path = local_path(arguments.definition)
    lock_path = local_path(arguments.lock or f"{arguments.definition}.lock")
    known = None
    if host.lexists(lock_path):
        known = parse_lock(read_small(host, str(lock_path), _LOCK_LIMIT, "the lock"), str(lock_path))
    output = arguments.to or f"{definition.name}-{definition.version}.tar"
    form = output_form(host, output, arguments.format)
    target = local_path(f"{definition.name}-{definition.version}" if form == "pipe" else output)
    if form == "pipe":
        _check_pipe(context)
    else:
        check_replaceable(host, target, directory=form == "directory", force=arguments.force)
    cache = local_path(arguments.cache) if arguments.cache else default_cache(host.environ)
    lock = None if arguments.update_lock else known
    options = _options(context, arguments, definition, lock)
    return _Plan(definition, path.parent, lock_path, known, lock, options, cache, form, target)


def _check_pipe(context: Context) -> None:
    if context.out.as_json:
        raise UsageError(
            "output-taken", "standard output is the bundle, so it cannot hold JSON too", hint="write to a file"
        )
    if os.isatty(1):
        raise UsageError(
            "output-terminal", "standard output is a terminal", hint="pipe the bundle into a program or file"
        )


def _options(context: Context, arguments: argparse.Namespace, definition: Definition, lock: Optional[Lock]) -> Options:
    platforms = definition.platforms
    if arguments.platform:
        known = {str(item): item for item in platforms}
        for name in arguments.platform:
            if name not in known:
                raise UsageError("unknown-platform", f"--platform {name}: the definition has {', '.join(known)}")
        platforms = tuple(item for name, item in known.items() if name in arguments.platform)
    level = arguments.level if arguments.level is not None else lock.compression.level if lock else DEFAULT_LEVEL
    if level not in LEVELS:
        raise UsageError("bad-level", f"--level {level}: must be from {LEVELS[0]} to {LEVELS[-1]}")
    jobs = arguments.jobs if arguments.jobs is not None else os.cpu_count() or 1
    if not 1 <= jobs <= 256:
        raise UsageError("bad-jobs", f"--jobs {jobs}: must be from 1 to 256")
    # A lock decides: the time of the files is in every layer, and the layers must be those of the lock.
    return Options(platforms, level, lock.mtime if lock else _epoch(context.host.environ), jobs)


def _epoch(environ: Mapping[str, str]) -> int:
    text = environ.get("SOURCE_DATE_EPOCH", "0") or "0"
    if not (text.isascii() and text.isdecimal()) or int(text) >= 1 << 33:
        raise UsageError("bad-epoch", f"SOURCE_DATE_EPOCH is {text!r}, no number of seconds that a tar can hold")
    return int(text)


def _builder(
    context: Context,
    plan: _Plan,
    arguments: argparse.Namespace,
    store: BlobStore,
    staged: HostPath,
    work: Work,
) -> Builder:
    host = context.host
    fetcher = Fetcher(host, plan.cache, offline=arguments.offline, warn=context.out.warn, stop=work.check)
    finder = SourceFinder(host, plan.base, fetcher, plan.lock)
    return Builder(host, plan.definition, finder, store, staged, plan.options, work)


# -- after ------------------------------------------------------------------------------------------


def _write_lock(context: Context, plan: _Plan, built: BuiltBundle) -> bool:
    """Write the lock if there is none to meet; whether it was written."""
    if plan.lock:
        return False
    left_out = {str(item) for item in set(plan.definition.platforms) - set(plan.options.platforms)}
    data = built.lock.completed_from(plan.known_lock, left_out).to_bytes()
    write_file(context.host, plan.lock_path, data, 0o644)
    return True


def _publish(context: Context, plan: _Plan, store: BlobStore, contents: Contents, work: Work) -> None:
    def write(output: BinaryIO) -> None:
        write_tar(output, contents, lambda blob: store.open(blob.digest), work.tick)

    if plan.form == "directory":
        store.complete(contents)
        publish_directory(context.host, store.root, plan.target)
    elif plan.form == "tar":
        publish_file(context.host, plan.target, write)
    else:
        try:
            with open(1, "wb", closefd=False) as output:
                write(output)
        except BrokenPipeError:
            raise StratumError("pipe-closed", "standard output: the reader left before the end of the bundle") from None


def _report(context: Context, plan: _Plan, built: BuiltBundle, locked: bool, signer: Optional[str]) -> None:
    definition = plan.definition
    platforms = [str(item) for item in plan.options.platforms]
    written = "standard output" if plan.form == "pipe" else str(plan.target)
    digest = digest_of(built.index)
    lines = [
        f"bundle: {definition.name} {definition.version} (serial {definition.serial}) for {', '.join(platforms)}",
        f"index: {digest}",
        f"written to: {written}",
        f"lock: {plan.lock_path} ({'written' if locked else 'met'})",
        f"signature: by key {signer}" if signer else "signature: none; sign it with `stratum bundle sign`",
    ]
    for line in lines:
        # Standard output is the bundle itself in the case of a pipe.
        (context.out.note if plan.form == "pipe" else context.out.result)(line)
    size = sum({item.digest: item.size for item in built.blobs}.values())
    context.out.document(
        "BundleBuild",
        {
            "dryRun": False,
            "name": definition.name,
            "version": definition.version,
            "serial": definition.serial,
            "platforms": platforms,
            "index": digest,
            "size": size,
            "output": written,
            "form": plan.form,
            "lock": str(plan.lock_path),
            "lockWritten": locked,
            "signedBy": signer,
        },
    )


# -- dry run ----------------------------------------------------------------------------------------


def _report_plan(context: Context, plan: _Plan, arguments: argparse.Namespace) -> int:
    """What would be fetched, read and written; nothing is."""
    fetcher = Fetcher(context.host, plan.cache, offline=True)
    finder = SourceFinder(context.host, plan.base, fetcher, plan.lock)
    sources = [
        {"platform": str(platform), "location": source.location, "from": _origin(finder, source)}
        for platform, source in _sources(plan)
    ]
    for item in sources:
        context.out.result(f"{item['from']}: {item['location']} ({item['platform']})")
    if not plan.lock:
        context.out.result(f"would write {plan.lock_path}")
    if arguments.key:
        context.out.result(f"would sign with {arguments.key}")
    context.out.result(f"would write {'standard output' if plan.form == 'pipe' else plan.target} ({plan.form})")
    context.out.document(
        "BundleBuild",
        {
            "dryRun": True,
            "name": plan.definition.name,
            "version": plan.definition.version,
            "serial": plan.definition.serial,
            "platforms": [str(item) for item in plan.options.platforms],
            "sources": sources,
            "output": str(plan.target),
            "form": plan.form,
            "lock": str(plan.lock_path),
            "lockWritten": plan.lock is None,
        },
    )
    return int(ExitCode.DONE)


def _sources(plan: _Plan) -> list[tuple[Platform, Source]]:
    found: dict[str, tuple[Platform, Source]] = {}
    for platform in plan.options.platforms:
        rules = [source for item in plan.definition.components_for(platform) for source, _ in item.parts]
        rules += [item.source for item in plan.definition.images_for(platform)]
        for rule in rules:
            source = rule.for_platform(platform)
            found.setdefault(source.location, (platform, source))
    return list(found.values())


def _origin(finder: SourceFinder, source: Source) -> str:
    if source.kind == "url":
        expected = source.expected or (
            finder.lock.sources.get(source.location, {}).get("sha256") if finder.lock else None
        )
        if expected and finder.fetcher.host.lexists(finder.fetcher.cache / "sha256" / expected):
            return "cached"
        return "would download"
    found = finder.find(source)
    return "directory" if found.sha256 is None else "file"
