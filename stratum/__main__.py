"""The first lines that run, in the pyz and under ``python3 -m stratum``.

An old interpreter must get one clear line and not a SyntaxError, so this file, alone in the project, keeps to
what Python 2.7 parses: no annotations, no f-strings, no ``from __future__ import annotations``.
"""

import sys

if sys.version_info < (3, 9, 2):
    # cryptography's modules do not load in 3.9.0 and 3.9.1, so the floor is 3.9.2 (Debian 11 has it).
    sys.stderr.write(
        "stratum: error[python-too-old]: this is Python %s (%s); stratum needs CPython 3.9.2 or later\n"  # noqa: UP031
        % (sys.version.split()[0], sys.executable)
    )
    sys.exit(1)

# A zip caches no bytecode, and a command that promises to write nothing must not leave __pycache__ in the
# interpreter's own library either.
sys.dont_write_bytecode = True

if __name__ == "__main__":
    if sys.argv[1:] == ["--version"] and sys.stdout is not None:
        # The one answer that is given before argparse is imported.
        from stratum import __version__

        sys.stdout.write("stratum " + __version__ + "\n")
        sys.stdout.flush()
        sys.exit(0)
    import os

    if os.path.isfile(sys.path[0]):
        # The pyz, possibly by a relative name or through /usr/local/bin/stratum. Neither a change of directory nor an
        # upgrade, which turns that link to another file, may change what this process goes on to import.
        sys.path[0] = os.path.realpath(sys.path[0])
    try:
        from stratum.boot import start

        start()
        from stratum.cli import main

        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        # Ctrl-C while modules are still being imported; main() has its own answer to it.
        sys.exit(130)
