"""Parser of multipart/form-data (RFC 7578) with limits: the fields and files of a form."""

from dataclasses import dataclass, field
from email.message import Message

from specbeam.apps.serve.refusals import Refusal, invalid, shown

# python-multipart, by Starlette, would write files above 1 MiB to the disk and count parts only while it parses. Here the
# body is in memory already, within its limit, and two searches per part find its bounds; errors name what is wrong.
MOST_PARTS = 64
LONGEST_BOUNDARY = 70  # characters, by RFC 2046
LONGEST_HEAD = 4096  # bytes of the headers of a part
LONGEST_FIELD = 65536  # bytes of the value of a field


@dataclass(frozen=True)
class MultipartForm:
    """The content of a form.

    Attributes:
        fields: the values of each field, in order.
        files: the bytes of each file, by the name of its field. The client's file name is ignored.
    """

    fields: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, list[bytes]] = field(default_factory=dict)


def parse_form(content_type: str, raw: bytes) -> MultipartForm:
    """Return the content of a form.

    Args:
        content_type: the header with the boundary.
        raw: the whole body.

    Raises `Refusal` if the body is malformed, or has too many or too long parts.
    """
    boundary = _boundary(content_type)
    form = MultipartForm()
    for head, content in _parts(raw, boundary):
        name, is_file = _name_of(head)
        if is_file:
            form.files.setdefault(name, []).append(content)
            continue
        if len(content) > LONGEST_FIELD:
            raise invalid(f"the field {shown(name)} has {len(content)} bytes; the limit is {LONGEST_FIELD}", name)
        try:
            form.fields.setdefault(name, []).append(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise invalid(f"the field {shown(name)} is not valid UTF-8", name) from error
    return form


def _boundary(content_type: str) -> bytes:
    """Return the boundary in a header. Raises `Refusal` if it has none, or another content type."""
    header = Message()
    header["content-type"] = content_type.replace("\r", " ").replace("\n", " ")
    if header.get_content_type() != "multipart/form-data":
        raise invalid(
            f"the content type is {shown(header.get_content_type())}; send multipart/form-data",
            None,
            "not_multipart",
            415,
        )
    boundary = header.get_boundary("")
    if not 0 < len(boundary) <= LONGEST_BOUNDARY or not boundary.isascii():
        raise _broken("its content type must have a boundary of 1 to 70 characters")
    return boundary.encode("ascii")


def _parts(raw: bytes, boundary: bytes) -> list[tuple[bytes, bytes]]:
    """Return headers and content of each part."""
    mark = b"--" + boundary
    start = 0 if raw.startswith(mark) else raw.find(b"\r\n" + mark) + 2
    if start == 1:
        raise _broken("it does not contain its boundary")
    found: list[tuple[bytes, bytes]] = []
    place = start + len(mark)
    while not raw.startswith(b"--", place):
        head_from = raw.find(b"\r\n", place) + 2
        if head_from == 1 or raw[place : head_from - 2].strip(b" \t"):
            raise _broken("a boundary is not followed by the end of the line")
        head_to = raw.find(b"\r\n\r\n", head_from, head_from + LONGEST_HEAD)
        end = raw.find(b"\r\n" + mark, head_from)
        if head_to < 0 or end < 0 or head_to + 4 > end + 2:
            raise _broken(f"a part has no end, or its headers have more than {LONGEST_HEAD} bytes")
        if len(found) == MOST_PARTS:
            raise _broken(f"it has more than {MOST_PARTS} parts")
        found.append((raw[head_from:head_to], raw[head_to + 4 : end]))
        place = end + 2 + len(mark)
    return found


def _name_of(head: bytes) -> tuple[str, bool]:
    """Return the name of a part's field, and whether the part is a file."""
    for line in head.split(b"\r\n"):
        title, _, value = line.partition(b":")
        if title.strip().lower() != b"content-disposition":
            continue
        header = Message()
        header["content-disposition"] = value.decode("utf-8", "replace").replace("\r", " ").replace("\n", " ").strip()
        name = header.get_param("name", header="content-disposition")
        if header.get_content_disposition() == "form-data" and isinstance(name, str) and name:
            is_file = header.get_param("filename", header="content-disposition") is not None
            return name, is_file
    raise _broken("a part has no name")


def _broken(reason: str) -> Refusal:
    return invalid(f"the body is not valid multipart/form-data: {reason}", None, "bad_form")
