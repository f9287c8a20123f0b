"""The parts of ``build_zipapp.py``: the lock of wheels, what is taken from each wheel, and the archive."""
