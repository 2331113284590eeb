"""Reads the body of an upload (multipart/form-data), which is in memory and bounded already."""

from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser

from fine_tuning.errors import BadInput

MAX_PARTS = 32
MAX_HEADER_BYTES = 8192


@dataclass(frozen=True)
class FormPart:
    """One field of a form; `filename` is None if it is no file."""

    name: str
    filename: str | None
    content: bytes


def form_of(content_type: str, body: bytes) -> dict[str, FormPart]:
    """The fields of a form by their names. Raises BadInput."""
    kind = Message()
    kind["content-type"] = content_type
    boundary = kind.get_boundary()
    if kind.get_content_type() != "multipart/form-data" or not boundary:
        raise BadInput("the body must be multipart/form-data, as OpenAI's clients send files")
    marker = b"\r\n--" + boundary.encode("latin-1", "replace")
    pieces = (b"\r\n" + body).split(marker, MAX_PARTS + 1)[1:]
    if not pieces or not pieces[-1].startswith(b"--"):
        raise BadInput("the body has no end, or more parts than an upload needs")
    parts = [_part(piece) for piece in pieces[:-1]]
    return {part.name: part for part in parts}


def _part(piece: bytes) -> FormPart:
    head, blank, content = piece.partition(b"\r\n\r\n")
    if not blank or len(head) > MAX_HEADER_BYTES:
        raise BadInput("a part of the body has no headers, or too many")
    headers = HeaderParser().parsestr(head.lstrip(b"\r\n").decode(errors="replace") + "\r\n\r\n")
    try:
        name = headers.get_param("name", header="content-disposition")
        filename = headers.get_filename()
    except (ValueError, LookupError, TypeError) as error:
        raise BadInput(f"a part of the body has headers that cannot be read: {error}") from None
    if not isinstance(name, str):
        raise BadInput("a part of the body has no name")
    return FormPart(name, filename and filename.encode(errors="replace").decode(), content)
