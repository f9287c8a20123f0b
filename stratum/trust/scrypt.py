"""The cost of opening a minisign secret key: libsodium's two limits and the scrypt parameters they stand for.

minisign stores ``opslimit`` and ``memlimit``, the arguments of libsodium's
``crypto_pwhash_scryptsalsa208sha256``. That function derives N, r and p from them; :meth:`Cost.parameters`
does the same, so both programs derive the same key from the same file.
"""

from __future__ import annotations

from dataclasses import dataclass

from stratum import boot

__all__ = ["INTERACTIVE", "SENSITIVE", "Cost"]

_BLOCK = 8  # r, which libsodium fixes
_OPS_LEAST = 32768
_PARALLEL_MOST = 0x3FFFFFFF  # scrypt's own bound on r * p
# A key file must not be able to take the machine down: twice minisign's own cost is the most that is tried.
_MEMORY_MOST = 2 << 30
_WORK_MOST = 1 << 26


@dataclass(frozen=True)
class Cost:
    """libsodium's limits: ``operations`` (opslimit) and ``memory`` (memlimit, bytes)."""

    operations: int
    memory: int

    @property
    def parameters(self) -> tuple[int, int, int]:
        """scrypt's N, r and p; raises ValueError when that is more than minisign ever asks for."""
        operations = max(self.operations, _OPS_LEAST)
        if operations < self.memory // 32:
            rounds = _power_below(operations // (_BLOCK * 4))
            parallel = 1
        else:
            rounds = _power_below(self.memory // (_BLOCK * 128))
            parallel = min((operations // 4) // rounds, _PARALLEL_MOST) // _BLOCK
        if rounds * _BLOCK * 128 > _MEMORY_MOST or rounds * _BLOCK * parallel * 4 > _WORK_MOST:
            raise ValueError("the key derivation asks for more memory or time than minisign does")
        if parallel < 1:
            raise ValueError("the key derivation has no valid parameters")
        return rounds, _BLOCK, parallel

    def derive(self, password: bytes, salt: bytes, size: int) -> bytes:
        """``size`` bytes from ``password``; raises ValueError (see :attr:`parameters`)."""
        n, r, p = self.parameters
        boot.require_compiled(persist=False)
        from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

        return Scrypt(salt=salt, length=size, n=n, r=r, p=p).derive(password)

    def to_bytes(self) -> bytes:
        """The two limits as the key file holds them."""
        return self.operations.to_bytes(8, "little") + self.memory.to_bytes(8, "little")

    @classmethod
    def from_bytes(cls, data: bytes) -> Cost:
        """The limits from the 16 bytes of a key file."""
        return cls(int.from_bytes(data[:8], "little"), int.from_bytes(data[8:16], "little"))


def _power_below(most: int) -> int:
    # libsodium: the first power of two, from 2 on, that is over half of ``most``.
    power = 2
    while power <= most // 2 and power < 1 << 62:
        power *= 2
    return power


# crypto_pwhash_scryptsalsa208sha256_{OPS,MEM}LIMIT_SENSITIVE, which minisign uses, and ..._INTERACTIVE.
SENSITIVE = Cost(33554432, 1073741824)
INTERACTIVE = Cost(524288, 16777216)
