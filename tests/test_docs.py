"""Every code block of README.md and docs/ runs and prints what its page says, and the runner notices if not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import DOCS_REPORT
from tests.pages import PageError, commands, parse, run_page, same

ROOT = Path(__file__).resolve().parent.parent
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if page.is_file()]

LONG = {ROOT / "docs" / "cli.md"}

DATABASE = "agents"
"""What pages that need a server call it: ``postgresql:///agents``. Its host and user come from the environment."""


@pytest.fixture
def surroundings(page, request):
    """What the reader of a page has set. One that needs a server, or CRIU, is skipped without one."""
    text = page.read_text(encoding="utf-8")
    if "$ holdfast freeze" in text:
        criu = request.getfixturevalue("criu")
        yield {"HOLDFAST_CRIU": str(criu), "XDG_STATE_HOME": str(request.getfixturevalue("tmp_path") / "state")}
        return
    if f"postgresql:///{DATABASE}" not in text:
        yield {}
        return
    server = request.getfixturevalue("postgres_server")
    with server.database(DATABASE):
        # This server does not flush.
        yield {"PGHOST": str(server.folder), "PGUSER": "postgres", "HOLDFAST_ALLOW_UNSAFE_POSTGRES": "1"}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page in LONG else page for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_block_of_the_page_runs(page, surroundings, record_property):
    name = str(page.relative_to(ROOT))
    told = run_page(page, name=name, env=surroundings)
    lines = [f"{name}: {told.run} run, {len(told.not_run)} not run"]
    lines += [f"  line {line}: {reason}" for line, reason in told.not_run if not reason.endswith("is shown, not run")]
    record_property(DOCS_REPORT, lines)


@pytest.fixture
def run(tmp_path):
    def run_text(text, **options):
        page = tmp_path / "page.md"
        page.write_text(text, encoding="utf-8")
        return run_page(page, **options)

    return run_text


def fails(run, text, *words, **options):
    with pytest.raises(PageError) as caught:
        run(text, **options)
    for word in words:
        assert word in str(caught.value)


def test_python_blocks_share_one_namespace_and_one_directory(run):
    told = run(
        "```python\nfrom pathlib import Path\nPath('a').write_text('one')\n```\nand then\n"
        "```python\nprint(Path('a').read_text())\n```\n"
        "<!-- output -->\n```text\none\n```\n"
    )
    assert (told.run, told.not_run) == (3, [])


def test_commands_run_between_python_blocks_in_page_order(run):
    run(
        "```python\nopen('n', 'w').write('1')\n```\n```console\n$ cat n\n1\n$ printf 2 > n\n```\n"
        "```python\nassert open('n').read() == '2'\n```\n"
    )


def test_cd_and_export_last_until_the_end_of_the_page(run):
    run(
        "```sh\n$ mkdir -p 'a b' && cd 'a b'\n$ export WORD='two words'\n```\n"
        '```console\n$ basename "$PWD"; echo $WORD\na b\ntwo words\n```\n'
    )


def test_a_python_block_that_raises_fails_and_names_its_line(run):
    fails(run, "# Title\n\n```python\nx = 1\n1 / 0\n```\n", "page.md:3", "ZeroDivisionError", "line 5", "1 / 0")


def test_a_python_block_that_should_raise_and_does_not_fails(run):
    run("<!-- raises: KeyError -->\n```python\n{}['a']\n```\n<!-- output -->\n```text\nKeyError: 'a'\n```\n")
    fails(run, "<!-- raises: KeyError -->\n```python\n{}.get('a')\n```\n", "did not raise KeyError")
    fails(run, "<!-- raises: KeyError -->\n```python\n[][0]\n```\n", "IndexError")


def test_other_output_than_the_page_shows_fails(run):
    words = ("the page shows\none", "it printed\ntwo")
    fails(run, "```python\nprint('two')\n```\n<!-- output -->\n```text\none\n```\n", *words)
    fails(run, "```console\n$ echo two\none\n```\n", "echo two", *words)
    fails(run, "```python\npass\n```\n<!-- output -->\n```text\none\n```\n")


def test_a_command_must_end_with_the_code_the_page_gives(run):
    fails(run, "```console\n$ echo no; exit 3\n```\n", "ended with 3, not with 0", "no")
    fails(run, "```console\n$ false\n$ true\n```\n", "ended with 1, not with 0")
    run("<!-- exit: 3 -->\n```console\n$ true\n$ exit 3\n```\n")
    fails(run, "<!-- exit: 3 -->\n```console\n$ true\n```\n", "ended with 0, not with 3")


def test_a_block_without_prompts_is_run_as_one_script(run):
    run("```sh\nfor i in 1 2; do\n  echo $i >> all\ndone\n```\n```console\n$ cat all\n1\n2\n```\n")
    fails(run, "```bash\nfalse\n```\n", "ended with 1")


def test_a_block_can_be_a_file(run):
    run("<!-- file: hello.py -->\n```python\nprint('hello')\n```\n```console\n$ python hello.py\nhello\n```\n")


def test_a_block_is_left_out_only_with_a_reason_and_is_counted(run):
    told = run(
        "<!-- not run: it needs a network -->\n```console\n$ git clone somewhere\n```\n\n"
        "```json\n{}\n```\n```python\n```\n"
    )
    assert told.run == 1
    assert told.not_run == [(2, "it needs a network"), (6, "json is shown, not run")]
    fails(run, "<!-- not run -->\n```python\n1 / 0\n```\n", "say why")


def test_mistakes_in_a_page_are_not_passed_over(run):
    fails(run, "```pyhton\nprint()\n```\n", "page.md:1", "pyhton")
    fails(run, "```python\nprint()\n", "never closed")
    fails(run, "<!-- output -->\n```text\n```\n", "output of what?")
    fails(run, "<!-- exit: 3 -->\n\nA paragraph.\n\n```console\n$ exit 3\n```\n", "stands before something else")
    fails(run, "```console\nhello\n$ echo hello\n```\n", "before the first command")
    fails(run, "```python\nimport os\nos._exit(0)\n```\n", "ended before this block")
    fails(run, "```python\nimport os\nos._exit(9)\n```\n", "ended with 9")


def test_a_page_that_hangs_fails_and_leaves_no_process(run):
    fails(run, "```console\n$ sleep 60\n```\n", "longer than", timeout_s=0.5)


def test_output_may_hold_masks():
    assert same("made id:… at …\nend", "made id:3f2a at 12:00\nend\n\n")
    assert not same("made id:… at …\nend", "made id:3f2a\nend")
    assert same("first\n…\nlast", "first\nsecond\nthird\nlast")
    assert same("first\n…\nlast", "first\nlast")
    assert not same("first\n…\nlast", "first\nlast\nmore")


def test_colour_and_spaces_at_line_ends_do_not_count():
    assert same("red", "\x1b[31mred\x1b[0m  \n")
    assert not same("re d", "red")


def test_commands_may_go_on_over_several_lines():
    assert commands("$ cat <<E\n> one\n> E\none\n$ true\n") == [("cat <<E\none\nE", "one"), ("true", "")]


def test_blocks_inside_lists_lose_their_indentation():
    (block,) = parse("1. Do this:\n\n   ```python\n   if x:\n       y\n   ```\n")
    assert block.text == "if x:\n    y\n"


def test_there_is_a_readme_and_it_says_how_to_see_and_test_it():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^\$? ?make demo\b", text, re.MULTILINE)
    assert re.search(r"^\$? ?make test\b", text, re.MULTILINE)
