"""Reads the XML files of annotation tools."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from datamodules.files.integers import format_value
from datamodules.files.text_files import finite_number, read_text

Element = ElementTree.Element


def read_xml(path: Path) -> Element:
    """Return the root of an XML file.

    Raises:
        ValueError: The file is not XML, or declares entities, which may expand without bound.
    """
    text = read_text(path)
    if "<!ENTITY" in text:
        raise ValueError(f"{path} declares XML entities, which are unsafe; remove <!ENTITY ...>")
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"{path} is not valid XML ({error}); it may be cut off") from None
    except RecursionError:
        raise ValueError(f"{path}: its elements are nested too deeply") from None


def child_text(element: Element, tag: str, where: str) -> str:
    """Return the text of a child.

    Raises:
        ValueError: The child is missing or empty.
    """
    text = (element.findtext(tag) or "").strip()
    if not text:
        raise ValueError(f"{where}: <{element.tag}> lacks <{tag}>")
    return text


def get_attribute(element: Element, name: str, where: str) -> str:
    """Return an attribute.

    Raises:
        ValueError: The attribute is missing.
    """
    value = element.get(name)
    if value is None:
        raise ValueError(f"{where}: <{element.tag}> lacks the attribute {name!r}")
    return value


def parse_number(text: str, where: str) -> float:
    """Return a finite number.

    Raises:
        ValueError: The text is not a finite number.
    """
    try:
        return finite_number(text)
    except ValueError:
        raise ValueError(f"{where} must be a finite number, got {format_value(text)}") from None
