"""What containerd reads of registries: hosts.toml, certificates and keys beside it, and what goes again."""

from __future__ import annotations

import base64
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratum.config import Containerd, Mirror, Registry, Secret
from stratum.errors import BundleError, StratumError
from stratum.node.containerd import (
    CONFIG_PATH,
    REGISTRY_DIR,
    ContainerdOptions,
    Login,
    plan_configuration,
    render_config,
)
from stratum.node.registries import directory_name, plan_registries, read_logins, recorded_logins, render_hosts
from stratum.removal import plan_removal
from stratum.system import Host
from tests.unit.hosting import content, perform, put, snapshot, work_on

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

CERTIFICATE = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
KEY = "-----BEGIN EC PRIVATE KEY-----\nBBBB\n-----END EC PRIVATE KEY-----\n"
PLAIN = Mirror("https://mirror.test")
FULL = Mirror(
    "https://mirror.test:5000/v2",
    ca_file="/root/ca.pem",
    client_certificate_file="/root/client.pem",
    client_key_file="/root/client-key.pem",
    skip_verify=True,
    override_path=True,
    username="reader",
    password_file="/root/password",
)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(str(tmp_path))
    for name, text in (("ca.pem", CERTIFICATE), ("client.pem", CERTIFICATE), ("client-key.pem", KEY)):
        put(host, f"/root/{name}", text)
    put(host, "/root/password", "pass: word\n")
    return host


def configure(host: Host, *registries: Registry, version: str = "2.1.0") -> list[str]:
    return perform(host, lambda work: plan_registries(work, Containerd(registries), version))


def hosts(host: Host, directory: str) -> dict[str, Any]:
    return tomllib.loads(content(host, f"{REGISTRY_DIR}/{directory}/hosts.toml").decode())


@pytest.mark.parametrize(
    ("name", "directory"),
    [
        ("docker.io", "docker.io"),
        ("registry:5000", "registry_5000_"),
        ("192.0.2.1:443", "192.0.2.1_443_"),
        ("[2001:db8::1]:5000", "[2001:db8::1]_5000_"),
        ("[2001:db8::1]", "[2001:db8::1]"),
        ("_default", "_default"),
    ],
)
def test_a_registry_has_the_directory_that_containerd_looks_for_first(name: str, directory: str) -> None:
    assert directory_name(name) == directory


@pytest.mark.parametrize(
    "name", ["", ".", "..", "https://docker.io", "a/b", "../x", "x:", "x:y", "a b", "-x", "x-", "_x", "x:123456", "x\n"]
)
def test_what_is_no_name_of_a_registry_is_refused(name: str) -> None:
    with pytest.raises(StratumError) as caught:
        directory_name(name)
    assert caught.value.reference == "registry-name"


@given(st.text())
def test_no_name_leads_out_of_the_directory(name: str) -> None:
    try:
        directory = directory_name(name)
    except StratumError:
        return
    assert "/" not in directory
    assert directory not in ("", ".", "..")


def test_mirrors_are_asked_in_order_and_then_the_registry(host: Host) -> None:
    configure(host, Registry("docker.io", (Mirror("https://b.test"), Mirror("http://a.test"))))
    value = hosts(host, "docker.io")
    assert value["server"] == "https://registry-1.docker.io"
    assert list(value["host"]) == ["https://b.test", "http://a.test"]
    assert value["host"]["https://b.test"] == {"capabilities": ["pull", "resolve"]}


def test_without_an_upstream_the_last_mirror_is_the_server_with_all_that_it_needs(host: Host) -> None:
    configure(host, Registry("registry:5000", (PLAIN, FULL), upstream=False))
    value = hosts(host, "registry_5000_")
    server = {key: value[key] for key in value if key not in ("server", "host")}
    assert value["server"] == FULL.url
    assert server == value["host"][FULL.url]
    assert list(value["host"]) == [PLAIN.url, FULL.url]


def test_for_all_other_registries_no_server_is_named_that_would_be_asked_for_each(host: Host) -> None:
    configure(host, Registry("_default", (PLAIN,)))
    assert "server" not in hosts(host, "_default")


def test_certificates_are_beside_it_and_keys_and_passwords_are_roots_alone(host: Host) -> None:
    configure(host, Registry("docker.io", (PLAIN, FULL)))
    table = hosts(host, "docker.io")["host"][FULL.url]
    assert table["ca"] == "mirror2-ca.pem"
    assert table["client"] == [["mirror2-client.pem", "mirror2-client-key.pem"]]
    assert table["skip_verify"] is True
    assert table["override_path"] is True
    assert base64.b64decode(table["header"]["Authorization"].split()[1]) == b"reader:pass: word"
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in Path(host.root + str(REGISTRY_DIR / "docker.io")).iterdir()
    }
    assert modes == {
        "hosts.toml": 0o600,
        "mirror2-ca.pem": 0o644,
        "mirror2-client.pem": 0o644,
        "mirror2-client-key.pem": 0o600,
    }
    assert content(host, f"{REGISTRY_DIR}/docker.io/mirror2-client-key.pem").decode() == KEY
    configure(host, Registry("docker.io", (PLAIN,)))
    assert stat.S_IMODE(Path(f"{host.root}{REGISTRY_DIR}/docker.io/hosts.toml").stat().st_mode) == 0o644


def test_a_file_that_has_the_key_too_gives_everybody_its_certificates_alone(host: Host) -> None:
    for name in ("ca.pem", "client.pem", "client-key.pem"):
        put(host, f"/root/{name}", CERTIFICATE + KEY + CERTIFICATE)
    configure(host, Registry("docker.io", (FULL,)))
    for name in ("mirror1-ca.pem", "mirror1-client.pem"):
        assert content(host, f"{REGISTRY_DIR}/docker.io/{name}").decode() == 2 * CERTIFICATE
    assert KEY in content(host, f"{REGISTRY_DIR}/docker.io/mirror1-client-key.pem").decode()


def test_no_secret_is_in_a_plan_or_in_the_receipt(host: Host) -> None:
    done = configure(host, Registry("docker.io", (FULL,)))
    actions = plan_registries(work_on(host), Containerd((Registry("quay.io", (FULL,)),)), "2.1.0")
    receipt = content(host, "/var/lib/stratum/receipt.json").decode()
    encoded = base64.b64encode(b"reader:pass: word").decode()
    for text in (*done, repr(actions), receipt):
        assert "pass: word" not in text
        assert encoded not in text
        assert "BBBB" not in text


@pytest.mark.parametrize(("version", "told"), [("1.6.20", True), ("1.7.24", True), ("2.0.0", False), ("2.1.9", False)])
def test_old_releases_are_told_of_credentials_in_their_main_configuration_too(
    host: Host, version: str, told: bool
) -> None:
    spec = Containerd((Registry("docker.io", (PLAIN, FULL)), Registry("quay.io", (FULL,))))
    logins = read_logins(host, spec, version)
    assert [(login.host, login.username) for login in logins] == ([("mirror.test:5000", "reader")] if told else [])
    assert "pass: word" not in repr(logins)
    options = ContainerdOptions(logins=logins)
    value = tomllib.loads(render_config(version, options).decode())
    found = value["plugins"].get("io.containerd.grpc.v1.cri", {}).get("registry", {}).get("configs", {})
    auth = {"auth": {"username": "reader", "password": "pass: word"}}
    assert found == ({"mirror.test:5000": auth} if told else {})
    done = perform(host, lambda work: plan_configuration(work, version, options))
    assert "pass: word" not in "".join(done)
    mode = stat.S_IMODE(Path(host.root + str(CONFIG_PATH)).stat().st_mode)
    assert mode == (0o600 if told else 0o644)
    perform(host, lambda work: plan_configuration(work, version))
    assert stat.S_IMODE(Path(host.root + str(CONFIG_PATH)).stat().st_mode) == 0o644


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
def test_credentials_of_the_main_configuration_are_read_as_they_were_written(name: str, password: str) -> None:
    logins = (Login("a.test:5000", name, Secret(password)), Login("[2001:db8::1]", "x", Secret("y")))
    text = render_config("1.7.24", ContainerdOptions(logins=logins)).decode()

    class Disk(Host):
        def read_text(self, _path: object) -> str:
            return text

    assert recorded_logins(Disk(), "1.7.24") == logins
    assert recorded_logins(Disk(), "2.1.0") == ()


def test_two_logins_for_one_host_are_more_than_an_old_release_can_know(host: Host) -> None:
    other = replace(FULL, username="writer")
    spec = Containerd((Registry("docker.io", (FULL,)), Registry("quay.io", (other,))))
    with pytest.raises(StratumError) as caught:
        read_logins(host, spec, "1.7.24")
    assert caught.value.reference == "registry-mirror"
    assert "pass: word" not in caught.value.message
    assert read_logins(host, spec, "2.1.9") == ()


def test_a_second_run_changes_nothing_and_a_registry_that_is_no_longer_there_goes(host: Host) -> None:
    configure(host, Registry("docker.io", (FULL,)), Registry("quay.io", (PLAIN,)))
    assert configure(host, Registry("docker.io", (FULL,)), Registry("quay.io", (PLAIN,))) == []
    done = configure(host, Registry("quay.io", (PLAIN,)))
    # Without the file that names them, nobody looks for the others.
    assert done[0] == f"remove {REGISTRY_DIR}/docker.io/hosts.toml"
    assert not Path(f"{host.root}{REGISTRY_DIR}/docker.io").exists()
    assert list(hosts(host, "quay.io")["host"]) == [PLAIN.url]
    configure(host)
    assert list(Path(f"{host.root}{REGISTRY_DIR}").iterdir()) == []
    assert configure(host) == []


def test_directories_and_files_of_the_admins_stay(host: Host) -> None:
    put(host, f"{REGISTRY_DIR}/own.test/hosts.toml", "server = 'https://own.test'\n")
    configure(host, Registry("docker.io", (PLAIN,)))
    put(host, f"{REGISTRY_DIR}/docker.io/note", "mine")
    configure(host)
    assert content(host, f"{REGISTRY_DIR}/docker.io/note") == b"mine"
    assert content(host, f"{REGISTRY_DIR}/own.test/hosts.toml").startswith(b"server")
    with pytest.raises(StratumError) as caught:
        configure(host, Registry("own.test", (PLAIN,)))
    assert caught.value.reference == "foreign-file"


def test_a_file_that_somebody_changed_is_not_removed(host: Host) -> None:
    configure(host, Registry("docker.io", (PLAIN,)))
    put(host, f"{REGISTRY_DIR}/docker.io/hosts.toml", "server = 'https://mine.test'\n")
    assert configure(host) == []
    assert b"mine.test" in content(host, f"{REGISTRY_DIR}/docker.io/hosts.toml")


def test_all_of_it_goes_with_the_receipt(host: Host) -> None:
    work_on(host)
    before = snapshot(host)
    configure(host, Registry("docker.io", (FULL, PLAIN)), Registry("registry:5000", (PLAIN,)))
    work = work_on(host)
    for action in plan_removal(work).actions:
        action.perform(work)
    assert snapshot(host) == before


@pytest.mark.parametrize(
    ("mirror", "says"),
    [
        (replace(PLAIN, url="mirror.test"), "URL"),
        (replace(PLAIN, url="ftp://mirror.test"), "URL"),
        (replace(PLAIN, url="https://"), "URL"),
        (replace(PLAIN, url='https://mirror.test/"x'), "no address"),
        (replace(PLAIN, url="https://mirror.test/?ns=x"), "no address"),
        (replace(PLAIN, url="https://reader:hidden@mirror.test"), "credentials"),
        (replace(FULL, client_key_file=""), "without its key"),
        (replace(FULL, client_certificate_file=""), "without its certificate"),
        (replace(FULL, username=""), "user name"),
        (replace(FULL, password_file=""), "password file"),
    ],
)
def test_a_mirror_that_is_no_use_is_refused_before_anything_is_written(host: Host, mirror: Mirror, says: str) -> None:
    with pytest.raises(StratumError) as caught:
        configure(host, Registry("docker.io", (PLAIN, mirror)))
    assert caught.value.reference == "registry-mirror"
    assert says in caught.value.message
    assert "hidden" not in caught.value.message
    assert not Path(f"{host.root}{REGISTRY_DIR}").exists()


@pytest.mark.parametrize(
    ("path", "text", "says"),
    [
        ("/root/ca.pem", "not PEM", "no PEM file"),
        ("/root/client.pem", KEY, "no PEM file"),
        ("/root/client-key.pem", CERTIFICATE, "no PEM file"),
        ("/root/password", "", "empty"),
        ("/root/password", b"\xff\xfe", "no text"),
        ("/root/ca.pem", "x" * ((1 << 20) + 1), "more than"),
        ("/root/ca.pem", None, "No such file"),
    ],
)
def test_a_file_that_is_no_use_is_named(host: Host, path: str, text: Any, says: str) -> None:
    if text is None:
        Path(host.root + path).unlink()
    else:
        put(host, path, text)
    with pytest.raises(StratumError) as caught:
        configure(host, Registry("docker.io", (FULL,)))
    assert caught.value.reference == "registry-file"
    assert path in caught.value.message
    assert says in caught.value.message


@pytest.mark.parametrize(
    "registries",
    [
        (Registry("docker.io", (PLAIN,)), Registry("docker.io", (PLAIN,))),
        (Registry("docker.io", (PLAIN, PLAIN)),),
        (Registry("docker.io"),),
    ],
    ids=["registry twice", "mirror twice", "no mirror"],
)
def test_a_file_that_containerd_would_take_for_broken_is_not_written(
    host: Host, registries: tuple[Registry, ...]
) -> None:
    with pytest.raises(StratumError):
        configure(host, *registries)


def test_an_unknown_containerd_is_refused(host: Host) -> None:
    with pytest.raises(BundleError):
        configure(host, version="1.5.0")


@given(
    st.lists(
        st.from_regex(r"https?://[a-z0-9.-]{1,20}(:\d{1,4})?(/[a-z]{1,5})?", fullmatch=True), min_size=1, unique=True
    ),
    st.booleans(),
)
def test_any_mirrors_make_a_file_that_holds_them_in_order(urls: list[str], upstream: bool) -> None:
    mirrors = [(Mirror(url), ['capabilities = ["pull", "resolve"]', "[header]", 'A = "b"']) for url in urls]
    value = tomllib.loads(render_hosts(Registry("registry:5000", upstream=upstream), mirrors).decode())
    assert list(value["host"]) == urls
    assert all(table["header"] == {"A": "b"} for table in value["host"].values())
    assert value["server"] == ("https://registry:5000" if upstream else urls[-1])
