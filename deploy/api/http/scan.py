"""What a JSON text holds, counted while it arrives and before anything is built from it.

A body of a few megabytes may hold millions of values, and whoever builds, validates or releases those keeps the
interpreter, and with it every stream, for seconds. Counting needs no more than a few passes over the bytes, all of them
inside the interpreter's own functions. Text that is no JSON is counted somehow; the parser refuses it.
"""

from __future__ import annotations

from itertools import accumulate

from deploy.api.http.errors import ApiError, invalid
from deploy.config.api import ApiConfig

SLICE = 64 * 1024
"""Bytes that are looked at in one go, for at most a few milliseconds."""
_STEPS = tuple((byte in b"[{") - (byte in b"]}") for byte in range(256))
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class JsonScanner:
    """Counts names, strings with arrays and objects, and all values; ApiError (400) as soon as there are too many of
    one, or when arrays and objects lie too deep in each other."""

    def __init__(self, limits: ApiConfig) -> None:
        self._limits = limits
        self._in_string = False
        self._backslash = b""
        """A backslash at the end of what was fed, which escapes what comes next."""
        self.depth = 0
        self.keys = 0
        """Names in objects."""
        self.items = 0
        """Values that are strings, arrays or objects."""
        self.values = 1
        """Values of any kind, or a little more: an empty array counts as if it held one."""

    def feed(self, data: bytes) -> None:
        """Count `data`, of at most `SLICE` bytes, which goes on where the last one ended."""
        data = self._without_escapes(data)
        pieces = data.split(b'"')
        outside = b"".join(pieces[self._in_string :: 2])
        # Every second quote begins a string, which is counted there.
        strings = (len(pieces) - self._in_string) // 2
        self._in_string ^= len(pieces) % 2 == 0
        names, opened = outside.count(b":"), outside.count(b"[") + outside.count(b"{")
        self.keys += names
        self.items += strings - names + opened
        self.values += opened + outside.count(b",")
        self._check_depth(outside, opened)
        limits = self._limits
        self._check(self.keys, limits.max_json_keys, "names of fields", "max_json_keys")
        self._check(self.items, limits.max_json_items, "strings, arrays and objects", "max_json_items")
        self._check(self.values, limits.max_json_values, "values", "max_json_values")

    def _without_escapes(self, data: bytes) -> bytes:
        """`data` without escaped backslashes and quotes: every quote that is left begins or ends a string."""
        data = self._backslash + data
        self._backslash = b""
        if b"\\" not in data:
            return data
        if (len(data) - len(data.rstrip(b"\\"))) % 2:
            data, self._backslash = data[:-1], b"\\"
        # Pairs of backslashes first, from the left, as a parser reads them.
        return data.replace(b"\\\\", b"").replace(b'\\"', b"")

    def _check_depth(self, outside: bytes, opened: int) -> None:
        most, deepest = self._limits.max_json_depth, self.depth + opened
        if deepest > most:  # perhaps: they may have been closed in between
            deepest = max(
                accumulate(map(_STEPS.__getitem__, outside.translate(None, _NO_BRACKETS)), initial=self.depth)
            )
        if deepest > most:
            raise invalid(
                f"the request body is nested too deep: at most {most} arrays and objects may lie in each other "
                "(max_json_depth)",
                code="invalid_json",
            )
        self.depth += opened - outside.count(b"]") - outside.count(b"}")

    @staticmethod
    def _check(count: int, most: int, what: str, setting: str) -> None:
        if count > most:
            raise too_many(what, most, setting)


def too_many(what: str, most: int, setting: str) -> ApiError:
    """400: the body holds more than a server takes in one request."""
    return invalid(
        f"the request body holds more than {most} {what}, the most that one request may have here ({setting}): "
        "send several requests",
        code="too_many_values",
    )
