"""Reads the XML files of annotation tools."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from datamodules.files.text_files import finite_number, read_text
from datamodules.files.values import file_errors

Element = ElementTree.Element


def read_xml(path: Path) -> Element:
    """Return the root of an XML file; expat bounds the expansion of entities.

    Raises:
        ValueError: The file is not XML.
    """
    text = read_text(path)
    with file_errors(path, " is not valid XML:"):
        return ElementTree.fromstring(text)


def child(element: Element, tag: str) -> Element:
    """Return the first child of a tag; raise ``KeyError`` if it is missing."""
    return {part.tag: part for part in reversed(element)}[tag]


def child_text(element: Element, tag: str) -> str:
    """Return the text of a child; raise ``KeyError`` if it is missing."""
    return (child(element, tag).text or "").strip()


def numbers(element: Element, *names: str) -> list[float]:
    """Return attributes as finite numbers."""
    return [finite_number(element.attrib[name]) for name in names]
