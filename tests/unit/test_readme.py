"""What the README and the other pages say is so: commands parse, names and links exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from dtrain import train
from dtrain.cli import main as cli
from dtrain.config import Config, load_config
from dtrain.errors import DtrainError
from dtrain.launch import torchrun

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
README = PAGES[0].read_text()


def page(file: Path) -> str:
    return str(file.relative_to(REPOSITORY))


def shell_lines(text: str) -> Iterator[str]:
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()


def header_lines(text: str) -> Iterator[str]:
    """The commands in a configuration's first comment, which are indented."""
    comment = re.match(r"(#.*\n)+", text)
    assert comment is not None
    joined = re.sub(r"\\\n#", " ", comment.group())
    yield from (line[1:] for line in joined.splitlines() if line.startswith("#   "))


SAID = [
    *((page(f), line) for f in PAGES for line in shell_lines(f.read_text())),
    *((page(f), line) for f in CONFIGS for line in header_lines(f.read_text())),
]
COMMANDS = [(where, shlex.split(line, comments=True)) for where, line in SAID]
COMMANDS = [(where, words) for where, words in COMMANDS if words]


def check_typer(words: list[str]) -> None:
    """Parse a command line as far as it can be without running it."""
    command: Any = typer.main.get_command(cli.app)
    context = command.make_context("dtrain", list(words))
    while hasattr(command, "commands"):
        name, command, words = command.resolve_command(context, words)
        assert command is not None, f"no command {name}"
        context = command.make_context(name, list(words), parent=context)


def check_run(words: list[str]) -> None:
    request, _ = torchrun.parse(words)
    if (REPOSITORY / "configs").joinpath(Path(request.config).name).is_file():
        load_config(REPOSITORY / request.config, list(request.overrides))
    else:
        assert request.config.isupper(), f"{request.config} is no shipped configuration"


def check(words: list[str]) -> None:
    match words:
        case ["dtrain", "run", *rest]:
            check_run(rest)
        case ["dtrain", *rest]:
            check_typer(rest)
        case ["torchrun", *rest]:
            at = rest.index("-m")
            assert rest[at + 1] == "dtrain.train"
            check_run(rest[:at] + rest[at + 2 :])
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        case ["python", script, *rest]:
            assert (REPOSITORY / script).is_file()
            if rest and rest[0] == "dtrain":
                check(rest)
        case ["pip", "install", "-c", "constraints.txt", "."]:
            pass
        case _:
            pytest.fail(f"a command of a kind that is not checked: {shlex.join(words)}")


@pytest.mark.parametrize(("where", "words"), COMMANDS, ids=lambda value: str(value)[:60])
def test_a_command_parses(where: str, words: list[str]) -> None:
    del where
    check(words)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("dtrain dat info x", cli._UsageError),
        ("dtrain data info", cli._UsageError),
        ("dtrain run configs/nope.yaml", AssertionError),
        ("dtrain run --bogus x", DtrainError),
        ("make nothing", AssertionError),
    ],
)
def test_a_wrong_command_does_not(line: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        check(line.split())


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_shipped_configuration_loads(file: Path) -> None:
    config = load_config(file)
    assert config.data.store.endswith(f"stores/{file.stem.split('-')[0]}")


def test_the_readme_begins_with_the_two_commands_and_the_users_own_torchrun() -> None:
    first_screen = "\n".join(README.splitlines()[:24])
    lines = [line.split("#")[0].strip() for line in shell_lines(first_screen)]
    assert lines[:2] == ["make demo", "make test"]
    assert any(line.startswith("torchrun ") for line in lines)


def test_every_configuration_is_in_the_readmes_table() -> None:
    assert all(f"`{file.stem}`" in README for file in CONFIGS)


def test_extras_exist() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    said = re.search(r"as in\n?\s*`'\.\[.*?\]'`: (.*?)\. ", README, re.DOTALL)
    assert said is not None
    assert set(re.findall(r"`(\w+)`", said[1])) <= set(project["optional-dependencies"])


@pytest.mark.parametrize("file", PAGES, ids=page)
def test_links_lead_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", file.read_text()):
        assert "://" in target or (file.parent / target).exists(), target


def fields(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """(section, field) of the configuration; section is empty at the top."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from ((name, inner) for inner in kind.model_fields)
        else:
            yield "", name


@pytest.mark.parametrize(("section", "field"), list(fields(Config)))
def test_every_field_is_documented(section: str, field: str) -> None:
    text = (REPOSITORY / "docs" / "configuration.md").read_text()
    if section:
        text = re.split(r"^## ", text.split(f"\n## {section}\n")[1], flags=re.MULTILINE)[0]
        assert re.search(rf"^\|[^|]*`{field}`", text, re.MULTILINE)
    else:
        assert f"`{field}`" in text or f"\n## {field}\n" in text


def test_identity_marks_are_right() -> None:
    """The fields marked **i** are those that change a run's identity."""
    text = (REPOSITORY / "docs" / "configuration.md").read_text()
    marked: dict[str, list[str]] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 4 and cells[3] == "i":
            marked.setdefault(section, []).extend(re.findall(r"`(\w+)`", cells[1]))
    base = Config.model_validate({"data": {"store": "s"}, "train": {"epochs": 1}})
    identity = base.identity("f")
    assert marked[""] == ["seed"]
    assert set(marked["model"]) == set(identity["model"])
    assert set(marked["sampler"]) == set(identity["sampler"])
    others = {f for s in ("data", "train", "parallel", "memory") for f in marked[s]}
    named = {"store": "dataset", "limit": "memory_limit"}
    assert {named.get(f, f) for f in others} == set(identity) - {
        "seed",
        "model",
        "sampler",
        "deepspeed",
    }
    assert not set(marked) - {"", "data", "model", "sampler", "train", "parallel", "memory"}


def test_the_torchrun_entry_takes_the_readmes_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        train.main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("--set", "--run-dir", "--json", "--debug"))
