"""Stratum turns a bare Linux host into a container or Kubernetes node, from one file and one signed bundle."""

__version__ = "0.1.0"
