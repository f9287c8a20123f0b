"""The JSON Schema of the configuration file (draft 2020-12), which ships with the package.

It says what an editor can check while somebody types; ``config check`` says all. A test holds it equal to the classes.
"""

from __future__ import annotations

import pkgutil

__all__ = ["read_schema"]


def read_schema() -> str:
    """The schema, as the text of its file. Works from the pyz too."""
    data = pkgutil.get_data("stratum", "node.schema.json")
    assert data is not None, "the package has its schema"
    return data.decode("utf-8")
