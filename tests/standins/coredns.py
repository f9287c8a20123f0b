#!/usr/bin/python3
"""A stand-in for CoreDNS: Debian has none. One file, standard library only, so that it can be a bundle's program.

It is as strict as the real one where Stratum could be wrong: flags, the Corefile's syntax, plugins and the arguments
of each (coredns 1.11 to 1.13, plugin/*/setup.go; coredns/caddy, caddyfile), with CoreDNS's words where they are known.
It binds, answers, forwards, finds loops and reloads; it caches nothing. A plugin that CoreDNS has and that is not
played here ends it.
"""

from __future__ import annotations

import argparse
import hashlib
import http.server
import ipaddress
import os
import random
import re
import signal
import socket
import socketserver
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, NoReturn, Optional

VERSION = "1.12.1"
# plugin.cfg, in its order; those that are played here are the keys of PLUGINS below.
DIRECTIVES = (
    "root", "metadata", "geoip", "cancel", "tls", "quic", "timeouts", "multisocket", "reload", "nsid", "bufsize",
    "bind", "debug", "trace", "ready", "health", "pprof", "prometheus", "errors", "log", "dnstap", "local", "dns64",
    "acl", "any", "chaos", "loadbalance", "tsig", "cache", "rewrite", "header", "dnssec", "autopath", "minimal",
    "template", "transfer", "hosts", "route53", "azure", "clouddns", "k8s_external", "kubernetes", "file", "auto",
    "secondary", "etcd", "loop", "forward", "grpc", "erratic", "whoami", "on", "sign", "view",
)  # fmt: skip
TYPES = {"A": 1, "NS": 2, "SOA": 6, "PTR": 12, "HINFO": 13, "MX": 15, "TXT": 16, "AAAA": 28, "SRV": 33, "ANY": 255}
CLASSES = {"IN": 1, "CH": 3, "ANY": 255}
NOERROR, SERVFAIL, NXDOMAIN, REFUSED = 0, 2, 3, 5
RCODES = {"NOERROR": NOERROR, "SERVFAIL": SERVFAIL, "NXDOMAIN": NXDOMAIN, "REFUSED": REFUSED}
HINFO = TYPES["HINFO"]
READ_TIMEOUT = 2.0
MAX_UPSTREAMS = 15


class CorefileError(Exception):
    """The Corefile cannot be used, in CoreDNS's words."""


# -- the syntax: coredns/caddy, caddyfile/lexer.go and parse.go -----------------------------------------


@dataclass(frozen=True)
class Token:
    text: str
    line: int


def lex(text: str) -> Iterator[Token]:
    """Words, split at white space; quotes keep it together, a # at the start of a word begins a comment."""
    line, index = 1, 0
    while index < len(text):
        char = text[index]
        if char == "\n":
            line += 1
            index += 1
        elif char.isspace():
            index += 1
        elif char == "#":
            index = text.find("\n", index) if "\n" in text[index:] else len(text)
        elif char == '"':
            first, value = line, ""
            index += 1
            while index < len(text) and text[index] != '"':
                if text[index] == "\\" and text[index + 1 : index + 2] == '"':
                    index += 1
                line += text[index] == "\n"
                value += text[index]
                index += 1
            index += 1
            yield Token(value, first)
        else:
            end = index
            while end < len(text) and not text[end].isspace():
                end += 1
            yield Token(text[index:end], line)
            index = end


class Dispenser:
    """Walks over the tokens of one directive, as caddy's Controller does for a plugin."""

    def __init__(self, name: str, tokens: Sequence[Token], keys: Sequence[str]) -> None:
        self.name, self.tokens, self.keys = name, list(tokens), list(keys)
        self.cursor, self.nesting = -1, 0

    @property
    def value(self) -> str:
        return self.tokens[self.cursor].text if 0 <= self.cursor < len(self.tokens) else ""

    def next(self) -> bool:
        if self.cursor + 1 < len(self.tokens):
            self.cursor += 1
            return True
        return False

    def next_argument(self) -> bool:
        """Move to the next token of the same line."""
        if self.cursor + 1 >= len(self.tokens):
            return False
        here, there = self.tokens[self.cursor], self.tokens[self.cursor + 1]
        if here.line != there.line or there.text == "{":
            return False
        self.cursor += 1
        return True

    def rest(self) -> list[str]:
        found = []
        while self.next_argument():
            found.append(self.value)
        return found

    def next_in_block(self) -> bool:
        """Move to the first token of the next line within the braces that begin on this line."""
        if self.nesting == 0:
            if self.cursor + 1 >= len(self.tokens) or self.tokens[self.cursor + 1].text != "{":
                return False
            self.cursor += 1
            self.nesting = 1
        self.next()
        if self.value == "}":
            self.nesting = 0
            return False
        return True

    def argument_error(self) -> CorefileError:
        if self.value == "{":
            return self.error("Unexpected token '{', expecting argument")
        return self.error(f"Wrong argument count or unexpected line ending after '{self.value}'")

    def error(self, said: str) -> CorefileError:
        line = self.tokens[min(max(self.cursor, 0), len(self.tokens) - 1)].line
        return CorefileError(f"{FILE}:{line} - Error during parsing: {said}")


FILE = "Corefile"


@dataclass
class Block:
    """A server block: its zones, and what its plugins made of their arguments."""

    zones: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    plugins: dict[str, Any] = field(default_factory=dict)
    hosts: list[str] = field(default_factory=lambda: [""])


def split_blocks(text: str) -> list[tuple[list[str], dict[str, list[list[Token]]]]]:
    """Keys of each server block, and the tokens of each directive in it."""
    tokens = list(lex(text))
    blocks: list[tuple[list[str], dict[str, list[list[Token]]]]] = []
    index = 0

    def failed(said: str) -> CorefileError:
        line = tokens[min(index, len(tokens) - 1)].line
        return CorefileError(f"{FILE}:{line} - Error during parsing: {said}")

    while index < len(tokens):
        keys: list[str] = []
        while index < len(tokens) and tokens[index].text != "{":
            if keys and tokens[index].line != tokens[index - 1].line and not tokens[index - 1].text.endswith(","):
                raise failed(f"Syntax error - unexpected '{tokens[index].text}', expecting '{{'")
            keys.append(tokens[index].text.rstrip(","))
            index += 1
        index += 1
        directives: dict[str, list[list[Token]]] = {}
        while index < len(tokens) and tokens[index].text != "}":
            name, begin, nesting = tokens[index].text, index, 0
            if name not in DIRECTIVES:
                raise failed(f"Unknown directive '{name}'")
            index += 1
            while index < len(tokens):
                word = tokens[index]
                if word.text == "{":
                    nesting += 1
                elif nesting == 0 and word.line != tokens[index - 1].line:
                    break
                elif word.text == "}":
                    if nesting == 0:
                        raise failed("Unexpected '}' because no matching opening brace")
                    nesting -= 1
                index += 1
            if nesting:
                raise failed("Unexpected EOF")
            directives.setdefault(name, []).append(tokens[begin:index])
        if index >= len(tokens):
            raise failed("Unexpected EOF")
        index += 1
        blocks.append((keys, directives))
    return blocks


# -- the plugins' arguments -----------------------------------------------------------------------------

_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(text: str) -> float:
    """Go's time.ParseDuration, in seconds."""
    if text == "0":
        return 0.0
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise CorefileError(f'time: invalid duration "{text}"')
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def number(text: str) -> int:
    if not re.fullmatch(r"[+-]?\d+", text):
        raise CorefileError(f'strconv.Atoi: parsing "{text}": invalid syntax')
    return int(text)


def fqdn(name: str) -> str:
    return name.lower() if name.endswith(".") else f"{name.lower()}."


def split_address(text: str) -> tuple[str, int]:
    """Go's net.SplitHostPort."""
    match = re.fullmatch(r"\[(?P<six>[^\]]*)\]:(?P<a>\d+)|(?P<four>[^:\[\]]*):(?P<b>\d+)", text)
    if not match:
        missing = ":" not in text or re.fullmatch(r"\[[^\]]*\]", text)
        raise CorefileError(f"address {text}: {'missing port in address' if missing else 'too many colons in address'}")
    return match["six"] or match["four"] or "", int(match["a"] or match["b"])


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def parse_bind(c: Dispenser) -> list[str]:
    found: list[str] = []
    while c.next():
        arguments = c.rest()
        if not arguments:
            raise CorefileError("at least one address or interface name is expected")
        for argument in arguments:
            if argument in [name for _, name in socket.if_nameindex()]:
                raise CorefileError(f"the stand-in binds to addresses only: {argument}")
            if not is_address(argument):
                raise CorefileError(f"not a valid IP address or interface name: {argument!r}")
            found.append(argument)
        if c.next_in_block():
            raise CorefileError("the stand-in knows no block of bind")
    return found


def once(c: Dispenser) -> None:
    """The plugin is written once, and nothing stands behind its name."""
    count = 0
    while c.next():
        count += 1
        if count > 1:
            raise CorefileError("this plugin can only be used once per Server Block")
        if c.next_argument():
            raise c.argument_error()
        if c.next_in_block():
            raise CorefileError(f"the stand-in knows no block of {c.name}")


def parse_endpoint(c: Dispenser, default: str) -> str:
    address = default
    while c.next():
        arguments = c.rest()
        if len(arguments) > 1:
            raise c.argument_error()
        if arguments:
            split_address(arguments[0])
            address = arguments[0]
        while c.next_in_block():
            if c.name != "health" or c.value != "lameduck":
                raise c.argument_error()
            values = c.rest()
            if len(values) != 1:
                raise c.argument_error()
            duration(values[0])
    return address


def parse_reload(c: Dispenser) -> float:
    c.next()
    arguments = c.rest()
    if len(arguments) > 2:
        raise c.argument_error()
    interval = duration(arguments[0]) if arguments else 30.0
    if interval < 2:
        raise CorefileError("interval value must be greater or equal to 2s")
    if len(arguments) > 1 and duration(arguments[1]) < 1:
        raise CorefileError("jitter value must be greater or equal to 1s")
    return interval


def parse_cache(c: Dispenser) -> bool:
    count = 0
    while c.next():
        count += 1
        if count > 1:
            raise CorefileError("this plugin can only be used once per Server Block")
        arguments = c.rest()
        if arguments and re.fullmatch(r"-?\d+", arguments[0]) and int(arguments[0]) <= 0:
            raise CorefileError(f"cache TTL can not be zero or negative: {arguments[0]}")
        while c.next_in_block():
            option = c.value
            values = c.rest()
            if option in ("success", "denial"):
                if not values:
                    raise c.argument_error()
                for value in values:
                    number(value)
                if len(values) > 1 and int(values[1]) <= 0:
                    raise CorefileError(f"cache TTL can not be zero or negative: {values[1]}")
            elif option == "prefetch":
                if not 1 <= len(values) <= 3:
                    raise c.argument_error()
                number(values[0])
            elif option == "serve_stale":
                if len(values) > 2:
                    raise c.argument_error()
                if values:
                    duration(values[0])
                if len(values) > 1 and values[1].lower() not in ("immediate", "verify"):
                    raise CorefileError(f"invalid value for serve_stale refresh mode: {values[1].lower()}")
            elif option == "servfail":
                if len(values) != 1:
                    raise c.argument_error()
                if duration(values[0]) > 300:
                    raise CorefileError("caching SERVFAIL responses over 5 minutes is not permitted")
            else:
                raise c.argument_error()
    return True


@dataclass
class Forward:
    origin: str
    servers: list[tuple[str, int]]
    force_tcp: bool = False
    policy: str = "random"


def parse_forward(c: Dispenser) -> list[Forward]:
    found = []
    while c.next():
        if not c.next_argument():
            raise c.argument_error()
        forward = Forward(fqdn(c.value), [])
        targets = c.rest()
        if not targets:
            raise c.argument_error()
        for target in targets:
            plain = target[6:] if target.startswith("dns://") else target
            try:
                host, port = split_address(plain)
            except CorefileError:
                host, port = plain, 53
            if not is_address(host):
                # The real one takes files too; here nothing may depend on one.
                raise CorefileError(f'not an IP address or file: "{plain}"')
            forward.servers.append((host, port))
        while c.next_in_block():
            option = c.value
            values = c.rest()
            if option in ("force_tcp", "prefer_udp", "failfast_all_unhealthy_upstreams"):
                if values:
                    raise c.argument_error()
                forward.force_tcp |= option == "force_tcp"
            elif option in ("max_fails", "expire", "max_concurrent", "health_check", "policy", "except"):
                if not values:
                    raise c.argument_error()
                if option in ("max_fails", "max_concurrent") and number(values[0]) < 0:
                    raise CorefileError(f"{option} can't be negative: {values[0]}")
                if option in ("expire", "health_check"):
                    duration(values[0])
                if option == "policy":
                    if values[0] not in ("random", "round_robin", "sequential"):
                        raise c.error(f"unknown policy '{values[0]}'")
                    forward.policy = values[0]
                if option == "except":
                    raise CorefileError("the stand-in does not play except of forward")
            else:
                raise c.error(f"unknown property '{option}'")
        if len(forward.servers) > MAX_UPSTREAMS:
            raise CorefileError(f"more than {MAX_UPSTREAMS} TOs configured: {len(forward.servers)}")
        found.append(forward)
    return found


@dataclass
class Template:
    kind: str
    klass: str
    zones: list[str]
    answers: list[str] = field(default_factory=list)
    rcode: int = NOERROR


def parse_template(c: Dispenser) -> list[Template]:
    found = []
    while c.next():
        if not c.next_argument():
            raise c.argument_error()
        if c.value not in CLASSES:
            raise c.error(f"invalid query class {c.value}")
        klass = c.value
        if not c.next_argument():
            raise c.argument_error()
        if c.value not in TYPES:
            raise c.error(f"invalid RR class {c.value}")
        kind = c.value
        template = Template(kind, klass, [fqdn(zone) for zone in c.rest() or c.keys])
        while c.next_in_block():
            option = c.value
            values = c.rest()
            if option == "answer":
                if not values:
                    raise c.argument_error()
                for value in values:
                    render(value, "x.")
                template.answers += values
            elif option == "rcode":
                if len(values) != 1 or values[0] not in RCODES:
                    raise c.error(f"unknown rcode {' '.join(values)}")
                template.rcode = RCODES[values[0]]
            elif option in ("match", "additional", "authority", "fallthrough", "ederror"):
                raise CorefileError(f"the stand-in does not play {option} of template")
            else:
                raise c.argument_error()
        if not template.answers and template.rcode == NOERROR:
            raise c.error("no answer section for template found")
        found.append(template)
    return found


def render(text: str, name: str) -> bytes:
    """The resource record of a template: an address."""
    line = text.replace("{{ .Name }}", name)
    if "{{" in line:
        raise CorefileError(f"could not compile template: the stand-in knows .Name only: {text}")
    words = line.split()
    if len(words) != 5 or words[3] not in ("A", "AAAA") or words[2] != "IN" or not words[1].isdigit():
        raise CorefileError(f"the stand-in knows address records only: {text}")
    address = ipaddress.ip_address(words[4])
    if (address.version == 4) != (words[3] == "A"):
        raise CorefileError(f"not an address of that type: {text}")
    data = address.packed
    return encode_name(fqdn(words[0])) + struct.pack(">HHIH", TYPES[words[3]], 1, int(words[1]), len(data)) + data


def parse_errors(c: Dispenser) -> None:
    while c.next():
        if c.next_argument():
            raise c.argument_error()
        while c.next_in_block():
            if c.value not in ("consolidate", "stacktrace"):
                raise c.argument_error()
            c.rest()


PLUGINS: dict[str, Callable[[Dispenser], Any]] = {
    "reload": parse_reload,
    "bind": parse_bind,
    "ready": lambda c: parse_endpoint(c, ":8181"),
    "health": lambda c: parse_endpoint(c, ":8080"),
    "prometheus": lambda c: parse_endpoint(c, "localhost:9153"),
    "errors": parse_errors,
    "log": once,
    "cache": parse_cache,
    "template": parse_template,
    "loop": once,
    "forward": parse_forward,
    "whoami": once,
}


def parse_corefile(text: str, port: int = 53) -> list[Block]:
    """The server blocks. Raises :class:`CorefileError`."""
    blocks = []
    served: set[tuple[str, str, int]] = set()
    for keys, directives in split_blocks(text):
        block = Block()
        for key in keys:
            plain = key[6:] if key.startswith("dns://") else key
            if "://" in plain or "/" in plain:
                raise CorefileError(f"the stand-in does not play this zone: {key}")
            zone, colon, given = plain.partition(":")
            if colon and not given.isdigit():
                raise CorefileError(f"invalid port: {key}")
            if any(not 0 < len(label) <= 63 for label in fqdn(zone)[:-1].split(".") if fqdn(zone) != "."):
                raise CorefileError(f"illegal domain name: {zone}")
            block.zones.append(fqdn(zone))
            block.ports.append(int(given) if given else port)
        for name in [one for one in DIRECTIVES if one in directives]:
            if name not in PLUGINS:
                raise CorefileError(f"the stand-in does not play plugin {name}")
            tokens = [token for part in directives[name] for token in part]
            try:
                block.plugins[name] = PLUGINS[name](Dispenser(name, tokens, block.zones))
            except CorefileError as error:
                raise CorefileError(f"plugin/{name}: {error}") from None
        block.hosts = block.plugins.get("bind") or [""]
        for zone, number_ in zip(block.zones, block.ports):
            for host in block.hosts:
                if (zone, host, number_) in served:
                    raise CorefileError(f"cannot serve dns://{zone}:{number_} - it is already defined")
                served.add((zone, host, number_))
        blocks.append(block)
    return blocks


# -- messages: RFC 1035 ---------------------------------------------------------------------------------


def encode_name(name: str) -> bytes:
    labels = [label.encode() for label in name.rstrip(".").split(".") if label]
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


@dataclass(frozen=True)
class Question:
    identifier: int
    name: str
    kind: int
    klass: int
    raw: bytes


def decode_question(data: bytes) -> Question:
    """The question of a query. Raises ValueError."""
    try:
        identifier, flags, questions = struct.unpack_from(">HHH", data)
        if flags & 0x8000 or questions != 1:
            raise ValueError("not one question")
        offset, labels = 12, []
        while data[offset]:
            length = data[offset]
            if length > 63:
                raise ValueError("a pointer in a question")
            labels.append(data[offset + 1 : offset + 1 + length].decode("ascii", "replace").lower())
            offset += 1 + length
        kind, klass = struct.unpack_from(">HH", data, offset + 1)
    except (IndexError, struct.error):
        raise ValueError("cut short") from None
    return Question(identifier, ".".join(labels) + ".", kind, klass, data[12 : offset + 5])


def reply(question: Question, rcode: int, answers: Sequence[bytes] = (), *, authoritative: bool = False) -> bytes:
    flags = 0x8180 | (0x0400 if authoritative else 0) | rcode
    return struct.pack(">HHHHHH", question.identifier, flags, 1, len(answers), 0, 0) + question.raw + b"".join(answers)


def exchange(server: tuple[str, int], data: bytes, *, tcp: bool) -> bytes:
    """Ask a server; raises OSError."""
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM) as channel:
        channel.settimeout(READ_TIMEOUT)
        channel.connect(socket.getaddrinfo(*server, family)[0][4])
        if not tcp:
            channel.send(data)
            return channel.recv(65535)
        channel.sendall(struct.pack(">H", len(data)) + data)
        with channel.makefile("rb") as stream:
            (length,) = struct.unpack(">H", stream.read(2).ljust(2, b"\0"))
            answer = stream.read(length)
    if not answer:
        raise OSError("closed without an answer")
    return answer


# -- serving --------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, flush=True)


def fatal(text: str) -> NoReturn:
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


@dataclass
class Loop:
    """The plugin loop: a random question to ourselves, counted."""

    zone: str
    name: str = ""
    seen: int = 0
    off: bool = False

    def __post_init__(self) -> None:
        self.name = f"{random.getrandbits(62)}.{random.getrandbits(62)}.{self.zone.lstrip('.')}"


class Server:
    """All server blocks of one Corefile."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = blocks
        self.loops = {id(block): Loop(block.zones[0]) for block in blocks if "loop" in block.plugins}

    def addresses(self) -> list[tuple[str, int]]:
        return sorted({(host, port) for block in self.blocks for host in block.hosts for port in block.ports})

    def endpoints(self) -> dict[str, str]:
        """Addresses of the small web servers, and what their path is."""
        paths = {"health": "/health", "ready": "/ready", "prometheus": "/metrics"}
        return {block.plugins[name]: path for block in self.blocks for name, path in paths.items()
                if name in block.plugins}  # fmt: skip

    def find(self, local: tuple[str, int], name: str) -> Optional[Block]:
        """The block with the longest zone that holds a name."""
        best: tuple[int, Optional[Block]] = (-1, None)
        for block in self.blocks:
            for zone, port in zip(block.zones, block.ports):
                if holds(zone, name) and port == local[1] and local[0] in block.hosts and len(zone) > best[0]:
                    best = (len(zone), block)
        return best[1]

    def answer(self, local: tuple[str, int], data: bytes, *, tcp: bool, peer: str) -> bytes:
        """The plugin chain, in the order of plugin.cfg. Raises ValueError for what is no question."""
        question = decode_question(data)
        block = self.find(local, question.name)
        if block is None:
            return reply(question, REFUSED)
        for template in block.plugins.get("template", ()):
            if (
                any(holds(zone, question.name) for zone in template.zones)
                and template.kind in ("ANY", kind_name(question.kind))
                and question.klass == 1
            ):
                records = [render(answer, question.name) for answer in template.answers]
                return reply(question, template.rcode, records, authoritative=True)
        loop = self.loops.get(id(block))
        if loop and not loop.off and question.kind == HINFO and question.name == loop.name:
            loop.seen += 1
            if loop.seen > 2:
                fatal(
                    f"[FATAL] plugin/loop: Loop ({peer} -> {local[0]}:{local[1]}) detected for zone "
                    f'"{loop.zone}", see https://coredns.io/plugins/loop#troubleshooting. Query: "HINFO {loop.name}"'
                )
        for forward in block.plugins.get("forward", ()):
            if holds(forward.origin, question.name):
                return self.forward(forward, question, data, tcp=tcp)
        if "whoami" in block.plugins:
            return reply(question, NOERROR, authoritative=True)
        return reply(question, SERVFAIL)

    def forward(self, forward: Forward, question: Question, data: bytes, *, tcp: bool) -> bytes:
        servers = list(forward.servers)
        if forward.policy != "sequential":
            random.shuffle(servers)
        for server in servers:
            try:
                return exchange(server, data, tcp=tcp or forward.force_tcp)
            except OSError as error:
                say(f"[ERROR] plugin/errors: 2 {question.name} {kind_name(question.kind)}: {server[0]}: {error}")
        return reply(question, SERVFAIL)

    def look_for_loops(self) -> None:
        """Ask ourselves once, until it can be sent, for up to 30 seconds."""
        for block in self.blocks:
            loop = self.loops.get(id(block))
            if loop is None:
                continue
            query = struct.pack(">HHHHHH", random.getrandbits(16), 0x0100, 1, 0, 0, 0)
            query += encode_name(loop.name) + struct.pack(">HH", HINFO, 1)
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                try:
                    exchange((block.hosts[0] or "127.0.0.1", block.ports[0]), query, tcp=False)
                    break
                except OSError:
                    # A question that an upstream never answered was no loop (plugin/loop/setup.go, since 1.6).
                    loop.seen = 0
                    time.sleep(1)
            time.sleep(2)
            loop.off = True


def holds(zone: str, name: str) -> bool:
    """Whether a name is in a zone."""
    return zone in (".", name) or name.endswith(f".{zone}")


def kind_name(kind: int) -> str:
    return next((name for name, number_ in TYPES.items() if number_ == kind), f"TYPE{kind}")


class Daemon:
    """The process: sockets, and the configuration that answers on them now."""

    def __init__(self, path: str, port: int) -> None:
        self.path, self.port = path, port
        self.digest = ""
        self.server = self.load()
        self.sockets: dict[tuple[str, str, int], socketserver.BaseServer] = {}
        self.lock = threading.Lock()

    def load(self) -> Server:
        with open(self.path, "rb") as file:
            data = file.read()
        self.digest = hashlib.md5(data).hexdigest()
        return Server(parse_corefile(data.decode(), self.port))

    def listen(self) -> None:
        """Open what is missing and close what is not wanted any more. Raises OSError."""
        wanted: dict[tuple[str, str, int], Callable[[], socketserver.BaseServer]] = {}
        for host, port in self.server.addresses():
            wanted["tcp", host, port] = lambda host=host, port=port: self.stream(host, port)  # type: ignore[misc]
            wanted["udp", host, port] = lambda host=host, port=port: self.datagrams(host, port)  # type: ignore[misc]
        for address, path in self.server.endpoints().items():
            host, port = split_address(address)
            wanted["http", host, port] = lambda host=host, port=port, path=path: web(host, port, path)  # type: ignore[misc]
        for key in [key for key in self.sockets if key not in wanted]:
            stale = self.sockets.pop(key)
            stale.shutdown()
            stale.server_close()
        for key, make in wanted.items():
            if key in self.sockets:
                continue
            protocol = "udp" if key[0] == "udp" else "tcp"
            shown = f"[{key[1]}]:{key[2]}" if ":" in key[1] else f"{key[1]}:{key[2]}"
            try:
                self.sockets[key] = make()
            except OSError as error:
                why = (error.strerror or str(error)).lower()
                raise OSError(f"Listen: listen {protocol} {shown}: bind: {why}") from None
            threading.Thread(target=self.sockets[key].serve_forever, args=(0.1,), daemon=True).start()

    def stream(self, host: str, port: int) -> socketserver.BaseServer:
        daemon = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = 10

            def handle(self) -> None:
                while True:
                    try:
                        head = self.rfile.read(2)
                        if len(head) < 2:
                            return
                        data = self.rfile.read(struct.unpack(">H", head)[0])
                        peer = f"{self.client_address[0]}:{self.client_address[1]}"
                        answer = daemon.server.answer((host, port), data, tcp=True, peer=peer)
                    except (OSError, ValueError):
                        return
                    self.wfile.write(struct.pack(">H", len(answer)) + answer)

        class Listener(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            allow_reuse_address = True
            daemon_threads = True

        return Listener((host, port), Handler)

    def datagrams(self, host: str, port: int) -> socketserver.BaseServer:
        daemon = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                data, channel = self.request
                peer = f"{self.client_address[0]}:{self.client_address[1]}"
                try:
                    answer = daemon.server.answer((host, port), data, tcp=False, peer=peer)
                except ValueError:
                    return
                if len(answer) > 1232:
                    question = decode_question(data)
                    answer = reply(question, NOERROR)[:2] + b"\x83\x80" + reply(question, NOERROR)[4:]
                channel.sendto(answer, self.client_address)

        class Listener(socketserver.ThreadingUDPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            max_packet_size = 65535
            daemon_threads = True

        return Listener((host, port), Handler)

    def reload(self) -> None:
        """Read the Corefile again; with an error in it the old one goes on."""
        with self.lock:
            before = self.server
            try:
                say("[INFO] Reloading")
                self.server = self.load()
                self.listen()
            except (CorefileError, OSError, UnicodeDecodeError) as error:
                self.server = before
                say(f"[ERROR] Restart failed: {error}")
                return
            say("[INFO] Reloading complete")
            threading.Thread(target=self.server.look_for_loops, daemon=True).start()

    def watch(self) -> None:
        while True:
            intervals = [block.plugins["reload"] for block in self.server.blocks if "reload" in block.plugins]
            time.sleep(min(intervals, default=1.0))
            if not intervals:
                continue
            try:
                with open(self.path, "rb") as file:
                    digest = hashlib.md5(file.read()).hexdigest()
            except OSError:
                continue
            if digest != self.digest:
                self.digest = digest
                self.reload()


def web(host: str, port: int, path: str) -> socketserver.BaseServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"OK" if self.path == path else b"404 page not found\n"
            self.send_response(200 if self.path == path else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            """Nothing: the journal is for DNS."""

    class Listener(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

        def server_bind(self) -> None:
            # Without the look-up of the host's name that HTTPServer does.
            socketserver.TCPServer.server_bind(self)

    return Listener((host, port), Handler)


# -- flags: coremain/run.go; Go's package flag takes one dash or two ------------------------------------

_USAGE = "Usage of coredns: -conf string, -dns.port string, -p string, -pidfile string, -plugins, -quiet, -version"
_SWITCHES = ("plugins", "quiet", "version")
_VALUES = ("conf", "dns.port", "p", "pidfile")


def parse_flags(words: Sequence[str]) -> argparse.Namespace:
    found: dict[str, Any] = {"conf": "", "dns.port": "53", "pidfile": "", **dict.fromkeys(_SWITCHES, False)}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if name in _SWITCHES:
            found[name] = value in ("", "true", "1")
        elif name in _VALUES:
            if not equals:
                if not rest:
                    misuse(f"flag needs an argument: -{name}")
                value = rest.pop(0)
            found["dns.port" if name == "p" else name] = value
        else:
            misuse(f"flag provided but not defined: -{name}")
    if rest:
        fatal(f"extra command line arguments: [{' '.join(rest)}]")
    return argparse.Namespace(**found)


def misuse(said: str) -> NoReturn:
    print(f"{said}\n{_USAGE}", file=sys.stderr, flush=True)
    os._exit(2)


def main(words: Sequence[str]) -> int:
    global FILE
    flags = parse_flags(words)
    if flags.version:
        say(f"CoreDNS-{VERSION}\nlinux/amd64, stand-in")
        return 0
    if flags.plugins:
        say("\n".join(f"dns.{name}" for name in sorted(DIRECTIVES)))
        return 0
    FILE = flags.conf or "Corefile"
    try:
        daemon = Daemon(FILE, int(getattr(flags, "dns.port")))
        daemon.listen()
    except (CorefileError, OSError, ValueError) as error:
        fatal(str(error))
    if flags.pidfile:
        with open(flags.pidfile, "w") as file:
            file.write(f"{os.getpid()}\n")
    for block in daemon.server.blocks if not flags.quiet else ():
        for zone, port in zip(block.zones, block.ports):
            say(f"{zone}:{port} on {' '.join(block.hosts)}")
    say(f"CoreDNS-{VERSION}\nlinux/amd64, stand-in")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=daemon.reload, daemon=True).start())
    threading.Thread(target=daemon.server.look_for_loops, daemon=True).start()
    daemon.watch()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
