"""Bundles: OCI layouts, read, written and unpacked."""
