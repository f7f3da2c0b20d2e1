"""The papers' experiments: an extra that only `deltune study` imports."""

from ..errors import check_extra

check_extra("studies", "studies need")
