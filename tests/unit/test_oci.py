"""The documents of a bundle and their verification: strict parsing, and nothing parsed before it is trusted."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratum.bundle.oci import (
    COMPONENT_NAME,
    CONFIG_TYPE,
    LAYER_GZIP,
    LAYER_TAR,
    LAYER_ZSTD,
    Description,
    Descriptor,
    Index,
    Manifest,
    Platform,
    canonical_json,
    digest_of,
    parse_json,
    safe_relative,
    unsafe_target,
)
from stratum.bundle.source import open_bundle
from stratum.bundle.verify import VerifiedBundle, check_all_digests, open_verified
from stratum.errors import BundleError, DigestMismatchError, ExitCode, NotTrustedError, StratumError
from tests.bundles import AMD64, ARM64, Bundle, Entry, Part, Publisher, directory, flipped, key_pair, symlink

KEYS = [key_pair()[1]]
Document = dict[str, Any]


def verified(bundle: Bundle, form: str, tmp_path: Path, platform: Platform = AMD64, **options: Any) -> VerifiedBundle:
    if form == "pipe":
        source = open_bundle("-", stdin=io.BytesIO(bundle.tar()))
    else:
        source = open_bundle(str(bundle.write_tar(tmp_path / "bundle.tar")))
    try:
        return open_verified(source, KEYS, platform=platform, **options)
    except BaseException:
        source.close()
        raise


def refused(publisher: Publisher, tmp_path: Path) -> str:
    with pytest.raises(BundleError) as caught:
        verified(publisher.build(), "tar", tmp_path)
    assert caught.value.exit_code == ExitCode.BUNDLE_MALFORMED
    assert "bundle.tar" in caught.value.message or "index.json" in caught.value.message
    return caught.value.message


# -- what is good ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["tar", "pipe"])
def test_a_good_bundle_gives_its_description(form: str, tmp_path: Path) -> None:
    found = verified(Publisher.demo().build(), form, tmp_path)
    assert (found.description.name, found.description.version, found.description.serial) == ("demo", "1.0.0", 1)
    assert [item.name for item in found.description.components] == ["tool", "daemon"]
    assert found.verdict is not None
    assert [item.key_id for item in found.verdict.signers] == [KEYS[0].key_id]
    assert [item.name for item in found.images] == ["example.test/demo:1"]
    for component in found.description.components:
        assert found.layer_of(component).digest == component.layer
    found.source.close()


def test_documents_come_out_as_they_went_in() -> None:
    bundle = Publisher.demo().build()
    index = Index.from_json(bundle.index)
    assert canonical_json(index.to_json()) == bundle.index
    raw = bundle.blobs[index.bundle_for(AMD64).digest]
    manifest = Manifest.from_json(raw)
    assert canonical_json(manifest.to_json()) == raw
    raw = bundle.blobs[manifest.config.digest]
    assert canonical_json(Description.from_json(raw).to_json()) == raw


def test_each_platform_has_its_own_content(tmp_path: Path) -> None:
    publisher = Publisher.demo()
    publisher.platforms = [AMD64, ARM64]
    for form in ("tar", "pipe"):
        found = verified(publisher.build(), form, tmp_path, ARM64)
        assert found.description.platform == ARM64
        found.source.close()
    found = verified(publisher.build(), "tar", tmp_path)
    assert found.content_for(ARM64).description.platform == ARM64
    assert found.content_for(AMD64) is found.content
    assert check_all_digests(found) == len(publisher.build().blobs)


def test_a_platform_that_the_bundle_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="nothing for linux/arm64, only for linux/amd64"):
        verified(Publisher.demo().build(), "tar", tmp_path, ARM64)


def test_unknown_fields_are_left_to_later_versions(tmp_path: Path) -> None:
    def more(document: Document) -> None:
        document["later"] = {"x": [1.5, None, True]}

    publisher = Publisher.demo()
    publisher.bend_description = publisher.bend_manifest = publisher.bend_index = more
    assert verified(publisher.build(), "tar", tmp_path).description.name == "demo"


# -- trust comes first ----------------------------------------------------------------------------------


def test_nothing_is_parsed_before_the_signature_is_good(tmp_path: Path) -> None:
    bundle = Publisher.demo().build()
    bundle.index = b"\xff not even JSON"
    with pytest.raises(NotTrustedError, match="bad-signature"):
        verified(bundle, "tar", tmp_path)
    bundle.signatures.clear()
    with pytest.raises(NotTrustedError, match="unsigned"):
        verified(bundle, "tar", tmp_path)
    with pytest.raises(BundleError, match="not JSON"):
        verified(bundle, "tar", tmp_path, insecure=True)
    bundle.sign()
    with pytest.raises(BundleError, match="not JSON"):
        verified(bundle, "tar", tmp_path)


@pytest.mark.parametrize(
    ("spoil", "reference"),
    [
        (lambda bundle: bundle.signatures.clear(), "unsigned"),
        (lambda bundle: (bundle.signatures.clear(), bundle.sign("stranger")), "unknown-key"),
        (lambda bundle: (bundle.signatures.clear(), bundle.sign(data=b"another bundle")), "bad-signature"),
        (lambda bundle: bundle.sign("stranger"), None),
        (lambda bundle: setattr(bundle, "index", bundle.index + b"\n"), "bad-signature"),
        (lambda bundle: bundle.signatures.update({"index.json.minisig": b"rubbish"}), "malformed-signature"),
    ],
)
def test_who_signed_decides(spoil: Callable[[Bundle], object], reference: str, tmp_path: Path) -> None:
    bundle = Publisher.demo().build()
    spoil(bundle)
    for form in ("tar", "pipe"):
        if reference is None:
            verified(bundle, form, tmp_path).source.close()
            continue
        with pytest.raises(NotTrustedError) as caught:
            verified(bundle, form, tmp_path)
        assert (caught.value.reference, caught.value.exit_code) == (reference, ExitCode.NOT_TRUSTED)


def test_insecure_leaves_out_the_signature_and_nothing_else(tmp_path: Path) -> None:
    publisher = Publisher.demo()
    publisher.signers = []
    bundle = publisher.build()
    found = verified(bundle, "tar", tmp_path, insecure=True)
    assert found.verdict is None
    assert check_all_digests(found) == len(bundle.blobs)
    bundle.spoil(found.index.bundles()[0].digest)
    with pytest.raises(DigestMismatchError):
        verified(bundle, "tar", tmp_path, insecure=True)


def test_a_clock_at_1970_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Publisher.demo().build()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert verified(bundle, "tar", tmp_path).verdict


@pytest.mark.parametrize("form", ["tar", "pipe"])
def test_a_bit_turned_in_index_or_signature_is_never_trusted(form: str, tmp_path: Path) -> None:
    bundle = Publisher.demo().build()
    index, signature = bundle.index, bundle.signatures["index.json.minisig"]
    comment = len(signature.split(b"\n")[0]) * 8  # the untrusted comment may be anything
    for bit in range(0, len(index) * 8, 31):
        bundle.index = flipped(index, bit)
        with pytest.raises(NotTrustedError):
            verified(bundle, form, tmp_path)
    bundle.index = index
    for bit in range(comment, len(signature) * 8, 17):
        bundle.signatures["index.json.minisig"] = flipped(signature, bit)
        with pytest.raises(NotTrustedError):
            verified(bundle, form, tmp_path)


@pytest.mark.parametrize("form", ["tar", "pipe"])
def test_a_bit_turned_in_any_blob_is_found_by_verifying(form: str, tmp_path: Path) -> None:
    publisher = Publisher.demo()
    publisher.platforms = [AMD64, ARM64]
    for digest in publisher.build().blobs:
        bundle = publisher.build()
        bundle.spoil(digest, 12345)
        with pytest.raises(DigestMismatchError) as caught:
            check_all_digests(verified(bundle, form, tmp_path))
        assert caught.value.expected == digest


@pytest.mark.parametrize("form", ["tar", "pipe"])
def test_a_missing_blob_is_found_by_verifying(form: str, tmp_path: Path) -> None:
    for digest in Publisher.demo().build().blobs:
        bundle = Publisher.demo().build()
        del bundle.blobs[digest]
        with pytest.raises(BundleError, match="is not in the bundle"):
            check_all_digests(verified(bundle, form, tmp_path))


def test_verifying_reports_progress_in_bytes(tmp_path: Path) -> None:
    bundle = Publisher.demo().build()
    seen: list[int] = []
    check_all_digests(verified(bundle, "tar", tmp_path), seen.append)
    assert sum(seen) == sum(len(data) for data in bundle.blobs.values())


# -- index, manifest and description must fit together --------------------------------------------------


def bent(what: str, change: Callable[[Document], object]) -> Publisher:
    publisher = Publisher.demo()

    def bend(document: Document) -> None:
        change(document)

    setattr(publisher, f"bend_{what}", bend)
    return publisher


@pytest.mark.parametrize(
    ("what", "change", "why"),
    [
        ("index", lambda d: d.update(manifests=[]), "this is no Stratum bundle"),
        ("index", lambda d: d.update(manifests={}), "manifests: must be a list"),
        ("index", lambda d: d.update(schemaVersion=1), "schemaVersion: must be 2"),
        ("index", lambda d: d.update(schemaVersion=True), "schemaVersion: must be a whole number"),
        ("index", lambda d: d["manifests"].append(d["manifests"][0]), "2 manifests for linux/amd64"),
        ("index", lambda d: d["manifests"][0].update(size=-1), "out of range"),
        ("index", lambda d: d["manifests"][0].update(size=1.5), "must be a whole number"),
        ("index", lambda d: d["manifests"][0].update(size=5 << 20), "instead of 5242880"),
        ("index", lambda d: d["manifests"][0].update(digest="sha512:" + "0" * 128), "no sha256 digest"),
        ("index", lambda d: d["manifests"][0].update(digest="sha256:" + "A" * 64), "no sha256 digest"),
        ("index", lambda d: d["manifests"][0].update(digest="sha256:" + "0" * 64 + "\n"), "no sha256 digest"),
        ("index", lambda d: d["manifests"][0].update(digest="sha256:../../../etc/shadow"), "no sha256 digest"),
        ("index", lambda d: d["manifests"][0].update(mediaType="text/plain"), "no image manifest"),
        ("index", lambda d: d["manifests"][0].pop("mediaType"), "mediaType: missing"),
        ("index", lambda d: d["manifests"][0].update(platform="linux/amd64"), "platform: must be an object"),
        ("index", lambda d: d["manifests"][0].update(annotations={"a": 1}), "must be a string"),
        ("manifest", lambda d: d.pop("artifactType"), "artifact type"),
        ("manifest", lambda d: d.pop("config"), "config: missing"),
        ("manifest", lambda d: d["config"].update(mediaType="application/json"), f"its config is no {CONFIG_TYPE}"),
        ("manifest", lambda d: d["layers"].pop(), "no layer of its own for component daemon"),
        ("manifest", lambda d: d["layers"].append(d["layers"][0]), "one layer stands twice"),
        ("manifest", lambda d: d["layers"][0].update(mediaType="application/x-lzma"), "x-lzma is not known"),
        ("manifest", lambda d: d["layers"][0].update(mediaType=LAYER_TAR + "+xz"), "is not known (known: "),
        ("manifest", lambda d: d["layers"][0].update(annotations={COMPONENT_NAME: "daemon"}), "marked as another"),
        ("manifest", lambda d: d["layers"].append({**d["layers"][0], "digest": digest_of(b"")}), "to no component"),
        ("description", lambda d: d["platform"].update(architecture="arm64"), "its description is for linux/arm64"),
        ("description", lambda d: d.update(name="Demo"), "'Demo' is no name"),
        ("description", lambda d: d.update(name="../x"), "is no name"),
        ("description", lambda d: d.update(version="../../etc"), "cannot name a version"),
        ("description", lambda d: d.update(version="current"), "cannot name a version"),
        ("description", lambda d: d.update(version="1.0\n"), "cannot name a version"),
        ("description", lambda d: d.update(serial="1"), "serial: must be a whole number"),
        ("description", lambda d: d.pop("components"), "components: missing"),
        ("description", lambda d: d["components"].append(d["components"][0]), "places a path twice|two components"),
        ("description", lambda d: d["components"][0].update(layer=d["components"][1]["layer"]), "marked as another"),
        ("description", lambda d: d["components"][0].update(size=3), "more in its files than in its layer"),
        ("description", lambda d: d["components"][0].update(name="x/y"), "is no name"),
    ],
)  # fmt: skip
def test_documents_that_do_not_fit_are_refused(
    what: str, change: Callable[[Document], object], why: str, tmp_path: Path
) -> None:
    said = refused(bent(what, change), tmp_path)
    assert any(part in said for part in why.split("|"))


def file_entry(path: str, **changes: Any) -> Document:
    return {"path": path, "type": "file", "mode": "0755", "size": 0, "digest": digest_of(b""), **changes}


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([file_entry("/etc/passwd")], "absolute or empty"),
        ([file_entry("")], "absolute or empty"),
        ([file_entry("../x")], "not a normal relative path"),
        ([file_entry("a/../../x")], "not a normal relative path"),
        ([file_entry("a/./b")], "not a normal relative path"),
        ([file_entry("a//b")], "not a normal relative path"),
        ([file_entry("a/")], "not a normal relative path"),
        ([file_entry(".")], "not a normal relative path"),
        ([file_entry("a\0b")], "control character"),
        ([file_entry("a\nb")], "control character"),
        ([file_entry("a\udc80b")], "control character"),
        ([file_entry("a\\b")], "backslash"),
        ([file_entry("x" * 256)], "too long"),
        ([file_entry("é" * 128)], "too long"),
        ([file_entry("/".join(["x" * 200] * 20))], "too long"),
        ([file_entry("a", mode="4755")], "no mode without special bits"),
        ([file_entry("a", mode="755")], "no mode"),
        ([file_entry("a", mode=493)], "must be a string"),
        ([file_entry("a", mode="0778")], "no mode"),
        ([file_entry("a", size=1 << 62)], "out of range"),
        ([file_entry("a", type="fifo")], "is not file, directory or symlink"),
        ([file_entry("a", digest="md5:x")], "no sha256 digest"),
        ([{"path": "a", "type": "symlink"}], "target: missing"),
        ([{"path": "a", "type": "symlink", "target": "/etc"}], "absolute or empty"),
        ([{"path": "a", "type": "symlink", "target": ""}], "absolute or empty"),
        ([{"path": "a", "type": "symlink", "target": ".."}], "leads out"),
        ([{"path": "d/a", "type": "symlink", "target": "../../x"}], "leads out"),
        ([{"path": "d/a", "type": "symlink", "target": "x/../../.."}], "'..' after a name"),
        ([{"path": "d/a", "type": "symlink", "target": "x\n"}], "control character"),
        ([file_entry("d/.wh..wh..opq")], "is a whiteout"),
        ([file_entry(".wh.d/a")], "is a whiteout"),
        ([file_entry("a"), file_entry("a")], "places a path twice"),
        ([{"path": "a", "type": "symlink", "target": "d"}, file_entry("a/x")], "placed below a, a symlink"),
        ([file_entry("a/x"), file_entry("a")], "placed below a, a file"),
    ],
)
def test_a_file_list_that_could_do_harm_is_refused(files: list[Document], why: str, tmp_path: Path) -> None:
    assert why in refused(Publisher.of([], files=files), tmp_path)


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ([Entry("bin/x", b"1")], [Entry("bin/x", b"2")], "two components place bin/x"),
        ([Entry("bin/x", b"1")], [Entry("bin/x", b"1")], "two components place bin/x"),
        ([symlink("lib", "bin")], [Entry("lib/x", b"2")], "placed below lib, a symlink"),
        ([symlink("lib", "bin")], [directory("lib")], "two components place lib"),
        ([directory("lib")], [directory("lib", 0o700)], "different modes"),
    ],
)
def test_two_components_may_share_directories_only(
    first: list[Entry], second: list[Entry], why: str, tmp_path: Path
) -> None:
    assert why in refused(Publisher(parts=[Part("a", first), Part("b", second)]), tmp_path)


@pytest.mark.parametrize("media_type", [LAYER_TAR, LAYER_GZIP, LAYER_ZSTD])
def test_three_kinds_of_layers_are_known(media_type: str, tmp_path: Path) -> None:
    assert verified(Publisher.of([Entry("a", b"x")], media_type=media_type).build(), "tar", tmp_path).description


# -- JSON -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"a":1,"a":2}',
        b'{"a":{"b":1,"b":1}}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b"\xff",
        b'{"a":1}x',
        b"\xef\xbb\xbf{}",
        b'{"a":' + b"9" * 100 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_what_is_no_plain_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(BundleError, match="here: not"):
        parse_json(data, "here")


def test_a_number_of_a_million_digits_takes_no_time() -> None:
    started = time.process_time()
    with pytest.raises(BundleError):
        parse_json(b'{"a":' + b"9" * 4_000_000 + b"}", "here")
    assert time.process_time() - started < 2


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_bent_documents_raise_nothing_but_bundle_errors(data: st.DataObject) -> None:
    bundle = Publisher.demo().build()
    index = Index.from_json(bundle.index)
    manifest = bundle.blobs[index.bundle_for(AMD64).digest]
    description = bundle.blobs[Manifest.from_json(manifest).config.digest]
    parse, original = data.draw(
        st.sampled_from(
            [(Index.from_json, bundle.index), (Manifest.from_json, manifest), (Description.from_json, description)]
        )
    )
    document = json.loads(original)
    place: Any = document
    while isinstance(place, (dict, list)) and place:
        keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if data.draw(st.booleans()) or not isinstance(place[key], (dict, list)):
            place[key] = data.draw(
                st.none()
                | st.booleans()
                | st.integers()
                | st.text(max_size=5)
                | st.just([])
                | st.just({})
                | st.just([1])
            )
            break
        place = place[key]
    try:
        parse(json.dumps(document).encode())
    except StratumError as error:
        assert isinstance(error, BundleError)


# -- paths and links ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["a", "bin/tool", "a.b/..c", "café", "with space", "-x"])
def test_clean_relative_paths_are_safe(path: str) -> None:
    assert safe_relative(path) is None


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("other/s", "../dir/target"),  # CPython issue 107845: once taken for an escape
        ("s", "dir/target"),
        ("a/b/c", "../../x"),
        ("a/s", ".."),
        ("lib/x.so", "./x.so.1"),
        ("s", "."),
        ("s", "dangling"),
    ],
)
def test_a_link_that_stays_inside_is_fine(path: str, target: str) -> None:
    assert unsafe_target(path, target) is None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_links_that_are_allowed_never_lead_out_however_they_are_chained(data: st.DataObject) -> None:
    """Resolve chains of links by hand, as path_resolution(7) does, and look whether one climbs over the top."""
    directories = ["", "d", "d/e", "d/e/f"]
    links: dict[str, str] = {}
    parts = st.sampled_from(["..", ".", "", "d", "e", "f", "l0", "l1", "l2", "l3"])
    for number in range(4):
        path = "/".join(filter(None, [data.draw(st.sampled_from(directories)), f"l{number}"]))
        target = "/".join(data.draw(st.lists(parts, min_size=1, max_size=5)))
        if unsafe_target(path, target) is None:
            links[path] = target
    for start in links:
        pending, here, steps = start.split("/"), [], 0
        while pending and steps < 200:
            steps += 1
            part = pending.pop(0)
            if part == "..":
                assert here, (links, start)
                here.pop()
            elif part not in ("", "."):
                here.append(part)
                target = links.get("/".join(here))
                if target is not None:
                    here.pop()
                    pending = target.split("/") + pending


def test_an_images_descriptor_without_a_platform_is_for_all() -> None:
    anywhere = Descriptor("x", digest_of(b""), 0)
    index = Index((anywhere, Descriptor("x", digest_of(b"a"), 1, platform=ARM64)))
    assert index.images_for(AMD64) == [anywhere]
    assert len(index.images_for(ARM64)) == 2
