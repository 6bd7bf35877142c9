"""docs/api.md says what the code does: its tables and examples are held against it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from epd.deployments import errors
from epd.deployments.documents import JSON
from epd.deployments.requests import read_request
from epd.deployments.settings import AuthSettings, FetchSettings, LimitSettings, Settings
from epd.deployments.wire import WHY_REFUSED, EmbeddingRequestBody

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def section(title: str) -> str:
    """The text under a heading, up to the next one of any level."""
    return re.split(rf"^#+ {title}$", PAGE, flags=re.MULTILINE)[1].split("\n#")[0]


def rows(title: str) -> Iterator[list[str]]:
    """Cells of a section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def error_classes(base: type[errors.EPDError] = errors.EPDError) -> Iterator[type[errors.EPDError]]:
    yield base
    for each in base.__subclasses__():
        yield from error_classes(each)


def test_every_error_has_its_row() -> None:
    """Status, code and type of each error, and of the two that the router answers with; no other row."""
    table = {(row[0], row[1].strip("`"), row[2].strip("`")) for row in rows("Errors")}
    tree = {(str(each.status), each.code, each.kind) for each in error_classes()}
    routes = {("404", "not_found"), ("405", "method_not_allowed")}
    assert table == tree | {(*route, "invalid_request_error") for route in routes}


def test_every_limit_has_its_default() -> None:
    """The table's numbers are the settings' own, and no limit is missing."""
    table = {row[0].strip("`"): row[1] for row in rows("Limits")}
    settings = Settings()
    for name, value in table.items():
        room, _, field = name.partition(".")
        default = getattr(getattr(settings, room), field)
        assert value == ("none" if default is None else str(default)), name
    numbers = {
        f"{room}.{name}"
        for room, model in (("limits", LimitSettings), ("auth", AuthSettings), ("fetch", FetchSettings))
        for name, field in model.model_fields.items()
        if field.annotation in (int, float, int | None)
    }
    assert set(table) == numbers


def test_every_field_has_its_row() -> None:
    """The fields that are honoured, and those that are refused by name."""
    own = {row[0].strip("`") for row in rows("Fields")}
    others = {name for row in rows("Other services' fields") for name in re.findall(r"`(\w+)`", row[0])}
    assert others == set(WHY_REFUSED)
    assert own | others == set(EmbeddingRequestBody.model_fields)


@pytest.mark.parametrize("block", blocks("json"), ids=lambda block: block[:30])
def test_the_examples_are_valid(block: str) -> None:
    """Each request on the page is read; answers and errors are JSON at least."""
    document = json.loads(block)
    if {"input", "messages"} & set(document):
        assert read_request(block.encode(), JSON, max_items=9, allow_urls=False).items


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block[:30])
def test_the_settings_are_valid(block: str) -> None:
    """Settings on the page are ones that the application takes."""
    Settings.model_validate(yaml.safe_load(block))


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block[:30])
def test_the_programs_compile(block: str) -> None:
    """Python on the page is Python."""
    compile(block, "docs/api.md", "exec")
