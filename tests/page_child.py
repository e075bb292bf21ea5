"""The process in which a page's blocks run: Python blocks in one namespace, shell commands in bash, in page order.

Started by tests/pages.py with one argument, a folder: ``steps.json`` says what to do, ``results.jsonl`` gets one line
for each step that was done, and the current directory is the reader's. It stops at the first step that goes wrong.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import subprocess
import sys
import traceback
import types
from pathlib import Path

# `cd` and `export` last from one command to the next, as in the reader's terminal.
SHELL_FRAME = """
test ! -f "$PAGE_SHELL" || . "$PAGE_SHELL"
trap 'code=$?; {{ export -p; printf "cd %q\\n" "$PWD"; }} >"$PAGE_SHELL"; exit $code' EXIT
{}
"""


def main(folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests import warm

    del sys.path[0]
    if job := warm.offer(folder / "warm"):  # a command of the page
        del sys.path[0]  # that of this program
        warm.live(*job)
        return
    told = json.loads((folder / "steps.json").read_text(encoding="utf-8"))
    page = told["page"]
    main_module = types.ModuleType("__main__")
    main_module.__file__ = str(Path.cwd() / "page.py")
    sys.modules["__main__"] = main_module
    sys.path[0] = str(Path.cwd())
    sys.argv = ["page.py"]
    with (folder / "results.jsonl").open("a", encoding="utf-8") as results:
        for step in told["steps"]:
            if step["do"] == "file":
                Path(step["name"]).write_text(step["text"], encoding="utf-8")
                result = {"problem": "", "output": ""}
            elif step["do"] == "shell":
                result = run_shell(step, folder / "shell")
            else:
                result = run_python(step, page, main_module)
            results.write(json.dumps(result) + "\n")
            results.flush()
            if result["problem"]:
                return


def run_shell(step: dict, state: Path) -> dict:
    script = f"PAGE_SHELL={str(state)!r}{SHELL_FRAME.format(step['text'])}"
    done = subprocess.run(
        ["bash", "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    problem = "" if done.returncode == step["exit"] else f"ended with {done.returncode}, not with {step['exit']}"
    return {"problem": problem, "output": done.stdout.decode(errors="replace")}


def run_python(step: dict, page: str, main_module: types.ModuleType) -> dict:
    linecache.checkcache(page)
    printed = io.StringIO()
    raised = None
    try:
        # Blank lines in front, so that a traceback names the page's own line.
        code = compile("\n" * step["line"] + step["text"], page, "exec", dont_inherit=True)
        with contextlib.redirect_stdout(printed):
            exec(code, main_module.__dict__)
    except SystemExit as error:
        raised, problem = "SystemExit", f"ended the program: {error}"
    except BaseException as error:
        raised, problem = type(error).__name__, traceback.format_exc()
        printed.write("".join(traceback.format_exception_only(error)))
    if raised == (step["raises"] or None):
        problem = ""
    elif raised is None:
        problem = f"did not raise {step['raises']}"
    return {"problem": problem, "output": printed.getvalue()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
