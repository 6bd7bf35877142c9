"""`epd embed` over an embedder that tests can bend, and over a model of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from epd.cli.embed import embed_files, rank, save
from epd.cli.embedders import Failed, Vector
from epd.cli.files import Item, find_files, read_item
from epd.cli.main import main
from epd.cli.progress import Progress


class FakeEmbed:
    """Texts become vectors by their length; a text in `bad` fails. Remembers its batches."""

    def __init__(self, *bad: str) -> None:
        self.bad = bad
        self.batches: list[int] = []

    def __call__(self, items: Sequence[Item]) -> list[Vector | Failed]:
        self.batches.append(len(items))
        return [
            Failed("bad text") if item["text"] in self.bad else np.array([len(item["text"]), 1], np.float32)
            for item in items
        ]


def write(folder: Path, **contents: str | bytes) -> list[Path]:
    """Files of these contents: `a_txt` is a.txt."""
    paths = [folder / name.replace("_", ".") for name in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return paths


def test_files_and_folders_are_found_once(tmp_path: Path) -> None:
    """A folder gives its pictures and texts, also from below; a file named is taken whatever its suffix."""
    paths = write(tmp_path, a_txt="a", b_PNG=b"b", c_csv="c")
    (tmp_path / "deep").mkdir()
    deep = write(tmp_path / "deep", d_md="d")
    assert find_files([str(tmp_path)]) == [paths[0], paths[1], *deep]
    assert find_files([str(paths[2]), str(paths[2])]) == [paths[2]]


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    """A name without a file, and a folder without pictures and texts."""
    with pytest.raises(ValueError, match="no such file"):
        find_files([str(tmp_path / "nothing")])
    with pytest.raises(ValueError, match="no picture and no text"):
        find_files([str(tmp_path)])


def test_files_become_items(tmp_path: Path) -> None:
    """Pictures travel as bytes, texts as text, and nothing else."""
    picture, text, other = write(tmp_path, a_JPG=b"\xff", b_txt="é", c_bin=b"\xff")
    assert (read_item(picture), read_item(text)) == ({"image": b"\xff"}, {"text": "é"})
    with pytest.raises(ValueError, match="neither a picture"):
        read_item(other)


def test_every_file_has_its_vector_or_its_reason(tmp_path: Path) -> None:
    """Files go out in batches; one that fails costs the others nothing, and the order stays."""
    paths = write(tmp_path, a_txt="a", b_txt="bb", c_txt="ccc", d_bin=b"\xff", e_txt="e" * 5)
    embed = FakeEmbed("bb")
    vectors, failures = embed_files(embed, paths, batch_size=2, workers=2)
    found = [(path.name, vector[0]) for path, vector in vectors.items()]
    assert found == [("a.txt", 1), ("c.txt", 3), ("e.txt", 5)]
    reasons = {path.name: reason.split()[0] for path, reason in failures.items()}
    assert reasons == {"b.txt": "bad", "d.bin": "neither"}
    assert sorted(embed.batches) == [1, 1, 2]


class FakeTerminal(StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


def test_many_files_have_a_progress_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, to its end, and on the stream for messages; one batch needs none."""
    paths = write(tmp_path, a_txt="a", b_txt="bb", c_txt="ccc")
    for batch_size, drawn in ((1, True), (3, False)):
        terminal = FakeTerminal()
        monkeypatch.setattr("sys.stderr", terminal)
        embed_files(FakeEmbed(), paths, batch_size)
        assert ("3/3" in terminal.getvalue()) == drawn


def test_ranking_is_by_cosine() -> None:
    """The best fit comes first."""
    vectors = {Path("a"): np.array([1, 0], np.float32), Path("b"): np.array([0, 1], np.float32)}
    ranked = rank(np.array([0.6, 0.8], np.float32), vectors)
    assert [path.name for _, path in ranked] == ["b", "a"]
    assert [score for score, _ in ranked] == pytest.approx([0.8, 0.6])


def test_vectors_are_saved_with_their_files(tmp_path: Path) -> None:
    """What is saved reads back by numpy alone, without pickle."""
    vectors = {Path("a"): np.array([1, 0], np.float32), Path("b"): np.array([0, 1], np.float32)}
    save(tmp_path / "out.npz", vectors)
    with np.load(tmp_path / "out.npz") as saved:
        assert saved["files"].tolist() == ["a", "b"]
        assert saved["vectors"].tolist() == [[1, 0], [0, 1]]


def test_progress_is_drawn_on_a_terminal_alone() -> None:
    """A bar with counts, rate and the time left; nothing where the stream is a file."""
    now = iter([0.0, 0.0, 2.0, 4.0])
    stream = StringIO()
    with Progress(4, stream, shown=True, clock=lambda: next(now)) as bar:
        bar.advance(1)
        bar.advance(3)
    lines = [line.rstrip() for line in stream.getvalue().split("\r")[1:]]
    assert lines[0].endswith("0/4")
    assert lines[1].endswith("1/4  0.5/s  6 s left")
    assert lines[2].startswith("[" + "#" * 30 + "] 4/4")
    quiet = StringIO()
    with Progress(4, quiet) as bar:
        bar.advance(4)
    assert quiet.getvalue() == ""


def test_a_model_in_this_process(
    tmp_path: Path, photo: bytes, demo_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--local` embeds pictures and texts without any service; a broken picture is named, with status 1."""
    write(tmp_path, a_jpg=photo, b_txt="a red circle", c_png=b"no picture")
    status = main(["embed", str(tmp_path), "--local", "--model", str(demo_folder), "--dimensions", "8"])
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert status == 1
    assert [Path(line["file"]).name for line in lines] == ["a.jpg", "b.txt"]
    assert np.allclose([np.linalg.norm(line["embedding"]) for line in lines], 1, atol=1e-5)
    assert {len(line["embedding"]) for line in lines} == {8}
    assert "c.png: 10 bytes that are no picture" in captured.err


def test_a_query_ranks_the_files(
    tmp_path: Path, demo_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--query` prints the files, the best fit first; the text itself fits itself best."""
    write(tmp_path, a_txt="a red circle", b_txt="two blue squares")
    arguments = [
        "embed",
        str(tmp_path),
        "--local",
        "--model",
        str(demo_folder),
        "--query",
        "two blue squares",
    ]
    assert main([*arguments, "--top", "1"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split() == ["1.0000", str(tmp_path / "b.txt")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--local", "--model", "/nowhere"], "no such folder"),
        (["--url", "http://127.0.0.1:9"], "start one with `epd serve`"),
        (["--batch-size", "0"], "at least 1"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(
    tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No model, no service: a line that says what to do, and no stack trace."""
    write(tmp_path, a_txt="a")
    assert main(["embed", str(tmp_path), *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_the_shipped_shapes_are_found_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    """The first command of the README ranks the right picture first, for every one of them."""
    folder = Path(__file__).parents[2] / "examples/shapes"
    for path in sorted(folder.iterdir()):
        colour, shape = path.stem.split("-")
        assert main(["embed", str(folder), "--query", f"a {colour} {shape}", "--local"]) == 0
        assert capsys.readouterr().out.splitlines()[0].endswith(path.name)
