"""Names as Kubernetes takes them: of nodes, labels, taints. Each check says why a text is none, or nothing.

Sources: kubernetes/kubernetes, ``apimachinery/pkg/util/validation`` (RFC 1123 subdomain, qualified name, label value),
``cmd/kubelet/app/options`` and ``k8s.io/kubelet/pkg/apis/well_known_labels.go`` (labels that a kubelet may set itself).
"""

from __future__ import annotations

import re

__all__ = [
    "EFFECTS",
    "LONGEST_NAME",
    "propose_name",
    "why_no_domain",
    "why_no_label_key",
    "why_no_label_value",
    "why_no_node_name",
    "why_not_own_label",
]

EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
#: A node's name becomes the value of its label kubernetes.io/hostname.
LONGEST_NAME = 63

_LONGEST_DOMAIN = 253
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*\Z")
_WORD = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]\Z")
# Names that thousands of hosts have before anybody gave them one.
_NOBODY = ("localhost", "localhost.localdomain", "localhost4", "localhost6", "(none)", "none", "linux", "unknown")

_KUBERNETES = ("kubernetes.io", "k8s.io")
_OWN_NAMESPACES = ("kubelet.kubernetes.io", "node.kubernetes.io")
_OWN_LABELS = frozenset(
    {
        "beta.kubernetes.io/arch",
        "beta.kubernetes.io/instance-type",
        "beta.kubernetes.io/os",
        "failure-domain.beta.kubernetes.io/region",
        "failure-domain.beta.kubernetes.io/zone",
        "kubernetes.io/arch",
        "kubernetes.io/hostname",
        "kubernetes.io/os",
        "node.kubernetes.io/instance-type",
        "topology.kubernetes.io/region",
        "topology.kubernetes.io/zone",
    }
)


def why_no_domain(text: str) -> str:
    """Why ``text`` is no RFC 1123 subdomain; empty when it is one."""
    if len(text) > _LONGEST_DOMAIN:
        return f"is longer than {_LONGEST_DOMAIN} characters"
    if _DOMAIN.match(text):
        return ""
    return "must consist of a-z, 0-9, - and ., and each part must begin and end with a letter or digit"


def why_no_node_name(text: str) -> str:
    """Why ``text`` cannot be a node's name; empty when it can."""
    if not text or text in _NOBODY:
        return "is no name that tells one host from another"
    if not _DOMAIN.match(text):
        bad = sorted(set(re.sub(r"[-a-z0-9.]", "", text)))
        why = why_no_domain(text[:_LONGEST_DOMAIN])
        return why + (f" (it has {' '.join(map(ascii, bad[:5]))})" if bad else "")
    if len(text) > LONGEST_NAME:
        return f"has {len(text)} characters; the name becomes a label, which has at most {LONGEST_NAME}"
    return ""


def propose_name(text: str) -> str:
    """A legal name that is near to ``text``; empty when nothing is left of it."""
    legal = re.sub(r"[^-a-z0-9.]+", "-", text.lower())
    parts = [part.strip("-") for part in legal.split(".")]
    parts = [part for part in parts if part]
    name = ".".join(parts)
    if len(name) > LONGEST_NAME:
        name = parts[0][:LONGEST_NAME].strip("-")
    return "" if why_no_node_name(name) else name


def why_no_label_key(key: str) -> str:
    """Why ``key`` is no qualified name (``example.com/zone``, or without the prefix); empty when it is one."""
    prefix, slash, name = key.rpartition("/")
    if "/" in prefix or (slash and not prefix):
        return "must be a name, or a domain, a slash and a name"
    if prefix and why_no_domain(prefix):
        return f"the part before the slash {why_no_domain(prefix)}"
    return _why_no_word(name)


def why_no_label_value(value: str) -> str:
    """Why ``value`` is no value of a label; empty when it is one. An empty one is."""
    return _why_no_word(value) if value else ""


def _why_no_word(text: str) -> str:
    if len(text) > LONGEST_NAME:
        return f"has {len(text)} characters, at most {LONGEST_NAME} are allowed"
    if _WORD.match(text):
        return ""
    return "must consist of letters, digits, -, _ and ., and must begin and end with a letter or digit"


def why_not_own_label(key: str) -> str:
    """Why a kubelet may not put the label on its own node; empty when it may.

    It refuses to start with another of Kubernetes' own labels.
    """
    namespace = key.rpartition("/")[0]
    if not _within(namespace, _KUBERNETES) or key in _OWN_LABELS or _within(namespace, _OWN_NAMESPACES):
        return ""
    return "a kubelet may not set this label of Kubernetes' own on its node"


def _within(namespace: str, domains: tuple[str, ...]) -> bool:
    return any(namespace == domain or namespace.endswith(f".{domain}") for domain in domains)
