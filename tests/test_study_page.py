"""scripts/study.py page: the tables of pages are drawn from the rows, and a page that says something else is found."""

import json
import math
import shutil
import sys

import pytest
from PIL import Image

from scripts import study as study_program
from scripts.studies import endpoints, page
from scripts.studies.record import RecordError
from scripts.studies.statistics import Interval
from tests.conftest import REPO

RECORDS = REPO / "scripts" / "studies" / "records"
TEXT = "# A page \r\n\n| mine | 1 |\n\n<!-- a comment -->\n{mark}\nold\n<!-- end -->\nText | with a bar.  "


def page_of(folder, words, text=TEXT):
    path = folder / "page.md"
    path.write_bytes(text.format(mark=f"<!-- study.py {words} -->").encode())
    return path


@pytest.fixture
def rows(tmp_path):
    """A small record: three arms of a game with 8 seeds."""
    return shutil.copy(RECORDS / "turns_smollm2.jsonl", tmp_path / "rows.jsonl")


def change_a_run(path):
    """One run of the arm `credit` has a higher curve, and the endpoints of that curve."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    row = next(row for row in lines if row.get("arm") == "credit")
    row["curve"]["held_out"] = [value + 0.1 for value in row["curve"]["held_out"]]
    found = endpoints.endpoints(endpoints.Curve(**row["curve"]), 1.0)
    row["endpoints"] = {name: found[name] for name in row["endpoints"]}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_pages_of_the_repository_are_what_their_rows_say(capsys):
    """python scripts/study.py page --check"""
    options = study_program.parser().parse_args(["page", "--check"])
    good = study_program.page(options)
    assert good, capsys.readouterr().out
    readme, records = ([mark.kind for mark in page.marks_of(path, path.read_text())] for path in options.pages)
    assert readme == ["beat"]
    assert (records.count("arms"), records.count("beat"), records.count("picture")) == (7, 2, 1)


def test_a_table_is_drawn_and_nothing_else(tmp_path, rows):
    """Drawn twice it is the same. Line ends, spaces and tables outside the comments stay as they are."""
    path = page_of(tmp_path, f"page: arms {rows}\n    --endpoints sampled")
    before, after = path.read_bytes().split(b"\nold\n")
    assert len(page.draw_pages([path], check=False)) == 1
    first = path.read_bytes()
    assert first.startswith(before) and first.endswith(after)
    assert b"\n| `base` | area 0.636 | 8 seeds | 0.529 |\n" in first
    assert page.draw_pages([path], check=True) == page.draw_pages([path], check=False) == []
    assert path.read_bytes() == first


def test_a_page_that_says_something_else_is_found(tmp_path, rows, monkeypatch, capsys):
    """The exit status is 1, the words name page and table, and the page is left as it is."""
    path = page_of(tmp_path, f"page: arms {rows}")
    page.draw_pages([path], check=False)
    drawn = path.read_text()
    path.write_text(drawn.replace("-0.092 [-0.186", "-0.093 [-0.186"))
    wrong = path.read_text()
    assert wrong != drawn
    monkeypatch.setattr(sys, "argv", ["study.py", "page", str(path), "--check"])
    with pytest.raises(SystemExit) as ended:
        study_program.main()
    assert ended.value.code == 1 and path.read_text() == wrong
    assert f"{path}, arms {rows}: is not what its rows say" in capsys.readouterr().out
    page.draw_pages([path], check=False)
    assert path.read_text() == drawn


def test_a_changed_row_is_found(tmp_path, rows):
    path = page_of(tmp_path, f"page: arms {rows}")
    page.draw_pages([path], check=False)
    assert page.draw_pages([path], check=True) == []
    change_a_run(rows)
    assert page.draw_pages([path], check=True) == [f"{path}, arms {rows}"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("page: arm ROWS", "page.md, arm ROWS: .*invalid choice: 'arm'"),
        ("table: arms ROWS", "page.md, table: arms ROWS: .*invalid choice: 'table:'"),
        ("page: arms ROWS --colour red", "page.md, arms ROWS --colour red: unrecognized arguments: --colour red"),
        ("page: arms", "page.md, arms: the following arguments are required: records"),
        ("page: beat ROWS --columns price", "page.md, .*invalid choice: 'price'"),
        ("page: arms nothing.jsonl", "page.md, arms nothing.jsonl: there is no file .*nothing.jsonl"),
        ("page: arms ROWS --base nobody", "page.md, arms ROWS: no arm nobody: there are base, index, credit"),
        ("page: beat ROWS --tasks last", "page.md, beat ROWS: no task last: there are guess"),
        ("page: arms ROWS --ends last", "page.md, arms ROWS: no task last: there are guess"),
        ("page: arms ROWS --><!-- study.py page: arms ROWS", "page.md: each .* needs an <!-- end --> after it"),
        ("page: arms ROWS --><!-- end", "page.md: each .* needs an <!-- end --> after it"),
    ],
)
def test_words_that_mean_nothing_are_refused(tmp_path, rows, words, said):
    """And no page is drawn, nor one before it."""
    (tmp_path / "other").mkdir()
    good = page_of(tmp_path / "other", f"page: arms {rows}")
    path = page_of(tmp_path, words.replace("ROWS", str(rows)))
    before = [good.read_bytes(), path.read_bytes()]
    with pytest.raises(RecordError, match=said.replace("ROWS", str(rows))):
        page.draw_pages([good, path], check=False)
    assert [good.read_bytes(), path.read_bytes()] == before


def test_a_page_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(RecordError, match="there is no page .*none.md"):
        page.draw_pages([tmp_path / "none.md"], check=False)


def test_a_picture_is_drawn_where_its_rows_changed(tmp_path, rows):
    """Its bytes stay where it shows the same, as those of another version of the library."""
    path = page_of(tmp_path, f"page: picture {rows}")
    picture = rows.with_suffix(".png")
    assert page.draw_pages([path], check=True)[-1] == f"{picture}, the picture" and not picture.exists()
    page.draw_pages([path], check=False)
    assert "(rows.png)" in path.read_text()
    first = picture.read_bytes()
    Image.open(picture).save(picture, compress_level=1)
    same = picture.read_bytes()
    assert same != first
    assert page.draw_pages([path], check=False) == [] and picture.read_bytes() == same
    change_a_run(rows)
    assert page.draw_pages([path], check=False) == [f"{picture}, the picture"]
    assert picture.read_bytes() != same
    for broken in (b"", same[:-100], same[:20] + b"?" + same[21:]):  # the head's checksum is wrong in the last one
        picture.write_bytes(broken)
        assert page.draw_pages([path], check=True) == [f"{picture}, the picture"]


def test_numbers_to_beat_by_hand(tmp_path):
    """Of rows of several records. Seconds elsewhere are those of that record, empty for a task that it lacks."""
    names = [RECORDS / f"smollm2_{name}.jsonl" for name in ("avx512_repeated", "second", "controls")]
    words = "beat {} {} --tasks second repeated --columns start target reached tokens processor --seconds_of {} {}"
    page_path = page_of(tmp_path, "page: " + words.format(*names, RECORDS / "smollm2.jsonl"))
    page.draw_pages([page_path], check=False)
    second, repeated = [line for line in page_path.read_text().splitlines() if line.startswith("| `")]
    cells = "0.09 | 0.8 | 7 of 8 | 26,000 [20,000, 33,000] | AMD EPYC 1 | 55 [36, 75] |  |"
    assert second == f"| `second` | {cells}"
    assert repeated.endswith(" | AMD EPYC 17 | 93 [70, 115] |  |")


def test_an_arm_with_fewer_seeds_has_their_number(tmp_path):
    names = " ".join(str(RECORDS / f"smollm2_avx512{name}.jsonl") for name in ("", "_repeated"))
    path = page_of(tmp_path, f"page: arms {names} --tasks largest repeated --beside last")
    page.draw_pages([path], check=False)
    lines = [line for line in path.read_text().splitlines() if line.startswith("| control")]
    assert "-0.252 [-0.405, -0.100] (4 seeds) | worse, as it must be |" in lines[0]
    assert lines[3].startswith("| control `lr0`: `--learning_rate 0` | no seed on all tasks |  | ")
    assert lines[3].endswith("(2 seeds) |")


def test_what_is_not_as_it_must_be_is_said():
    assert page.control_words(Interval(-0.1, -0.2, -0.01)) == "worse, as it must be"
    assert page.control_words(Interval(-0.1, -0.2, 0.01)) == "NOT shown to be worse"
    assert page.noise_words(Interval(0.1, -0.1, 0.3)).startswith("holds 0; ")
    assert page.noise_words(Interval(0.1, 0.05, 0.15)).startswith("does NOT hold 0; ")


def test_a_bar_does_not_end_a_cell():
    assert page.markdown(["arm"], [["`x`: `--stop_strings a|b`"]]).splitlines()[2] == r"| `x`: `--stop_strings a\|b` |"


def test_amounts_are_rounded_once():
    """59 s [46, 71.48] is [46, 71]: rounded to 71.5 before, it became 72."""
    assert page.amount(Interval(58.94, 46.41, 71.476), "seconds") == "59 [46, 71]"
    assert page.amount(Interval(1.76, 1.2, 2.34), "seconds") == "1.8 [1.2, 2.3]"
    assert page.amount(Interval(22822, 15620, 30023), "tokens") == "23,000 [16,000, 30,000]"
    assert page.amount(Interval(950, 900, 1000), "tokens") == "950 [900, 1,000]"
    assert page.amount(Interval(4.0, -math.inf, math.inf), "steps") == "4.0"
