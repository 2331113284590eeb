"""Ids that callers choose: of sessions, groups, users and rollout servers."""

import re
from typing import Annotated

from pydantic import AfterValidator

ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._:@~=+-]{1,200}")
"""An id may stand in a URL path as it is. `.` and `..` are excluded, because paths give them a meaning."""


def _checked(value: str) -> str:
    if not ID.fullmatch(value):
        raise ValueError("an id is 1 to 200 of A-Z a-z 0-9 . _ : @ ~ = + - and neither . nor ..")
    return value


Id = Annotated[str, AfterValidator(_checked)]
